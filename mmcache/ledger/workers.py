"""Workers in other processes: the plans that they were sent, and what they say they hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeAlias

from mmcache.errors import ReleasedError, RequestError
from mmcache.ledger.records import READY, Entry, Ticket
from mmcache.planning import StepPlan

__all__ = ["Step", "Workers"]

Step: TypeAlias = Ticket | StepPlan


class Workers:
    """Open plans by their number, and the start of each worker's store. No lock here: the ledger holds it.

    Attributes:
        plans: the lookups whose plans were sent and that are still open.
    """

    def __init__(self, ledger_id: str) -> None:
        self.plans: dict[int, Ticket] = {}
        self._ledger_id = ledger_id
        self._epochs: dict[Hashable, str] = {}

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

    def send(self, ticket: Ticket) -> None:
        """A plan goes out: from now on workers may write the rows of what it calls missing."""
        if not ticket.released:
            self.plans[ticket.plan_id] = ticket
        for entry in ticket.unsettled or ():
            if entry.owner is ticket:
                entry.written = True

    def lost(
        self,
        entries: Mapping[int, Entry],
        worker: Hashable,
        epoch: str,
        held: Iterable[int] | None,
        lost: Iterable[int],
    ) -> list[Entry]:
        """Ready entries that a worker, by its report, does not hold, in the order of their admission."""
        gone = {handle for handle in lost if handle in entries and entries[handle].state is READY}
        if held is not None:
            kept = frozenset(held)
            gone.update(h for h, entry in entries.items() if entry.state is READY and h not in kept)
        elif self._epochs.get(worker, epoch) != epoch:
            gone.update(h for h, entry in entries.items() if entry.state is READY)
        self._epochs[worker] = epoch
        return [entries[handle] for handle in sorted(gone)]
