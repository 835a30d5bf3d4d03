"""Workers in other processes: the plans that they were sent, and what they say they hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeAlias

from mmcache.errors import ReleasedError, RequestError
from mmcache.integers import as_int
from mmcache.ledger.records import READY, Entry, Ticket
from mmcache.ledger.snapshots import decision_of, plan_of
from mmcache.planning import StepPlan

__all__ = ["Step", "Workers"]

Step: TypeAlias = Ticket | StepPlan

_WORKERS = 1 << 12
"""Whose starts are remembered."""


class Workers:
    """Open plans by their number, and the start of each worker's store. No lock here: the ledger holds it.

    Of a worker that has not reported for long while thousands of others did, the start is forgotten; unless it says
    what it holds, it counts as having started anew.

    Attributes:
        plans: the lookups whose plans were sent and that are still open.
    """

    def __init__(self, ledger_id: str) -> None:
        self.plans: dict[int, Ticket] = {}
        self._ledger_id = ledger_id
        self._epochs: dict[Hashable, str] = {}
        self._forgot = False

    def find(self, plan: StepPlan) -> Ticket | None:
        """The lookup of a plan, or None if it has ended or is another ledger's, whose plans have numbers, too.

        Raises:
            RequestError: it is no plan.
        """
        if not isinstance(plan, StepPlan):
            raise RequestError("a ledger knows its steps by their StepPlan", found=type(plan).__name__)
        return self.plans.get(plan.plan_id) if plan.ledger_id == self._ledger_id else None

    def ticket(self, plan: Step) -> Ticket:
        """The lookup of a plan, or that lookup itself.

        Raises:
            ReleasedError: it is not open here.
            RequestError: it is neither.
        """
        if isinstance(plan, Ticket):
            return plan
        ticket = self.find(plan)
        if ticket is None:
            raise ReleasedError(
                "the plan is not open in this ledger", request_id=plan.request_id, found=f"plan {plan.plan_id}"
            )
        return ticket

    def send(self, ticket: Ticket, epoch: int, drops: Iterable[Entry]) -> StepPlan:
        """The plan that goes out: from now on workers may write the rows of what it calls missing."""
        if not ticket.released:
            self.plans[ticket.plan_id] = ticket
        for entry in ticket.unsettled or ():
            if entry.owner is ticket:
                entry.written = True
        drop = tuple(entry.handle for entry in drops)
        ticket.plan = plan_of(self._ledger_id, ticket, decision_of(ticket, epoch), drop)
        return ticket.plan

    def snapshot(self, ticket: Ticket, epoch: int) -> StepPlan:
        """The plan of a lookup as it was decided, or as it last went out."""
        if ticket.plan is None:
            ticket.plan = plan_of(self._ledger_id, ticket, ticket.decided or decision_of(ticket, epoch))
        return ticket.plan

    def lost(
        self,
        entries: Mapping[int, Entry],
        worker: Hashable,
        epoch: str,
        held: Iterable[int] | None,
        lost: Iterable[int],
    ) -> list[Entry]:
        """Ready entries that a worker, by its report, does not hold, in the order of their admission.

        Raises:
            RequestError: it names what are no handles.
        """
        kept = None if held is None else _handles(held, "held")
        gone = {handle for handle in _handles(lost, "lost") if handle in entries and entries[handle].state is READY}
        if kept is not None:
            gone.update(h for h, entry in entries.items() if entry.state is READY and h not in kept)
        elif self._epochs.get(worker, None if self._forgot else epoch) != epoch:
            gone.update(h for h, entry in entries.items() if entry.state is READY)
        self._epochs.pop(worker, None)
        self._epochs[worker] = epoch
        if len(self._epochs) > _WORKERS:
            del self._epochs[next(iter(self._epochs))]
            self._forgot = True
        return [entries[handle] for handle in sorted(gone)]


def _handles(handles: object, name: str) -> frozenset[int]:
    """What a worker says it holds or lacks. Raise RequestError unless they are integers."""
    if isinstance(handles, Iterable) and not isinstance(handles, (str, bytes)):
        given = list(handles)
        numbers = [as_int(handle) for handle in given]
        if None not in numbers:
            return frozenset(number for number in numbers if number is not None)
    raise RequestError("a worker names handles", field=name, expected="integers", found=repr(handles)[:80])
