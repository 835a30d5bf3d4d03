"""Where a worker keeps encoder outputs. It decides nothing: it obeys plans, and reports what it holds.

Rows are kept under the handles that plans name. A handle is never used for two admissions, so a drop that travels late
can never hit an entry that was admitted anew.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcache.errors import ConfigError, EmbeddingError, RequestError, UnresolvedItemError
from mmcache.fields import owns_memory
from mmcache.integers import as_int
from mmcache.planning import ItemStatus, PlannedItem, StepPlan, check_index
from mmcache.staging import Event, staging_for

__all__ = ["EmbeddingStore", "Embeddings", "StoreReport", "asked_for", "check_rows"]

Embeddings = Mapping[int, Tensor] | Sequence[Tensor] | Tensor


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What a worker's store says of itself.

    Attributes:
        ledger_id: the ledger that it obeys.
        epoch: unique to the store and its start.
        held: all handles that it holds; None where the ledger can know from what was reported before.
        lost: handles that a plan called stored and that are not here.
    """

    ledger_id: str
    epoch: str
    held: tuple[int, ...] | None
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    rows: Tensor
    written: Event | None  # recorded behind the kernels that write the rows; None on the CPU


class EmbeddingStore:
    """Rows `[num_rows, width]` of encoder outputs by handle, each in memory of its own, on one device.

    Thread-safe: every change is one operation on one dictionary.

    On an accelerator nothing here waits on the host: a reader's stream waits for the event behind which the rows were
    written, and memory is given back to the allocator only after the last reader's stream is done with it.

    Attributes:
        device: where rows are kept.
        epoch: unique to this store and start.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        try:
            self.device = torch.device(device)
            if self.device.type == "meta":
                raise RuntimeError("it holds no values")
            torch.empty(0, device=self.device)
        except (RuntimeError, TypeError, AssertionError) as error:  # torch asserts that it was built for the device
            raise ConfigError(
                f"the device cannot be used: {error}", field="device", found=repr(device), expected="one that is here"
            ) from None
        self.epoch = uuid.uuid4().hex
        self._held: dict[int, _Held] = {}
        self._ledger_id: str | None = None

    def __len__(self) -> int:
        """Number of entries held."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes held, added up anew: threads put and drop at the same time, and a running sum would need a lock."""
        return sum(_bytes(held.rows) for held in list(self._held.values()))

    def apply(self, plan: StepPlan) -> StoreReport:
        """Drop what the plan says, and tell what of it is not here. Another ledger's plan empties the store first.

        Raises:
            RequestError: it is no plan.
        """
        _check_plan(plan)
        fresh = plan.ledger_id != self._ledger_id
        if fresh:
            self.clear()
            self._ledger_id = plan.ledger_id
        self.drop(plan.drop)
        stored = {item.handle for item in plan.items if item.status is ItemStatus.STORED and item.handle >= 0}
        lost = tuple(sorted(handle for handle in stored if handle not in self._held))
        return StoreReport(plan.ledger_id, self.epoch, self.handles() if fresh else None, lost)

    def handles(self) -> tuple[int, ...]:
        """All handles held."""
        return tuple(self._held)

    def put(self, handle: int, rows: Tensor, *, copy: bool = True) -> int:
        """Keep rows under a handle; replaces what was there.

        Args:
            handle: as the plan names it.
            rows: floating-point `[num_rows, width]` on any device.
            copy: False hands the tensor over, to be kept as it is where it is contiguous, on this store's device and
                its storage's only content, in memory of torch's (an array of numpy's may be a view of a larger one);
                the caller does not write to it again. Anything else is copied.

        Returns:
            Bytes kept.

        Raises:
            EmbeddingError: the rows are no tensor.
        """
        if not isinstance(rows, Tensor):
            raise EmbeddingError("embeddings are tensors", expected="Tensor", found=type(rows).__name__)
        held = self._own(rows.detach(), copy)
        self._held[handle] = held
        return _bytes(held.rows)

    def get(self, handle: int) -> Tensor | None:
        """The rows under a handle, or None; the current stream waits until they are written. Do not write to them."""
        held = self._held.get(handle)
        if held is None:
            return None
        if held.written is not None:
            streams = staging_for(held.rows.device).streams
            streams.wait(held.written)
            streams.used(held.rows)
        return held.rows

    def drop(self, handles: Iterable[int]) -> None:
        """Forget rows; handles that are not here are passed over."""
        for handle in handles:
            self._held.pop(handle, None)

    def clear(self) -> None:
        """Forget everything."""
        self.drop(self.handles())

    def put_planned(self, plan: StepPlan, embeddings: Embeddings, *, copy: bool = True) -> dict[int, int]:
        """Keep the rows of items that a plan calls missing.

        Args:
            plan: the plan that said so.
            embeddings: {item index: rows} for any of `plan.missing`, or a sequence in its order; rows are
                `[num_rows, width]`.
            copy: as for `put`.

        Returns:
            item index to bytes, for the ledger's `settle`.

        Raises:
            EmbeddingError: an index is not missing, or its rows do not fit; nothing is kept then.
            RequestError: it is no plan.
        """
        _check_plan(plan)
        planned = {item.index: item for item in plan.items}
        rows_of = asked_for(embeddings, plan.missing, plan.request_id)
        for index, rows in rows_of.items():
            check_rows(rows, planned[index].num_rows, plan.request_id, index)
        return {index: self.put(planned[index].handle, rows, copy=copy) for index, rows in rows_of.items()}

    def report(self) -> StoreReport:
        """All that is held, for `EncoderLedger.reconcile`."""
        return StoreReport(self._ledger_id or "", self.epoch, self.handles(), ())

    def rows(self, plan: StepPlan, index: int) -> Tensor:
        """The rows `[num_rows, width]` of a planned item.

        Raises:
            UnresolvedItemError: the plan does not need the item, or nobody has provided its rows.
            RequestError: it is no plan, or its request has no such item.
        """
        _check_plan(plan)
        index = check_index(plan.request_id, index, plan.num_items)
        item: PlannedItem | None = next((item for item in plan.items if item.index == index), None)
        rows = None if item is None else self.get(item.handle)
        if rows is None:
            raise UnresolvedItemError("no rows are held for the item", request_id=plan.request_id, item=index)
        return rows

    def _own(self, rows: Tensor, copy: bool) -> _Held:
        if rows.device.type != self.device.type or (self.device.index not in (None, rows.device.index)):
            rows = _to_device(rows, self.device)
        elif copy or not (rows.is_contiguous() and owns_memory(rows)):
            rows = rows.clone(memory_format=torch.contiguous_format)
        return _Held(rows, _written(rows))


