"""What requests hold between their steps. No lock here: the ledger holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmcache.errors import RequestError
from mmcache.items import MultimodalRequest
from mmcache.ledger.budget import Budget
from mmcache.ledger.records import Entry, Session, Ticket

__all__ = ["Sessions", "id_of"]

_NOT_HELD = object()


def id_of(request: MultimodalRequest | str) -> str:
    """The id of a request that is named by itself or by its id.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(request, str):
        return request
    if not isinstance(request, MultimodalRequest):
        raise RequestError("a request, or its id", found=type(request).__name__)
    return request.request_id


class Sessions(dict[str, Session]):
    """The requests that have looked something up and are not finished, by id; their pins."""

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget

    def unpin(self, session: Session, entries: Sequence[Entry]) -> None:
        """The request no longer holds these, if it did."""
        held = [entry for entry in entries if entry in session.held]
        for entry in held:
            del session.held[entry]
        for entry in entries:
            session.passed.pop(entry, None)
        self._budget.unpin(held)

    def commit(self, request: MultimodalRequest, num_tokens: int) -> None:
        """The request needs no entry any more whose last row lies in its first `num_tokens` tokens."""
        session = self.get(request.request_id)
        if session is not None and session.held:
            last_use, passed = request._last_use, session.passed
            for entry in session.held:
                if last_use.get(entry.identifier, 0) <= num_tokens:
                    passed[entry] = None
            if passed:
                self.let_go(session)

    def wait(self, request_id: str) -> None:
        """The request waits in the engine's queue: while it does, others may need the room of what it holds."""
        session = self.get(request_id)
        if session is not None:
            session.passed.update(session.held)
            self.let_go(session)

    def let_go(self, session: Session) -> None:
        """Unpin what the request needs no longer, but for what an open lookup of it has."""
        if not session.tickets:
            passed, held = session.passed, session.held
            session.passed = {}
            self._budget.unpin([entry for entry in passed if held.pop(entry, _NOT_HELD) is None])
            return
        in_use = session.in_use()
        entries = [entry for entry in session.passed if entry not in in_use]
        if entries:
            self.unpin(session, entries)

    def shrink(self, ticket: Ticket, dropped: Iterable[Entry]) -> None:
        """A lookup no longer needs these: the pins that it brought go, unless another one needs them."""
        session, pinned = ticket.session, ticket.pinned or []
        for entry in dropped:
            if entry in pinned:
                pinned.remove(entry)
                others = (other for other in session.tickets if other is not ticket)
                if not any(entry in other.entries.values() for other in others):
                    self.unpin(session, (entry,))

    def take_back(self, ticket: Ticket) -> None:
        """A lookup could not be made: its request is as before it, but for what it no longer shares with nobody."""
        session = ticket.session
        ticket.released = True
        del session.tickets[ticket]
        if ticket.pinned:
            self.unpin(session, ticket.pinned)
        ticket.entries = {}
        if not session.tickets and not session.held:
            del self[session.request_id]

    def drop(self, entry: Entry) -> list[Ticket]:
        """Workers lost the entry: no request holds it; the open lookups that have it."""
        users = []
        for session in self.values():
            session.held.pop(entry, None)
            session.passed.pop(entry, None)
            users += [ticket for ticket in session.tickets if entry in ticket.entries.values()]
        return users
