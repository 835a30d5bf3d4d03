"""Rows on their way from a store into the shared memory: fetched in the background, checked, copied by a thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mmcache.engines.vllm.region import SharedRegion, SlotHeader, slot_bytes
from mmcache.engines.vllm.residents import Resident, Residents, State
from mmcache.tiers import Expected, Key

__all__ = ["Fetches", "Intake"]


class Fetches(Protocol):
    """What is used of a `TieredStore` for reading."""

    def prefetch(self, keys: Mapping[Key, Expected | None], on_done: Callable[[dict[Key, Tensor]], None]) -> object:
        """Start fetching; `on_done` is called once, on any thread, with what was found."""


class Intake:
    """Fetches for the scheduler's thread, whose methods these are; other threads come in through `call_soon`.

    Args:
        region: the shared memory.
        residents: what lies in it.
        store: where rows come from.
        helper: runs a function soon, on another thread.
        call_soon: has a function called on the scheduler's thread.
        counts: of the scheduler's side.
        dtype: that rows must have.
    """

    def __init__(
        self,
        region: SharedRegion,
        residents: Residents,
        store: Fetches,
        *,
        helper: Callable[[Callable[[], None]], None],
        call_soon: Callable[[Callable[[], None]], None],
        counts: Counter[str],
        dtype: torch.dtype,
    ) -> None:
        self._region = region
        self._residents = residents
        self._store = store
        self._helper = helper
        self._call_soon = call_soon
        self._counts = counts
        self._dtype = dtype
        self.under_way: set[Key] = set()
        """Keys that were asked for and are not settled yet."""

    def fetch(self, wanted: Mapping[Key, Expected | None]) -> None:
        """Ask the store, in one batch. What it has becomes resident; what it has not is no longer under way."""
        asked = tuple(wanted)
        self.under_way.update(asked)
        try:
            self._store.prefetch(wanted, lambda found: self._call_soon(lambda: self._arrived(asked, found)))
        except BaseException:
            self.under_way.difference_update(asked)
            raise

    def _arrived(self, asked: Sequence[Key], found: Mapping[Key, Tensor]) -> None:
        for key in asked:
            rows = found.get(key)
            if rows is None or not self._take_in(key, rows):
                self.under_way.discard(key)

    def _take_in(self, key: Key, rows: Tensor) -> bool:
        """Have rows copied into a slot; False if there is none to be had."""
        if rows.ndim != 2 or rows.dtype != self._dtype or rows.device.type != "cpu":
            self._counts["refused.mismatch"] += 1
            return False
        count, width = rows.shape
        size = slot_bytes(count, width, rows.dtype)
        resident = self._residents.admit(key, State.FILLING, size, count, width, rows.dtype)
        if resident is None:
            self._counts["refused.memory"] += 1
            return False
        self._region.clear_header(resident.offset)
        self._helper(lambda: self._copy(resident, rows))
        return True

    def _copy(self, resident: Resident, rows: Tensor) -> None:
        """On the helper's thread: the slot is this thread's alone while its resident is filling."""
        whole = False
        try:
            target = self._region.payload(resident.offset, resident.rows, resident.width, resident.dtype)
            target.copy_(rows)
            header = SlotHeader(0, resident.rows, resident.width, resident.dtype)
            self._region.write_header(resident.offset, header)
            whole = True
        finally:
            self._call_soon(lambda: self._copied(resident, whole))

    def _copied(self, resident: Resident, whole: bool) -> None:
        self.under_way.discard(resident.key)
        if whole:
            resident.state = State.READY
            resident.fetched = True
        self._residents.unpin(resident)
