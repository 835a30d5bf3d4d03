"""Pure decisions: which items of a request a step needs, what becomes of each field, and how many bytes that is.

Nothing here holds a lock, a tensor or a reference to a cache. Items before the first that is needed are never looked
at: a plan for n covered items and k needed ones costs O(log n + k).
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from mmcache.errors import FieldError, RequestError, WindowError
from mmcache.items import MultimodalRequest

__all__ = [
    "FieldAction",
    "ItemStatus",
    "PlanBytes",
    "PlannedItem",
    "Progress",
    "StepPlan",
    "action_of",
    "check_window",
    "count_bytes",
    "needed_items",
]


class ItemStatus(Enum):
    """What a step needs of an item."""

    COVERED = "covered"
    """None of its embedding rows lies at or after `needed_from`: its tokens' KV exists."""
    STORED = "stored"
    """Its rows are held, or were given by the client."""
    IN_FLIGHT = "in_flight"
    """Another lookup encodes the same content."""
    MISSING = "missing"
    """This lookup is the one to encode it."""
    LATER = "later"
    """Its next row lies beyond window and look-ahead."""


class FieldAction(Enum):
    """What becomes of one field of an item in this step."""

    TRANSFER = "transfer"
    KEEP_ON_CPU = "keep_on_cpu"
    SKIP_COVERED = "skip_covered"
    SKIP_STORED = "skip_stored"
    SKIP_IN_FLIGHT = "skip_in_flight"
    SKIP_LATER = "skip_later"


_ACTIONS = {
    ItemStatus.COVERED: FieldAction.SKIP_COVERED,
    ItemStatus.STORED: FieldAction.SKIP_STORED,
    ItemStatus.IN_FLIGHT: FieldAction.SKIP_IN_FLIGHT,
    ItemStatus.MISSING: FieldAction.TRANSFER,
    ItemStatus.LATER: FieldAction.SKIP_LATER,
}


@dataclass(frozen=True, slots=True)
class PlanBytes:
    """Bytes of all fields of a request's items, by what becomes of them in a step; they add up to `total`.

    A shared field counts once, with the first `MISSING` item that has it, else with the first item that has it.
    """

    transfer: int
    kept_on_cpu: int
    covered: int
    stored: int
    in_flight: int
    later: int

    @property
    def total(self) -> int:
        """All bytes of all fields."""
        return self.transfer + self.kept_on_cpu + self.covered + self.stored + self.in_flight + self.later


