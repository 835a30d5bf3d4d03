"""Room in bytes: who takes it, who may lose it, and what the workers have to drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from mmcache.errors import ConfigError
from mmcache.ledger.records import GONE, READY, RESERVED, Entry, Scope
from mmcache.policies import EvictionPolicy

__all__ = ["Budget"]


class Budget:
    """The ledger's bookkeeping of bytes. Not thread-safe: the ledger holds its lock around every call.

    An entry that is reserved or pinned is outside the policy's order. At every moment
    `used = bytes of the cached entries <= capacity` and `fixed = bytes of the reserved and pinned ones`.

    The policy may be anybody's. What it does wrong is noted and interrupts nothing, so that the books balance whatever
    it does; the next operation that can fail cleanly raises it (`complain`).

    Attributes:
        capacity, used, fixed: bytes.
        entries: every entry that a worker may hold, by handle.
        scopes: those of all these entries, by salt and adapter.
        drops: entries whose rows workers still have to be told to drop.
        evictions: number of entries evicted, by cause.
        uncached: number of items served uncached, by reason.
        fault: the first thing that the policy did wrong since `complain`, or None.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.used = 0
        self.fixed = 0
        self.entries: dict[int, Entry] = {}
        self.scopes: dict[tuple[str | None, str | None], Scope] = {}
        self.fault: ConfigError | None = None
        self.drops: list[Entry] = []
        self.evictions: Counter[str] = Counter()
        self.uncached: Counter[str] = Counter()

    def reserve(self, entry: Entry, nbytes: int, *, may_evict: bool = True) -> None:
        """Take room for an entry about to be encoded; where there can be none, mark it uncached and evict nothing.

        Where the policy fails to name what goes, the entry stays without room, as if its size were not known.
        """
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
                if not self._evict_one():
                    return None
        entry.sized = True
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
        try:
            self.policy.pin([entry.handle for entry in entries])
        except Exception as error:
            self.failed("pin", error)

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
            try:
                self.policy.unpin(back)
            except Exception as error:
                self.failed("unpin", error)

    def settle(self, entry: Entry) -> None:
        """A ready, cached entry has no holder: hand it to the policy, or drop it if nobody can find it any more."""
        self.fixed -= entry.nbytes
        if entry.detached:
            self._release(entry)
            self.drops.append(entry)
        else:
            entry.ranked = True
            cost = 1.0 if entry.cost is None else entry.cost
            try:
                self.policy.add(entry.handle, entry.nbytes, cost, (*entry.scope.key, entry.identifier))  # `content`
            except Exception as error:
                self.failed("add", error)

    def unrank(self, entry: Entry) -> None:
        """A ready entry that is pinned can no longer be found: when its pins go it is dropped, not evicted."""
        if entry.ranked:
            entry.ranked = False
            try:
                self.policy.remove(entry.handle)
            except Exception as error:
                self.failed("remove", error)

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
        self.unlist(entry)
        self._release(entry)
        self.drops.append(entry)

    def unlist(self, entry: Entry) -> None:
        """No lookup finds the entry from now on."""
        if not entry.detached:
            entry.detached = True
            entry.scope.detached += 1
            del entry.scope[entry.identifier]

    def forget(self, entry: Entry) -> None:
        """Nobody has the entry any more: a reservation given up, an uncached one whose last user is gone."""
        scope = entry.scope
        if entry.detached:
            scope.detached -= 1
        else:
            entry.detached = True
            del scope[entry.identifier]
        nbytes = entry.nbytes
        if entry.state is RESERVED:
            self.fixed -= nbytes
        self.used -= nbytes
        entry.nbytes = 0
        entry.state = GONE
        entry.owner = None
        del self.entries[entry.handle]
        if not scope and not scope.detached:
            del self.scopes[scope.key]
        if entry.written:
            self.drops.append(entry)

    def lose(self, entry: Entry) -> None:
        """Workers no longer have a ready entry."""
        if entry.pins:
            self.fixed -= entry.nbytes
        self.unrank(entry)
        self._release(entry)
        self.drops.append(entry)  # other workers may still have it

    def heir_of(self, entry: Entry) -> Entry | None:
        """The entry that lookups of its salt and adapter find in its place. Takes no lock, and needs none."""
        scope = self.scopes.get(entry.scope.key)
        return None if scope is None else scope.get(entry.identifier)

    def take_drops(self) -> list[Entry]:
        """What workers have to drop; they are told once."""
        drops, self.drops = self.drops, []
        return drops

    def failed(self, method: str, error: Exception) -> None:
        """The policy raised this when that method of it was called."""
        if self.fault is None:
            self.fault = ConfigError(
                f"the eviction policy raised from `{method}`", field="policy", found=f"{type(error).__name__}: {error}"
            )
            self.fault.__cause__ = error

    def complain(self) -> None:
        """Raise what the policy did wrong, once.

        Raises:
            ConfigError: it raised, or named as the next to be evicted what is no candidate, or nothing though there
                are candidates.
        """
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault

    def _release(self, entry: Entry) -> None:
        """A detached entry is gone."""
        self.used -= entry.nbytes
        entry.nbytes = 0
        entry.state = GONE
        del self.entries[entry.handle]
        scope = entry.scope
        scope.detached -= 1
        if not scope and not scope.detached:
            del self.scopes[scope.key]

    def _evict_one(self) -> bool:
        """Evict what the policy names; False, and a fault, where that is not to be evicted: to search on might not end.

        What does not fit in although nothing can go was not let in: there are candidates whenever this is called.
        """
        try:
            handle = self.policy.victim()
        except Exception as error:
            self.failed("victim", error)
            return False
        entry = self.entries.get(handle) if isinstance(handle, int) else None
        if entry is None or not entry.ranked or entry.pins:
            self._no_candidate(handle, entry)
            return False
        entry.ranked = False  # the policy gave it up on its own
        self.remove(entry, "room")
        return True

    def _no_candidate(self, handle: Hashable | None, entry: Entry | None) -> None:
        if entry is not None:
            found = f"{handle}, which is {'pinned' if entry.pins else 'reserved, or on its way out'}"
        else:
            found = "None" if handle is None else f"{handle!r}, which it was not told of or which is gone"
        if self.fault is None:
            self.fault = ConfigError(
                "the eviction policy names no candidate as its victim",
                field="policy",
                expected="a key that was added, and not pinned or removed since",
                found=found,
            )

    def _serve_uncached(self, entry: Entry, reason: str) -> None:
        entry.sized = True
        entry.cached = False
        self.uncached[reason] += 1