def asked_for(embeddings: Embeddings, missing: Sequence[int], request_id: str) -> dict[int, Tensor]:
    """Rows by item index, for items that are to be encoded.

    Raises:
        EmbeddingError: an index is not among the missing ones, or a sequence is not as long as they are.
    """
    if not isinstance(embeddings, Mapping):
        return _in_order(embeddings, missing, request_id)
    rows_of = {}
    for key, rows in embeddings.items():
        index = as_int(key)
        if index is None or index not in missing:
            raise EmbeddingError(
                "embeddings for an item that is not this step's to encode",
                request_id=request_id,
                item=index,
                expected=f"one of {list(missing)}",
                found=repr(key),
            )
        rows_of[index] = rows
    return rows_of


def _in_order(embeddings: Sequence[Tensor] | Tensor, missing: Sequence[int], request_id: str) -> dict[int, Tensor]:
    if not isinstance(embeddings, (Sequence, Tensor)) or isinstance(embeddings, (str, bytes)):
        raise EmbeddingError(
            "embeddings come as {item index: rows} or as a sequence",
            request_id=request_id,
            found=type(embeddings).__name__,
        )
    number = len(embeddings) if not isinstance(embeddings, Tensor) or embeddings.dim() else 0
    if number != len(missing):
        raise EmbeddingError(
            "a sequence of embeddings has one entry for each missing item; give {index: rows} for some of them",
            request_id=request_id,
            expected=f"{len(missing)} for items {list(missing)}",
            found=number,
        )
    return dict(zip(missing, embeddings))


def check_rows(rows: object, num_rows: int, request_id: str, index: int) -> Tensor:
    """The rows, if they can be the embeddings of an item with that many.

    Raises:
        EmbeddingError: not a floating-point tensor `[num_rows, width]`.
    """
    if not isinstance(rows, Tensor):
        raise EmbeddingError(
            "embeddings are tensors", request_id=request_id, item=index, expected="Tensor", found=type(rows).__name__
        )
    if rows.layout is not torch.strided or rows.is_nested or rows.is_meta:
        raise EmbeddingError(
            "embeddings are dense tensors that hold their values",
            request_id=request_id,
            item=index,
            found=f"{rows.layout}, {rows.device}",
        )
    if rows.dim() != 2 or rows.shape[0] != num_rows or not rows.shape[1]:
        raise EmbeddingError(
            "embeddings have one row for each embedding position",
            request_id=request_id,
            item=index,
            expected=f"shape ({num_rows}, width)",
            found=tuple(rows.shape),
        )
    if not rows.is_floating_point():
        raise EmbeddingError(
            "embeddings are floating-point",
            request_id=request_id,
            item=index,
            expected="a float dtype",
            found=rows.dtype,
        )
    return rows


def _check_plan(plan: object) -> None:
    if not isinstance(plan, StepPlan):
        raise RequestError("a store obeys a StepPlan", found=type(plan).__name__)


def _bytes(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()


def _to_device(rows: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return rows.to(device, non_blocking=True).contiguous()
    # To the host: an asynchronous copy may be read only after a wait, and readers here are told nothing; so wait once.
    return rows.to(device).contiguous()


def _written(rows: Tensor) -> Event | None:
    return None if rows.is_cpu else staging_for(rows.device).streams.record()
