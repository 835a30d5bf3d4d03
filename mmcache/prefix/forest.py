"""The trees of all salts and adapters: where requests stand in them, and how they grow and shrink."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from typing import Any, TypeAlias
from weakref import ref

from mmcache.items import MultimodalRequest
from mmcache.prefix.leaves import LeafOrder
from mmcache.prefix.tree import Comparison, Node, block_key, item_keys, keys_before

__all__ = ["Forest", "Place", "Scope", "parent_of"]

Scope: TypeAlias = tuple[str | None, str | None]
"""Cache salt and adapter."""


class Place:
    """How far a request agrees with its tree: up to `block`, in `node`; `item` is its first item at or after that.

    Attributes:
        request, node, block, item: as above.
        cuts: what the node's were.
        num_items: how many items the request had.
        parted: the state of the forest in which they agree no further, or -1.
    """

    __slots__ = ("block", "cuts", "item", "node", "num_items", "parted", "request")

    def __init__(self, request: ref[MultimodalRequest], node: Node, block: int, item: int, num_items: int) -> None:
        self.request = request
        self.node = node
        self.cuts = node.cuts
        self.block = block
        self.item = item
        self.num_items = num_items
        self.parted = -1


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
        self._changes = 0

    def walk(self, request: MultimodalRequest, stop: int) -> Place | None:
        """How far the request's first `stop` blocks agree with its tree; marks that as used. None: there is no tree."""
        root = self.roots.get((request.cache_salt, request.adapter))
        if root is None:
            return None
        place = self._places.get(id(request))
        if place is None or place.request() is not request:
            place = self._remember(request, root)
        node = place.node
        if node.cuts != place.cuts or node.root is not root or place.num_items != len(request._offsets):
            place = self._revised(request, place, root)
            node = place.node
        block = place.block
        if block > stop:
            # Asked about less than is known to agree: what is remembered stays.
            block = stop
            place = Place(place.request, node, stop, bisect_left(request._offsets, stop * self.size), place.num_items)
        while node.start >= block and node.parent is not None:  # was split since, or agrees with less
            node = node.parent
        if block < stop and place.parted != self._changes:
            if block == node.end and not node.children:
                place.parted = self._changes
            else:
                node, block = self._descend(request, place, node, block, stop)
                place.block = block
        if place.node is not node:
            place.node = node
            place.cuts = node.cuts
        self._clock = node.used = self._clock + 1
        return place

    def grow(self, request: MultimodalRequest, place: Place | None, end: int, ids: array[int]) -> None:
        """Append the blocks up to `end` where the request left its tree, under these ids."""
        size = self.size
        if place is None or not place.block:  # making room may have emptied its tree
            place = self._remember(request, self._root(request))
        node, block = place.node, place.block
        if block < node.end:
            node = node.split(block, size)
        tokens = request._buffer
        keys, place.item = item_keys(request, place.item, end * size)
        if node.children or node.parent is None:
            first_block = tokens[block * size : (block + 1) * size].tobytes()
            key = block_key(first_block, keys_before(keys, (block + 1) * size))
            child = Node(node, key, block, block, ids, keys)
            node.children[key] = child
            node = child
        else:
            node.ids += ids
            if keys:
                node.items += keys
        node.hold(tokens, end, size)
        self.count += end - block
        # Nothing is behind the new end: there the request and the tree part.
        self._changes = place.parted = self._changes + 1
        self._clock = node.used = self._clock + 1
        place.block = end
        place.node = node
        place.cuts = node.cuts
        if not node.queued:
            self.leaves.add(node, self.count)

    def make_room(self, place: Place | None, blocks: int, evicted: list[int]) -> None:
        """Evict that many blocks, or what can be; none of those up to `place`."""
        if place is None or not place.block:
            self._evict(blocks, evicted)
            return
        insort(place.node.pins, place.block)
        self._evict(blocks, evicted)
        place.node.pins.remove(place.block)
        self.leaves.add(place.node, self.count)
        place.cuts = place.node.cuts  # it was cut behind the place, if at all

    def clear(self, scope: Scope, evicted: list[int]) -> None:
        """Forget a tree. Blocks that are pinned go with their last pin."""
        nodes = [self.roots.pop(scope)]
        for node in nodes:  # grows
            nodes += node.children.values()
        for node in reversed(nodes):  # leaves first
            self._prune(node, evicted)

    def pin(self, node: Node, block: int) -> None:
        """Keep a node's blocks before `block`, and all before the node, from eviction."""
        pins = node.pins
        if not pins or block >= pins[-1]:
            pins.append(block)
        else:
            insort(pins, block)

    def unpin(self, node: Node, block: int, evicted: list[int]) -> None:
        """Take back one `pin`."""
        while node.start >= block:  # was split since
            node = parent_of(node)
        pins = node.pins
        if pins[-1] == block:
            pins.pop()
        else:
            del pins[bisect_left(pins, block)]
        if self.roots.get(node.root.key) is not node.root:
            self._prune(node, evicted)
        elif not node.queued:
            self.leaves.add(node, self.count)

    def _root(self, request: MultimodalRequest) -> Node:
        scope = (request.cache_salt, request.adapter)
        root = self.roots.get(scope)
        if root is None:
            root = self.roots[scope] = Node(None, scope, 0, 0, array("q"), [])
        return root

    def _remember(self, request: MultimodalRequest, root: Node) -> Place:
        """A place for the request at the root of its tree, for as long as the request lives."""
        key, places = id(request), self._places

        def forget(_: ref[MultimodalRequest]) -> None:
            places.pop(key, None)

        place = places[key] = Place(ref(request, forget), root, 0, 0, len(request._offsets))
        return place

    def _revised(self, request: MultimodalRequest, place: Place, root: Node) -> Place:
        """The place of a request that has new items, or where the tree is no longer what it was."""
        offsets = request._offsets
        came_late = place.item < len(offsets) and offsets[place.item] < place.block * self.size
        if came_late or place.node.cuts != place.cuts or place.node.root is not root:
            # New items may stand for tokens that were compared without them.
            return self._remember(request, root)
        place.num_items = len(offsets)
        place.parted = -1  # the next block may be another one with them
        return place

    def _descend(self, request: MultimodalRequest, place: Place, node: Node, block: int, stop: int) -> tuple[Node, int]:
        """Compare a request with its tree from a block on, down to where they part or to `stop`."""
        size = self.size
        while block < stop:
            if block == node.end:
                child = None
                if node.children:
                    starts, _ = item_keys(request, place.item, (block + 1) * size)
                    first_block = request._buffer[size * block : size * (block + 1)].tobytes()
                    child = node.children.get(block_key(first_block, starts))
                if child is None:
                    place.parted = self._changes
                    break
                node = child
            until = min(stop, node.end)
            keys, after = item_keys(request, place.item, until * size)
            agreed = node.common(block, until, request._buffer, keys, size, self._comparison)
            block = agreed
            if agreed < until:
                place.item = bisect_left(request._offsets, agreed * size, place.item)
                place.parted = self._changes
                break
            place.item = after
        return node, block

    def _evict(self, blocks: int, evicted: list[int]) -> None:
        goal = self.count - blocks
        while self.count > goal and (node := self.leaves.pop(self.count)) is not None:
            self._cut(node, max(node.floor, node.end - (self.count - goal)), evicted)
            self.leaves.add(node, self.count)

    def _cut(self, node: Node, end: int, evicted: list[int]) -> None:
        ids = node.cut(end, self.size)
        self._changes += 1
        self.count -= len(ids)
        evicted += reversed(ids)
        if node.dead:
            parent = parent_of(node)
            parent.used = max(parent.used, node.used)
            self.leaves.add(parent, self.count)
            if parent.parent is None and not parent.children and self.roots.get(parent.key) is parent:
                del self.roots[parent.key]

    def _prune(self, node: Node, evicted: list[int]) -> None:
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
