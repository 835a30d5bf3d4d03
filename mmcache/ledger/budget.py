"""Room in bytes: who takes it, who may lose it, and what the workers have to drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mmcache.errors import MMCacheError
from mmcache.ledger.records import GONE, READY, RESERVED, Entry
from mmcache.policies import EvictionPolicy

__all__ = ["Budget"]


class Budget:
    """The ledger's bookkeeping of bytes. Not thread-safe: the ledger holds its lock around every call.

    An entry that is reserved or pinned is outside the policy's order. At every moment
    `used = bytes of the cached entries <= capacity` and `fixed = bytes of the reserved and pinned ones`.

    Attributes:
        capacity, used, fixed: bytes.
        entries: every entry that a worker may hold, by handle.
        drops: entries whose rows workers still have to be told to drop.
        evictions: number of entries evicted, by cause.
        uncached: number of items served uncached, by reason.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.used = 0
        self.fixed = 0
        self.entries: dict[int, Entry] = {}
        self.drops: list[Entry] = []
        self.evictions: Counter[str] = Counter()
        self.uncached: Counter[str] = Counter()

    def reserve(self, entry: Entry, nbytes: int, *, may_evict: bool = True) -> None:
        """Take room for an entry about to be encoded; where there can be none, mark it uncached and evict nothing."""
        entry.sized = True
        if nbytes <= self.capacity - self.used:
            pass
        elif nbytes > self.capacity:
            return self._serve_uncached(entry, "larger than the budget")
        elif nbytes > self.capacity - self.fixed:
            return self._serve_uncached(entry, "all room is pinned")
        elif not may_evict:
            return self._serve_uncached(entry, "size learned too late to evict")
        else:
            while self.used + nbytes > self.capacity:
                self._evict_one()
        entry.nbytes = nbytes
        self.used += nbytes
        self.fixed += nbytes
        return None

    def pin(self, entries: Sequence[Entry]) -> None:
        """One more request holds these ready entries, and uses them."""
        for entry in entries:
            if not entry.pins:
                self.fixed += entry.nbytes
            entry.pins += 1
        self.policy.pin([entry.handle for entry in entries])

    def unpin(self, entries: Iterable[Entry]) -> None:
        """One request fewer holds these; what nobody holds any more may be evicted."""
        back = []
        for entry in entries:
            entry.pins -= 1
            if not entry.pins and entry.state is READY:
                if entry.ranked:
                    self.fixed -= entry.nbytes
                    back.append(entry.handle)
                else:
                    self.settle(entry)
        if back:
            self.policy.unpin(back)

    def settle(self, entry: Entry) -> None:
        """A ready, cached entry has no holder: hand it to the policy, or drop it if nobody can find it any more."""
        self.fixed -= entry.nbytes
        if entry.detached:
            self._release(entry)
            self.drops.append(entry)
        else:
            entry.ranked = True
            cost = 1.0 if entry.cost is None else entry.cost
            self.policy.add(entry.handle, entry.nbytes, cost, (*entry.scope.key, entry.identifier))  # `content`

    def unrank(self, entry: Entry) -> None:
        """A ready entry that is pinned can no longer be found: when its pins go it is dropped, not evicted."""
        if entry.ranked:
            entry.ranked = False
            self.policy.remove(entry.handle)

    def uncache(self, entry: Entry) -> None:
        """A reserved entry will not be cached after all: give its room back."""
        self.used -= entry.nbytes
        self.fixed -= entry.nbytes
        entry.nbytes = 0
        entry.cached = False
        entry.sized = True

    def remove(self, entry: Entry, cause: str) -> None:
        """Drop a ready entry that nobody pins."""
        if entry.ranked:
            self.unrank(entry)
        self.evictions[cause] += 1
        if entry.scope.get(entry.identifier) is entry:
            del entry.scope[entry.identifier]
        entry.detached = True
        self._release(entry)
        self.drops.append(entry)

    def forget(self, entry: Entry) -> None:
        """Nobody has the entry any more: a reservation given up, an uncached one whose last user is gone."""
        if not entry.detached:
            entry.detached = True
            del entry.scope[entry.identifier]
        nbytes = entry.nbytes
        if entry.state is RESERVED:
            self.fixed -= nbytes
        self.used -= nbytes
        entry.nbytes = 0
        entry.state = GONE
        entry.owner = None
        del self.entries[entry.handle]
        if entry.written:
            self.drops.append(entry)

    def lose(self, entry: Entry) -> None:
        """Workers no longer have a ready entry."""
        if entry.pins:
            self.fixed -= entry.nbytes
        self.unrank(entry)
        self._release(entry)
        self.drops.append(entry)  # other workers may still have it

    def take_drops(self) -> list[Entry]:
        """What workers have to drop; they are told once."""
        drops, self.drops = self.drops, []
        return drops

    def _release(self, entry: Entry) -> None:
        self.used -= entry.nbytes
        entry.nbytes = 0
        entry.state = GONE
        del self.entries[entry.handle]

    def _evict_one(self) -> None:
        handle = self.policy.victim()
        if not isinstance(handle, int):
            # By the invariant an unpinned entry exists; to search on would spin for ever inside the lock.
            raise MMCacheError("the eviction policy has no victim although entries are unpinned: please report this")
        entry = self.entries[handle]
        entry.ranked = False  # the policy gave it up on its own
        self.remove(entry, "room")

    def _serve_uncached(self, entry: Entry, reason: str) -> None:
        entry.cached = False
        self.uncached[reason] += 1
