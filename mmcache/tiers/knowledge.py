"""What this process knows of a tier's contents without asking it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock

from mmcache.tiers.keys import Key
from mmcache.tiers.removals import Removals

__all__ = ["Knowledge"]


class Knowledge:
    """Keys that a tier was seen to hold, each for a while, the oldest forgotten first.

    Reading takes no lock: an engine's scheduler asks for every item of every request.

    Args:
        seconds: how long a sighting counts. Others may evict; an entry that is gone after all is a miss like any other.
        capacity: number of keys to remember.
        clock: seconds, monotonic.
        tick: see `Removals`.
    """

    def __init__(
        self,
        *,
        seconds: float = 60.0,
        capacity: int = 1 << 18,
        clock: Callable[[], float] = time.monotonic,
        tick: Callable[[], int] = int,
    ) -> None:
        self._seconds = seconds
        self._capacity = capacity
        self._clock = clock
        self._lock = Lock()
        self._until: dict[Key, float] = {}
        self._removals = Removals(tick)

    def __contains__(self, key: Key) -> bool:
        until = self._until.get(key)
        return until is not None and until > self._clock()

    def held(self, keys: Iterable[Key]) -> Iterator[Key]:
        """Those of the keys that are known, with one look at the clock."""
        now, until = self._clock(), self._until
        return (key for key in keys if until.get(key, now) > now)

    def __len__(self) -> int:
        return len(self._until)

    def removed_after(self, key: Key, moment: int) -> bool:
        """Whether the key was removed (`remove`, `clear`) later than that moment: what was read then is not to count.
        Takes no lock."""
        return self._removals.after(key, moment)

    def add(self, keys: Iterable[Key], seen: int | None = None) -> list[Key]:
        """The tier holds these; returns those that were not known.

        Args:
            keys: the keys.
            seen: a moment before the tier was asked: what was removed after it stays unknown. None: it is so now.
        """
        until = self._clock() + self._seconds
        new = []
        with self._lock:
            for key in keys:
                if seen is not None and self._removals.after(key, seen):
                    continue
                if self._until.pop(key, None) is None:
                    new.append(key)
                self._until[key] = until
            while len(self._until) > self._capacity:
                del self._until[next(iter(self._until))]
        return new

    def discard(self, keys: Iterable[Key]) -> list[Key]:
        """The tier does not hold these; returns those that were known."""
        with self._lock:
            return [key for key in keys if self._until.pop(key, None) is not None]

    def remove(self, keys: Sequence[Key]) -> list[Key]:
        """These are to leave the tier, and answers under way are out of date; returns those that were known."""
        with self._lock:
            self._removals.note(keys)
        return self.discard(keys)

    def clear(self, namespace: str | None) -> list[Key]:
        """As `remove`, for a namespace (None: for everything)."""
        with self._lock:
            self._removals.note((namespace,))
        return self.discard_namespace(namespace)

    def discard_namespace(self, namespace: str | None) -> list[Key]:
        """The tier holds nothing of a namespace (None: nothing at all); returns what was known of it."""
        with self._lock:
            gone = [key for key in self._until if namespace in (None, key.namespace)]
            for key in gone:
                del self._until[key]
        return gone
