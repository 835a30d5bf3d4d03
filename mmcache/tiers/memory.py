"""Entries in this process's memory, under a byte budget, least recently used first to go."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

from mmcache.errors import TierError
from mmcache.tiers.arguments import check_entries, check_name, check_whole, keys_of
from mmcache.tiers.entry import Entry, check_pinning, host_bytes
from mmcache.tiers.keys import Key
from mmcache.tiers.protocol import PutOutcome, StoredEntry, TierUsage

__all__ = ["MemoryTier"]


class MemoryTier:
    """Host memory as a tier: what no longer fits on the device stays a copy away instead of an encoder run away.

    Entries share memory with the rows they were put from and with the rows they are read as, so neither may be written
    to; a write is found by the checksum and the entry dropped.

    Args:
        capacity_bytes: budget, headers included.
        pinned: keep payloads in page-locked memory (one copy when put), for fast copies to a GPU.
        name: name for counters and events.

    Raises:
        ConfigError: the budget is not positive, or memory cannot be page-locked.
    """

    shared = False

    def __init__(self, capacity_bytes: int, *, pinned: bool = False, name: str = "memory") -> None:
        check_whole("capacity_bytes", capacity_bytes)
        check_name(name)
        check_pinning(pinned)
        self.name = name
        self._capacity = capacity_bytes
        self._pinned = pinned
        self._lock = Lock()
        self._entries: OrderedDict[Key, tuple[Entry, float]] = OrderedDict()
        self._bytes = 0
        self._closed = False

    def contains_many(self, keys: Sequence[Key]) -> dict[Key, int]:
        """See `Tier`."""
        keys = keys_of(keys)
        with self._lock:
            self._check_open()
            return {key: self._entries[key][0].nbytes for key in keys if key in self._entries}

    def get_many(self, keys: Sequence[Key]) -> dict[Key, Entry]:
        """See `Tier`."""
        keys = keys_of(keys)
        now = time.time()
        found = {}
        with self._lock:
            self._check_open()
            for key in keys:
                held = self._entries.pop(key, None)
                if held is not None:
                    self._entries[key] = (held[0], now)
                    found[key] = held[0]
        return found

    def put_many(self, entries: Mapping[Key, Entry]) -> PutOutcome:
        """See `Tier`."""
        check_entries(entries)
        fitting = {key: entry for key, entry in entries.items() if entry.nbytes <= self._capacity}
        fitting = {key: self._own(entry) for key, entry in fitting.items()}
        now = time.time()
        evicted = []
        with self._lock:
            self._check_open()
            for key, entry in fitting.items():
                self._drop(key)
                self._entries[key] = (entry, now)
                self._bytes += entry.nbytes
            while self._bytes > self._capacity:
                victim = next(iter(self._entries))
                self._drop(victim)
                evicted.append(victim)
        return PutOutcome(frozenset(fitting).difference(evicted), tuple(evicted))

    def remove_many(self, keys: Sequence[Key]) -> int:
        """See `Tier`."""
        keys = keys_of(keys)
        with self._lock:
            self._check_open()
            return sum(self._drop(key) for key in keys)

    def clear(self, namespace: str | None = None) -> int:
        """See `Tier`."""
        with self._lock:
            self._check_open()
            doomed = [key for key in self._entries if namespace in (None, key.namespace)]
            return sum(self._drop(key) for key in doomed)

    def scan(self) -> Iterator[StoredEntry]:
        """See `Tier`."""
        with self._lock:
            self._check_open()
            held = list(self._entries.items())
        return (StoredEntry(key.name, key, entry.nbytes, used) for key, (entry, used) in held)

    def usage(self) -> TierUsage:
        """See `Tier`."""
        with self._lock:
            return TierUsage(len(self._entries), self._bytes, self._capacity)

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._closed = True
            self._entries.clear()
            self._bytes = 0

    def _drop(self, key: Key) -> bool:
        held = self._entries.pop(key, None)
        if held is None:
            return False
        self._bytes -= held[0].nbytes
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", field=self.name)

    def _own(self, entry: Entry) -> Entry:
        # A payload that is a slice of something larger would keep all of it alive, outside the budget
        payload = entry.payload
        whole = payload.untyped_storage().nbytes() == payload.numel()
        if whole and (payload.is_pinned() or not self._pinned):
            return entry
        owned = host_bytes(payload.numel(), pinned=self._pinned)
        owned.copy_(payload)
        return Entry(entry.header, owned)
