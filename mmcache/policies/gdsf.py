"""Cost per byte, with frequency and ageing.

`pin` and `unpin` are on the way of every look-up and take all its keys at once. They write into one record each and
leave the order for `victim` to find: a record has one node in a heap, and since the priority of a record only grows, a
node that is out of date is a lower bound. `victim` puts such nodes right as they come up, O(log n) for each use before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from math import isfinite

from mmcache.errors import ConfigError

__all__ = ["IN_HEAP", "NOWHERE", "PARKED", "GdsfPolicy", "Record"]

NOWHERE, IN_HEAP, PARKED = range(3)
_HISTORY = 4096
"""Records kept of entries that were removed: a policy is not told whether they are gone or pinned and to come back."""


class Record:
    """What GDSF knows of an entry. `place` says which order holds its one node."""

    __slots__ = (
        "content",
        "cost",
        "key",
        "live",
        "nbytes",
        "pinned",
        "place",
        "priority",
        "tick",
        "uses",
        "value",
    )

    def __init__(self, key: Hashable, nbytes: int, cost: float, content: Hashable, uses: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.cost = cost
        self.content = content
        self.uses = uses
        self.value = cost / nbytes if nbytes > 0 else cost
        self.live = False  # a candidate
        self.pinned = False  # taken by `pin`, and to come back by `unpin`
        self.place = NOWHERE
        self.priority = 0.0
        self.tick = 0


class GdsfPolicy:
    """Greedy-Dual-Size-Frequency: lowest `age + uses * cost / bytes` first, older use first among equals.

    `age` is the priority of the last victim, so that an entry that was used often long ago gives way in the end. The
    uses of an entry outlive its pins: pinned and unpinned within one use, it counts that use once. After Cherkasova,
    "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998).
    """

    def __init__(self) -> None:
        self._records: dict[Hashable, Record] = {}
        self._heap: list[tuple[float, int, Record]] = []
        self._returned: list[Record] = []  # candidates again whose node was dropped: pushed by the next `victim`
        self._age = 0.0
        self._tick = 0
        self._weight = 1.0  # of the uses after the first
        self._held = 0  # entries that are candidates or pinned
        self._evicted = 0  # since the age was last taken as zero
        self._room = 4 * _HISTORY  # records and nodes before the next look for idle ones

    def __len__(self) -> int:
        """Number of candidates; looks at every entry."""
        return sum(record.live for record in self._records.values())

    def add(self, key: Hashable, nbytes: int, cost: float = 1.0, content: Hashable = None) -> None:
        """Make an entry a candidate; see `EvictionPolicy`.

        Raises:
            ConfigError: `cost` is negative or not finite, or `nbytes` is negative.
        """
        record = self._records.get(key)
        if record is None or record.nbytes != nbytes or record.cost != cost or record.content != content:
            record = self._record(key, nbytes, cost, content, record)
        elif record.live:
            return
        if not record.pinned:
            self._held += 1
        record.pinned = False
        record.live = True
        self._rank(record)
        if not record.place:
            record.place = IN_HEAP
            self._returned.append(record)

    def touch(self, key: Hashable) -> None:
        """Count one use of an entry."""
        record = self._records.get(key)
        if record is not None:
            record.uses += 1
            self._rank(record)

    def remove(self, key: Hashable) -> None:
        """Make an entry no candidate; idempotent."""
        record = self._records.get(key)
        if record is not None and (record.live or record.pinned):
            record.live = record.pinned = False
            self._held -= 1

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Count one use of each entry and make it no candidate until `unpin`."""
        get = self._records.get
        for key in keys:
            record = get(key)
            if record is not None:
                record.uses += 1
                if record.live:
                    record.live = False
                    record.pinned = True

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Make pinned entries candidates again."""
        get = self._records.get
        age, weight, tick = self._age, self._weight, self._tick
        for key in keys:
            record = get(key)
            if record is not None and record.pinned:
                record.pinned = False
                record.live = True
                record.tick = tick = tick + 1
                priority = age + record.value * (1.0 + weight * (record.uses - 1))  # as `_rank`
                if priority > record.priority:
                    record.priority = priority
                if not record.place:
                    record.place = IN_HEAP
                    self._returned.append(record)
        self._tick = tick

    def victim(self) -> Hashable | None:
        """Take out the candidate of the lowest priority, or return None."""
        record = self._lowest()
        return None if record is None else self._evict(record)

    def _rank(self, record: Record) -> None:
        """An entry was used: it is the last of its priority, which never falls."""
        record.tick = self._tick = self._tick + 1
        priority = self._age + record.value * (1.0 + self._weight * (record.uses - 1))
        if priority > record.priority:
            record.priority = priority

    def _record(self, key: Hashable, nbytes: int, cost: float, content: Hashable, old: Record | None) -> Record:
        """A new record; it replaces one of other size, cost or content, whose node might no longer be a lower bound."""
        if not (isfinite(cost) and cost >= 0 and nbytes >= 0):
            raise ConfigError(
                "an entry has a finite cost and a size", expected="cost >= 0, nbytes >= 0", found=(cost, nbytes)
            )
        if old is not None:
            self.remove(key)
        if len(self._records) + len(self._heap) + len(self._returned) > self._room:
            self._compact()
        # Costs of 1e9 and sizes of one byte, used a thousand million times, stay far from the largest float.
        record = Record(key, nbytes, min(cost, 1e12), content, 1 if old is None else old.uses)
        if old is not None:
            self._records.pop(key, None)
        self._records[key] = record
        return record

    def _lowest(self) -> Record | None:
        """Take the node of the candidate with the lowest priority out of the heap."""
        heap = self._heap
        if self._evicted > len(self._records) + _HISTORY:
            self._compact()
            heap = self._heap
        for record in self._returned:
            if record.live:
                heappush(heap, (record.priority, record.tick, record))
            else:
                record.place = NOWHERE
        self._returned.clear()
        while heap:
            _, tick, record = heap[0]
            if not record.live:
                heappop(heap)
                record.place = NOWHERE
            elif record.tick != tick:  # used since
                heapreplace(heap, (record.priority, record.tick, record))
            else:
                heappop(heap)
                record.place = NOWHERE
                return record
        return None

    def _evict(self, record: Record) -> Hashable:
        if record.priority > self._age:
            self._age = record.priority
        self._evicted += 1
        self._held -= 1
        record.live = False
        del self._records[record.key]
        return record.key

    def _compact(self) -> None:
        """Drop the nodes and the history of entries that went long ago, and count the age from zero again.

        The age would otherwise grow until adding `cost / bytes` to it no longer changes it.
        """
        idle = [key for key, record in self._records.items() if not (record.live or record.pinned)]
        for key in idle[: max(0, len(idle) - _HISTORY)]:  # in the order of their making
            del self._records[key]
        for _, _, record in self._heap:
            record.place = NOWHERE
        for record in self._returned:
            record.place = NOWHERE
        self._returned.clear()
        heap = self._heap = []
        for record in self._records.values():
            record.priority -= self._age
            if record.live and record.place == NOWHERE:
                record.place = IN_HEAP
                heap.append((record.priority, record.tick, record))
        heapify(heap)
        self._age = 0.0
        self._evicted = 0
        self._room = 4 * (len(self._records) + _HISTORY)
