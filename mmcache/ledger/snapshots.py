"""A lookup as a `StepPlan`: what was decided, frozen and free of references."""

from __future__ import annotations

from collections.abc import Container, Iterable

from mmcache.ledger.records import Decision, Entry, Ticket
from mmcache.planning import ItemStatus, PlanBytes, PlannedItem, StepPlan, count_bytes, covered_beyond

__all__ = ["bytes_of", "decision_of", "keep", "plan_of"]

Row = tuple[int, ItemStatus, int, int]


def decision_of(ticket: Ticket, epoch: int) -> Decision:
    """What is decided as things stand: no more than what the plan needs and what will change."""
    return epoch, _rows(ticket)


def keep(ticket: Ticket, epoch: int) -> None:
    """The lookup's statuses are about to change, and its plan is a snapshot of what was decided."""
    if ticket.plan is None and ticket.decided is None and not ticket.released:
        ticket.decided = decision_of(ticket, epoch)


def bytes_of(ticket: Ticket, encoded: Container[Entry] = ()) -> PlanBytes:
    """Bytes of the lookup's request by what becomes of them, as things stand; `encoded` entries count as missing."""
    return count_bytes(ticket.request, ticket, _outcome(_rows(ticket, encoded)))


def plan_of(ledger_id: str, ticket: Ticket, decision: Decision, drop: tuple[int, ...] = ()) -> StepPlan:
    """The plan of a lookup, as decided."""
    request = ticket.request
    items = request.items
    schemas, schema_of = request.schemas(ticket.num_items)
    epoch, rows = decision
    return StepPlan(
        ledger_id=ledger_id,
        plan_id=ticket.plan_id,
        epoch=epoch,
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
                status,
                handle,
                items[index].placeholder.num_embeds,
                nbytes,
            )
            for index, status, handle, nbytes in rows
        ),
        drop=drop,
        bytes=count_bytes(request, ticket, _outcome(rows)),
        first=ticket.first,
        covered=frozenset(covered_beyond(request, ticket, ticket.entries)),
        schemas=schemas,
        schema_of=schema_of,
    )


def _rows(ticket: Ticket, encoded: Container[Entry] = ()) -> list[Row]:
    return [
        (index, ItemStatus.STORED, -1, 0)
        if entry is None
        else (
            index,
            ItemStatus.MISSING if encoded and entry in encoded else ticket.status_of(entry),
            entry.handle,
            entry.nbytes,
        )
        for index, entry in ticket.entries.items()
    ]


def _outcome(rows: Iterable[Row]) -> dict[int, ItemStatus]:
    """Status by item; a content's payload goes once, with its first item, and the others count as stored."""
    seen: set[int] = set()
    outcome = {}
    for index, status, handle, _ in rows:
        if status is ItemStatus.MISSING:
            status = ItemStatus.STORED if handle in seen else status
            seen.add(handle)
        outcome[index] = status
    return outcome
