"""Plans as messages: a `StepPlan` in, an equal one out."""

from __future__ import annotations

from mmcache.errors import MessageError
from mmcache.ipc.messages import Part, Payload
from mmcache.ipc.mirror import Mirror
from mmcache.planning import ItemStatus, PlanBytes, PlannedItem, StepPlan

__all__ = ["decode_plan", "encode_plan"]

_STATUSES = tuple(ItemStatus)
_NUMBER = {status: number for number, status in enumerate(_STATUSES)}


def encode_plan(plan: StepPlan, uid: int, payloads: list[Payload]) -> Part:
    """A plan as a message's part; the request's tokens and items travel beside it."""
    counts = plan.bytes
    return Part(
        uid=uid,
        plan=(
            plan.ledger_id,
            plan.plan_id,
            plan.epoch,
            plan.needed_from,
            plan.lookahead,
            plan.num_items,
            plan.first,
        ),
        window=plan.window,
        drop=list(plan.drop),
        bytes=(
            counts.transfer,
            counts.kept_on_cpu,
            counts.covered,
            counts.stored,
            counts.in_flight,
            counts.later,
        ),
        covered=sorted(plan.covered),
        items=[(item.index, _NUMBER[item.status], item.handle, item.num_rows, item.nbytes) for item in plan.items],
        payloads=payloads,
    )


def decode_plan(part: Part, mirror: Mirror) -> StepPlan:
    """The plan of a part, for a request that is here.

    Raises:
        MessageError: the plan does not fit the request.
    """
    ledger_id, plan_id, epoch, needed_from, lookahead, num_items, first = part.plan
    start, end = part.window
    lies_within = start <= end <= mirror.num_tokens and needed_from <= mirror.num_tokens
    if not lies_within or not first <= num_items <= len(mirror.identifiers):
        raise MessageError(
            "a plan lies within its request",
            request_id=mirror.request_id,
            expected=f"{mirror.num_tokens} tokens, {mirror.num_items} items",
            found=f"window {part.window}, {num_items} items",
        )
    items = []
    last = -1
    for index, status, handle, num_rows, nbytes in part.items:
        if not last < index < num_items or status >= len(_STATUSES):
            raise MessageError("a plan's items are items of its request", request_id=mirror.request_id, item=index)
        if num_rows != mirror.num_rows(index):
            # Layout and rows from different sources would merge one item's rows over another's places.
            raise MessageError(
                "a planned item has the rows of its placeholder range",
                request_id=mirror.request_id,
                item=index,
                expected=mirror.num_rows(index),
                found=num_rows,
            )
        last = index
        items.append(
            PlannedItem(
                index,
                mirror.identifiers[index],
                mirror.modality(index),
                _STATUSES[status],
                handle,
                num_rows,
                nbytes,
            )
        )
    schemas, schema_of = mirror.plan_schemas(num_items)
    return StepPlan(
        ledger_id=ledger_id,
        plan_id=plan_id,
        epoch=epoch,
        request_id=mirror.request_id,
        window=(start, end),
        needed_from=needed_from,
        lookahead=lookahead,
        num_items=num_items,
        items=tuple(items),
        drop=tuple(part.drop),
        bytes=PlanBytes(*part.bytes),
        first=first,
        covered=frozenset(part.covered),
        schemas=schemas,
        schema_of=schema_of,
    )
