"""The life of an entry: absent, reserved by one owner, ready, gone. No lock here: the ledger holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from mmcache.errors import RequestError
from mmcache.items import MultimodalRequest
from mmcache.ledger.budget import Budget
from mmcache.ledger.records import READY, RESERVED, Entry, Scope, Ticket
from mmcache.ledger.snapshots import keep
from mmcache.ledger.widths import Widths

__all__ = ["EntryTable"]


class EntryTable:
    """Entries by scope and identifier, and the steps of their lives.

    Attributes:
        budget: room in bytes.
        row_bytes: bytes of one embedding row by modality; learned from the first rows where not configured.
        epoch: advances when entries are invalidated.
        counts: events by name.
        woken: lookups with news, to be woken once the lock is released.
    """

    def __init__(
        self,
        budget: Budget,
        row_bytes: Mapping[str, int],
        lease_seconds: float,
        split_by_adapter: bool,
        clock: Callable[[], float],
    ) -> None:
        self.budget = budget
        self.row_bytes = Widths(row_bytes)
        self.epoch = 0
        self.counts: Counter[str] = Counter()
        self.woken: list[Ticket] = []
        self.scopes = budget.scopes
        self._lease_seconds = lease_seconds
        self._split_by_adapter = split_by_adapter
        self._clock = clock
        self._next_handle = 0

    def scope_of(self, request: MultimodalRequest) -> Scope:
        """The entries that the request can share; where there are none, a scope that is known with its first entry."""
        key = (request.cache_salt, request.adapter if self._split_by_adapter else None)
        scope = self.scopes.get(key)
        return Scope(key) if scope is None else scope

    def content_of(self, request: MultimodalRequest, identifier: str) -> tuple[str | None, str | None, str]:
        """What two items have in common if they share an embedding: (salt, adapter, identifier)."""
        return (request.cache_salt, request.adapter if self._split_by_adapter else None, identifier)

    def holds(self, request: MultimodalRequest, index: int) -> bool:
        """Whether there is an entry that would serve the item."""
        item = request.items[index]
        scope = self.scopes.get(self.content_of(request, item.identifier)[:2])
        entry = None if scope is None else scope.get(item.identifier)
        return entry is not None and (entry.modality, entry.num_rows) == (item.modality, item.placeholder.num_embeds)

    def resolve(self, ticket: Ticket, needed: Iterable[int]) -> None:
        """Find, join or reserve an entry for each needed item, and pin what is ready.

        Raises:
            ConfigError: the eviction policy failed; the lookup has to be taken back.
        """
        request, session, entries = ticket.request, ticket.session, ticket.entries
        held, passed = session.held, session.passed
        scope = self.scopes.get((request.cache_salt, request.adapter if self._split_by_adapter else None))
        if scope is None:
            scope = self.scope_of(request)
        identifiers, num_rows, given = request._identifiers, request._num_rows, request._embeds_given
        items, budget = request.items, self.budget
        hits: list[Entry] = []
        absent: list[int] = []
        for index in needed:
            entry = scope.get(identifiers[index])
            if entry is None and not given:
                # Room that is free is taken at once; where some has to be made, all that is ready is pinned first.
                nbytes = num_rows[index] * self.row_bytes.get(items[index]._modality, 0)
                if 0 < nbytes <= budget.capacity - budget.used:
                    entries[index] = self.reserve(ticket, scope, index, free=nbytes)
                else:
                    entries[index] = None
                    absent.append(index)
            elif given and index in given:
                entries[index] = None
            elif (
                entry is not None
                and entry.state is READY
                and entry.num_rows == num_rows[index]
                and entry.modality == items[index]._modality
            ):
                entries[index] = entry
                if entry not in held:
                    held[entry] = None
                    hits.append(entry)
                elif passed:
                    passed.pop(entry, None)  # needed again: its tokens are computed anew
            else:
                entries[index] = None
                absent.append(index)
        if hits:
            budget.pin(hits)
            ticket.pinned = hits
        for index in absent:
            if identifiers[index] in scope:
                entries[index] = self._obtain(ticket, scope, index)
            else:
                entries[index] = self.reserve(ticket, scope, index)
        if budget.fault is not None:
            budget.complain()

    def _obtain(self, ticket: Ticket, scope: Scope, index: int) -> Entry:
        """An entry for one item: what is ready, the lookup's own, somebody else's, or a new one."""
        entry = scope.get(ticket.request._identifiers[index])
        if entry is None:
            return self.reserve(ticket, scope, index)
        request = ticket.request
        if entry.num_rows != request._num_rows[index] or entry.modality != request.items[index]._modality:
            return self._replace(ticket, scope, entry, index)
        if entry.state is READY:
            if entry not in ticket.session.held:
                self.hold(ticket, entry)
            return entry
        return entry if entry.owner is ticket else self._join(ticket, scope, entry, index)

    def reserve(self, ticket: Ticket, scope: Scope, index: int, *, listed: bool = True, free: int = 0) -> Entry:
        """Make the lookup the owner of a new entry, for itself alone if not `listed`; `free`: a size that has room."""
        request = ticket.request
        identifier, rows = request._identifiers[index], request._num_rows[index]
        modality = request.items[index]._modality
        self._next_handle = handle = self._next_handle + 1  # as `entry`: every new item passes here
        entry = Entry(handle, scope, identifier, modality, rows, ticket, self._clock())
        (budget := self.budget).entries[handle] = entry
        if listed:
            if not scope:
                self.scopes[scope.key] = scope
            scope[identifier] = entry
            if free:
                entry.sized = True
                entry.nbytes = free
                budget.used += free
                budget.fixed += free
            elif (row_bytes := self.row_bytes.get(modality)) is not None:
                budget.reserve(entry, rows * row_bytes)
        else:
            scope.detached += 1
            entry.detached = entry.sized = True
            entry.cached = False
        if ticket.unsettled is None:
            ticket.unsettled = [entry]
        else:
            ticket.unsettled.append(entry)
        return entry

    def entry(self, scope: Scope, identifier: str, modality: str, rows: int) -> Entry:
        """A new entry that nobody owns."""
        self._next_handle = handle = self._next_handle + 1
        entry = Entry(handle, scope, identifier, modality, rows, None, self._clock())
        self.scopes[scope.key] = scope
        self.budget.entries[handle] = scope[identifier] = entry
        return entry

    def hold(self, ticket: Ticket, entry: Entry) -> None:
        """The lookup's request pins a ready entry until commit passes it."""
        self.budget.pin((entry,))
        ticket.session.held[entry] = None
        ticket.pinned = [*(ticket.pinned or ()), entry]

    def _replace(self, ticket: Ticket, scope: Scope, entry: Entry, index: int) -> Entry:
        """The content is known with another number of rows, or from another modality's encoder: never serve it."""
        self.counts["stale"] += 1
        if entry.state is RESERVED:
            # Somebody encodes it as the other: whichever is wrong fails on its own, not both. Once for all its places.
            for own in ticket.unsettled or ():
                if own.owner is ticket and own.identifier == entry.identifier:
                    return own
            return self.reserve(ticket, scope, index, listed=False)
        self.detach(entry, "stale")
        return self.reserve(ticket, scope, index)

    def _join(self, ticket: Ticket, scope: Scope, entry: Entry, index: int) -> Entry:
        if ticket in entry.waiters:
            return entry
        if self.expired(entry):
            self.counts["lease_takeovers"] += 1
            self._supersede(entry)
            heir = scope.get(entry.identifier)
            if heir is None:
                return self.reserve(ticket, scope, index)
            entry = heir
        entry.waiters += (ticket,)
        ticket.unsettle(entry)
        return entry

    def expired(self, entry: Entry) -> bool:
        """Whether the owner of a reserved entry has exceeded its lease."""
        return entry.owner is not None and self._clock() - entry.since > self._lease_seconds

    def lease_left(self, entry: Entry) -> float:
        """Seconds until a waiter may take over; of what a tier loads nobody does: the tier's own deadline ends that."""
        return inf if entry.owner is None else max(0.0, self._lease_seconds - (self._clock() - entry.since))

    def take_over_expired(self, entry: Entry) -> None:
        """The owner exceeded its lease: the first waiter encodes."""
        self.counts["lease_takeovers"] += 1
        self._supersede(entry)

    def size(self, entry: Entry, nbytes: int, *, may_evict: bool, learn: bool = True) -> None:
        """The first rows of a modality tell the bytes of a row; an entry reserved before gets its room now."""
        if learn and entry.num_rows and not entry.detached:
            self.row_bytes.learn(entry.modality, nbytes // entry.num_rows)
        if not entry.sized:
            self.budget.reserve(entry, nbytes, may_evict=may_evict)
        entry.written = True

    def publish(self, entry: Entry, nbytes: int, cost: float | None) -> None:
        """The rows are in the store: whoever owned the entry or waited for it has it now."""
        self._freeze(entry)
        loaded = entry.owner is None
        if entry.sized and entry.modality in self.row_bytes:
            entry.written = True
        else:  # what the encoder makes is the measure of a row's width, not what lies in a tier
            self.size(entry, nbytes, may_evict=False, learn=not loaded)
        waiters = entry.waiters
        users = waiters if entry.owner is None else (entry.owner, *waiters)
        entry.owner, entry.waiters, entry.state, entry.cost = None, (), READY, cost
        self.counts["loads" if loaded else "encodes"] += 1
        self.counts["joins"] += len(waiters)
        if entry.cached:
            for user in users:
                if entry not in user.session.held:
                    user.session.held[entry] = None
                    entry.pins += 1
                    user.pinned = [entry] if user.pinned is None else [*user.pinned, entry]
            if not entry.pins:
                self.budget.settle(entry)
        else:
            entry.users = len(users)
            self.budget.unlist(entry)
            if not users:
                self.budget.forget(entry)
        for waiter in waiters:
            waiter.arrived = [*(waiter.arrived or ()), entry]
            self.woken.append(waiter)

    def give_up(self, ticket: Ticket) -> None:
        """The lookup ends: it leaves all that is not settled."""
        for entry in ticket.unsettled or ():
            if entry.owner is ticket and not entry.waiters:
                self.budget.forget(entry)
            elif entry.state is RESERVED or not entry.cached:
                self.leave(ticket, entry)
        ticket.unsettled = None

    def settle(self, ticket: Ticket, sizes: Mapping[int, int], seconds: float | None) -> None:
        """The rows of what the lookup still owns of these items are in the store."""
        entries, total = ticket.entries, 0
        for index in sizes:
            entry = entries.get(index)
            if entry is not None:
                total += entry.num_rows
        for index, nbytes in sizes.items():
            entry = entries.get(index)
            if entry is not None and entry.owner is ticket and entry.state is RESERVED:
                self.publish(entry, nbytes, None if seconds is None else seconds * entry.num_rows / (total or 1))
                ticket.encoded = {entry} if ticket.encoded is None else {*ticket.encoded, entry}

    def leave(self, ticket: Ticket, entry: Entry) -> None:
        """The lookup ends, or no longer needs the entry: give up what it owns, waits for, or uses uncached."""
        if entry.state is RESERVED:
            if entry.owner is ticket:
                self.abandon(entry)
            else:
                entry.waiters = tuple(waiter for waiter in entry.waiters if waiter is not ticket)
        elif entry.state is READY and not entry.cached:
            entry.users -= 1
            if not entry.users:
                self.budget.forget(entry)

    def abandon(self, entry: Entry) -> None:
        """The owner gives up: exactly one waiter takes over, or the reservation ends."""
        if not entry.waiters:
            self.budget.forget(entry)
            return
        self._freeze(entry)
        heir, *rest = entry.waiters
        entry.owner, entry.waiters, entry.since = heir, tuple(rest), self._clock()
        heir.mine = [*(heir.mine or ()), entry]
        self.counts["takeovers"] += 1
        self.woken.append(heir)

    def shrink(self, ticket: Ticket, needed: Iterable[int]) -> list[Entry]:
        """The lookup needs these items only; returns the entries that it has no longer."""
        kept = {index: ticket.entries[index] for index in needed if index in ticket.entries}
        still = set(kept.values())
        dropped = [e for e in dict.fromkeys(ticket.entries.values()) if e is not None and e not in still]
        ticket.entries = kept
        for entry in dropped:
            if ticket.unsettled and entry in ticket.unsettled:
                ticket.unsettled.remove(entry)
                self.leave(ticket, entry)
        return dropped

    def invalidate(self, identifier: str | None) -> None:
        """Forget one content, or everything, and begin a new epoch; other weights may have other widths as well.

        Raises:
            RequestError: the content is not named by a string.
            ConfigError: the eviction policy failed; all is forgotten as it should be.
        """
        if identifier is not None and not isinstance(identifier, str):
            raise RequestError("a content is named by its identifier", expected="a string", found=repr(identifier))
        self.epoch += 1
        if identifier is None:
            listed = [entry for entry in self.budget.entries.values() if not entry.detached]
        else:
            listed = [scope[identifier] for scope in self.scopes.values() if identifier in scope]
        # Ready ones first: what takes the place of a reservation should not have to evict what goes anyway.
        for entry in sorted(listed, key=lambda entry: (entry.state is RESERVED, entry.handle)):
            if not entry.detached:
                self.detach(entry, "invalidated")
        if identifier is None:
            self.row_bytes.relearn()
        self.budget.complain()

    def detach(self, entry: Entry, cause: str) -> None:
        """No new lookup finds the entry from now on; those who hold it keep it."""
        if entry.state is RESERVED:
            self._supersede(entry)
            return
        self.budget.unlist(entry)
        if entry.pins:
            self.budget.unrank(entry)
        else:
            self.budget.remove(entry, cause)

    def _supersede(self, entry: Entry) -> None:
        """A reserved entry will not be published: its owner may finish it for itself, waiters begin anew among them."""
        self._freeze(entry)
        self.budget.unlist(entry)
        if entry.cached:
            self.budget.uncache(entry)
        waiters, entry.waiters = entry.waiters, ()
        if entry.owner is None:
            self.budget.forget(entry)
        if not waiters:
            return
        heir = waiters[0]
        index = next(i for i, other in heir.entries.items() if other is entry)
        new = self.reserve(heir, entry.scope, index)
        new.waiters = waiters[1:]
        for ticket in waiters:
            settled = [other for other in ticket.unsettled or () if other is not entry and other is not new]
            ticket.unsettled = [*settled, new]
            for i, other in ticket.entries.items():
                if other is entry:
                    ticket.entries[i] = new
        heir.mine = [*(heir.mine or ()), new]
        self.woken.append(heir)

    def lose(self, lost: Sequence[tuple[Entry, Sequence[Ticket]]]) -> None:
        """Workers no longer have these ready entries: the lookups that use one encode it anew, one for all.

        All go before any is taken anew: they need no room any more, and there is nothing of them to evict.

        Raises:
            ConfigError: the eviction policy failed; all that is lost is to be encoded anew.
        """
        for _, users in lost:
            for ticket in users:
                keep(ticket, self.epoch)
        for entry, _ in lost:
            self.counts["lost"] += 1
            self.budget.unlist(entry)
            self.budget.lose(entry)
        for entry, users in lost:
            for ticket in users:
                for index, other in ticket.entries.items():
                    if other is not entry:
                        continue
                    new = ticket.entries[index] = self._obtain(ticket, entry.scope, index)
                    if new.owner is ticket and new not in (ticket.mine or ()):
                        ticket.mine = [*(ticket.mine or ()), new]
                        self.woken.append(ticket)
        self.budget.complain()

    def _freeze(self, entry: Entry) -> None:
        """Statuses of these lookups are about to change, and their plans are snapshots of what was decided."""
        if entry.owner is not None:
            keep(entry.owner, self.epoch)
        for ticket in entry.waiters:
            keep(ticket, self.epoch)
