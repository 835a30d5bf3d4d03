"""How many rows of a flat field each item owns, read from the batch itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mmcache.errors import FieldError

__all__ = [
    "Sizes",
    "columns",
    "counts",
    "entries",
    "first",
    "grouped",
    "merged",
    "merged_groups",
    "numbers",
    "pairs",
    "products",
    "sums",
    "unless",
    "where",
]

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A rule for the sizes of a flat field.

    Attributes:
        text: the rule in words, for tables.
        read: (batch, name of the flat field) to one size an item; None where the field turns out to have one entry an
            item, that is, where it is batched.
    """

    text: str
    read: Callable[[Batch, str], list[int] | None]


def numbers(value: Any, name: str) -> list[Any]:
    """A field's values as nested lists of numbers.

    Raises:
        FieldError: it holds something else, or is a single number.
    """
    result: Any = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value
    if not isinstance(result, Sequence) or isinstance(result, (str, bytes)):
        raise FieldError("sizes are read from a sequence of numbers", field=name, found=type(value).__name__)
    return [numbers(entry, name) if isinstance(entry, (Tensor, np.ndarray, list, tuple)) else entry for entry in result]


def _needed(batch: Batch, source: str, field: str) -> list[Any]:
    value = batch.get(source)
    if value is None:
        raise FieldError(f"its sizes come from {source!r}, which the batch lacks", field=field, expected=repr(source))
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        raise FieldError("sizes are one an item", field=source, found="a scalar")
    return numbers(value, source)


def _flat(values: list[Any]) -> list[Any]:
    return [part for value in values for part in (_flat(value) if isinstance(value, list) else [value])]


def _product(row: Any, source: str) -> int:
    # A grid may carry a dimension for a batch of one: (1, 3) instead of (3,).
    values = _flat(row) if isinstance(row, list) else None
    if not values or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise FieldError("a grid is a row of whole numbers", field=source, found=repr(row))
    return math.prod(values)


def counts(source: str, plus: int = 0) -> Sizes:
    """The values of `source`, one an item, plus a constant."""

    def read(batch: Batch, field: str) -> list[int]:
        return [value + plus for value in _flat(_needed(batch, source, field))]

    return Sizes(f"{source} + {plus}" if plus else source, read)


def entries(source: str) -> Sizes:
    """The lengths of the entries of `source`; None where the field has one entry an item."""

    def read(batch: Batch, field: str) -> list[int] | None:
        lengths = [len(value) if isinstance(value, list) else 1 for value in _needed(batch, source, field)]
        return None if len(lengths) == _rows(batch[field]) else lengths

    return Sizes(f"entries of {source}; batched where there is one an item", read)


def products(source: str) -> Sizes:
    """The product of each row of `source`, a grid."""

    def read(batch: Batch, field: str) -> list[int]:
        return [_product(row, source) for row in _needed(batch, source, field)]

    return Sizes(f"prod({source})", read)


def grouped(source: str, members: str) -> Sizes:
    """The products of the rows of `source`, summed over each item's `members` rows."""

    def read(batch: Batch, field: str) -> list[int]:
        rows = [_product(row, source) for row in _needed(batch, source, field)]
        return _sums(rows, source, batch, members, field)

    return Sizes(f"prod({source}) summed over {members}", read)


def merged(source: str) -> Sizes:
    """The product of each grid, divided by the number of patches that make one row (seen from the field's length)."""
    return _divided(products(source))


def merged_groups(source: str, members: str) -> Sizes:
    """As `merged`, for grids that are grouped into items."""
    return _divided(grouped(source, members))


def _divided(patches: Sizes) -> Sizes:
    def read(batch: Batch, field: str) -> list[int] | None:
        value = batch[field]
        sizes = patches.read(batch, field) or []
        rows = _rows(value)
        if isinstance(value, (list, tuple)) and rows == len(sizes):
            return None
        total = sum(sizes)
        if not total and not rows:
            return sizes
        ratio = total // rows if rows else 0
        if not ratio or ratio * rows != total or any(size % ratio for size in sizes):
            raise FieldError("its rows do not divide the patches of the grids", field=field, expected=sizes, found=rows)
        return [size // ratio for size in sizes]

    return Sizes(f"{patches.text} / merge²", read)


def sums(source: str, members: str) -> Sizes:
    """The values of `source`, summed over each item's `members` values."""

    def read(batch: Batch, field: str) -> list[int]:
        return _sums(_flat(_needed(batch, source, field)), source, batch, members, field)

    return Sizes(f"{source} summed over {members}", read)


def columns(source: str, rows: Sizes) -> Sizes:
    """Columns of images that are packed side by side: the patches of an item's grids times the width of a patch.

    Args:
        source: the grids.
        rows: how many of them each item owns.
    """

    def read(batch: Batch, field: str) -> list[int]:
        found = [_product(row, source) for row in _needed(batch, source, field)]
        width, total = int(batch[field].shape[-1]), sum(found)
        if width and (not total or width % total):
            raise FieldError("its columns are no multiple of the patches", field=field, expected=total, found=width)
        owned = rows.read(batch, source)
        items = found if owned is None else _grouped(found, owned, source, rows.text, field)
        return [size * (width // total) for size in items] if total else items

    return Sizes(f"patch width * prod({source})", read)


def pairs(source: str) -> Sizes:
    """The rows of two grids a row of `source`, `(h, w, h, w)`."""

    def read(batch: Batch, field: str) -> list[int]:
        return [_product(row[:2], source) + _product(row[2:], source) for row in _needed(batch, source, field)]

    return Sizes(f"both grids of {source}", read)


def first(source: str) -> Sizes:
    """The first value of each row of `source`."""

    def read(batch: Batch, field: str) -> list[int]:
        return [row[0] for row in _needed(batch, source, field)]

    return Sizes(f"{source}[0]", read)


def where(present: str, sizes: Sizes, other: Sizes | None = None) -> Sizes:
    """A rule for batches that have a field `present`, else another one, else batched."""

    def read(batch: Batch, field: str) -> list[int] | None:
        chosen = sizes if batch.get(present) is not None else other
        return None if chosen is None else chosen.read(batch, field)

    return Sizes(f"{sizes.text}, else {'batched' if other is None else other.text}", read)


def unless(present: str, sizes: Sizes) -> Sizes:
    """Batched in batches that have a field `present`, else a rule."""

    def read(batch: Batch, field: str) -> list[int] | None:
        return None if batch.get(present) is not None else sizes.read(batch, field)

    return Sizes(f"{sizes.text}; batched where there are {present}", read)


def _sums(values: list[int], source: str, batch: Batch, members: str, field: str) -> list[int]:
    return _grouped(values, _flat(_needed(batch, members, field)), source, members, field)


def _grouped(values: list[int], lengths: list[int], source: str, members: str, field: str) -> list[int]:
    if sum(lengths) != len(values):
        text = f"{members!r} does not add up to the rows of {source!r}"
        raise FieldError(text, field=field, expected=len(values), found=lengths)
    starts = [sum(lengths[:item]) for item in range(len(lengths))]
    return [sum(values[start : start + length]) for start, length in zip(starts, lengths)]


def _rows(value: Any) -> int:
    return int(value.shape[0]) if isinstance(value, (Tensor, np.ndarray)) else len(value)
