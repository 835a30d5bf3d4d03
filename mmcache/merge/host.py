"""Writing blocks of rows to a destination on the CPU: one pass over the rows, converting as it goes, on one thread.

Rows of equal dtype are copied as bits by numpy, run by run (one `memmove` each), and by fancy indexing where runs are
so short that a call for each would cost more than the copy; other dtypes go through `copy_`, or through a buffer that
stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from mmcache.merge.blocks import Block, are_short, evenly_spaced
from mmcache.staging import Bits, as_bits

__all__ = ["SHORT_CONVERSION", "chunk_elements", "converted", "copy_evenly", "write_host"]

# A conversion for each run pays from this many elements a run on (measured); below, rows are converted in chunks.
SHORT_CONVERSION = 16384
# Up to this number of (strided) copies a block is written by one call each.
_FEW_CALLS = 4
# PyTorch runs an elementwise operation of this many elements on one thread.
_SERIAL_ELEMENTS = 32768 - 1
# What is converted, or joined, before it is copied to its places stays in the processor's cache.
_CHUNK_ELEMENTS = 128 << 10


def chunk_elements() -> int:
    """Elements to convert or join at a time, so that they stay in the cache and on one thread.

    Many small operations on several threads stall at a barrier each, where the cores are shared with others.
    """
    return _CHUNK_ELEMENTS if torch.get_num_threads() == 1 else _SERIAL_ELEMENTS


def write_host(target: Tensor, blocks: Iterable[tuple[Tensor, Block]]) -> None:
    """Write rows of each source `[n, width]`, of any dtype or device, to their places in `target` `[rows, width]`."""
    bits = as_bits(target)
    for source, block in blocks:
        if not source.is_cpu:
            source = source[block.first : block.first + block.count].to(target.dtype).cpu()
            block = Block(0, block.count, block.runs, block.positions)
        if bits is None or (source.requires_grad and torch.is_grad_enabled()):
            _copy_runs(target, source, block)
        elif source.dtype is target.dtype and (source_bits := as_bits(source)) is not None:
            _copy_bits(bits, source_bits, block)
        elif block.runs is None or len(block.runs) * SHORT_CONVERSION > block.count * target.shape[1]:
            _convert_scattered(bits, target.dtype, source, block)
        else:
            _copy_runs(target, source, block)


def _copy_bits(target: Bits, source: Bits, block: Block) -> None:
    row = block.first
    if block.runs is None or are_short(len(block.runs), block.count, target.shape[1] * target.itemsize, bits=True):
        target[block.indices()] = source[row : row + block.count]
        return
    for start, length in block.runs:
        target[start : start + length] = source[row : row + length]
        row += length


def _convert_scattered(target: Bits, dtype: torch.dtype, source: Tensor, block: Block) -> None:
    indices = block.indices()
    done = 0
    for piece in converted(source[block.first : block.first + block.count].detach(), dtype):
        count = piece.shape[0]
        target[indices[done : done + count]] = as_bits(piece)
        done += count


def converted(source: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The rows of `source` as `dtype`, a few at a time, in one buffer: use each tensor before the next."""
    step = max(1, chunk_elements() // max(1, source.shape[1]))
    buffer = torch.empty(min(step, source.shape[0]), source.shape[1], dtype=dtype)
    for start in range(0, source.shape[0], step):
        piece = source[start : start + step]
        yield buffer[: piece.shape[0]].copy_(piece)


def _copy_runs(target: Tensor, source: Tensor, block: Block) -> None:
    """A copy for each run, or for evenly spaced ones together: converts, and is seen by autograd."""
    rows = source[block.first : block.first + block.count]
    if block.runs is None:
        target.index_copy_(0, torch.from_numpy(block.indices()), rows.to(target.dtype))
        return
    tracked = torch.is_grad_enabled() and (target.requires_grad or rows.requires_grad)
    evenly = evenly_spaced(block.runs)
    if len(evenly) <= _FEW_CALLS or tracked:
        copy_evenly(target, rows, evenly)
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


def copy_evenly(target: Tensor, rows: Tensor, groups: Sequence[tuple[int, int, int, int]]) -> None:
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
