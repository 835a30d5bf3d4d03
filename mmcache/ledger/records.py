"""What the ledger keeps in mind: entries, requests and lookups. Plain records; `EncoderLedger` is the one that acts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mmcache.items import MultimodalRequest
from mmcache.planning import ItemStatus, StepPlan

if TYPE_CHECKING:
    import asyncio  # 0.02 s, and only tasks that wait need it

__all__ = ["Decision", "Entry", "EntryState", "PinnedMatch", "Scope", "Session", "Ticket"]

Decision: TypeAlias = tuple[int, list[tuple[int, ItemStatus, int, int]]]
"""The ledger's epoch, and of each needed item its index, its status, and the handle and bytes of its entry."""


class EntryState(Enum):
    """Where an entry is on its way; an absent content has no entry."""

    RESERVED = "reserved"
    READY = "ready"
    GONE = "gone"


class PinnedMatch(Protocol):
    """Something that a lookup keeps from being evicted until its release."""

    def release(self) -> None:
        """Let go of it. Idempotent."""


RESERVED, READY, GONE = EntryState
_STORED, _MISSING, _IN_FLIGHT = ItemStatus.STORED, ItemStatus.MISSING, ItemStatus.IN_FLIGHT


class Scope(dict[str, "Entry"]):
    """Entries by identifier that requests of one salt and adapter share.

    The ledger knows a scope for as long as entries of it live, those included that no lookup finds any more. So all
    that live refer to one scope, and a salt of which nothing is left costs nothing.

    Attributes:
        key: (salt, adapter).
        detached: number of its entries that live and that no lookup finds.
    """

    __slots__ = ("detached", "key")

    def __init__(self, key: tuple[str | None, str | None]) -> None:
        super().__init__()
        self.key = key
        self.detached = 0


class Entry:
    """One encoder output, from the reservation of its room until it is dropped.

    Attributes:
        handle: the store's key; never used twice.
        scope: the entries among which this one is found by its identifier, unless `detached`.
        identifier, modality, num_rows: of the item.
        nbytes: bytes that the entry takes of the budget.
        sized: whether `nbytes` is known; before, it is 0.
        cached: whether it takes room of the budget. Uncached rows live as long as the lookups that use them.
        detached: no new lookup finds it (invalidated, or replaced); those who have it keep it.
        state: see `EntryState`.
        owner: the lookup that encodes it while `RESERVED`; None for rows that a tier loads.
        since: when the owner began, in the ledger's clock.
        waiters: lookups that wait for it.
        pins: requests that hold it.
        users: open lookups that use it, counted for uncached entries only.
        ranked: whether the eviction policy knows it, as a candidate or as pinned.
        told: whether listeners know that it is stored.
        written: whether rows may be in the store, announced or not.
        cost: seconds that encoding took, or None where nobody measured.
    """

    __slots__ = (
        "cached",
        "cost",
        "detached",
        "handle",
        "identifier",
        "modality",
        "nbytes",
        "num_rows",
        "owner",
        "pins",
        "ranked",
        "scope",
        "since",
        "sized",
        "state",
        "told",
        "users",
        "waiters",
        "written",
    )

    def __init__(
        self,
        handle: int,
        scope: Scope,
        identifier: str,
        modality: str,
        num_rows: int,
        owner: Ticket | None,
        since: float,
    ) -> None:
        self.handle = handle
        self.scope = scope
        self.identifier = identifier
        self.modality = modality
        self.num_rows = num_rows
        self.owner = owner
        self.since = since
        self.state = RESERVED
        self.waiters: tuple[Ticket, ...] = ()
        self.cost: float | None = None
        self.cached = True
        self.nbytes = self.pins = self.users = 0
        self.sized = self.detached = self.ranked = self.told = self.written = False

    @property
    def content(self) -> tuple[str | None, str | None, str]:
        """(salt, adapter, identifier), as the eviction policy knows it."""
        return (*self.scope.key, self.identifier)

    @property
    def gone(self) -> bool:
        """Whether nobody has it any more."""
        return self.state is GONE


