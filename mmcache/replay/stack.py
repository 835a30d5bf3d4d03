"""LRU at every capacity in one pass, by stack distances in bytes.

The stack holds contents by their last use. A content is a hit in a cache of C bytes exactly if it and all that was used
after it take at most C bytes. After Mattson et al., "Evaluation techniques for storage hierarchies" (1970), with the
bytes of an entry in place of a page. That holds for contents of unequal sizes, as long as
what one request needs fits into C.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import inf, isqrt

__all__ = ["LruStack"]

_LEAST = 1024


class LruStack:
    """Contents by last use, with sums of their bytes. What lies deeper than `depth_bytes` is forgotten."""

    def __init__(self, depth_bytes: float = inf) -> None:
        self._depth = depth_bytes
        self._place: dict[Hashable, int] = {}  # the oldest first
        self._total = 0
        self._resize(_LEAST)

    def __len__(self) -> int:
        """Number of contents that are remembered."""
        return len(self._place)

    def use(self, contents: Mapping[Hashable, int]) -> list[int | None]:
        """Use contents (with their bytes) together, as the items of one request.

        Returns:
            For each the smallest capacity, in bytes, that had it before; None if it is not known.
        """
        place, sizes = self._place, self._sizes
        found: list[int | None] = []
        for content in contents:
            position = place.get(content)
            found.append(None if position is None else self._total - self._below(position))
        for content, nbytes in contents.items():
            position = place.pop(content, None)
            if position is not None:
                self._put(position, -sizes[position])
            if self._next == len(sizes):
                self._compact()
                sizes = self._sizes
            place[content] = self._next
            self._put(self._next, nbytes)
            self._next += 1
        self._forget()
        return found

    def _put(self, position: int, nbytes: int) -> None:
        self._sizes[position] += nbytes
        self._blocks[position // self._width] += nbytes
        self._total += nbytes

    def _below(self, position: int) -> int:
        """Bytes of what was used before."""
        block, width = position // self._width, self._width
        return sum(self._blocks[:block]) + sum(self._sizes[block * width : position])

    def _forget(self) -> None:
        while self._place:
            content = next(iter(self._place))
            position = self._place[content]
            # All that is deeper than this one is gone, so that it lies as deep as everything.
            if self._total <= self._depth:
                return
            del self._place[content]
            self._put(position, -self._sizes[position])

    def _compact(self) -> None:
        """Number the contents anew, with as much room again."""
        sizes = [self._sizes[position] for position in self._place.values()]
        self._resize(max(_LEAST, 2 * len(sizes)))
        self._total = 0
        for place, (content, nbytes) in enumerate(zip(self._place, sizes)):
            self._place[content] = place
            self._put(place, nbytes)
        self._next = len(sizes)

    def _resize(self, room: int) -> None:
        self._width = isqrt(room)
        self._sizes = [0] * room
        self._blocks = [0] * (room // self._width + 1)
        self._next = 0
