"""A tier around a tier that fails in the ways in which tiers fail, on command or at random."""

import random
import threading
import time
from collections import Counter

from mmcache.errors import TierError
from mmcache.tiers import Entry, PutOutcome, Tier

FAULTS = (
    "refused",  # the connection is refused
    "timeout",  # nothing for longer than the deadline
    "raises",  # an error that no tier should raise
    "flipped",  # a bit of the payload
    "header",  # a bit of the header
    "truncated",  # half a value
    "empty",  # no bytes at all
    "version",  # written by another version
    "foreign",  # somebody else's bytes
    "swapped",  # another key's entry
    "lost",  # gone between knowing and getting
    "restarted",  # the server came back empty
    "not stored",  # no room
)


class FaultyTier:
    def __init__(self, inner: Tier, *, seed: int = 0, rate: float = 0.0, delay: float = 0.0) -> None:
        self.inner = inner
        self.random = random.Random(seed)
        self.rate = rate
        self.delay = delay
        self.next: list[str] = []
        self.always: str | None = None
        self.injected: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self._last: Entry | None = None
        self._lock = threading.Lock()

    @property
    def name(self):
        return self.inner.name

    @property
    def shared(self):
        return self.inner.shared

    def hang(self) -> None:
        self.gate.clear()

    def go_on(self) -> None:
        self.gate.set()

    def _fault(self, *possible: str) -> str | None:
        self.gate.wait()
        with self._lock:
            fault = self.always
            if fault is None and self.next:
                fault = self.next.pop(0)
            if fault is None and self.random.random() < self.rate:
                fault = self.random.choice(FAULTS)
            if fault not in possible:
                return None
            self.injected[fault] += 1
        if fault == "refused":
            raise TierError("connection refused", field=self.name)
        if fault == "raises":
            raise KeyError("a bug in a tier")
        if fault == "timeout":
            time.sleep(self.delay)
        if fault == "restarted":
            self.inner.clear()
        return fault

    def contains_many(self, keys):
        self.calls["contains"] += 1
        self._fault("refused", "timeout", "raises", "restarted")
        return self.inner.contains_many(keys)

    def get_many(self, keys):
        self.calls["get"] += 1
        fault = self._fault(*FAULTS[:-1])
        found = self.inner.get_many(keys)
        return {key: self._damaged(entry, fault) for key, entry in found.items() if fault != "lost"}

    def put_many(self, entries):
        self.calls["put"] += 1
        fault = self._fault("refused", "timeout", "raises", "restarted", "not stored", "flipped", "truncated", "header")
        if fault == "not stored":
            return PutOutcome(frozenset())
        return self.inner.put_many({key: self._damaged(entry, fault) for key, entry in entries.items()})

    def remove_many(self, keys):
        self.calls["remove"] += 1
        self._fault("refused", "timeout", "raises")
        return self.inner.remove_many(keys)

    def clear(self, namespace=None):
        return self.inner.clear(namespace)

    def scan(self):
        return self.inner.scan()

    def usage(self):
        return self.inner.usage()

    def close(self):
        self.inner.close()

    def _damaged(self, entry: Entry, fault: str | None) -> Entry:
        header, payload = bytearray(entry.header), entry.payload
        last, self._last = self._last, entry
        if fault == "flipped":
            payload = payload.clone()
            payload[self.random.randrange(len(payload))] ^= 1 << self.random.randrange(8)
        elif fault == "header":
            header[self.random.randrange(80)] ^= 1 << self.random.randrange(8)
        elif fault == "truncated":
            payload = payload[: len(payload) // 2]
        elif fault == "empty":
            header, payload = bytearray(), payload[:0]
        elif fault == "version":
            header[8] += 1
        elif fault == "foreign":
            header[:8] = b"REDIS000"
        elif fault == "swapped" and last is not None:
            return last
        return Entry(bytes(header), payload)


class LateTier(FaultyTier):
    """Reads at once and answers when the gate opens."""

    def get_many(self, keys):
        found = self.inner.get_many(keys)
        self.calls["read"] += 1
        self.gate.wait()
        return found

    def contains_many(self, keys):
        found = self.inner.contains_many(keys)
        self.calls["looked"] += 1
        self.gate.wait()
        return found

    def put_many(self, entries):
        return self.inner.put_many(entries)

    def remove_many(self, keys):
        return self.inner.remove_many(keys)
