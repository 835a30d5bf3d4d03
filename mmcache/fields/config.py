"""How a field's batch is laid out over its items, and whether the field may leave the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor

from mmcache.errors import FieldError
from mmcache.integers import as_int

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
        if not isinstance(self.keep_on_cpu, bool):
            raise FieldError("keep_on_cpu is a bool", found=repr(self.keep_on_cpu))

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
        before = (slice(None),) * dim
        cut = []
        for item, entry in enumerate(_as_list(slices, "slices")):
            parts = entry if isinstance(entry, (tuple, list)) else (*before, entry)
            cut.append(tuple(_checked_slice(part, item) for part in parts))
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
        dim = _checked_dim(dim)
        cut = []
        start = 0
        for item, given in enumerate(_as_list(size_per_item, "sizes")):
            size = as_int(given)
            if size is None or size < 0:
                raise FieldError(
                    "sizes of a flat field are a one-dimensional sequence of integers >= 0",
                    item=item,
                    found=repr(given),
                )
            cut.append((slice(None),) * dim + (slice(start, start + size),))
            start += size
        return FieldConfig(modality, "flat", keep_on_cpu, dim, tuple(cut), total=start)

    @staticmethod
    def shared(modality: str, batch_size: int, *, keep_on_cpu: bool = False) -> FieldConfig:
        """Every one of the `batch_size` items has the whole value; its bytes count once in a request."""
        number = as_int(batch_size)
        if number is None or number < 0:
            raise FieldError("a shared field's batch size is an integer >= 0", found=repr(batch_size))
        return FieldConfig(modality, "shared", keep_on_cpu, 0, None, number)


def _checked_dim(dim: int) -> int:
    number = as_int(dim)
    if number is None or number < 0:
        raise FieldError("a flat field's dim is an integer >= 0", found=repr(dim))
    return number


def _checked_slice(part: object, item: int) -> slice:
    if not isinstance(part, slice):
        raise FieldError("a flat field is cut by slices or tuples of slices", item=item, found=repr(part))
    start, stop = as_int(part.start), as_int(part.stop)
    for given, bound in ((part.start, start), (part.stop, stop)):
        if given is not None and (bound is None or bound < 0):
            raise FieldError("a slice has bounds >= 0", item=item, found=repr(part))
    if part.step not in (None, 1):
        raise FieldError("a slice has no step", item=item, found=repr(part))
    return slice(start, stop)


def _as_list(values: Any, what: str) -> list[Any]:
    with suppress(TypeError):
        values = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    if not isinstance(values, list):
        raise FieldError(f"{what} of a flat field are one-dimensional", found=f"the scalar {values!r}")
    return values
