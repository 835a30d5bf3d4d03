"""A radix tree over blocks of tokens, compared as they are.

An edge holds many blocks: their tokens as one array, which one pass compares with a request's, and the items that start
in them. An item that starts in a block and reaches into later ones need not be compared there again: on the way down
from the root its start was passed, and with it its identifier, length and mask. So two requests share a block if and
only if they share all blocks before it, its tokens, and every item that overlaps it.

A node's path from the root never changes while the node lives, but for its own end, which eviction cuts and insertion
extends; `cuts` counts the former, so that who remembers a place in a node can tell whether it still stands for the
same tokens, and `state` any change, so that they can tell whether there is more to compare with.

Tokens are not copied where a request's own array serves: it is append-only, so that what a node refers to never
changes. A node keeps no more alive than `_WASTE` times what it stands for; where an array is longer it copies its part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mmcache.items import MultimodalRequest
from mmcache.prefix.ids import Ids, cut_ids, split_ids

__all__ = ["Comparison", "ItemKey", "Node", "add_keys", "block_key", "keys_before"]

Tokens: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

ItemKey: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...] | None, str]
"""Offset, length, runs of a mask, identifier. On one path, equal offsets are equal starts in a block."""

_CHUNK = 1 << 14  # tokens compared at once: edges are long, and two may part early
_WASTE = 3


def add_keys(keys: list[ItemKey], request: MultimodalRequest, index: int, limit: int) -> int:
    """Append the keys of the items from `index` on that start before token `limit`; the first that does not.

    Items without tokens overlap no block and have no key.
    """
    offsets = request._offsets
    end = len(offsets)
    if index == end or offsets[index] >= limit:
        return index
    if offsets[-1] >= limit:
        end = bisect_left(offsets, limit, index)
    if end == index + 1:  # the next turn's: a comprehension would cost five times as much
        item = request.items[index]
        place = item._placeholder
        if place._length:
            keys.append((place._offset, place._length, place._runs, item._identifier))
        return end
    # The slots instead of the properties: this is the larger part of matching a request of many items.
    keys += [
        (place._offset, place._length, place._runs, item._identifier)
        for item in request.items[index:end]
        if (place := item._placeholder)._length
    ]
    return end


def keys_before(keys: list[ItemKey], limit: int) -> list[ItemKey]:
    """Those of the keys whose items start before token `limit`."""
    return keys[: bisect_left(keys, (limit,))] if keys else keys


def block_key(tokens: bytes, starts: Sequence[ItemKey]) -> Hashable:
    """Under what a parent knows the child that begins with a block: its tokens and the items that start in it."""
    return (tokens, *starts) if starts else tokens


class Comparison:
    """Finds where two runs of tokens part. Not thread-safe.

    One side is copied to where `memcmp` can be had: that touches less memory than numpy's comparison and its mask do,
    and stops where the runs part.
    """

    __slots__ = ("_bytes", "_view")

    def __init__(self) -> None:
        self._bytes = bytearray(4 * _CHUNK)
        self._view: Tokens = np.frombuffer(self._bytes, np.int32)

    def parting(self, one: Tokens, other: Tokens) -> int:
        """Index of the first difference of two arrays of one length; that length where there is none."""
        for first in range(0, len(one), _CHUNK):
            mine, theirs = one[first : first + _CHUNK], other[first : first + _CHUNK]
            self._view[: len(mine)] = mine
            if not self._bytes.startswith(theirs):  # type: ignore[arg-type]
                return first + int((mine != theirs).argmax())
        return len(one)


_NONE: Tokens = np.empty(0, np.int32)


class Node:
    """The blocks `[start, end)` of all requests that pass here, and what follows them.

    Attributes:
        parent: the node before it; None for a root, which has no blocks.
        root: the root of its tree.
        key: its first block, under which its parent knows it; what its requests have in common where it is a root.
        start, end: its blocks, counted from the root.
        tokens: an array that holds their tokens; not to be written to but by the one node that owns it, at its end.
        base: position in the request of the first token in it.
        owned: whether it is this node's own.
        ids: their block ids.
        items: the items that start in them.
        pins: sorted; up to which block each match that ends here holds it.
        cuts: how often its end was cut off.
        state: how often its blocks or its children changed, or its tree was cleared.
        used: when it, or what followed it, was used last.
        queued: whether the order of eviction holds it.
        dead: whether it was removed; of a root, whether requests no longer find it.
    """

    __slots__ = (
        "base", "children", "cuts", "dead", "end", "ids", "items", "key", "owned", "parent", "pins", "queued", "root",
        "start", "state", "tokens", "used",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, key: Hashable, start: int, end: int, ids: Ids, items: list[ItemKey]
    ) -> None:
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.key = key
        self.start = start
        self.end = end
        self.tokens: Tokens = _NONE
        self.base = 0
        self.owned = False
        self.ids = ids
        self.items = items
        self.children: dict[Hashable, Node] = {}
        self.pins: list[int] = []
        self.cuts = self.state = 0
        self.used = 0
        self.queued = False
        self.dead = False

    @property
    def floor(self) -> int:
        """The block down to which it may be cut."""
        return self.pins[-1] if self.pins else self.start

    def common(self, block: int, stop: int, tokens: Tokens, keys: list[ItemKey], size: int, run: Comparison) -> int:
        """Up to which block, at most `stop <= end`, it agrees with a request that agrees up to `block`.

        Args:
            block: a block of this node, or its end.
            stop: where to stop.
            tokens: the request's, from its first.
            keys: the keys of the request's items that start in the blocks `[block, stop)`.
            size: tokens of a block.
            run: what compares.
        """
        own = self.items
        if block > self.start:
            own = own[bisect_left(own, (block * size,)) :]
        if stop < self.end:
            own = keys_before(own, stop * size)
        if own != keys:
            stop = _parting(own, keys) // size
        if tokens is self.tokens:
            return stop
        first, last = block * size, stop * size
        return (first + run.parting(self.tokens[first - self.base : last - self.base], tokens[first:last])) // size

    def hold(self, tokens: Tokens, end: int, size: int) -> None:
        """Stand for the blocks up to `end`, at least those so far, which are the first of a request's tokens."""
        if _WASTE * size * (end - self.start) >= len(tokens):
            self.end = end
            self.tokens = tokens
            self.base = 0
            self.owned = False
            return
        first, known, last = self.start * size, self.end * size, end * size
        self.end = end
        if not self.owned or last - self.base > len(self.tokens):
            grown = np.empty((last - first) * 5 // 4, np.int32)  # the next turns' go in without copying all again
            grown[: known - first] = self.tokens[first - self.base : known - self.base]
            self.tokens, self.base, self.owned = grown, first, True
        self.tokens[known - self.base : last - self.base] = tokens[known:last]

    def split(self, block: int, size: int) -> Node:
        """Move the blocks before `block` to a new node above this one, and return it."""
        if self.parent is None:
            raise ValueError("a root has no blocks to split")
        first = bisect_left(self.items, (block * size,))
        ids, self.ids = split_ids(self.ids, block - self.start)
        upper = Node(self.parent, self.key, self.start, block, ids, self.items[:first])
        upper.tokens, upper.base = self.tokens, self.base
        upper.used = self.used
        self.items = self.items[first:]
        self.start = block
        self.state += 1
        held = bisect_left(self.pins, block + 1)
        upper.pins, self.pins = self.pins[:held], self.pins[held:]
        self.parent.children[self.key] = upper
        self.parent = upper
        begin = block * size - self.base
        self.key = block_key(self.tokens[begin : begin + size].tobytes(), keys_before(self.items, (block + 1) * size))
        upper.children[self.key] = self
        self._trim(size)
        upper._trim(size)
        return upper

    def cut(self, end: int, size: int) -> Ids:
        """Drop the blocks from `end` on and return their ids, the last first; without any left the node is dead."""
        ids = cut_ids(self.ids, self.end - end)
        del self.items[bisect_left(self.items, (end * size,)) :]
        self.end = end
        self.cuts += 1
        self.state += 1
        if self.start == end and self.parent is not None:
            self.dead = True
            del self.parent.children[self.key]
        self._trim(size)
        return ids

    def _trim(self, size: int) -> None:
        """Copy its part of an array that is much longer."""
        first, count = self.start * size, (self.end - self.start) * size
        if _WASTE * count < len(self.tokens):
            begin = first - self.base
            self.tokens = self.tokens[begin : begin + count].copy()
            self.base = first
            self.owned = True


def _parting(own: list[ItemKey], keys: list[ItemKey]) -> int:
    """The first token at which two unequal lists of items differ."""
    for mine, other in zip(own, keys):
        if mine != other:
            return min(mine[0], other[0])
    longer = own if len(own) > len(keys) else keys
    return longer[min(len(own), len(keys))][0]
