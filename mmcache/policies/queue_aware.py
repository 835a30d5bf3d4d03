"""Cost per byte, with knowledge of the requests that wait in the engine's queue."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush

from mmcache.policies.gdsf import IN_HEAP, NOWHERE, PARKED, GdsfPolicy, Record

__all__ = ["QueueAwarePolicy"]


class _Need:
    """One content that announced requests need."""

    __slots__ = ("node", "parked", "positions")

    def __init__(self) -> None:
        self.positions: list[float] = []  # of the requests, sorted; never empty while the need is known
        self.parked: list[Record] = []  # entries that were passed over for this need
        self.node: float | None = None  # the position under which `_late` has this need


class QueueAwarePolicy(GdsfPolicy):
    """Cost per byte with ageing, but what waiting requests need goes last, later needs before sooner ones.

    A need is known by content, so that an entry admitted after the announcement is recognised.

    How much the uses of an entry count among the rest depends on the traffic. Pictures that many conversations share
    are worth the more, the more often they were used; those of one conversation are used every turn and then never
    again, and what only frequency ranks high would stay long after it. So the weight of uses is learned, between none
    (GreedyDual-Size, which is LRU where sizes and costs are equal) and full (GDSF): contents that were evicted are
    remembered, as many as there are entries, and one that is wanted again says of which kind too much was evicted,
    those used once or those used more often. The step is that of ARC, so that no constant is to be tuned. After Megiddo
    and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (2003).
    """

    def __init__(self) -> None:
        super().__init__()
        self._needs: dict[Hashable, _Need] = {}
        self._late: list[tuple[float, int, _Need]] = []  # (-position, tie, need): latest first
        self._ties = 0
        self._weight = 0.5
        self._ghosts: OrderedDict[Hashable, bool] = OrderedDict()  # evicted contents: whether used more than once
        self._often = 0  # how many of them were

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
                self._haunt(record)
                return self._evict(record)
            self._park(record, need)
        return self._latest()

    def _record(self, key: Hashable, nbytes: int, cost: float, content: Hashable, old: Record | None) -> Record:
        record = super()._record(key, nbytes, cost, content, old)
        often = self._ghosts.pop(content, None)
        if often is not None:
            self._learn(often)
        return record

    def _learn(self, often: bool) -> None:
        """A content that was evicted is wanted again: weigh uses more where it was used often, else less."""
        same = self._often if often else len(self._ghosts) + 1 - self._often
        other = len(self._ghosts) + 1 - same
        step = max(1.0, other / same) / (self._held + 1)
        self._weight = min(1.0, self._weight + step) if often else max(0.0, self._weight - step)
        self._often -= often

    def _haunt(self, record: Record) -> None:
        """Remember the content of an entry that is evicted though nobody may need it."""
        if record.content is None:
            return
        ghosts, often = self._ghosts, record.uses > 1
        self._often += often - ghosts.pop(record.content, False)
        ghosts[record.content] = often
        room = max(2, self._held)
        while len(ghosts) >= room:
            self._often -= ghosts.popitem(last=False)[1]

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
                    record.place = NOWHERE
                    if record.live:
                        return self._evict(record)
                heappop(late)
                need.node = None
        return None

    def _park(self, record: Record, need: _Need) -> None:
        for other in need.parked:
            if not other.live:
                other.place = NOWHERE
        need.parked = [other for other in need.parked if other.live]
        need.parked.append(record)
        record.place = PARKED
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
            record.place = NOWHERE
            if record.live:
                record.place = IN_HEAP
                self._returned.append(record)
        need.parked.clear()

    def _rebuild_late(self) -> None:
        self._late = [node for node in self._late if node[2].node == -node[0]]
        heapify(self._late)
