"""The trees of all salts and adapters: where requests stand in them, and how they grow and shrink."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from weakref import ref

from mmcache.items import MultimodalRequest
from mmcache.prefix.ids import MOST_PIECES, Ids, join_ids
from mmcache.prefix.leaves import LeafOrder
from mmcache.prefix.tree import Comparison, ItemKey, Node, add_keys, block_key, keys_before

__all__ = ["Forest", "Place", "Scope", "parent_of"]

Scope: TypeAlias = tuple[str | None, str | None]
"""Cache salt and adapter."""


_PARTED = 1 << 62  # behind a place the request and its tree differ
_END = _PARTED + 1  # behind it there is nothing in the tree


class Place:
    """How far a request agrees with its tree: up to `block`, in `node`; `item` is its first item at or after that.

    Attributes:
        request, node, block, item: as above.
        salt, adapter: the request's when it was first looked for.
        until: up to which block they were compared. As far as any block goes where they part before, `_PARTED`, or
            where the tree ends, `_END`.
        num_items: how many items the request had.
        state: what the node's was; while it is, all this stands.
        cuts: what the node's were; while they are, the request agrees at least that far.
    """

    __slots__ = ("adapter", "block", "cuts", "item", "node", "num_items", "request", "salt", "state", "until")

    def __init__(self, request: MultimodalRequest, forget: Callable[[Any], object] | None, node: Node) -> None:
        """At the start of a request; `forget` is called when that is gone."""
        self.request = ref(request, forget)
        self.salt = request.cache_salt
        self.adapter = request.adapter
        self.node = node
        self.cuts = node.cuts
        self.block = self.item = 0
        self.num_items = len(request._offsets)
        self.state = self.until = -1


class Forest:
    """A tree for each scope. Not thread-safe: the index holds its lock around every call.

    A place is remembered for every request that was looked for, for as long as that lives, so that a request is
    compared from there on.

    Attributes:
        size: tokens of a block.
        roots: the trees.
        count: blocks of all trees, of those that were cleared and are pinned, too.
        leaves: the order of eviction.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.roots: dict[Any, Node] = {}
        self.count = 0
        self.leaves = LeafOrder()
        self._places: dict[int, Place] = {}  # by id of the request
        self._comparison = Comparison()
        self._clock = 0

    def walk(self, request: MultimodalRequest, stop: int) -> Place | None:
        """How far the request's first `stop` blocks agree with its tree; marks that as used. None: there is no tree."""
        place = self._places.get(id(request))
        offsets = request._offsets
        if (
            place is None
            or place.state != place.node.state
            or not place.block <= stop <= place.until
            or request.cache_salt is not place.salt
            or request.adapter is not place.adapter
            # New items change nothing where they are behind all that the tree knows.
            or (
                place.num_items != len(offsets)
                and (place.until != _END or offsets[place.item] < place.block * self.size)
            )
        ):
            place = self._compare(request, place, stop)
            if place is None:
                return None
        place.num_items = len(offsets)
        self._clock = place.node.used = self._clock + 1
        return place

    def grow(self, request: MultimodalRequest, place: Place | None, end: int, ids: range | array[int]) -> None:
        """Append the blocks up to `end` behind the place that `walk` just found, under these ids."""
        size = self.size
        if place is None or not place.block:  # making room may have emptied its tree
            place = self._remember(request, self._root(request))
        node, block = place.node, place.block
        if block < node.end:
            node = node.split(block, size)
        tokens = request._buffer
        node.state += 1
        if node.children or node.parent is None:
            keys: list[ItemKey] = []
            place.item = add_keys(keys, request, place.item, end * size)
            first_block = tokens[block * size : (block + 1) * size].tobytes()
            key = block_key(first_block, keys_before(keys, (block + 1) * size))
            child = Node(node, key, block, block, [ids], keys)
            self._clock = child.used = self._clock + 1
            node.children[key] = child
            node = child
        else:
            node.ids.append(ids)
            if len(node.ids) > MOST_PIECES:
                join_ids(node.ids)
            if place.item < place.num_items:
                place.item = add_keys(node.items, request, place.item, end * size)
        node.hold(tokens, end, size)
        self.count += end - block
        place.node = node
        place.cuts = node.cuts
        place.state = node.state
        place.block = end
        place.until = _END
        if not node.queued:
            self.leaves.add(node, self.count)

    def make_room(self, place: Place | None, blocks: int, evicted: Ids) -> None:
        """Evict that many blocks, or what can be; none of those up to `place`."""
        if place is None or not place.block:
            self._evict(blocks, evicted)
            return
        insort(place.node.pins, place.block)
        self._evict(blocks, evicted)
        place.node.pins.remove(place.block)
        self.leaves.add(place.node, self.count)
        place.cuts = place.node.cuts  # it was cut behind the place, if at all

    def clear(self, scope: Scope, evicted: Ids) -> None:
        """Forget a tree. Blocks that are pinned go with their last pin."""
        nodes = [self.roots.pop(scope)]
        nodes[0].dead = True
        for node in nodes:  # grows
            nodes += node.children.values()
            node.state += 1
        for node in reversed(nodes):  # leaves first
            self._prune(node, evicted)

    def unpin(self, node: Node, block: int, evicted: Ids) -> None:
        """Let go of a node's blocks before `block`, which is one of its pins, or was when it was not split yet."""
        while node.start >= block:
            node = parent_of(node)
        pins = node.pins
        if pins[-1] == block:
            pins.pop()
        else:
            del pins[bisect_left(pins, block)]
        if node.root.dead:
            self._prune(node, evicted)
        elif not node.queued:
            self.leaves.add(node, self.count)

    def _root(self, request: MultimodalRequest) -> Node:
        scope = (request.cache_salt, request.adapter)
        root = self.roots.get(scope)
        if root is None:
            root = self.roots[scope] = Node(None, scope, 0, 0, [], [])
        return root

    def _remember(self, request: MultimodalRequest, root: Node) -> Place:
        """A place for the request at the root of its tree, for as long as the request lives."""
        key = id(request)
        # No Python code runs between the request's end and that of its place, that could fail or be interrupted: no
        # other request of the same id finds it.
        place = self._places[key] = Place(request, partial(self._places.pop, key), root)
        return place

    def _compare(self, request: MultimodalRequest, place: Place | None, stop: int) -> Place | None:
        """What `walk` finds where it is not remembered as it is."""
        root = self.roots.get((request.cache_salt, request.adapter))
        if root is None:
            return None
        offsets = request._offsets
        if (
            place is None
            or place.cuts != place.node.cuts
            or place.node.root is not root
            # New items that stand for tokens which were compared without them.
            or (place.item < len(offsets) and offsets[place.item] < place.block * self.size)
        ):
            place = self._remember(request, root)
        node, block = place.node, place.block
        while node.start >= block and node.parent is not None:  # was split since
            node = node.parent
        if block > stop:
            # Asked about less than is known to agree: what is remembered stays.
            while node.start >= stop and node.parent is not None:
                node = node.parent
            less = Place(request, None, node)
            less.block, less.item = stop, bisect_left(offsets, stop * self.size)
            return less
        place.node, place.block = node, block = self._descend(request, place, node, block, stop)
        place.cuts = node.cuts
        place.state = node.state
        if block == node.end and not node.children:
            place.until = _END
        else:
            place.until = _PARTED if block < stop else stop
        return place

    def _descend(self, request: MultimodalRequest, place: Place, node: Node, block: int, stop: int) -> tuple[Node, int]:
        """Compare a request with its tree from a block on, down to where they part or to `stop`."""
        size = self.size
        while block < stop:
            if block == node.end:
                if not node.children:
                    break
                starts: list[ItemKey] = []
                add_keys(starts, request, place.item, (block + 1) * size)
                first_block = request._buffer[size * block : size * (block + 1)].tobytes()
                child = node.children.get(block_key(first_block, starts))
                if child is None:
                    break
                node = child
            until = min(stop, node.end)
            keys: list[ItemKey] = []
            after = add_keys(keys, request, place.item, until * size)
            agreed = node.common(block, until, request._buffer, keys, size, self._comparison)
            block = agreed
            if agreed < until:
                place.item = bisect_left(request._offsets, agreed * size, place.item)
                break
            place.item = after
        return node, block

    def _evict(self, blocks: int, evicted: Ids) -> None:
        goal = self.count - blocks
        while self.count > goal and (node := self.leaves.pop(self.count)) is not None:
            self._cut(node, max(node.floor, node.end - (self.count - goal)), evicted)
            self.leaves.add(node, self.count)

    def _cut(self, node: Node, end: int, evicted: Ids) -> None:
        self.count -= node.end - end
        evicted += node.cut(end, self.size)
        if node.dead:
            parent = parent_of(node)
            parent.state += 1
            parent.used = max(parent.used, node.used)
            self.leaves.add(parent, self.count)
            if parent.parent is None and not parent.children and not parent.dead:
                del self.roots[parent.key]
                parent.dead = True

    def _prune(self, node: Node, evicted: Ids) -> None:
        """Cut what is not pinned of a node of a cleared tree, and of those before it."""
        while node.parent is not None and not node.children and not node.dead:
            if node.end > node.floor:
                self._cut(node, node.floor, evicted)
            if not node.dead:
                return
            node = node.parent


def parent_of(node: Node) -> Node:
    """The node before one that has blocks."""
    if node.parent is None:
        raise RuntimeError("a root has no blocks")
    return node.parent
