"""What this process knows of a tier's contents without asking it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock

from mmcache.tiers.keys import Key

__all__ = ["Knowledge"]


class Knowledge:
    """Keys that a tier was seen to hold, each for a while, the oldest forgotten first.

    Reading takes no lock: an engine's scheduler asks for every item of every request.

    Args:
        seconds: how long a sighting counts. Others may evict; an entry that is gone after all is a miss like any other.
        capacity: number of keys to remember.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, seconds: float = 60.0, capacity: int = 1 << 18, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._capacity = capacity
        self._clock = clock
        self._lock = Lock()
        self._until: dict[Key, float] = {}

    def __contains__(self, key: Key) -> bool:
        until = self._until.get(key)
        return until is not None and until > self._clock()

    def held(self, keys: Iterable[Key]) -> Iterator[Key]:
        """Those of the keys that are known, with one look at the clock."""
        now, until = self._clock(), self._until
        return (key for key in keys if until.get(key, now) > now)

    def __len__(self) -> int:
        return len(self._until)

    def add(self, keys: Iterable[Key]) -> list[Key]:
        """The tier holds these; returns those that were not known."""
        until = self._clock() + self._seconds
        new = []
        with self._lock:
            for key in keys:
                if self._until.pop(key, None) is None:
                    new.append(key)
                self._until[key] = until
            while len(self._until) > self._capacity:
                del self._until[next(iter(self._until))]
        return new

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """The tier does not hold these; returns those that were known."""
        with self._lock:
            return [key for key in keys if self._until.pop(key, None) is not None]

    def discard_namespace(self, namespace: str | None) -> list[Key]:
        """The tier holds nothing of a namespace (None: nothing at all); returns what was known of it."""
        with self._lock:
            gone = [key for key in self._until if namespace in (None, key.namespace)]
            for key in gone:
                del self._until[key]
        return gone
