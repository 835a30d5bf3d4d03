"""What lies in the shared memory: which rows, where, who needs them, and what has to leave first.

Only the scheduler's thread changes it, so that what it finds between two calls of vLLM stays where it is.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum

import torch

from mmcache.engines.vllm.slots import SlotAllocator
from mmcache.tiers import Key

__all__ = ["Resident", "Residents", "State"]


class State(Enum):
    """How far a resident is."""

    FILLING = "filling"
    """Its bytes are being copied in from a store."""
    SAVING = "saving"
    """A worker was told to write what it encodes."""
    READY = "ready"
    """Verified and whole."""


class Resident:
    """Rows in a slot."""

    __slots__ = ("dtype", "fetched", "key", "offset", "pins", "rows", "state", "step", "width")

    def __init__(self, key: Key, offset: int, state: State, rows: int, width: int, dtype: torch.dtype) -> None:
        self.key = key
        self.offset = offset
        self.state = state
        self.rows = rows
        self.width = width
        self.dtype = dtype
        self.pins = 0
        self.step = 0
        """The step in which a worker wrote it; 0 for rows that came from a store."""
        self.fetched = False
        """It came from a store and was not used yet."""

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return self.rows * self.width * self.dtype.itemsize


class Residents:
    """Residents by key, and the order in which they leave: the one that was not needed for longest first.

    What was fetched and has not been used yet stays in front of what comes after it: requests wait for it, in the order
    in which they came. It is protected for `protect_seconds`.

    Args:
        nbytes: memory for slots.
        protect_seconds: see above.
        clock: seconds, monotonic.
    """

    def __init__(
        self, nbytes: int, *, protect_seconds: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slots = SlotAllocator(nbytes)
        self._protect = protect_seconds
        self._clock = clock
        self._by_key: dict[Key, Resident] = {}
        self._idle: OrderedDict[Key, Resident] = OrderedDict()  # ready, not pinned, used
        self._fresh: OrderedDict[Key, tuple[Resident, float]] = OrderedDict()  # ready, not pinned, fetched and not used
        self.evicted = 0

    @property
    def used_bytes(self) -> int:
        """Bytes in use, headers and alignment included."""
        return self._slots.used

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: Key) -> Resident | None:
        """The resident of this key, in whatever state."""
        return self._by_key.get(key)

    def admit(self, key: Key, state: State, size: int, rows: int, width: int, dtype: torch.dtype) -> Resident | None:
        """A slot of `size` bytes for a key that has none, pinned once.

        Returns:
            the new resident, or None if it does not fit beside what is pinned or protected.
        """
        if key in self._by_key or size > self._slots.nbytes:
            return None
        offset = self._slots.take(size)
        while offset is None and (victim := self._victim()) is not None:
            self._forget(victim)
            self.evicted += 1
            offset = self._slots.take(size)
        if offset is None:
            return None
        resident = Resident(key, offset, state, rows, width, dtype)
        resident.pins = 1
        self._by_key[key] = resident
        return resident

    def pin(self, resident: Resident) -> None:
        """Keep it until `unpin`."""
        resident.pins += 1
        self._idle.pop(resident.key, None)
        self._fresh.pop(resident.key, None)

    def unpin(self, resident: Resident) -> None:
        """Take one pin back; the last one of a resident that never became ready removes it."""
        resident.pins -= 1
        if resident.pins or self._by_key.get(resident.key) is not resident:
            return
        if resident.state is not State.READY:
            self._forget(resident)
        elif resident.fetched:
            self._fresh[resident.key] = (resident, self._clock() + self._protect)
        else:
            self._idle[resident.key] = resident

    def drop(self, resident: Resident) -> bool:
        """Remove a ready resident that is of no use; False if it is pinned."""
        if resident.pins:
            return False
        self._forget(resident)
        return True

    def _victim(self) -> Resident | None:
        if self._idle:
            return next(iter(self._idle.values()))
        if self._fresh:
            resident, until = next(iter(self._fresh.values()))
            if until <= self._clock():
                return resident
        return None

    def _forget(self, resident: Resident) -> None:
        self._idle.pop(resident.key, None)
        self._fresh.pop(resident.key, None)
        del self._by_key[resident.key]
        self._slots.give_back(resident.offset)
