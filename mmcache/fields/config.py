"""How a field's batch is laid out over its items, and whether the field may leave the CPU."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from mmcache.errors import FieldError

__all__ = ["FieldConfig"]

Layout: TypeAlias = Literal["batched", "flat", "shared"]
Slices: TypeAlias = "Sequence[slice | Sequence[slice]]"


@dataclass(frozen=True, slots=True)
class FieldConfig:
    """How one field of a batch is laid out over its items; made by one of the four constructors below.

    Attributes:
        modality: the modality whose items own the field ("image", "video", "audio", ...).
        layout: "batched" (entry i of the first dimension is item i), "flat" (item i is a slice) or "shared" (one value
            for the whole batch).
        keep_on_cpu: the model reads this field on the CPU; it is never dropped and never goes to the device. A promise
            about the consumer: prove it.
        dim: the dimension along which items of a flat field join.
        slices: of a flat field, one tuple of slices an item, outermost dimension first.
        total: of a flat field made from sizes, their sum, which must be the field's size along `dim`.
        batch_size: of a shared field, the number of items that share it.
    """

    modality: str
    layout: Layout
    keep_on_cpu: bool = False
    dim: int = 0
    slices: tuple[tuple[slice, ...], ...] | None = None
    batch_size: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.modality, str) or not self.modality:
            raise FieldError("a field's modality is a non-empty string", found=repr(self.modality))

    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool = False) -> FieldConfig:
        """Item i is `batch[i]`: a tensor without its first dimension, or entry i of a list."""
        return FieldConfig(modality, "batched", keep_on_cpu)

    @staticmethod
    def flat(modality: str, slices: Slices, dim: int = 0, *, keep_on_cpu: bool = False) -> FieldConfig:
        """Item i is the slice `slices[i]` along `dim` (or a tuple of slices, one a dimension from the first on).

        Raises:
            FieldError: a slice has a step, a negative bound, or is not a slice.
        """
        dim = _checked_dim(dim)
        cut = []
        for item, entry in enumerate(slices):
            parts: tuple[Any, ...] = (
                tuple(entry) if isinstance(entry, (tuple, list)) else (slice(None),) * dim + (entry,)
            )
            for part in parts:
                _check_slice(part, item)
            cut.append(parts)
        return FieldConfig(modality, "flat", keep_on_cpu, dim, tuple(cut))

    @staticmethod
    def flat_from_sizes(
        modality: str,
        size_per_item: Tensor | np.ndarray[Any, Any] | Sequence[int],
        dim: int = 0,
        *,
        keep_on_cpu: bool = False,
    ) -> FieldConfig:
        """Item i owns the next `size_per_item[i]` entries along `dim`; sizes are one-dimensional integers.

        Raises:
            FieldError: sizes are not one-dimensional, not integers, or negative.
        """
        sizes = size_per_item.tolist() if isinstance(size_per_item, (Tensor, np.ndarray)) else list(size_per_item)
        if not isinstance(sizes, list):
            raise FieldError("sizes of a flat field are one-dimensional", found=f"the scalar {sizes!r}")
        dim = _checked_dim(dim)
        cut = []
        start = 0
        for item, size in enumerate(sizes):
            try:
                size = operator.index(size)
            except TypeError:
                size = -1
            if size < 0 or isinstance(sizes[item], bool):
                raise FieldError(
                    "sizes of a flat field are a one-dimensional sequence of integers >= 0",
                    item=item,
                    found=repr(sizes[item]),
                )
            cut.append((slice(None),) * dim + (slice(start, start + size),))
            start += size
        return FieldConfig(modality, "flat", keep_on_cpu, dim, tuple(cut), total=start)

    @staticmethod
    def shared(modality: str, batch_size: int, *, keep_on_cpu: bool = False) -> FieldConfig:
        """Every one of the `batch_size` items has the whole value; its bytes count once in a request."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 0:
            raise FieldError("a shared field's batch size is an integer >= 0", found=repr(batch_size))
        return FieldConfig(modality, "shared", keep_on_cpu, 0, None, batch_size)


def _checked_dim(dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise FieldError("a flat field's dim is an integer >= 0", found=repr(dim))
    return dim


def _check_slice(part: object, item: int) -> None:
    if not isinstance(part, slice):
        raise FieldError("a flat field is cut by slices or tuples of slices", item=item, found=repr(part))
    for bound in (part.start, part.stop):
        if bound is not None and (isinstance(bound, bool) or not hasattr(bound, "__index__") or bound < 0):
            raise FieldError("a slice has bounds >= 0", item=item, found=repr(part))
    if part.step not in (None, 1):
        raise FieldError("a slice has no step", item=item, found=repr(part))
