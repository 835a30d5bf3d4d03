"""What a sender is given: requests, and steps of requests with their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmcache.errors import FieldError, RequestError
from mmcache.fields import ItemFields
from mmcache.ipc.values import flatten
from mmcache.items import MultimodalRequest
from mmcache.planning import StepPlan, check_index

__all__ = ["check_pairs", "check_plan", "check_request", "check_supplied"]


def check_request(request: object) -> None:
    """Raise RequestError unless it is one."""
    if not isinstance(request, MultimodalRequest):
        raise RequestError("a sender knows MultimodalRequests", found=type(request).__name__)


def check_pairs(parts: Sequence[tuple[MultimodalRequest, StepPlan]]) -> Sequence[tuple[MultimodalRequest, StepPlan]]:
    """The parts of a step. Raise RequestError unless they are requests with their plans."""
    pairs = []
    part: object = parts
    try:
        for part in parts:
            request, plan = part
            if not isinstance(request, MultimodalRequest) or not isinstance(plan, StepPlan):
                raise TypeError
            pairs.append((request, plan))
    except (TypeError, ValueError):
        kinds = ", ".join(type(one).__name__ for one in part) if isinstance(part, tuple) else type(part).__name__
        raise RequestError(
            "a step is a list of requests with their plans",
            expected="(MultimodalRequest, StepPlan) in a list",
            found=kinds if part is parts else f"in it {kinds}",
        ) from None
    return pairs


def check_plan(request: MultimodalRequest, plan: StepPlan) -> None:
    """Raise RequestError unless the plan can be of the request."""
    if plan.request_id != request.request_id:
        raise RequestError(
            "a plan is sent with its request", request_id=request.request_id, found=f"a plan for {plan.request_id!r}"
        )
    if plan.num_items > len(request.items):
        raise RequestError(
            "a plan is sent with its request",
            request_id=request.request_id,
            expected=f"at most {len(request.items)} items",
            found=f"a plan for {plan.num_items} items",
        )


def check_supplied(request: MultimodalRequest, fields: Mapping[int, ItemFields]) -> None:
    """Raise RequestError or FieldError unless these can be fields of the request's items."""
    check_request(request)
    if not isinstance(fields, Mapping):
        raise RequestError("content is fields by item", request_id=request.request_id, found=type(fields).__name__)
    for index, given in fields.items():
        check_index(request.request_id, index, len(request.items))
        modality = request.items[index].modality
        if not isinstance(given, ItemFields) or given.modality != modality:
            raise RequestError(
                "an item is supplied with fields of its modality",
                request_id=request.request_id,
                item=index,
                expected=modality,
                found=given.modality if isinstance(given, ItemFields) else type(given).__name__,
            )
        for name, value in given.items():
            try:
                flatten(value, name)
            except FieldError as error:
                raise error.about(request_id=request.request_id, item=index) from None
