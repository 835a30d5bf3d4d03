"""The prefix index: how much of a request's KV exists, and in which blocks."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from threading import Lock
from types import EllipsisType, TracebackType
from typing import Any, Self, TypeAlias
from weakref import ref

import numpy as np

from mmcache.errors import ConfigError, ReleasedError, RequestError, WindowError
from mmcache.items import MultimodalRequest
from mmcache.prefix.keys import check_block_size
from mmcache.prefix.tree import Node, block_key, item_keys, keys_before, roomy, skip_items

__all__ = ["PrefixIndex", "PrefixMatch"]

BlockIds: TypeAlias = "Sequence[int] | Any"  # or a numpy array or tensor of integers


_NUMBERS = 256  # ids made at once, beyond those that are asked for


class _Place:
    """How far a request agrees with the tree: up to `block`, in `node`; `item` is its first item at or after that."""

    __slots__ = ("block", "cuts", "item", "node", "parted", "request")

    def __init__(self, request: ref[MultimodalRequest], node: Node, block: int, item: int) -> None:
        self.request = request
        self.node = node
        self.cuts = node.cuts
        self.block = block
        self.item = item
        self.parted = -1  # the state of the tree in which they agree no further


class PrefixMatch:
    """The blocks that a request can reuse. Pinned until `release`.

    Attributes:
        num_tokens: tokens whose KV exists, at most all tokens of the request but the last. A multiple of the block size
            unless that last token caps it; the last block is then used in part and its last token computed again.
    """

    __slots__ = ("_blocks", "_index", "_node", "_released", "num_tokens")

    def __init__(self, index: PrefixIndex, node: Node | None, blocks: int, num_tokens: int) -> None:
        self._index = index
        self._node = node
        self._blocks = blocks
        self._released = False
        self.num_tokens = num_tokens

    @property
    def block_ids(self) -> list[int]:
        """Ids of the blocks that hold these tokens, in order, one for each begun block.

        Raises:
            ReleasedError: after `release` they may stand for other tokens at any time.
        """
        return self._index._ids_of(self)

    def release(self) -> None:
        """Let the blocks be evicted. Idempotent."""
        self._index._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # May run in a thread that holds the index's lock: leave it to the next operation.
        if not self._released and self._node is not None:
            self._index._forgotten.append((self._node, self._blocks))

    def __repr__(self) -> str:
        return f"PrefixMatch({self.num_tokens} tokens, {self._blocks} blocks{', released' if self._released else ''})"


class PrefixIndex:
    """Which blocks of KV exist for which prefix, for full attention.

    Blocks are known by their tokens, by the items that overlap them and by `(cache_salt, adapter)`. No more than
    `capacity_blocks` are known; the least recently used go first, from the end of the longest prefixes, pinned ones
    never. A request that was matched or inserted before is compared from there on. Thread-safe.
    """

    def __init__(self, block_size: int = 16, capacity_blocks: int = 1 << 16) -> None:
        """Make an empty index.

        Args:
            block_size: tokens of a block.
            capacity_blocks: how many blocks exist.

        Raises:
            ConfigError: one of them is not a positive integer.
        """
        check_block_size(block_size)
        if type(capacity_blocks) is not int or capacity_blocks < 1:
            raise ConfigError(
                "an index has room for at least one block", expected="an integer >= 1", found=repr(capacity_blocks)
            )
        self._size = block_size
        self._capacity = capacity_blocks
        self._lock = Lock()
        self._callbacks: list[Callable[[list[int]], object]] = []
        self._roots: dict[Any, Node] = {}  # by (cache salt, adapter)
        self._places: dict[int, _Place] = {}  # by id of the request, for as long as that lives
        self._order: list[tuple[int, int, Node]] = []  # (used, tie, leaf); one for each leaf that can be cut
        self._forgotten: deque[tuple[Node, int]] = deque()
        self._count = 0
        self._clock = 0
        self._changes = 0
        self._ties = 0
        self._assigns: bool | None = None  # whether the ids are the index's own; the first insert decides
        self._numbers: array[int] = array("q")  # the next ids of its own
        self._fresh = 0  # the one after these
        self._given: set[int] = set()  # the engine's ids in use

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._size

    @property
    def capacity_blocks(self) -> int:
        """How many blocks can be known at once."""
        return self._capacity

    @property
    def num_blocks(self) -> int:
        """How many blocks are known."""
        return self._count

    def match(self, request: MultimodalRequest) -> PrefixMatch:
        """The longest known prefix of the request, pinned until the match is released."""
        if self._forgotten:
            self._reclaim()
        size = self._size
        num_tokens = request.num_tokens
        with self._lock:
            place = self._walk(request, num_tokens // size)
            if place is None or not place.block:
                return PrefixMatch(self, None, 0, 0)
            node = place.node
            blocks = place.block
            matched = blocks * size
            if matched == num_tokens:
                matched -= 1
                blocks = -(-matched // size)
                if not blocks:
                    return PrefixMatch(self, None, 0, 0)
                while node.start >= blocks:
                    node = _parent(node)
            pins = node.pins
            if not pins or blocks >= pins[-1]:
                pins.append(blocks)
            else:
                insort(pins, blocks)
            return PrefixMatch(self, node, blocks, matched)

    def insert(self, request: MultimodalRequest, num_tokens: int, block_ids: BlockIds | None = None) -> range:
        """The KV of the request's first `num_tokens` tokens exists: know their whole blocks. Idempotent.

        A block that is known already keeps its id. Where there is no room and nothing that could be evicted, fewer
        blocks are known.

        Args:
            request: the request.
            num_tokens: how many of its tokens have KV; the tokens of a last block that is not full are not known.
            block_ids: ids of the blocks that hold them, one for each whole block from the first; what follows is
                ignored, so that an engine may pass its block table. None: the index numbers the
                blocks that it is told of, from 0 and no number twice. An index takes either ids or None, always.

        Returns:
            The blocks of the request that were new: `range(first, last + 1)`. Those before were known, under the ids
            that `match` gives; those after found no room. An engine that gave ids keeps only the blocks of the range
            for the index, and the others are its own to free.

        Raises:
            WindowError: `num_tokens` lies outside the request.
            RequestError: too few ids, ids that are not integers, that occur twice or are in use for other blocks.
            ConfigError: ids where the index assigned some before, or the other way round.
        """
        if type(num_tokens) is not int and isinstance(num_tokens, np.integer):
            num_tokens = int(num_tokens)
        if type(num_tokens) is not int or not 0 <= num_tokens <= request.num_tokens:
            raise WindowError(
                "the tokens to insert lie within the request",
                request_id=request.request_id,
                expected=f"0 to {request.num_tokens}",
                found=repr(num_tokens),
            )
        if self._forgotten:
            self._reclaim()
        stop = num_tokens // self._size
        evicted: list[int] = []
        with self._lock:
            if self._assigns is not (block_ids is None) and self._assigns is not None:
                raise ConfigError(
                    "an index either assigns all block ids or is given all",
                    request_id=request.request_id,
                    expected="no block_ids" if self._assigns else "block_ids",
                )
            place = self._walk(request, stop)
            first = end = place.block if place is not None else 0
            ids = None if block_ids is None else self._check_ids(block_ids, first, stop, request)
            if first < stop:
                end = stop
                if self._count + stop - first > self._capacity:
                    end = min(stop, first + self._make_room(place, stop - first, evicted))
                if first < end:
                    if ids is None:
                        ids = self._number(end - first)
                    else:
                        ids = ids[: end - first]
                        self._given.update(ids)
                    self._assigns = block_ids is None
                    self._store(request, place, end, ids)
        if evicted:
            self._announce(evicted)
        return range(first, end)

    def clear(self, *, cache_salt: str | EllipsisType | None = ..., adapter: str | EllipsisType | None = ...) -> None:
        """Forget all blocks, or those of one salt (None is one of its own), of one adapter, or of both.

        Blocks that are pinned are not matched any more and go with their last pin.
        """
        if self._forgotten:
            self._reclaim()
        evicted: list[int] = []
        with self._lock:
            for (salt, own_adapter), root in list(self._roots.items()):
                if cache_salt in (salt, ...) and adapter in (own_adapter, ...):
                    del self._roots[salt, own_adapter]
                    nodes = [root]
                    for node in nodes:  # grows
                        nodes += node.children.values()
                    for node in reversed(nodes):  # leaves first
                        self._prune(node, evicted)
        self._announce(evicted)

    def on_evict(self, callback: Callable[[list[int]], object]) -> None:
        """Call `callback` with the ids of blocks that were evicted, each time, outside the lock; later blocks first.

        It is called in the thread whose `insert`, `match`, `clear` or `release` evicted them, before that returns.
        """
        self._callbacks.append(callback)

    def _announce(self, evicted: list[int]) -> None:
        for callback in self._callbacks if evicted else ():
            callback(list(evicted))

    def _walk(self, request: MultimodalRequest, stop: int) -> _Place | None:
        """How far the tree agrees with the request's first `stop` blocks; marks that as used."""
        root = self._roots.get((request.cache_salt, request.adapter))
        if root is None:
            return None
        place = self._places.get(id(request))
        if place is None or place.request() is not request:
            place = self._remember(request, root)
        node = place.node
        if node.dead or node.cuts != place.cuts or node.root is not root:
            place = self._remember(request, root)
            node = root
        block = place.block
        if block > stop:
            # Asked about less than is known to agree: what is remembered stays.
            block = stop
            place = _Place(place.request, node, stop, skip_items(request.items, 0, stop * self._size))
        while node.start >= block and node.parent is not None:  # was split since, or agrees with less
            node = node.parent
        if block < stop and place.parted != self._changes:
            node, block = self._descend(request, place, node, block, stop)
        place.node = node
        place.cuts = node.cuts
        place.block = block
        self._clock = node.used = self._clock + 1
        return place

    def _descend(
        self, request: MultimodalRequest, place: _Place, node: Node, block: int, stop: int
    ) -> tuple[Node, int]:
        """Compare a request with the tree from a block on, down to where they part or to `stop`."""
        items, size = request.items, self._size
        while block < stop:
            if block == node.end:
                child = None
                if node.children:
                    starts, _ = item_keys(items, place.item, (block + 1) * size)
                    first_block = request._buffer[size * block : size * (block + 1)].tobytes()
                    child = node.children.get(block_key(first_block, starts))
                if child is None:
                    place.parted = self._changes
                    break
                node = child
            until = min(stop, node.end)
            keys, after = item_keys(items, place.item, until * size)
            agreed = node.common(block, until, request._buffer, keys, size)
            place.item = after if agreed == until else skip_items(items, place.item, agreed * size)
            block = agreed
            if agreed < until:
                place.parted = self._changes
                break
        return node, block

    def _remember(self, request: MultimodalRequest, root: Node) -> _Place:
        """A place for the request at the root of its tree, for as long as the request lives."""
        key, places = id(request), self._places

        def forget(_: ref[MultimodalRequest]) -> None:
            places.pop(key, None)

        place = places[key] = _Place(ref(request, forget), root, 0, 0)
        return place

    def _store(self, request: MultimodalRequest, place: _Place | None, end: int, ids: array[int]) -> None:
        """Append blocks up to `end` where the request left the tree."""
        size = self._size
        if place is None or not place.block:  # making room may have emptied its tree
            scope = (request.cache_salt, request.adapter)
            root = self._roots.get(scope)
            if root is None:
                root = self._roots[scope] = Node(None, scope, 0, 0, bytearray(), array("q"), [])
            place = self._remember(request, root)
        node, block = place.node, place.block
        if block < node.end:
            node = node.split(block, size)
        tokens = request._buffer[size * block : size * end]
        keys, place.item = item_keys(request.items, place.item, end * size)
        if node.children or node.parent is None:
            key = block_key(tokens[:size].tobytes(), keys_before(keys, (block + 1) * size))
            child = Node(node, key, block, end, roomy(tokens), ids, keys)
            node.children[key] = child
            node = child
        else:
            node.extend(end, tokens, ids, keys)
        self._count += end - block
        self._changes += 1
        self._clock = node.used = self._clock + 1
        if not node.queued:
            self._queue(node)
        place.node = node
        place.cuts = node.cuts
        place.block = end

    def _number(self, count: int) -> array[int]:
        """The next ids of the index's own."""
        if count > len(self._numbers):
            more = np.arange(self._fresh, self._fresh + count + _NUMBERS, dtype=np.int64)
            self._fresh += len(more)
            self._numbers.frombytes(more.tobytes())
        ids = self._numbers[:count]
        del self._numbers[:count]
        return ids

    def _make_room(self, place: _Place | None, wanted: int, evicted: list[int]) -> int:
        """Evict until there is room for that many blocks; how many there is room for."""
        missing = self._count + wanted - self._capacity
        if place is not None and place.block:
            insort(place.node.pins, place.block)  # not what is to be extended
            self._evict(missing, evicted)
            place.node.pins.remove(place.block)
            self._queue(place.node)
            place.cuts = place.node.cuts  # it was cut behind the place, if at all
        else:
            self._evict(missing, evicted)
        return self._capacity - self._count

    def _evict(self, count: int, evicted: list[int]) -> None:
        goal = self._count - count
        while self._count > goal and self._order:
            used, _, node = heappop(self._order)
            node.queued = False
            if node.used == used and not node.dead and not node.children and node.end > node.floor:
                self._cut(node, max(node.floor, node.end - (self._count - goal)), evicted)
            self._queue(node)

    def _cut(self, node: Node, end: int, evicted: list[int]) -> None:
        ids = node.cut(end, self._size)
        self._changes += 1
        self._count -= len(ids)
        evicted += reversed(ids)
        self._given.difference_update(ids)
        if node.dead:
            parent = _parent(node)
            parent.used = max(parent.used, node.used)
            self._queue(parent)
            if parent.parent is None and not parent.children and self._roots.get(parent.key) is parent:
                del self._roots[parent.key]

    def _queue(self, node: Node) -> None:
        """Have the order of eviction know a leaf that can be cut."""
        if not (node.queued or node.children or node.dead) and node.end > node.floor:
            node.queued = True
            self._ties += 1
            heappush(self._order, (node.used, self._ties, node))
            if len(self._order) > 2 * self._count + 64:  # mostly nodes that went by other ways than eviction
                self._order = [entry for entry in self._order if not entry[2].dead]
                heapify(self._order)

    def _prune(self, node: Node, evicted: list[int]) -> None:
        """Cut what is not pinned of a node of a cleared tree, and of those before it."""
        while node.parent is not None and not node.children and not node.dead:
            if node.end > node.floor:
                self._cut(node, node.floor, evicted)
            if not node.dead:
                return
            node = node.parent

    def _reclaim(self) -> None:
        """Release the matches that were dropped without."""
        evicted: list[int] = []
        with self._lock:
            while self._forgotten:
                self._unpin(*self._forgotten.popleft(), evicted)
        self._announce(evicted)

    def _unpin(self, node: Node, block: int, evicted: list[int]) -> None:
        while node.start >= block:  # was split since
            node = _parent(node)
        node.pins.remove(block)
        if self._roots.get(node.root.key) is node.root:
            if not node.queued:
                self._queue(node)
        else:
            self._prune(node, evicted)

    def _release(self, match: PrefixMatch) -> None:
        evicted: list[int] = []
        with self._lock:
            if match._released:
                return
            match._released = True
            if match._node is not None:
                self._unpin(match._node, match._blocks, evicted)
        if evicted:
            self._announce(evicted)

    def _ids_of(self, match: PrefixMatch) -> list[int]:
        pieces: list[list[int]] = []
        with self._lock:
            if match._released:
                raise ReleasedError("the match was released: its blocks may hold other tokens by now")
            node = match._node
            while node is not None and node.parent is not None:
                if node.start < match._blocks:
                    pieces.append(node.ids[: match._blocks - node.start].tolist())
                node = node.parent
        return [block_id for piece in reversed(pieces) for block_id in piece]

    def _check_ids(self, block_ids: BlockIds, first: int, stop: int, request: MultimodalRequest) -> array[int]:
        """The ids of the blocks `[first, stop)`, of which none may be in use."""
        if len(block_ids) < stop:
            raise RequestError(
                "there is one id for each whole block",
                request_id=request.request_id,
                expected=stop,
                found=len(block_ids),
            )
        given = block_ids[first:stop]
        try:
            ids = array("q", given.tolist() if hasattr(given, "tolist") else given)
        except (TypeError, OverflowError) as error:
            raise RequestError(
                "block ids are integers of 64 bits", request_id=request.request_id, found=str(error)
            ) from None
        if len(set(ids)) < len(ids) or not self._given.isdisjoint(ids):
            seen = set(self._given)
            twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
            raise RequestError(
                "a block id stands for two blocks", request_id=request.request_id, found=f"{twice} is in use"
            )
        return ids


def _parent(node: Node) -> Node:
    if node.parent is None:
        raise RuntimeError("a root has no blocks")
    return node.parent