class Session:
    """What one request holds between its steps.

    Attributes:
        request_id: the request's.
        held: entries that it pins: until commit passes their last row, the request's finish, or its waiting.
        passed: of these the ones that it needs no longer, but that an open lookup still uses.
        tickets: its open lookups.
    """

    __slots__ = ("held", "passed", "request_id", "tickets")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.held: dict[Entry, None] = {}
        self.passed: dict[Entry, None] = {}
        self.tickets: dict[Ticket, None] = {}

    def in_use(self) -> set[Entry | None]:
        """Entries of its open lookups: a plan that calls them stored must find them, whatever is committed."""
        return {entry for ticket in self.tickets for entry in ticket.entries.values()} if self.tickets else set()


class Ticket:
    """One lookup, from `open` until its release. Statuses follow from the entries, so they are always live.

    Attributes:
        plan_id: number of the lookup within the ledger.
        request, session: whose it is.
        start, end, needed_from, lookahead: the window, resolved.
        first, later: see `needed_items`.
        entries: needed item to its entry; None where the client gave the embeddings.
        unsettled: entries that this lookup owns or waits for, and uncached ones that it uses.
        pinned: entries that this lookup was the first of its request to pin.
        num_items: items of the request when the lookup was made.
        encoded: entries that this lookup encoded.
        decided: what was decided, kept when something is about to change; the plan is made of it when it is asked for.
        plan: the plan, once it was asked for.
        arrived, mine: news for the next `poll`.
        match: the prefix match that the window began with, if the cache looked it up; released with the lookup.
        released: whether it has ended.
        event, futures: who is to be woken by news.
    """

    __slots__ = (
        "arrived",
        "decided",
        "encoded",
        "end",
        "entries",
        "event",
        "first",
        "futures",
        "later",
        "lookahead",
        "match",
        "mine",
        "needed_from",
        "num_items",
        "pinned",
        "plan",
        "plan_id",
        "released",
        "request",
        "session",
        "start",
        "unsettled",
    )

    def __init__(
        self,
        plan_id: int,
        request: MultimodalRequest,
        session: Session,
        start: int,
        end: int,
        needed_from: int,
        lookahead: int,
        first: int,
        later: int,
        num_items: int,
        match: PinnedMatch | None,
    ) -> None:
        self.plan_id = plan_id
        self.request = request
        self.session = session
        self.start = start
        self.end = end
        self.needed_from = needed_from
        self.lookahead = lookahead
        self.first = first
        self.later = later
        self.entries: dict[int, Entry | None] = {}
        self.num_items = num_items
        self.match = match
        self.released = False
        self.unsettled: list[Entry] | None = None
        self.pinned: list[Entry] | None = None
        self.encoded: set[Entry] | None = None
        self.decided: Decision | None = None
        self.plan: StepPlan | None = None
        self.arrived: list[Entry] | None = None
        self.mine: list[Entry] | None = None
        self.event: threading.Event | None = None
        self.futures: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] | None = None

    def status_of(self, entry: Entry | None) -> ItemStatus:
        """Status of a needed item that has this entry."""
        if entry is None or entry.state is READY:
            return _STORED
        return _MISSING if entry.owner is self and entry.state is RESERVED else _IN_FLIGHT

    def with_status(self, status: ItemStatus) -> tuple[int, ...]:
        """Indices of the needed items of that status; of `MISSING` contents the first item."""
        if status is not _MISSING:
            return tuple(i for i, entry in self.entries.items() if self.status_of(entry) is status)
        if not self.unsettled:
            return ()
        return tuple(self.firsts_of(lambda entry: entry.owner is self and entry.state is RESERVED))

    def firsts_of(self, wanted: Callable[[Entry], bool]) -> list[int]:
        """The first item of each wanted entry, in order."""
        seen: set[Entry] = set()
        firsts = []
        for index, entry in self.entries.items():
            if entry is not None and entry not in seen and wanted(entry):
                seen.add(entry)
                firsts.append(index)
        return firsts

    def indices_of(self, entries: list[Entry]) -> tuple[int, ...]:
        """All needed items of these entries, in order."""
        return tuple(i for i, entry in self.entries.items() if entry in entries)

    def unsettle(self, entry: Entry) -> None:
        """Note that the release of this lookup has to look at the entry."""
        if self.unsettled is None:
            self.unsettled = [entry]
        elif entry not in self.unsettled:
            self.unsettled.append(entry)
