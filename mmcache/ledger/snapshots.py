"""A lookup as a `StepPlan`: what was decided, frozen and free of references."""

from __future__ import annotations

from typing import Protocol

from mmcache.ledger.records import Ticket
from mmcache.planning import ItemStatus, PlanBytes, PlannedItem, StepPlan, count_bytes, covered_beyond

__all__ = ["bytes_of", "plan_of"]


class _Decider(Protocol):
    ledger_id: str
    epoch: int


def bytes_of(ticket: Ticket) -> PlanBytes:
    """Bytes of the lookup's request by what becomes of them, as things stand."""
    return count_bytes(
        ticket.request,
        ticket.needed_from,
        ticket.first,
        ticket.later,
        ticket.entries,
        lambda index: ticket.status_of(ticket.entries[index]),
        ticket.with_status(ItemStatus.MISSING),
    )


def plan_of(ledger: _Decider, ticket: Ticket, drop: tuple[int, ...] = ()) -> StepPlan:
    """The plan of a lookup, as things stand."""
    request = ticket.request
    items = request.items
    schemas, schema_of = request.schemas()
    return StepPlan(
        ledger_id=ledger.ledger_id,
        plan_id=ticket.plan_id,
        epoch=ledger.epoch,
        request_id=request.request_id,
        window=(ticket.start, ticket.end),
        needed_from=ticket.needed_from,
        lookahead=ticket.lookahead,
        num_items=ticket.num_items,
        items=tuple(
            PlannedItem(
                index,
                items[index].identifier,
                items[index].modality,
                ticket.status_of(entry),
                -1 if entry is None else entry.handle,
                items[index].placeholder.num_embeds,
                0 if entry is None else entry.nbytes,
            )
            for index, entry in ticket.entries.items()
        ),
        drop=drop,
        bytes=bytes_of(ticket),
        first=ticket.first,
        covered=frozenset(covered_beyond(request, ticket.needed_from, ticket.first, ticket.later, ticket.entries)),
        schemas=tuple(schemas),
        schema_of=tuple(schema_of),
    )
