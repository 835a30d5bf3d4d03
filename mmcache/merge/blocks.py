"""Blocks of rows and the runs of a destination that they go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Block", "Positions", "are_short", "evenly_spaced"]

# Runs shorter than both on average are cheaper to write by fancy indexing: a call for a run costs what indexing costs
# for some twenty rows, and no longer matters where a run is large (measured with rows of 128 bytes to 8 KB). Copies of
# bits push the interpreter out of the processor's cache, so that for them it matters longer.
_SHORT_RUN = 24
_SHORT_RUN_BYTES = 64 << 10
_SHORT_COPY_BYTES = 256 << 10

Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows `[first, first + count)` of a source, and where they go.

    Attributes:
        first, count: the rows.
        runs: (start, length) in rows of the destination, in order; or None where `positions` is given.
        positions: destination row of each source row, int64 `[count]`; or None where `runs` is given.
    """

    first: int
    count: int
    runs: Sequence[tuple[int, int]] | None = None
    positions: Positions | None = None

    def indices(self) -> Positions:
        """Destination row of each source row."""
        if self.positions is not None:
            return self.positions
        runs = np.asarray(self.runs, dtype=np.int64).reshape(-1, 2)
        before = np.cumsum(runs[:, 1]) - runs[:, 1]
        return np.repeat(runs[:, 0] - before, runs[:, 1]) + np.arange(self.count)


def are_short(runs: int, rows: int, row_bytes: int, *, bits: bool = False) -> bool:
    """Whether `runs` runs of `rows` rows together are better written by index than one by one; `bits`: by numpy."""
    most = _SHORT_COPY_BYTES if bits else _SHORT_RUN_BYTES
    return runs > 1 and rows < runs * _SHORT_RUN and rows * row_bytes < runs * most


def evenly_spaced(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """(start, length, count, pitch) of groups of runs of equal length and distance, the rule where frames repeat."""
    groups: list[tuple[int, int, int, int]] = []
    for start, length in runs:
        if groups:
            first, size, count, pitch = groups[-1]
            if size == length and (count == 1 or start == first + count * pitch):
                groups[-1] = first, size, count + 1, pitch if count > 1 else start - first
                continue
        groups.append((start, length, 1, 0))
    return groups
