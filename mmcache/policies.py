"""Which entry to evict next.

Only candidates are ordered: an entry that gets pinned leaves (`pin`, `remove`) and comes back when its last pin goes
(`unpin`, `add`), so that pinned entries cost an eviction nothing. A policy is not thread-safe; its owner calls it under
its own lock.

`pin` and `unpin` are on the way of every look-up and take all its keys at once. They write into one record each and
leave the order for `victim` to find: a record has one node in a heap, and since the priority of a record only grows, a
node that is out of date is a lower bound. `victim` puts such nodes right as they come up, O(log n) for each use before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isfinite, sqrt
from typing import Protocol

from mmcache.errors import ConfigError

__all__ = ["EvictionPolicy", "GdsfPolicy", "LruPolicy", "QueueAwarePolicy", "make_policy"]


class EvictionPolicy(Protocol):
    """An order of eviction over opaque keys. A key stands for the same entry for as long as that entry lives."""

    def add(self, key: Hashable, nbytes: int, cost: float = 1.0, content: Hashable = None) -> None:
        """Make an entry a candidate: a new one, or one whose last pin went. No use of it is counted but the first.

        Args:
            key: the entry.
            nbytes: bytes that evicting it gives back.
            cost: what making it again costs, in any one unit (encoder seconds, or 1 per item), finite and not negative.
            content: what announced requests call it, or None.
        """

    def touch(self, key: Hashable) -> None:
        """Count one use of an entry, a candidate or a pinned one. Unknown keys are ignored."""

    def remove(self, key: Hashable) -> None:
        """Make an entry no candidate: it is pinned, or gone. Idempotent; unknown keys are ignored."""

    def pin(self, keys: Iterable[Hashable]) -> None:
        """`touch` and `remove` each of several entries, pinned ones too; unknown keys are ignored."""

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Make entries that `pin` took candidates again, with the size, cost and content that they had.

        Keys whose entries were removed meanwhile are ignored. Who counts pins calls this for the last one.
        """

    def victim(self) -> Hashable | None:
        """Take the next entry to evict out of the policy and return its key, or None when there is no candidate."""


