"""What a worker gets to do: a step, and in it each request's part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from mmcache.errors import ReleasedError, UnresolvedItemError
from mmcache.fields import FieldValue, ItemFields
from mmcache.ipc.mirror import ItemPayload, Mirror
from mmcache.items import MultimodalItem, MultimodalRequest
from mmcache.planning import ItemStatus, StepPlan

__all__ = ["RowStore", "WorkerPart", "WorkerStep"]


class RowStore(Protocol):
    """What a receiver asks of the store that holds the rows; `EmbeddingStore` is one."""

    def handles(self) -> Sequence[int]:
        """The handles whose rows are here."""

    def apply(self, plan: StepPlan, /) -> Any:
        """Drop what the plan says; returns a report with `lost`: handles that it calls stored and that are not here."""

    def rows(self, plan: StepPlan, index: int, /) -> Tensor:
        """The rows `[num_rows, width]` of a planned item."""


class WorkerPart:
    """One request's part in a step. `encoder_inputs` and `MergePlan` take it as they take a lookup.

    Attributes:
        plan: the plan; items whose rows were lost here and whose payload came again are missing in it.
    """

    __slots__ = ("_live", "_mirror", "_num_tokens", "_payload", "_store", "plan")

    def __init__(self, plan: StepPlan, mirror: Mirror, store: RowStore | None, payload: dict[int, ItemPayload]) -> None:
        self.plan = plan
        self._mirror = mirror
        self._num_tokens = mirror.num_tokens  # the request may grow while the step is under way
        self._store = store
        self._payload = payload
        self._live = True

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self.plan.request_id

    @property
    def window(self) -> tuple[int, int]:
        """(first, end) of the tokens of this step."""
        return self.plan.window

    @property
    def needed(self) -> tuple[int, ...]:
        """Indices of the items with rows in window or look-ahead."""
        return tuple(item.index for item in self.plan.items)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the items to encode."""
        return self.plan.missing

    @property
    def token_ids(self) -> Any:
        """The request's tokens as they were when the step was sent: int32 `[num_tokens]`, read-only."""
        return self._mirror.token_ids(self._num_tokens)

    @property
    def request(self) -> MultimodalRequest:
        """The request; during the step its items to encode have their payload, in shared memory that is read-only.

        Raises:
            ReleasedError: the step is over.
        """
        self._check()
        request = self._mirror.request()
        for index in self._payload:
            request.items[index] = self._full_item(index)
        return request

    def metadata(self, field: str) -> list[FieldValue]:
        """The `keep_on_cpu` field of every item that has it, covered ones too, in order, on the CPU.

        Raises:
            FieldError: an item has the field, but it is not marked `keep_on_cpu`.
        """
        return self._mirror.metadata(field, self.plan.num_items)

    def fields(self, index: int) -> ItemFields | None:
        """The fields of an item: metadata, and payload where the step brought it; None for an item without fields.

        Payload tensors lie in shared memory: writing to one ends the process. They may be kept beyond the step, which
        keeps their memory from being used again.

        Raises:
            ReleasedError: the step is over.
            RequestError: the plan has no such item.
        """
        self._check()
        self.plan.status(index)
        return self._mirror.fields(index, self._payload.get(index))

    def key(self, index: int) -> Hashable:
        """Equal for two items, of one step or of several, whose rows are the same.

        Raises:
            UnresolvedItemError: the plan does not need the item.
        """
        for item in self.plan.items:
            if item.index == index:
                return (self.plan.ledger_id, item.handle) if item.handle >= 0 else (self.request_id, index)
        raise UnresolvedItemError("the plan does not need the item", request_id=self.request_id, item=index)

    def rows(self, index: int) -> Tensor:
        """Rows of a needed item, `[num_rows, width]`: from the store, or as the client gave them.

        Raises:
            UnresolvedItemError: nobody has provided them.
        """
        given = self._payload.get(index)
        if given is not None and given.embeds is not None:
            return given.embeds
        if self._store is None:
            raise UnresolvedItemError("this worker holds no rows", request_id=self.request_id, item=index)
        return self._store.rows(self.plan, index)

    def expecting(self) -> StepPlan:
        """The plan, with what another step encodes as stored: by now it should be."""
        items = tuple(
            replace(item, status=ItemStatus.STORED) if item.status is ItemStatus.IN_FLIGHT else item
            for item in self.plan.items
        )
        return replace(self.plan, items=items) if items != self.plan.items else self.plan

    def lack(self, handles: Set[int]) -> list[int]:
        """Mark what the store does not have as missing; returns the items whose payload has to come again."""
        if not handles:
            return []
        items = tuple(
            replace(item, status=ItemStatus.MISSING) if item.handle in handles and item.handle >= 0 else item
            for item in self.plan.items
        )
        before = set(self.plan.missing)
        self.plan = replace(self.plan, items=items)
        return [index for index in self.plan.missing if index not in before]

    def supply(self, payload: Mapping[int, ItemPayload]) -> None:
        """Add payload that came again."""
        self._payload.update(payload)

    def _full_item(self, index: int) -> MultimodalItem:
        payload = self._payload[index]
        return MultimodalItem(
            self._mirror.modality(index),
            self._mirror.fields(index, payload if payload.embeds is None else None),
            self._mirror.placeholder(index),
            self._mirror.identifiers[index],
            embeds=payload.embeds,
        )

    def _check(self) -> None:
        if not self._live:
            raise ReleasedError("the step is over", request_id=self.request_id)

    def _end(self) -> None:
        if self._live:
            self._live = False
            self._mirror.strip(self._payload)
            self._payload.clear()


class WorkerStep:
    """A step of the scheduler, to be run as one batch. Call `done`, or use it as a context manager.

    Attributes:
        number: the scheduler's number of the step.
        parts: its requests' parts, in the scheduler's order.
        failed: request to the items that nobody has any more; these requests are not among the parts.
    """

    __slots__ = ("_on_done", "failed", "number", "parts")

    def __init__(self, number: int, parts: list[WorkerPart], on_done: Callable[[], None]) -> None:
        self.number = number
        self.parts = parts
        self.failed: dict[str, tuple[int, ...]] = {}
        self._on_done: Callable[[], None] | None = on_done

    def done(self) -> None:
        """The step is run. Payload is given back as soon as no tensor of it is alive. Idempotent."""
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            for part in self.parts:
                part._end()
            on_done()

    def __enter__(self) -> WorkerStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done()
