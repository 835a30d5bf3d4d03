"""Placeholder ranges: which tokens stand for an item, and which of them receive an embedding row."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import PlaceholderError
from mmcache.integers import as_int

__all__ = ["PlaceholderRange"]


class PlaceholderRange:
    """The tokens `[offset, offset + length)` that stand for an item. Immutable."""

    # Made in bulk on a hot path: read-only properties over plain slots cost a third of a frozen dataclass.
    __slots__ = ("_length", "_num_embeds", "_offset", "_places", "_rows_before", "_runs", "_starts")

    def __init__(
        self, offset: int, length: int, is_embed: Tensor | np.ndarray[Any, Any] | Sequence[bool] | None = None
    ) -> None:
        """Make a range; `is_embed` is a boolean mask `[length]`, copied; None and a mask of all True are the same.

        Raises:
            PlaceholderError: a negative or non-integer bound, or a mask that is not of booleans (or of 0 and 1), or not
                of that length.
        """
        if type(offset) is not int or type(length) is not int:
            offset, length = _integer(offset, "offset"), _integer(length, "length")
        if offset < 0 or length < 0:
            raise PlaceholderError("a placeholder range has offset and length >= 0", found=f"({offset}, {length})")
        self._offset = offset
        self._length = self._num_embeds = length
        end = offset + length
        # What a request asks of all its ranges at once: offset, end, first row, end of the rows (0 without rows), rows.
        self._places = offset, end, offset, end if length else 0, length
        self._runs: tuple[tuple[int, int], ...] | None = None  # of a mask; None where every position receives a row
        if is_embed is not None:
            mask = _as_mask(is_embed, length)
            if not mask.all():
                self._set_mask(mask)

    def _set_mask(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        starts, lengths = edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist()
        self._runs = tuple(zip(starts, lengths))
        self._num_embeds = sum(lengths)
        offset, end = self._places[:2]
        first_row, end_row = (offset + starts[0], offset + starts[-1] + lengths[-1]) if starts else (offset, 0)
        self._places = offset, end, first_row, end_row, self._num_embeds
        self._starts: list[int] = starts
        self._rows_before: list[int] = list(accumulate(lengths, initial=0))

    @property
    def offset(self) -> int:
        """The first token, counted from the start of the request."""
        return self._offset

    @property
    def length(self) -> int:
        """Number of tokens, the ones without an embedding row (newline, separator, timestamp) included."""
        return self._length

    @property
    def num_embeds(self) -> int:
        """Number of tokens that receive an embedding row."""
        return self._num_embeds

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, length) of each run of embedding positions, relative to `offset`, in order."""
        if self._runs is None:
            return ((0, self._length),) if self._length else ()
        return self._runs

    @property
    def first_row(self) -> int:
        """Position in the request of the first embedding row; `offset` where there are no rows."""
        return self._places[2]

    @property
    def end_row(self) -> int:
        """Position in the request one past the last embedding row; `offset` where there are no rows."""
        return self._places[3] or self._offset

    @property
    def is_embed(self) -> Tensor | None:
        """The mask as a CPU tensor bool `[length]`, or None where every position receives a row."""
        return None if self._runs is None else torch.from_numpy(_mask_of(self._runs, self._length))

    def embed_rows(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of embedding rows at the offsets `[start, end)` within this range.

        O(1) without a mask, else O(log runs).

        Raises:
            PlaceholderError: not 0 <= start <= end <= length.
        """
        start, end = _integer(start, "start"), _integer(end, "end")
        if not 0 <= start <= end <= self._length:
            raise PlaceholderError(
                "offsets lie within the placeholder range",
                expected=f"0 <= start <= end <= {self._length}",
                found=(start, end),
            )
        if self._runs is None:
            return start, end
        return self._rows_until(start, self._runs), self._rows_until(end, self._runs)

    def next_row(self, position: int) -> int | None:
        """Position in the request of the first embedding row at or after `position`, or None if there is none."""
        _, _, first_row, end_row, _ = self._places
        if position >= end_row:
            return None
        if position <= first_row:
            return first_row
        runs = self._runs
        if runs is None or len(runs) == 1:
            return position
        within = position - self._offset
        run = bisect_right(self._starts, within) - 1
        start, length = runs[run]
        return position if within < start + length else self._offset + runs[run + 1][0]

    def _rows_until(self, offset: int, runs: tuple[tuple[int, int], ...]) -> int:
        run = bisect_right(self._starts, offset) - 1
        if run < 0:
            return 0
        start, length = runs[run]
        return self._rows_before[run] + min(offset - start, length)

    def common_row(self, other: PlaceholderRange) -> int | None:
        """The first position of the request at which both ranges have an embedding row. Linear in their runs."""
        if self.first_row >= other.end_row or other.first_row >= self.end_row:
            return None
        runs, other_runs = self.runs, other.runs
        i = j = 0
        while i < len(runs) and j < len(other_runs):
            start, other_start = self._offset + runs[i][0], other._offset + other_runs[j][0]
            end, other_end = start + runs[i][1], other_start + other_runs[j][1]
            if max(start, other_start) < min(end, other_end):
                return max(start, other_start)
            if end <= other_end:
                i += 1
            else:
                j += 1
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        return self._offset == other.offset and self._length == other.length and self._runs == other._runs

    def __hash__(self) -> int:
        return hash((self._offset, self._length, self._runs))

    def __repr__(self) -> str:
        masked = "" if self._runs is None else f", num_embeds={self._num_embeds} in {len(self._runs)} runs"
        return f"PlaceholderRange({self._offset}, {self._length}{masked})"


def _integer(value: object, name: str) -> int:
    number = as_int(value)
    if number is None:
        raise PlaceholderError(f"a placeholder range's {name} is an integer", found=repr(value))
    return number


def _as_mask(is_embed: Any, length: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    try:
        mask = is_embed.detach().cpu().numpy() if isinstance(is_embed, Tensor) else np.asarray(is_embed)
    except (TypeError, ValueError) as error:
        raise PlaceholderError("is_embed is a boolean mask", found=str(error)) from None
    if mask.dtype != np.bool_ and mask.size:
        if mask.dtype.kind not in "iu" or mask.min() < 0 or mask.max() > 1:
            found = f"dtype {mask.dtype}" if mask.dtype.kind not in "iu" else f"{mask.min()} to {mask.max()}"
            raise PlaceholderError("is_embed is a mask of booleans, or of 0 and 1", found=found)
        mask = mask.astype(np.bool_)
    if mask.shape != (length,):
        raise PlaceholderError("is_embed covers the placeholder range", expected=f"shape ({length},)", found=mask.shape)
    return mask


def _mask_of(runs: tuple[tuple[int, int], ...], length: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(length, np.bool_)
    for start, count in runs:
        mask[start : start + count] = True
    return mask