class LruPolicy:
    """The entry that was not used for the longest time goes first. O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()
        self._pinned: set[Hashable] = set()

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self._order)

    def add(self, key: Hashable, nbytes: int, cost: float = 1.0, content: Hashable = None) -> None:
        """Make an entry a candidate, the last one; see `EvictionPolicy`."""
        self._pinned.discard(key)
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: Hashable) -> None:
        """Make a candidate the last one to go."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        """Make an entry no candidate; idempotent."""
        self._order.pop(key, None)
        self._pinned.discard(key)

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Make entries no candidates until `unpin`."""
        for key in keys:
            if key in self._order:
                del self._order[key]
                self._pinned.add(key)

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Make pinned entries candidates again, the last ones."""
        for key in keys:
            if key in self._pinned:
                self._pinned.remove(key)
                self._order[key] = None

    def victim(self) -> Hashable | None:
        """Take out the least recently used candidate, or return None."""
        return self._order.popitem(last=False)[0] if self._order else None


class _Record:
    """What GDSF knows of an entry. `place` says which order holds its one node."""

    __slots__ = (
        "content",
        "cost",
        "key",
        "limit",
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
        self.limit = inf  # of what its uses can make of its value
        self.live = False  # a candidate
        self.pinned = False  # taken by `pin`, and to come back by `unpin`
        self.place = _NOWHERE
        self.priority = 0.0
        self.tick = 0


_LIFT = 1.5
_SPREAD = 4
_WINDOW = 1000  # entries over which the mean value is taken
_NOWHERE, _IN_HEAP, _PARKED = range(3)
_HISTORY = 4096
"""Records kept of entries that were removed: a policy is not told whether they are gone or pinned and to come back."""


class GdsfPolicy:
    """Greedy-Dual-Size-Frequency: lowest `age + uses * cost / bytes` first, older use first among equals.

    `age` is the priority of the last victim, so that an entry that was used often long ago gives way in the end. The
    uses of an entry outlive its pins: pinned and unpinned within one use, it counts that use once. After Cherkasova,
    "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998).
    """

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}
        self._heap: list[tuple[float, int, _Record]] = []
        self._returned: list[_Record] = []  # candidates again whose node was dropped: pushed by the next `victim`
        self._age = 0.0
        self._tick = 0
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
        record.pinned = False
        record.live = True
        record.tick = self._tick = self._tick + 1
        record.priority = self._age + min(record.uses * record.value, record.limit)
        if not record.place:
            record.place = _IN_HEAP
            self._returned.append(record)

    def touch(self, key: Hashable) -> None:
        """Count one use of an entry."""
        record = self._records.get(key)
        if record is not None:
            record.uses += 1
            self._tick = record.tick = self._tick + 1
            record.priority = self._age + min(record.uses * record.value, record.limit)

    def remove(self, key: Hashable) -> None:
        """Make an entry no candidate; idempotent."""
        record = self._records.get(key)
        if record is not None:
            record.live = record.pinned = False

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
        age = self._age
        tick = self._tick
        for key in keys:
            record = get(key)
            if record is not None and record.pinned:
                record.pinned = False
                record.live = True
                record.tick = tick = tick + 1
                worth = record.uses * record.value
                record.priority = age + (worth if worth < record.limit else record.limit)
                if not record.place:
                    record.place = _IN_HEAP
                    self._returned.append(record)
        self._tick = tick

    def victim(self) -> Hashable | None:
        """Take out the candidate of the lowest priority, or return None."""
        record = self._lowest()
        return None if record is None else self._evict(record)

    def _record(self, key: Hashable, nbytes: int, cost: float, content: Hashable, old: _Record | None) -> _Record:
        """A new record; it replaces one of other size, cost or content, whose node might no longer be a lower bound."""
        if not (isfinite(cost) and cost >= 0 and nbytes >= 0):
            raise ConfigError(
                "an entry has a finite cost and a size", expected="cost >= 0, nbytes >= 0", found=(cost, nbytes)
            )
        self.remove(key)
        if len(self._records) + len(self._heap) + len(self._returned) > self._room:
            self._compact()
        # Costs of 1e9 and sizes of one byte, used a thousand million times, stay far from the largest float.
        record = _Record(key, nbytes, min(cost, 1e12), content, 1 if old is None else old.uses)
        self._records.pop(key, None)
        self._records[key] = record
        return record

    def _lowest(self) -> _Record | None:
        """Take the node of the candidate with the lowest priority out of the heap."""
        heap = self._heap
        if self._evicted > len(self._records) + _HISTORY:
            self._compact()
            heap = self._heap
        for record in self._returned:
            if record.live:
                heappush(heap, (record.priority, record.tick, record))
            else:
                record.place = _NOWHERE
        self._returned.clear()
        while heap:
            _, tick, record = heap[0]
            if not record.live:
                heappop(heap)
                record.place = _NOWHERE
            elif record.tick != tick:  # used since
                heapreplace(heap, (record.priority, record.tick, record))
            else:
                heappop(heap)
                record.place = _NOWHERE
                return record
        return None

    def _evict(self, record: _Record) -> Hashable:
        if record.priority > self._age:
            self._age = record.priority
        self._evicted += 1
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
            record.place = _NOWHERE
        for record in self._returned:
            record.place = _NOWHERE
        self._returned.clear()
        heap = self._heap = []
        for record in self._records.values():
            record.priority -= self._age
            if record.live and record.place == _NOWHERE:
                record.place = _IN_HEAP
                heap.append((record.priority, record.tick, record))
        heapify(heap)
        self._age = 0.0
        self._evicted = 0
        self._room = 4 * (len(self._records) + _HISTORY)


class _Need:
    """One content that announced requests need."""

    __slots__ = ("node", "parked", "positions")

    def __init__(self) -> None:
        self.positions: list[float] = []  # of the requests, sorted; never empty while the need is known
        self.parked: list[_Record] = []  # entries that were passed over for this need
        self.node: float | None = None  # the position under which `_late` has this need


class QueueAwarePolicy(GdsfPolicy):
    """GDSF that knows which requests wait: what they need goes last, later needs before sooner ones.

    A need is known by content, so that an entry admitted after the announcement is recognised.

    Among the rest, uses make up for a low value, but lift no entry beyond `_SPREAD` standard deviations above the mean
    value: a conversation uses its images every turn and then never again, and what only frequency ranks high would
    stay long after it. So with equal sizes and costs, where GDSF loses to LRU on chats, the order is that of LRU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._needs: dict[Hashable, _Need] = {}
        self._late: list[tuple[float, int, _Need]] = []  # (-position, tie, need): latest first
        self._ties = 0
        self._seen = 0
        self._mean = 0.0  # of the values of late, and of their squares
        self._square = 0.0

    def announce(self, position: float, contents: Iterable[Hashable]) -> None:
        """A request waits that needs `contents`; requests of lower positions run sooner. O(log queue) an item."""
        for content in contents:
            need = self._needs.get(content)
            if need is None:
                need = self._needs[content] = _Need()
            positions = need.positions
            if not positions or position >= positions[-1]:
                positions.append(position)
            else:
                insort(positions, position)

    def withdraw(self, position: float, contents: Iterable[Hashable]) -> None:
        """Take back an announcement, of all or some of its contents; what was not announced is ignored."""
        for content in contents:
            need = self._needs.get(content)
            if need is None:
                continue
            positions = need.positions
            index = bisect_left(positions, position)
            if index == len(positions) or positions[index] != position:
                continue
            del positions[index]
            if not positions:
                del self._needs[content]
                self._unpark(need)
            elif index == 0 and need.node is not None and positions[0] > need.node:
                self._push(need)
        if len(self._late) > 2 * len(self._needs) + 64:
            self._rebuild_late()

    def victim(self) -> Hashable | None:
        """Take out the candidate of the lowest priority that no announced request needs, else the one needed last."""
        while (record := self._lowest()) is not None:
            need = self._needs.get(record.content)
            if need is None:
                return self._evict(record)
            self._park(record, need)
        return self._latest()

    def _record(self, key: Hashable, nbytes: int, cost: float, content: Hashable, old: _Record | None) -> _Record:
        record = super()._record(key, nbytes, cost, content, old)
        value = record.value
        self._seen = min(self._seen + 1, _WINDOW)
        self._mean += (value - self._mean) / self._seen
        self._square += (value * value - self._square) / self._seen
        spread = sqrt(max(0.0, self._square - self._mean * self._mean))
        record.limit = max(value, _LIFT * self._mean + _SPREAD * spread)
        return record

    def _latest(self) -> Hashable | None:
        late = self._late
        while late:
            position, _, need = late[0]
            if need.node != -position:  # replaced by a later node, or the need is over
                heappop(late)
            elif need.positions[0] != need.node:  # needed sooner than that by now
                heappop(late)
                self._push(need)
            else:
                while need.parked:
                    record = need.parked.pop()
                    record.place = _NOWHERE
                    if record.live:
                        return self._evict(record)
                heappop(late)
                need.node = None
        return None

    def _park(self, record: _Record, need: _Need) -> None:
        for other in need.parked:
            if not other.live:
                other.place = _NOWHERE
        need.parked = [other for other in need.parked if other.live]
        need.parked.append(record)
        record.place = _PARKED
        if need.node is None:
            self._push(need)

    def _push(self, need: _Need) -> None:
        need.node = need.positions[0]
        self._ties += 1
        heappush(self._late, (-need.node, self._ties, need))

    def _unpark(self, need: _Need) -> None:
        """Nobody needs it any more: its entries are candidates like the others."""
        need.node = None
        for record in need.parked:
            record.place = _NOWHERE
            if record.live:
                record.place = _IN_HEAP
                self._returned.append(record)
        need.parked.clear()

    def _rebuild_late(self) -> None:
        self._late = [node for node in self._late if node[2].node == -node[0]]
        heapify(self._late)


_POLICIES: dict[str, type[LruPolicy] | type[GdsfPolicy]] = {
    "lru": LruPolicy,
    "gdsf": GdsfPolicy,
    "queue-aware": QueueAwarePolicy,
}


def make_policy(name: str) -> EvictionPolicy:
    """A new policy: "lru", "gdsf" or "queue-aware".

    Raises:
        ConfigError: there is no policy of that name.
    """
    policy = _POLICIES.get(name)
    if policy is None:
        raise ConfigError("unknown eviction policy", expected=" or ".join(_POLICIES), found=repr(name))
    return policy()
