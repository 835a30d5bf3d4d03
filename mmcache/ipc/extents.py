"""Free and used parts of a linear space: first fit, neighbours joined."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Extents"]


class Extents:
    """Which parts of `[0, size)` are free."""

    __slots__ = ("_holes",)

    def __init__(self, size: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, size)]  # (offset, size), sorted, never adjacent

    @property
    def largest(self) -> int:
        """Size of the largest free part."""
        return max((size for _, size in self._holes), default=0)

    def take(self, size: int) -> int | None:
        """Offset of `size` units that are not free any more, or None where no hole is large enough."""
        for position, (offset, hole) in enumerate(self._holes):
            if hole >= size:
                if hole == size:
                    del self._holes[position]
                else:
                    self._holes[position] = (offset + size, hole - size)
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Make a part free that `take` returned."""
        holes = self._holes
        at = bisect_left(holes, (offset, 0))
        if at < len(holes) and offset + size == holes[at][0]:
            size += holes.pop(at)[1]
        if at and sum(holes[at - 1]) == offset:
            at -= 1
            offset, before = holes.pop(at)
            size += before
        holes.insert(at, (offset, size))
