"""Who waits: requests in the engine's queue, and lookups for each other's encodes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from mmcache.ledger.records import READY, RESERVED, Ticket
from mmcache.ledger.table import EntryTable
from mmcache.planning import ItemStatus, Progress
from mmcache.policies import EvictionPolicy, QueueAwarePolicy

if TYPE_CHECKING:
    import asyncio  # 0.02 s, and only tasks that wait need it

__all__ = ["WaitingLine", "awaited", "news_of", "wake"]

_NOTHING = Progress((), ())


class WaitingLine:
    """The requests that wait in the engine's queue, in order, and what each will need; tells the policy.

    Attributes:
        positions: place in the line and contents, by request.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.positions: dict[str, tuple[int, Sequence[Hashable]]] = {}
        self._policy = policy if isinstance(policy, QueueAwarePolicy) else None
        self._last = 0

    def announce(self, request_id: str, contents: Sequence[Hashable]) -> None:
        """The request waits, and will need these; if it waits already it keeps its place."""
        position = self.withdraw(request_id)
        if position is None:
            self._last = position = self._last + 1
        self.positions[request_id] = (position, contents)
        if self._policy is not None:
            self._policy.announce(position, contents)

    def withdraw(self, request_id: str) -> int | None:
        """The request no longer waits; its place, if it did. Idempotent."""
        position, contents = self.positions.pop(request_id, (None, ()))
        if position is not None and self._policy is not None:
            self._policy.withdraw(position, contents)
        return position


def news_of(table: EntryTable, ticket: Ticket) -> Progress:
    """What has changed for a lookup since it was last asked; takes over from owners beyond their lease."""
    for entry in list(ticket.unsettled or ()):
        if entry.state is RESERVED and entry.owner is not ticket and table.expired(entry):
            table.take_over_expired(entry)
    arrived, mine = ticket.arrived, ticket.mine
    if arrived is None and mine is None:
        return _NOTHING
    ticket.arrived = ticket.mine = None
    ready = ticket.indices_of([entry for entry in arrived or () if entry.state is READY])
    own = [entry for entry in mine or () if entry.owner is ticket]
    return Progress(ready, tuple(ticket.firsts_of(lambda entry: entry in own)))


def awaited(table: EntryTable, ticket: Ticket) -> tuple[float | None, bool]:
    """Seconds until a lookup that waits looks again, None where others encode nothing for it; and whether all that it
    lacks is its own request's to encode.
    """
    waits = [entry for entry in ticket.unsettled or () if entry.state is RESERVED and entry.owner is not ticket]
    others = [e for e in waits if e.owner is None or e.owner.session is not ticket.session]
    own = not others and bool(waits or ticket.with_status(ItemStatus.MISSING))
    return min((table.lease_left(entry) for entry in others), default=None), own


def wake(tickets: Iterable[Ticket]) -> None:
    """Wake the threads and tasks that wait on these lookups. Not under a lock."""
    for ticket in dict.fromkeys(tickets):
        event, futures = ticket.event, ticket.futures
        ticket.futures = None
        if event is not None:
            event.set()
        for loop, future in futures or ():
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:  # the loop was closed: nobody waits there any more
                continue


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
