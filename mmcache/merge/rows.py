"""Writing blocks of rows to runs of a destination: one pass over the rows, converting and moving as it goes.

On the CPU rows of equal dtype are copied as bits by numpy, run by run (one `memmove` each), and by fancy indexing where
runs are so short that a call for each would cost more than the copy; other dtypes go through `copy_`. On a device a
block of few runs, or of evenly spaced ones, is a strided copy or a few, any other one an indexed copy, with all indices
of a call sent over at once from pinned memory: the number of launches does not depend on the number of rows, and the
host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache.staging import BITS, Bits, Staging, as_bits, fill, staging_for

__all__ = ["Block", "are_short", "send_places", "write_blocks"]

# Runs shorter than both on average are cheaper to write by fancy indexing: a call for a run costs what indexing costs
# for some twenty rows, and no longer matters where a run is large (measured with rows of 128 bytes to 8 KB).
_SHORT_RUN = 24
_SHORT_RUN_BYTES = 64 << 10
# A conversion for each run pays from this many elements a run on (measured); below, rows are converted in chunks.
_SHORT_CONVERSION = 16384
# Up to this number of (strided) copies a block is written by one call each.
_FEW_CALLS = 4
# PyTorch runs an elementwise operation of this many elements on one thread.
_SERIAL_ELEMENTS = 32768 - 1
_CHUNK_BYTES = 256 << 10

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


def are_short(runs: int, rows: int, row_bytes: int) -> bool:
    """Whether `runs` runs of `rows` rows together are better written by index than one by one."""
    return runs > 1 and rows < runs * _SHORT_RUN and rows * row_bytes < runs * _SHORT_RUN_BYTES


def write_blocks(
    target: Tensor, blocks: Sequence[tuple[Tensor, Block]], places: Sequence[Tensor | None] | None = None
) -> None:
    """Write rows of each source `[n, width]` to their places in `target` `[rows, width]`.

    Sources may have another dtype or device. All has been checked before: nothing here raises for a caller's mistake.

    Args:
        target: the destination, in place.
        blocks: sources and what is written of them.
        places: on a device, what `send_places` returned for these blocks, if that is at hand.
    """
    # Rows of the destination itself are read before any of it is written.
    storage = target.untyped_storage().data_ptr()
    blocks = [(s.clone() if s.untyped_storage().data_ptr() == storage else s, block) for s, block in blocks]
    if target.is_cpu:
        _write_host(target, blocks)
        return
    staging = staging_for(target.device)
    if places is None:
        places = send_places([block for _, block in blocks], staging)
    _write_device(target, blocks, places, staging)


def _write_host(target: Tensor, blocks: Iterable[tuple[Tensor, Block]]) -> None:
    bits = as_bits(target)
    for source, block in blocks:
        if not source.is_cpu:
            source = source[block.first : block.first + block.count].to(target.dtype).cpu()
            block = Block(0, block.count, block.runs, block.positions)
        if bits is None or (source.requires_grad and torch.is_grad_enabled()):
            _copy_runs(target, source, block)
        elif source.dtype is target.dtype and (source_bits := as_bits(source)) is not None:
            _copy_bits(bits, source_bits, block)
        elif block.runs is None or len(block.runs) * _SHORT_CONVERSION > block.count * target.shape[1]:
            _convert_scattered(bits, target.dtype, source, block)
        else:
            _copy_runs(target, source, block)


def _copy_bits(target: Bits, source: Bits, block: Block) -> None:
    row = block.first
    if block.runs is None or are_short(len(block.runs), block.count, target.shape[1] * target.itemsize):
        target[block.indices()] = source[row : row + block.count]
        return
    for start, length in block.runs:
        target[start : start + length] = source[row : row + length]
        row += length


def _convert_scattered(target: Bits, dtype: torch.dtype, source: Tensor, block: Block) -> None:
    """Convert a few rows at a time into a buffer that stays in the cache, and scatter that."""
    width = source.shape[1]
    rows = max(1, min(block.count, _CHUNK_BYTES // max(1, width * dtype.itemsize)))
    if torch.get_num_threads() > 1:
        rows = max(1, min(rows, _SERIAL_ELEMENTS // max(1, width)))
    buffer = torch.empty(rows, width, dtype=dtype)
    converted = buffer.view(BITS[dtype.itemsize]).numpy()
    indices = block.indices()
    for done in range(0, block.count, rows):
        count = min(rows, block.count - done)
        first = block.first + done
        buffer[:count].copy_(source[first : first + count].detach())
        target[indices[done : done + count]] = converted[:count]


def _copy_runs(target: Tensor, source: Tensor, block: Block) -> None:
    """A copy for each run, or for evenly spaced ones together: converts, and is seen by autograd."""
    rows = source[block.first : block.first + block.count]
    if block.runs is None:
        target.index_copy_(0, torch.from_numpy(block.indices()), rows.to(target.dtype))
        return
    tracked = torch.is_grad_enabled() and (target.requires_grad or rows.requires_grad)
    evenly = _evenly_spaced(block.runs)
    if len(evenly) <= _FEW_CALLS or tracked:
        _copy_evenly(target, rows, evenly)
        return
    runs = block.runs
    if torch.get_num_threads() > 1:
        # Many small copies on several threads stall at a barrier each, where the cores are shared.
        runs = list(_pieces(runs, max(1, _SERIAL_ELEMENTS // max(1, target.shape[1]))))
    # All views and copies in three calls: for runs of a few rows the calls would cost as much as the copies.
    sizes: list[int] = []
    end = 0
    for start, length in runs:
        sizes += (start - end, length)
        end = start + length
    sizes.append(target.shape[0] - end)
    places = torch.split(target.detach(), sizes)[1::2]
    torch._foreach_copy_(places, torch.split(rows.detach(), [length for _, length in runs]))


def _evenly_spaced(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
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


def _copy_evenly(target: Tensor, rows: Tensor, groups: Sequence[tuple[int, int, int, int]]) -> None:
    """One strided copy for each group."""
    done = 0
    step, column = target.stride()
    for start, length, count, pitch in groups:
        part = rows[done : done + count * length]
        done += count * length
        if count == 1:
            target[start : start + length].copy_(part, non_blocking=True)
        else:
            shape, strides = (count, length, target.shape[1]), (pitch * step, step, column)
            place = target.as_strided(shape, strides, target.storage_offset() + start * step)
            place.copy_(part.view(shape), non_blocking=True)


def _pieces(runs: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    for start, length in runs:
        for begin in range(start, start + length, most):
            yield begin, min(most, start + length - begin)


def send_places(blocks: Sequence[Block], staging: Staging) -> list[Tensor | None]:
    """For each block of many runs its destination rows, on the device; None for the others. One copy for all."""
    indexed = [block for block in blocks if _is_indexed(block)]
    if not indexed:
        return [None] * len(blocks)
    buffer, region = staging.take((sum(block.count for block in indexed),), torch.int64)
    event = None
    try:
        np.concatenate([block.indices() for block in indexed], out=buffer.numpy())
        sent = buffer.to(staging.device, non_blocking=True)
        event = staging.streams.record()
    finally:
        if region is not None:
            region.release(event)
    parts = iter(torch.split(sent, [block.count for block in indexed]))
    return [next(parts) if _is_indexed(block) else None for block in blocks]


def _is_indexed(block: Block) -> bool:
    return block.runs is None or len(_evenly_spaced(block.runs)) > _FEW_CALLS


def _write_device(
    target: Tensor, blocks: Sequence[tuple[Tensor, Block]], places: Sequence[Tensor | None], staging: Staging
) -> None:
    for (source, block), place in zip(blocks, places):
        rows = source[block.first : block.first + block.count]
        if rows.is_cpu and not (rows.requires_grad and torch.is_grad_enabled()):
            _write_staged(target, rows.detach(), block, place, staging)
            continue
        staging.streams.used(rows)
        _put_rows(target, rows, block, place)


def _write_staged(target: Tensor, rows: Tensor, block: Block, place: Tensor | None, staging: Staging) -> None:
    """Rows on the host: converted into pinned memory, and copied to their place from there."""
    staged, region = staging.take((block.count, target.shape[1]), target.dtype)
    event = None
    try:
        fill(staged, rows)
        _put_rows(target, staged, block, place)
        event = staging.streams.record()
    finally:
        if region is not None:
            region.release(event)


def _put_rows(target: Tensor, rows: Tensor, block: Block, place: Tensor | None) -> None:
    if place is None:
        _copy_evenly(target, rows, _evenly_spaced(block.runs or ()))
        return
    rows = rows.to(target.device, target.dtype, non_blocking=True)
    if not (torch.is_grad_enabled() and (target.requires_grad or rows.requires_grad)):
        # As integers of that size: indexed copies of the smallest float types are not everywhere.
        kind = BITS[target.element_size()]
        target, rows = target.detach().view(kind), rows.detach().view(kind)
    target.index_copy_(0, place, rows)
