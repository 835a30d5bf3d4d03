"""A radix tree over blocks of tokens, compared as they are.

An edge holds many blocks: their tokens as one run of bytes, which one `memcmp` compares with a request's buffer, and
the items that start in them. An item that starts in a block and reaches into later ones need not be compared there
again: on the way down from the root its start was passed, and with it its identifier, length and mask. So two requests
share a block if and only if they share all blocks before it, its tokens, and every item that overlaps it.

A node's path from the root never changes while the node lives, but for its own end, which eviction cuts and insertion
extends; `cuts` counts the former, so that who remembers a place in a node can tell whether it still stands for the
same tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mmcache.items import MultimodalItem

__all__ = ["ItemKey", "Node", "block_key", "item_keys", "keys_before", "roomy", "skip_items"]

Buffer: TypeAlias = Any
"""A contiguous int32 array, which `bytearray` takes as its bytes."""

ItemKey: TypeAlias = tuple[int, int, tuple[tuple[int, int], ...], str]
"""Offset, length, runs of embedding rows, identifier. On one path, equal offsets are equal starts in a block."""

_CHUNK = 1024  # tokens compared at once to find where two runs part


def item_keys(items: Sequence[MultimodalItem], index: int, limit: int) -> tuple[list[ItemKey], int]:
    """The keys of the items from `index` on that start before token `limit`, and the index of the first that does not.

    Items without tokens overlap no block and have no key.
    """
    # The slots instead of the properties: this is the larger part of matching a request of many items.
    end = len(items)
    if index == end or items[index]._placeholder._offset >= limit:
        return [], index
    if items[-1]._placeholder._offset >= limit:
        end = skip_items(items, index, limit)
    if end == index + 1:
        place = items[index]._placeholder
        return [(place._offset, place._length, place._runs, items[index]._identifier)] if place._length else [], end
    keys = [
        (place._offset, place._length, place._runs, item._identifier)
        for item in items[index:end]
        if (place := item._placeholder)._length
    ]
    return keys, end


def skip_items(items: Sequence[MultimodalItem], index: int, limit: int) -> int:
    """Index of the first item from `index` on that starts at or after token `limit`."""
    return bisect_left(items, limit, index, key=_offset)


def keys_before(keys: list[ItemKey], limit: int) -> list[ItemKey]:
    """Those of the keys whose items start before token `limit`."""
    return keys[: bisect_left(keys, (limit,))] if keys else keys


def block_key(tokens: bytes, starts: Sequence[ItemKey]) -> Hashable:
    """Under what a parent knows the child that begins with a block: its tokens and the items that start in it."""
    return (tokens, *starts) if starts else tokens


def roomy(tokens: Buffer) -> bytearray:
    """The bytes of tokens, with room for an eighth more: a conversation grows, and copies them again only then."""
    size = 4 * len(tokens)
    data = bytearray(size + size // 8)
    np.frombuffer(data, np.int32, len(tokens))[:] = tokens
    del data[size:]  # keeps the memory
    return data


def _offset(item: MultimodalItem) -> int:
    return item._placeholder._offset


class Node:
    """The blocks `[start, end)` of all requests that pass here, and what follows them.

    Attributes:
        parent: the node before it; None for a root, which has no blocks.
        root: the root of its tree.
        key: its first block, under which its parent knows it; what its requests have in common where it is a root.
        start, end: its blocks, counted from the root.
        tokens: their tokens, int32 each.
        ids: their block ids.
        items: the items that start in them.
        pins: sorted; up to which block each match that ends here holds it.
        cuts: how often its end was cut off.
        used: when it, or what followed it, was used last.
        queued: whether the order of eviction holds it.
        dead: whether it was removed.
    """

    __slots__ = (
        "children", "cuts", "dead", "end", "ids", "items", "key", "parent", "pins", "queued", "root", "start",
        "tokens", "used",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        key: Hashable,
        start: int,
        end: int,
        tokens: bytearray,
        ids: array[int],
        items: list[ItemKey],
    ) -> None:
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.key = key
        self.start = start
        self.end = end
        self.tokens = tokens
        self.ids = ids
        self.items = items
        self.children: dict[Hashable, Node] = {}
        self.pins: list[int] = []
        self.cuts = 0
        self.used = 0
        self.queued = False
        self.dead = False

    @property
    def floor(self) -> int:
        """The block down to which it may be cut."""
        return self.pins[-1] if self.pins else self.start

    def common(self, block: int, stop: int, buffer: Buffer, keys: list[ItemKey], size: int) -> int:
        """Up to which block, at most `stop <= end`, it agrees with a request that agrees up to `block`.

        Args:
            block: a block of this node, or its end.
            stop: where to stop.
            buffer: the request's int32 tokens, from its first.
            keys: the keys of the request's items that start in the blocks `[block, stop)`.
            size: tokens of a block.
        """
        own = self.items
        if block > self.start:
            own = own[bisect_left(own, (block * size,)) :]
        if stop < self.end:
            own = keys_before(own, stop * size)
        if own != keys:
            stop = _parting(own, keys) // size
        first = block * size
        offset = 4 * (first - self.start * size)
        if self.tokens.startswith(buffer[first : stop * size], offset):
            return stop
        while self.tokens.startswith(buffer[first : first + _CHUNK], offset):
            first += _CHUNK
            offset += 4 * _CHUNK
        other = buffer[first : min(first + _CHUNK, stop * size)]
        differ = np.frombuffer(self.tokens, np.int32, len(other), offset) != other
        return (first + int(differ.argmax())) // size

    def extend(self, end: int, tokens: Buffer, ids: array[int], items: list[ItemKey]) -> None:
        """Append the blocks `[self.end, end)`."""
        self.end = end
        self.tokens.extend(tokens)
        self.ids += ids
        self.items += items

    def split(self, block: int, size: int) -> Node:
        """Move the blocks before `block` to a new node above this one, and return it."""
        if self.parent is None:
            raise ValueError("a root has no blocks to split")
        count = block - self.start
        width = 4 * count * size
        first = bisect_left(self.items, (block * size,))
        upper = Node(
            self.parent, self.key, self.start, block, self.tokens[:width], self.ids[:count], self.items[:first]
        )
        upper.used = self.used
        self.start = block
        self.tokens = self.tokens[width:]
        self.ids = self.ids[count:]
        self.items = self.items[first:]
        held = bisect_left(self.pins, block + 1)
        upper.pins, self.pins = self.pins[:held], self.pins[held:]
        self.parent.children[self.key] = upper
        self.parent = upper
        self.key = block_key(bytes(self.tokens[: 4 * size]), keys_before(self.items, (block + 1) * size))
        upper.children[self.key] = self
        return upper

    def cut(self, end: int, size: int) -> array[int]:
        """Drop the blocks from `end` on and return their ids; without any blocks left the node is dead."""
        ids = self.ids[end - self.start :]
        del self.ids[end - self.start :]
        del self.tokens[(end - self.start) * 4 * size :]
        del self.items[bisect_left(self.items, (end * size,)) :]
        self.end = end
        self.cuts += 1
        if self.start == end and self.parent is not None:
            self.dead = True
            del self.parent.children[self.key]
        return ids


def _parting(own: list[ItemKey], keys: list[ItemKey]) -> int:
    """The first token at which two unequal lists of items differ."""
    for mine, other in zip(own, keys):
        if mine != other:
            return min(mine[0], other[0])
    longer = own if len(own) > len(keys) else keys
    return longer[min(len(own), len(keys))][0]