@dataclass(frozen=True, slots=True)
class Progress:
    """What changed since the last `poll`.

    Attributes:
        ready: indices of items that were in flight and whose rows are here now.
        mine: indices of items that were in flight and are this request's to encode now.
    """

    ready: tuple[int, ...]
    mine: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.ready or self.mine)


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One needed item of a plan.

    Attributes:
        index: index in the request.
        identifier, modality: as in the item.
        status: `STORED`, `IN_FLIGHT` or `MISSING`.
        handle: the key under which a worker's `EmbeddingStore` holds the rows; a content that is evicted and encoded
            anew gets another one. -1 where the client gave the embeddings.
        num_rows: embedding rows of the whole item.
        nbytes: bytes reserved or held for them; 0 where the width is not known yet.
    """

    index: int
    identifier: str
    modality: str
    status: ItemStatus
    handle: int
    num_rows: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A decision for one request and step: frozen, picklable, free of tensors; what a scheduler sends to its workers.

    Attributes:
        ledger_id: the ledger that decided, a name unique to its process and start.
        plan_id: number of the plan within the ledger.
        epoch: the ledger's epoch when it was made.
        request_id: the request.
        window: (num_computed_tokens, end): the tokens of this step.
        needed_from, lookahead: as given to `lookup`.
        num_items: items of the request.
        items: the needed items in order: those with rows in window or look-ahead that are not covered.
        drop: handles that a worker drops before it runs this step.
        bytes: what becomes of all bytes of the request.
        first: items before this index are covered.
        covered: the covered items from `first` on.
        schemas: the distinct lists of (field, keep_on_cpu) of the request's items.
        schema_of: which of the schemas each item has.
    """

    ledger_id: str
    plan_id: int
    epoch: int
    request_id: str
    window: tuple[int, int]
    needed_from: int
    lookahead: int
    num_items: int
    items: tuple[PlannedItem, ...]
    drop: tuple[int, ...]
    bytes: PlanBytes
    first: int
    covered: frozenset[int]
    schemas: tuple[tuple[tuple[str, bool], ...], ...]
    schema_of: tuple[int, ...]

    @property
    def num_computed_tokens(self) -> int:
        """Length of the prefix whose KV exists."""
        return self.window[0]

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the items to encode: of each content the first."""
        seen: set[int] = set()
        return tuple(
            item.index
            for item in self.items
            if item.status is ItemStatus.MISSING and not (item.handle in seen or seen.add(item.handle))  # type: ignore[func-returns-value]
        )

    @property
    def stored(self) -> tuple[int, ...]:
        """Indices of the needed items whose rows are held."""
        return tuple(item.index for item in self.items if item.status is ItemStatus.STORED)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Indices of the needed items that another lookup encodes."""
        return tuple(item.index for item in self.items if item.status is ItemStatus.IN_FLIGHT)

    def status(self, index: int) -> ItemStatus:
        """The item's status when the plan was made.

        Raises:
            RequestError: the request has no such item.
        """
        check_index(self.request_id, index, self.num_items)
        for item in self.items:
            if item.index == index:
                return item.status
        return ItemStatus.COVERED if index < self.first or index in self.covered else ItemStatus.LATER

    def action(self, index: int, field: str) -> FieldAction:
        """What becomes of the item's field.

        Raises:
            RequestError: the request has no such item.
            FieldError: the item has no such field.
        """
        status = self.status(index)
        for name, keep_on_cpu in self.schemas[self.schema_of[index]]:
            if name == field:
                first = status is ItemStatus.MISSING and index in self.missing
                return action_of(status, keep_on_cpu, first)
        raise FieldError("the item has no such field", request_id=self.request_id, item=index, field=field)


def check_index(request_id: str, index: int, num_items: int) -> None:
    """Raise RequestError unless `index` is an item's."""
    if type(index) is not int or not 0 <= index < num_items:
        raise RequestError(
            "the request has no such item",
            request_id=request_id,
            expected=f"0 <= index < {num_items}",
            found=repr(index),
        )


def action_of(status: ItemStatus, keep_on_cpu: bool, first_of_content: bool) -> FieldAction:
    """The action for a field of an item of that status; repeats of a missing content move nothing of their own."""
    if keep_on_cpu:
        return FieldAction.KEEP_ON_CPU
    if status is ItemStatus.MISSING and not first_of_content:
        return FieldAction.SKIP_STORED
    return _ACTIONS[status]


def check_window(
    request: MultimodalRequest,
    num_computed_tokens: int,
    num_scheduled_tokens: int | None,
    needed_from: int | None,
    lookahead: int,
) -> tuple[int, int]:
    """The window's end and `needed_from`, resolved.

    Raises:
        WindowError: a bound is not an integer, or lies outside the request's tokens.
    """
    if type(request) is not MultimodalRequest:
        raise RequestError("a lookup is for a MultimodalRequest", found=type(request).__name__)
    length = request.num_tokens
    if type(num_computed_tokens) is not int or not 0 <= num_computed_tokens <= length:
        num_computed_tokens = _check_bound(request, "num_computed_tokens", num_computed_tokens, length)
    end = length
    if num_scheduled_tokens is not None:
        num_scheduled_tokens = _check_bound(request, "num_scheduled_tokens", num_scheduled_tokens, None)
        end = min(length, num_computed_tokens + num_scheduled_tokens)
    if needed_from is None:
        needed_from = num_computed_tokens
    else:
        needed_from = _check_bound(request, "needed_from", needed_from, length)
    if lookahead:
        _check_bound(request, "lookahead", lookahead, None)
    return end, needed_from


