"""Who waits: requests in the engine's queue, and lookups for each other's encodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmcache.ledger.budget import Budget
from mmcache.ledger.records import READY, RESERVED, Ticket
from mmcache.ledger.table import EntryTable
from mmcache.planning import ItemStatus, Progress
from mmcache.policies import QueueAwarePolicy

if TYPE_CHECKING:
    import asyncio  # 0.02 s, and only tasks that wait need it

__all__ = ["WaitingLine", "Waits", "news_of", "wake"]

_NOTHING = Progress((), ())


class WaitingLine:
    """The requests that wait in the engine's queue, in order, and what each will need; tells the policy.

    Attributes:
        positions: place in the line and contents, by request.
    """

    def __init__(self, budget: Budget) -> None:
        self.positions: dict[str, tuple[int, Sequence[Hashable]]] = {}
        self._budget = budget
        self._policy = budget.policy if isinstance(budget.policy, QueueAwarePolicy) else None
        self._last = 0

    def announce(self, request_id: str, contents: Sequence[Hashable]) -> None:
        """The request waits, and will need these; if it waits already it keeps its place.

        Raises:
            ConfigError: the eviction policy failed; the request waits all the same.
        """
        position = self.withdraw(request_id)
        if position is None:
            self._last = position = self._last + 1
        self.positions[request_id] = (position, contents)
        if self._policy is not None:
            try:
                self._policy.announce(position, contents)
            except Exception as error:
                self._budget.failed("announce", error)
        self._budget.complain()

    def withdraw(self, request_id: str) -> int | None:
        """The request no longer waits; its place, if it did. Idempotent."""
        position, contents = self.positions.pop(request_id, (None, ()))
        if position is not None and self._policy is not None:
            try:
                self._policy.withdraw(position, contents)
            except Exception as error:
                self._budget.failed("withdraw", error)
        return position


def news_of(table: EntryTable, ticket: Ticket) -> Progress:
    """What has changed for a lookup since it was last asked; takes over from owners beyond their lease.

    Raises:
        ConfigError: the eviction policy failed; what was taken over is, and the news are kept.
    """
    for entry in list(ticket.unsettled or ()):
        if entry.state is RESERVED and entry.owner is not ticket and table.expired(entry):
            table.take_over_expired(entry)
            table.budget.complain()
    arrived, mine = ticket.arrived, ticket.mine
    if arrived is None and mine is None:
        return _NOTHING
    ticket.arrived = ticket.mine = None
    ready = ticket.indices_of([entry for entry in arrived or () if entry.state is READY])
    own = [entry for entry in mine or () if entry.owner is ticket]
    return Progress(ready, tuple(ticket.firsts_of(lambda entry: entry in own)))


@dataclass(frozen=True, slots=True)
class Waits:
    """The part of a ledger that those talk to who wait, in threads and tasks, for each other's encodes.

    Attributes:
        table, lock, wake: as of `TierLoads`.
    """

    table: EntryTable
    lock: threading.Lock
    wake: Callable[[], None]

    def begin(self, ticket: Ticket, arm: Callable[[Ticket], None]) -> tuple[Progress, float | None, bool]:
        """News of the lookup; where there are none, `arm` the ticket so that news wake the caller, in one step.

        Returns:
            (news, seconds after which to look again or None where nobody encodes for it, whether all that it lacks is
            its own request's to encode).
        """
        with self.lock:
            progress = news_of(self.table, ticket)
            waits = [e for e in ticket.unsettled or () if e.state is RESERVED and e.owner is not ticket]
            others = [e for e in waits if e.owner is None or e.owner.session is not ticket.session]
            own = not others and bool(waits or ticket.with_status(ItemStatus.MISSING))
            pause = min((self.table.lease_left(entry) for entry in others), default=None)
            if not progress and others:
                arm(ticket)
        self.wake()
        return progress, pause, own

    def end(self, ticket: Ticket, future: asyncio.Future[None]) -> None:
        """The future is no longer to be woken."""
        with self.lock:
            if ticket.futures:
                ticket.futures = [pair for pair in ticket.futures if pair[1] is not future]


def wake(tickets: list[Ticket], lock: threading.Lock) -> None:
    """Wake the threads and tasks that wait on these lookups, and empty the list, which the lock guards; it is free."""
    with lock:
        woken = dict.fromkeys(tickets)
        tickets.clear()
    for ticket in woken:
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
