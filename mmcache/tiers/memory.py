"""Entries in this process's memory, on the host or a device, under a byte budget, least recently used first to go."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

import torch

from mmcache.errors import ConfigError, TierError
from mmcache.fields import owns_memory
from mmcache.tiers.arguments import check_entries, check_name, check_namespace, check_whole, keys_of
from mmcache.tiers.devices import Apart, on_host, usable_device
from mmcache.tiers.entry import Entry, check_pinning
from mmcache.tiers.keys import Key
from mmcache.tiers.protocol import PutOutcome, StoredEntry, TierUsage

__all__ = ["MemoryTier"]


class MemoryTier:
    """Memory of the host or of a device as a tier: what it holds stays a copy away instead of an encoder run away.

    Entries share memory with the rows they were put from (on the host, or on the tier's device) and with the rows they
    are read as, so neither may be written to; a write is found by the checksum and the entry dropped.

    A device's entries are whole when they are found, on whatever stream. Who reads the payload of one, other than
    through a `TieredStore`, tells the allocator so (`Tensor.record_stream`), since the entry may be evicted meanwhile.

    Args:
        capacity_bytes: budget, headers included. It holds while entries are put, too: what has to go goes first.
        device: where payloads lie. Headers stay on the host.
        pinned: keep payloads in page-locked host memory (one copy when put), for fast copies to a GPU.
        name: name for counters and events.

    Raises:
        ConfigError: the budget is not positive, the device is not to be had, or memory cannot be page-locked.
    """

    shared = False

    def __init__(
        self,
        capacity_bytes: int,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        name: str = "memory",
    ) -> None:
        check_whole("capacity_bytes", capacity_bytes)
        check_name(name)
        check_pinning(pinned)
        self.name = name
        self.device = usable_device(device)
        if pinned and self.device.type != "cpu":
            raise ConfigError("only host memory is page-locked", field="pinned", found=self.device, expected="cpu")
        self._capacity = capacity_bytes
        self._pinned = pinned
        self._apart = Apart(self.device)
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
        """See `Tier`. Payloads may lie on any device."""
        check_entries(entries, on_host=False)
        stored: dict[Key, None] = {}
        evicted: dict[Key, None] = {}
        for key, entry in entries.items():
            if entry.nbytes > self._capacity:
                continue
            with self._lock:
                self._check_open()
                self._drop(key)
                for victim in self._make_room(entry.nbytes):
                    evicted[victim] = None
                    stored.pop(victim, None)
                if self._bytes + entry.nbytes > self._capacity:
                    continue  # what other threads are putting right now takes the room
                self._bytes += entry.nbytes
            owned = None
            try:
                owned = self._own(entry)
            except RuntimeError as error:
                raise TierError(f"no memory could be had: {error}", field=self.name) from error
            finally:
                with self._lock:
                    self._bytes -= entry.nbytes
                    if owned is not None and not self._closed:
                        self._drop(key)
                        self._entries[key] = (owned, time.time())
                        self._bytes += entry.nbytes
            stored[key] = None
            evicted.pop(key, None)
        return PutOutcome(frozenset(stored), tuple(evicted))

    def remove_many(self, keys: Sequence[Key]) -> int:
        """See `Tier`."""
        keys = keys_of(keys)
        with self._lock:
            self._check_open()
            return sum(self._drop(key) for key in keys)

    def clear(self, namespace: str | None = None) -> int:
        """See `Tier`."""
        check_namespace(namespace)
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

    def _make_room(self, nbytes: int) -> list[Key]:
        evicted = []
        while self._entries and self._bytes + nbytes > self._capacity:
            victim = next(iter(self._entries))
            self._drop(victim)
            evicted.append(victim)
        return evicted

    def _own(self, entry: Entry) -> Entry:
        payload = on_host(entry.payload) if self.device.type == "cpu" else entry.payload
        # A payload that is a part of something larger, as a slice or as memory that torch was lent, would keep all of
        # it alive, outside the budget
        whole = payload.device == self.device and owns_memory(payload)
        if whole and (payload.is_pinned() or not self._pinned):
            return Entry(entry.header, payload)
        with self._apart.work():
            owned = torch.empty(payload.shape, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)
            owned.copy_(payload)
        return Entry(entry.header, owned)