def as_int(value: object) -> object:
    """The value as an int where it is an integer of another kind (numpy's); else as it is."""
    if type(value) is int or isinstance(value, bool) or not hasattr(value, "__index__"):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _check_bound(request: MultimodalRequest, name: str, value: object, most: int | None) -> int:
    value = as_int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (most is not None and value > most):
        raise WindowError(
            f"{name} is out of range",
            request_id=request.request_id,
            expected="an integer >= 0" if most is None else f"an integer from 0 to {most}",
            found=repr(value),
        )
    return value


def needed_items(request: MultimodalRequest, needed_from: int, horizon: int) -> tuple[int, int, list[int]]:
    """The items that a step needs: those whose next embedding row at or after `needed_from` lies before `horizon`.

    Returns:
        (first, later, needed): items before `first` are covered, those from `later` on are not needed before `horizon`
        nor covered (but where they have no rows), `needed` are the indices in between that have rows to merge.
    """
    first = bisect_right(request._reach, needed_from)
    offsets = request._offsets
    later = len(offsets)
    if first == later:
        return first, later, []
    if horizon < request.num_tokens:
        # Of items that nest, one that begins late may yet end before `needed_from`.
        later = bisect_left(offsets, horizon if horizon > needed_from else needed_from, first)
    first_rows, end_rows = request._first_rows, request._end_rows
    needed = []
    for index in range(first, later):
        row = first_rows[index]
        if row < needed_from or not end_rows[index]:
            # Partly behind us: a range with gaps may have its next row far ahead, or have none at all.
            next_row = request.items[index].placeholder.next_row(needed_from)
            if next_row is None:
                continue
            row = next_row
        if row < horizon:
            needed.append(index)
    return first, later, needed


def unneeded_status(request: MultimodalRequest, needed_from: int, index: int) -> ItemStatus:
    """Status of an item that is not among the needed ones."""
    return ItemStatus.COVERED if request._end_rows[index] <= needed_from else ItemStatus.LATER


def covered_beyond(
    request: MultimodalRequest, needed_from: int, first: int, later: int, needed: Iterable[int]
) -> list[int]:
    """Covered items from `first` on: gaps between needed items, and items without rows."""
    known = set(needed)
    ends = request._end_rows
    zero = request._zero_rows
    return [i for i in range(first, later) if i not in known and ends[i] <= needed_from] + zero[
        bisect_left(zero, later) :
    ]


def count_bytes(
    request: MultimodalRequest,
    needed_from: int,
    first: int,
    later: int,
    needed: Mapping[int, object],
    status_of: Callable[[int], ItemStatus],
    missing: Iterable[int],
) -> PlanBytes:
    """Bytes by what becomes of them; costs O(log n + needed items).

    Args:
        request: the request.
        needed_from, first, later: as `needed_items` was given and returned.
        needed: keyed by the indices that it returned.
        status_of: status of a needed item.
        missing: the first index of each missing content.
    """
    until = request._payload_until
    sums = dict.fromkeys(ItemStatus, 0)
    sums[ItemStatus.COVERED] = until[first]
    sums[ItemStatus.LATER] = until[-1] - until[later]
    firsts = frozenset(missing)

    def category(index: int) -> ItemStatus:
        if index not in needed:
            return unneeded_status(request, needed_from, index)
        status = status_of(index)
        return ItemStatus.STORED if status is ItemStatus.MISSING and index not in firsts else status

    for index in range(first, later):
        sums[category(index)] += until[index + 1] - until[index]
    zero = request._zero_rows
    for index in zero[bisect_left(zero, later) :]:
        size = until[index + 1] - until[index]
        sums[ItemStatus.LATER] -= size
        sums[ItemStatus.COVERED] += size
    if request._shared:
        moved: set[int] = set()
        for index in sorted(firsts):
            for value, home, size in request._shared.get(index, ()):
                if value not in moved and home not in firsts:
                    sums[category(home)] -= size
                    sums[ItemStatus.MISSING] += size
                moved.add(value)
    return PlanBytes(
        transfer=sums[ItemStatus.MISSING],
        kept_on_cpu=request.kept_bytes,
        covered=sums[ItemStatus.COVERED],
        stored=sums[ItemStatus.STORED],
        in_flight=sums[ItemStatus.IN_FLIGHT],
        later=sums[ItemStatus.LATER],
    )
