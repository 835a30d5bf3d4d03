"""Blocks of rows and the runs of a destination that they go to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from mmcache.merge.records import Flags

__all__ = ["Block", "Positions", "blocks_of", "edges_of", "ends_of", "evenly_spaced"]

# Runs of fewer rows on average are described by the position of each row: quicker to make and to send.
_SHORT_RUN = 8

Positions: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows `[first, first + count)` of a source, and where they go.

    Attributes:
        first, count: the rows; at least one.
        runs: (start, length) in rows of the destination, in order; or None where `positions` is given.
        positions: destination row of each source row, int64 `[count]`, in order; or None where `runs` is given.
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

    def stretches(self) -> Sequence[tuple[int, int]]:
        """`runs`, also where they are given as positions."""
        if self.runs is not None:
            return self.runs
        rows = self.indices()
        edges = (np.diff(rows, prepend=-2, append=rows[-1] + 2) != 1).nonzero()[0]
        return list(zip(rows[edges[:-1]].tolist(), np.diff(edges).tolist()))

    def flags(self) -> tuple[int, Flags]:
        """The first row of the destination, and which rows from there on receive one."""
        if self.runs is None:
            assert self.positions is not None
            start = int(self.positions[0])
            flags = np.zeros(int(self.positions[-1]) + 1 - start, np.bool_)
            flags[self.positions - start] = True
            return start, flags
        start = self.runs[0][0]
        flags = np.zeros(sum(self.runs[-1]) - start, np.bool_)
        for begin, length in self.runs:
            flags[begin - start : begin - start + length] = True
        return start, flags


def edges_of(flags: Flags) -> Positions:
    """Where runs of True begin and end, alternating."""
    padded = np.zeros(len(flags) + 2, np.bool_)
    padded[1:-1] = flags
    edges: Positions = (padded[1:] != padded[:-1]).nonzero()[0]
    return edges


def blocks_of(sources: Iterable[Tensor], flags: Flags) -> Iterator[tuple[Tensor, Block]]:
    """Each source `[n, width]` and where its rows go, if the sources fill the True flags in order."""
    edges = edges_of(flags)
    short = int(np.count_nonzero(flags)) < len(edges) // 2 * _SHORT_RUN
    positions = flags.nonzero()[0] if short else None
    edge = iter(edges.tolist())
    done = start = end = 0
    for source in sources:
        left = count = source.shape[0]
        if not count:
            continue
        if positions is not None:
            yield source, Block(0, count, None, positions[done : done + count])
            done += count
            continue
        runs = []
        while left:
            if start == end:
                start, end = next(edge), next(edge)
            length = min(left, end - start)
            runs.append((start, length))
            start += length
            left -= length
        yield source, Block(0, count, runs)


def ends_of(flags: Flags, counts: Sequence[int]) -> list[int]:
    """Behind which position each part ends, if parts of so many rows, one or more, fill the True flags in order."""
    if len(counts) < 2:
        return [len(flags)] * len(counts)
    ends: list[int] = (flags.nonzero()[0][np.cumsum(counts) - 1] + 1).tolist()
    return ends


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
