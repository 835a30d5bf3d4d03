"""Pure decisions: which items of a request a step needs, what becomes of each field, and how many bytes that is.

Nothing here holds a lock, a tensor or a reference to a cache. Items before the first that is needed are never looked
at: a plan for n covered items and k needed ones costs O(log n + k).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Protocol

from mmcache.errors import FieldError, RequestError, WindowError
from mmcache.integers import as_int
from mmcache.items import MultimodalRequest

__all__ = [
    "FieldAction",
    "ItemStatus",
    "PlanBytes",
    "PlannedItem",
    "Progress",
    "Span",
    "StepPlan",
    "action_of",
    "check_index",
    "check_window",
    "count_bytes",
    "covered_beyond",
    "needed_items",
    "unneeded_status",
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
        index = check_index(self.request_id, index, self.num_items)
        place = bisect_left(self.items, index, key=_index_of)
        if place < len(self.items) and self.items[place].index == index:
            return self.items[place].status
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


_index_of = attrgetter("index")


def check_index(request_id: str, index: object, num_items: int) -> int:
    """The index of an item, as an int.

    Raises:
        RequestError: there is no such item.
    """
    number = as_int(index)
    if number is None or not 0 <= number < num_items:
        raise RequestError(
            "the request has no such item",
            request_id=request_id,
            expected=f"0 <= index < {num_items}",
            found=repr(index),
        )
    return number


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
    num_scheduled_tokens: int | None = None,
    needed_from: int | None = None,
    lookahead: int = 0,
) -> tuple[int, int, int, int]:
    """The window, resolved: (start, end, needed_from, lookahead).

    Raises:
        RequestError: the request is none.
        WindowError: a bound is not an integer, or lies outside the request's tokens.
    """
    if not isinstance(request, MultimodalRequest):
        raise RequestError("a step is one of a MultimodalRequest", found=type(request).__name__)
    length = request.num_tokens
    start = _bound(request, "num_computed_tokens", num_computed_tokens, length)
    end = length
    if num_scheduled_tokens is not None:
        end = min(length, start + _bound(request, "num_scheduled_tokens", num_scheduled_tokens, None))
    first = start if needed_from is None else _bound(request, "needed_from", needed_from, length)
    return start, end, first, _bound(request, "lookahead", lookahead, None)


def _bound(request: MultimodalRequest, name: str, value: object, most: int | None) -> int:
    number = as_int(value)
    if number is None or number < 0 or (most is not None and number > most):
        raise WindowError(
            f"{name} is out of range",
            request_id=request.request_id,
            expected="an integer >= 0" if most is None else f"an integer from 0 to {most}",
            found=repr(value),
        )
    return number


def needed_items(
    request: MultimodalRequest, needed_from: int, horizon: int, num_items: int | None = None
) -> tuple[int, int, Sequence[int]]:
    """The items that a step needs: those whose next embedding row at or after `needed_from` lies before `horizon`.

    Args:
        request: the request.
        needed_from: first token whose embedding is needed.
        horizon: one past the last token that the step looks at.
        num_items: how many of the request's items there are for this step; all if None.

    Returns:
        (first, later, needed): items before `first` are covered, those from `later` on are not needed before `horizon`
        nor covered (but where they have no rows), `needed` are the indices in between that have rows to merge.
    """
    later = len(request.items) if num_items is None else num_items
    first = bisect_right(request._reach, needed_from, 0, later)
    if first == later:
        return first, later, ()
    if horizon < request.num_tokens:
        # Of items that nest, one that begins late may yet end before `needed_from`.
        later = bisect_left(request._offsets, horizon if horizon > needed_from else needed_from, first, later)
    elif request._offsets[first] >= needed_from and not request._zero_rows:
        return first, later, range(first, later)
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


class Span(Protocol):
    """Which items of a request a step looked at; see `needed_items`."""

    @property
    def needed_from(self) -> int:
        """First token whose embedding is needed."""

    @property
    def first(self) -> int:
        """Items before it are covered."""

    @property
    def later(self) -> int:
        """Items from it on are not needed yet."""

    @property
    def num_items(self) -> int:
        """Items of the request when the step was decided."""


def unneeded_status(request: MultimodalRequest, needed_from: int, index: int) -> ItemStatus:
    """Status of an item that is not among the needed ones."""
    return ItemStatus.COVERED if request._end_rows[index] <= needed_from else ItemStatus.LATER


def covered_beyond(request: MultimodalRequest, span: Span, needed: Container[int]) -> list[int]:
    """Covered items from `span.first` on: gaps between needed items, and items without rows."""
    ends, zero = request._end_rows, request._zero_rows
    gaps = [i for i in range(span.first, span.later) if i not in needed and ends[i] <= span.needed_from]
    return gaps + zero[bisect_left(zero, span.later) : bisect_left(zero, span.num_items)]


def count_bytes(request: MultimodalRequest, span: Span, outcome: Mapping[int, ItemStatus]) -> PlanBytes:
    """Bytes by what becomes of them; costs O(log n + needed items).

    Args:
        request: the request.
        span: which of its items are looked at.
        outcome: status of each needed item; of a missing content, `MISSING` only for the item whose payload moves.
    """
    until, num_items = request._payload_until, span.num_items
    sums = {
        ItemStatus.COVERED: until[span.first],
        ItemStatus.STORED: 0,
        ItemStatus.IN_FLIGHT: 0,
        ItemStatus.MISSING: 0,
        ItemStatus.LATER: until[num_items] - until[span.later],
    }

    def category(index: int) -> ItemStatus:
        return outcome.get(index) or unneeded_status(request, span.needed_from, index)

    for index in range(span.first, span.later):
        sums[category(index)] += until[index + 1] - until[index]
    zero = request._zero_rows
    for index in zero[bisect_left(zero, span.later) : bisect_left(zero, num_items)]:
        size = until[index + 1] - until[index]
        sums[ItemStatus.LATER] -= size
        sums[ItemStatus.COVERED] += size
    if request._shared:
        moved: set[int] = set()
        for index in (i for i, status in outcome.items() if status is ItemStatus.MISSING):
            for value, home, size in request._shared.get(index, ()):
                if value not in moved and outcome.get(home) is not ItemStatus.MISSING:
                    sums[category(home)] -= size
                    sums[ItemStatus.MISSING] += size
                moved.add(value)
    return PlanBytes(
        transfer=sums[ItemStatus.MISSING],
        kept_on_cpu=request._kept_until[num_items],
        covered=sums[ItemStatus.COVERED],
        stored=sums[ItemStatus.STORED],
        in_flight=sums[ItemStatus.IN_FLIGHT],
        later=sums[ItemStatus.LATER],
    )
