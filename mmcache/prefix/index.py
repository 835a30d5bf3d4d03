"""The prefix index: how much of a request's KV exists, and in which blocks."""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from types import EllipsisType

from mmcache.errors import ConfigError, ReleasedError, RequestError, WindowError
from mmcache.integers import as_int
from mmcache.items import MultimodalRequest
from mmcache.prefix.forest import Forest, parent_of
from mmcache.prefix.ids import BlockIds, Ids, check_ids, split_ids
from mmcache.prefix.keys import check_block_size
from mmcache.prefix.match import PrefixMatch
from mmcache.prefix.tree import Node

__all__ = ["PrefixIndex"]

_log = logging.getLogger("mmcache.prefix")


class PrefixIndex:
    """Which blocks of KV exist for which prefix, for full attention.

    Blocks are known by their tokens, by the items that overlap them and by `(cache_salt, adapter)`. No more than
    `capacity_blocks` are known; the least recently used go first, from the end of the longest prefixes, pinned ones
    never. A request that was matched or inserted before is compared from there on. Thread-safe.

    Attributes:
        callback_errors: exceptions that callbacks raised.
    """

    def __init__(self, block_size: int = 16, capacity_blocks: int = 1 << 16) -> None:
        """Make an empty index.

        Args:
            block_size: tokens of a block.
            capacity_blocks: how many blocks exist.

        Raises:
            ConfigError: one of them is not a positive integer.
        """
        size, capacity = check_block_size(block_size), as_int(capacity_blocks)
        if capacity is None or capacity < 1:
            raise ConfigError(
                "an index has room for at least one block", expected="an integer >= 1", found=repr(capacity_blocks)
            )
        self._size = size
        self._capacity = capacity
        self._lock = Lock()
        self._forest = Forest(size)
        self._callbacks: list[Callable[[list[int]], object]] = []
        self._forgotten: deque[tuple[Node, int]] = deque()  # what matches hold that were dropped without a release
        self._own_ids: bool | None = None  # whether the ids are the index's own; the first insert decides
        self._next_id = 0
        self._given: set[int] = set()  # the engine's ids in use
        self.callback_errors = 0

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
        return self._forest.count

    def match(self, request: MultimodalRequest) -> PrefixMatch:
        """The longest known prefix of the request, pinned until the match is released.

        Raises:
            RequestError: it is no request.
        """
        if type(request) is not MultimodalRequest:
            _check_request(request)
        if self._forgotten:
            self._reclaim()
        size = self._size
        num_tokens = request.num_tokens
        self._lock.acquire()  # by hand where every step passes: half the price of `with`
        try:
            place = self._forest.walk(request, num_tokens // size)
            match = PrefixMatch()
            match._index = self
            match._released = False
            match._node = None
            match.num_tokens = match._blocks = 0
            if place is None or not place.block:
                return match
            node, blocks = place.node, place.block
            matched = blocks * size
            if matched == num_tokens:
                matched -= 1
                blocks = -(-matched // size)
                if not blocks:
                    return match
                while node.start >= blocks:
                    node = parent_of(node)
            insort(node.pins, blocks)
            match._node = node
            match._blocks = blocks
            match.num_tokens = matched
            return match
        finally:
            self._lock.release()

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
            RequestError: too few ids, ids that are not integers, that occur twice or are in use for other blocks; or
                it is no request.
            ConfigError: ids where the index assigned some before, or the other way round.
        """
        if type(request) is not MultimodalRequest:
            _check_request(request)
        known = num_tokens if type(num_tokens) is int else as_int(num_tokens)
        if known is None or not 0 <= known <= request.num_tokens:
            raise WindowError(
                "the tokens to insert lie within the request",
                request_id=request.request_id,
                expected=f"0 to {request.num_tokens}",
                found=repr(num_tokens),
            )
        if self._forgotten:
            self._reclaim()
        stop = known // self._size
        own_ids = block_ids is None
        forest = self._forest
        evicted: Ids | None = None
        self._lock.acquire()
        try:
            if self._own_ids is not own_ids and self._own_ids is not None:
                raise ConfigError(
                    "an index either assigns all block ids or is given all",
                    request_id=request.request_id,
                    expected="no block_ids" if self._own_ids else "block_ids",
                )
            place = forest.walk(request, stop)
            first = end = place.block if place is not None else 0
            given = None if own_ids else check_ids(block_ids, first, stop, self._given, request)
            if first < stop:
                end = stop
                missing = forest.count + stop - first - self._capacity
                if missing > 0:
                    evicted = []
                    forest.make_room(place, missing, evicted)
                    if not own_ids:
                        self._given.difference_update(*evicted)
                    end = min(stop, first + self._capacity - forest.count)
                if first < end:
                    self._own_ids = own_ids
                    if given is None:
                        number = self._next_id
                        self._next_id = until = number + end - first
                        forest.grow(request, place, end, range(number, until))
                    else:
                        del given[end - first :]
                        self._given.update(given)
                        forest.grow(request, place, end, given)
        finally:
            self._lock.release()
        if evicted:
            self._announce(evicted)
        return range(first, end)

    def clear(self, *, cache_salt: str | EllipsisType | None = ..., adapter: str | EllipsisType | None = ...) -> None:
        """Forget all blocks, or those of one salt (None is one of its own), of one adapter, or of both.

        Blocks that are pinned are not matched any more and go with their last pin.
        """
        if self._forgotten:
            self._reclaim()
        evicted: Ids = []
        with self._lock:
            for salt, own_adapter in list(self._forest.roots):
                if cache_salt in (salt, ...) and adapter in (own_adapter, ...):
                    self._forest.clear((salt, own_adapter), evicted)
            self._given.difference_update(*evicted)
        self._announce(evicted)

    def on_evict(self, callback: Callable[[list[int]], object]) -> None:
        """Call `callback` with the ids of blocks that were evicted, each time, outside the lock; later blocks first.

        It is called in the thread whose `insert`, `match`, `clear` or `release` evicted them, before that returns. It
        may use the index. What it raises is logged and counted: others are told all the same, and the operation stands.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(callback):
            raise ConfigError("a callback is called with block ids", expected="a callable", found=repr(callback))
        self._callbacks.append(callback)

    def _announce(self, evicted: Ids) -> None:
        for callback in list(self._callbacks) if evicted else ():
            try:
                callback([block_id for piece in evicted for block_id in piece])
            except Exception:
                self.callback_errors += 1
                _log.exception("a callback of on_evict failed")

    def _reclaim(self) -> None:
        """Release the matches that were dropped without."""
        evicted: Ids = []
        with self._lock:
            while self._forgotten:
                self._forest.unpin(*self._forgotten.popleft(), evicted)
            self._given.difference_update(*evicted)
        self._announce(evicted)

    def _ids_of(self, match: PrefixMatch) -> list[int]:
        pieces: list[Sequence[int]] = []
        with self._lock:
            if match._released:
                raise ReleasedError("the match was released: its blocks may hold other tokens by now")
            node = match._node
            while node is not None and node.parent is not None:
                if node.start < match._blocks:
                    pieces += reversed(split_ids(node.ids, match._blocks - node.start)[0])
                node = node.parent
        return list(chain.from_iterable(reversed(pieces)))


def _check_request(request: object) -> None:
    if not isinstance(request, MultimodalRequest):
        raise RequestError("an index knows MultimodalRequests", found=type(request).__name__)
