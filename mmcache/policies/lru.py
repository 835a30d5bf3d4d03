"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

__all__ = ["LruPolicy"]


class LruPolicy:
    """The entry that was not used for the longest time goes first. O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()
        self._pinned: set[Hashable] = set()

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self._order)

    def add(self, key: Hashable, nbytes: int, cost: float = 1.0, content: Hashable = None) -> None:
        """Make an entry a candidate, the last one; see `EvictionPolicy`."""
        self._pinned.discard(key)
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: Hashable) -> None:
        """Make a candidate the last one to go."""
        if key in self._order:
            self._order.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        """Make an entry no candidate; idempotent."""
        self._order.pop(key, None)
        self._pinned.discard(key)

    def pin(self, keys: Iterable[Hashable]) -> None:
        """Make entries no candidates until `unpin`."""
        for key in keys:
            if key in self._order:
                del self._order[key]
                self._pinned.add(key)

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Make pinned entries candidates again, the last ones."""
        for key in keys:
            if key in self._pinned:
                self._pinned.remove(key)
                self._order[key] = None

    def victim(self) -> Hashable | None:
        """Take out the least recently used candidate, or return None."""
        return self._order.popitem(last=False)[0] if self._order else None
