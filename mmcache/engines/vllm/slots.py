"""Where in a block of memory things may lie."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["SLOT_ALIGN", "SlotAllocator"]

SLOT_ALIGN = 64


class SlotAllocator:
    """Hands out parts of a block, first fit, and joins what comes back. For one thread.

    Args:
        nbytes: size of the block.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // SLOT_ALIGN * SLOT_ALIGN
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]  # (offset, size), sorted, no two adjacent
        self._sizes: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The offset of a free part of at least `nbytes`, or None."""
        size = -(-max(nbytes, 1) // SLOT_ALIGN) * SLOT_ALIGN
        for i, (offset, room) in enumerate(self._free):
            if room >= size:
                if room == size:
                    del self._free[i]
                else:
                    self._free[i] = (offset + size, room - size)
                self._sizes[offset] = size
                self.used += size
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free the part at an offset.

        Raises:
            KeyError: nothing was taken there.
        """
        size = self._sizes.pop(offset)
        self.used -= size
        i = bisect_left(self._free, (offset, 0))
        if i < len(self._free) and offset + size == self._free[i][0]:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            before, room = self._free[i - 1]
            self._free[i - 1] = (before, room + size)
        else:
            insort(self._free, (offset, size))
