"""Which leaf of the trees loses blocks next."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from mmcache.prefix.tree import Node

__all__ = ["LeafOrder"]

_SLACK = 64  # nodes beyond twice the living ones before the dead are looked for


class LeafOrder:
    """The leaves that can be cut, least recently used first. O(log n), whatever the number of pins.

    Only leaves whose end is not pinned are in it, each at most once. A leaf that was used since it came in is found out
    of place when it comes up, and put back: one step for each use before.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []  # (used, tie, leaf)
        self._ties = 0

    def add(self, node: Node, living: int) -> None:
        """Take in a node, if it is a leaf that can be cut; there are at most `living` nodes."""
        if node.queued or node.children or node.dead or node.end <= node.floor:
            return
        node.queued = True
        self._ties += 1
        heappush(self._heap, (node.used, self._ties, node))
        if len(self._heap) > 2 * living + _SLACK:  # mostly nodes that went by other ways than eviction
            self._heap = [entry for entry in self._heap if not entry[2].dead]
            heapify(self._heap)

    def pop(self, living: int) -> Node | None:
        """Take out the leaf that is next, or return None when there is none."""
        heap = self._heap
        while heap:
            used, _, node = heappop(heap)
            node.queued = False
            if node.used == used and not (node.dead or node.children) and node.end > node.floor:
                return node
            self.add(node, living)
        return None
