"""When keys and namespaces were removed from a tier, so that what was read before is told from what is there now."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mmcache.tiers.keys import Key

__all__ = ["Removals"]


class Removals:
    """The moments of the latest removals. Recording is for one thread at a time; asking takes no lock.

    Args:
        tick: gives a larger number at every call; shared by whoever compares moments.
        capacity: number of keys and namespaces to remember. Whatever began before the ones that were forgotten counts
            as older than some removal: it is read again, which is slower and not wrong.
    """

    def __init__(self, tick: Callable[[], int], *, capacity: int = 1 << 16) -> None:
        self._tick = tick
        self._capacity = capacity
        self._at: dict[Key | str | None, int] = {}
        self._forgotten = -1

    def note(self, what: Iterable[Key | str | None]) -> None:
        """These keys or namespaces (None: everything) are removed now."""
        now = self._tick()
        for each in what:
            self._at[each] = now  # in one go, for those who ask meanwhile
        while len(self._at) > self._capacity:
            oldest = next(iter(self._at))
            self._forgotten = max(self._forgotten, self._at[oldest])
            del self._at[oldest]

    def after(self, key: Key, moment: int) -> bool:
        """Whether the key was removed later than that moment."""
        at = self._at
        if not at:
            return False
        return moment < max(self._forgotten, at.get(key, -1), at.get(key.namespace, -1), at.get(None, -1))
