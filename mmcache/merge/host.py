"""Writing rows to a destination on the CPU: one pass over the rows, converting as it goes, on one thread.

Rows of equal dtype are copied as records, all runs in one call; so are float32 ones to bfloat16, by the compiled part.
Rows of another dtype are converted straight into their places, run by run, where runs are long, else through a buffer
that stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import EllipsisType

import numpy as np
import torch
from torch import Tensor

from mmcache.merge.blocks import Block, blocks_of, edges_of, ends_of, evenly_spaced
from mmcache.merge.records import PAST_CACHE, Flags, Records, can_be_put, is_followed, put, records_of
from mmcache.merge.sources import as_one

__all__ = ["chunk_elements", "convert_flagged", "copy_evenly", "write_flagged", "write_host"]

# A conversion for each run pays from this many elements a run on (measured); below, rows are converted in chunks.
_SHORT_CONVERSION = 16384
# Up to this number of groups of evenly spaced runs a block is seen by strided views.
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
    places, dtype = records_of(target), target.dtype
    # All is looked at before the first copy: each copy drives the interpreter out of the processor's cache.
    copies: list[tuple[Records, Flags | EllipsisType, Records]] = []
    into: list[Tensor] = []
    converted: list[Tensor] = []
    for source, block in blocks:
        whole = block.count == source.shape[0]
        rows = source if whole else source[block.first : block.first + block.count]
        if not rows.is_cpu:  # written at once, so that not all of them lie on the host at a time
            write_host(target, [(rows.to(dtype).cpu(), replace(block, first=0))])
        elif places is None or is_followed(rows):
            _copy_runs(target, rows, block)
        elif can_be_put(rows.dtype, dtype) and (found := records_of(rows)) is not None:
            start, flags = block.flags()
            copies.append((places[start : start + len(flags)], flags if len(flags) > block.count else ..., found))
        elif block.runs and _are_long(rows.numel(), len(block.runs)):
            for place, piece in _views(target.detach(), rows.detach(), _serial(block.runs, target.shape[1])):
                into.append(place)
                converted.append(piece)
        else:
            start, flags = block.flags()
            write_flagged(places[start : start + len(flags)], flags, (rows,), dtype)
    past = sum(len(found) * taken.itemsize for taken, _, found in copies) >= PAST_CACHE
    for taken, marks, found in copies:
        put(taken, marks, found, past)
    if into:
        torch._foreach_copy_(into, converted)


def _are_long(elements: int, runs: int) -> bool:
    return elements >= runs * _SHORT_CONVERSION


def convert_flagged(target: Tensor, flags: Flags, parts: Sequence[Tensor | list[Tensor]]) -> None:
    """As `write_flagged`, for a target `[rows, width]` and rows of which most have another dtype."""
    if _are_long(int(np.count_nonzero(flags)) * target.shape[1], len(edges_of(flags)) // 2):
        write_host(target, blocks_of(map(as_one, parts), flags))
        return
    places = records_of(target)
    assert places is not None
    write_flagged(places, flags, parts, target.dtype)


def write_flagged(places: Records, flags: Flags, parts: Sequence[Tensor | list[Tensor]], dtype: torch.dtype) -> None:
    """Write the rows of all parts, together as many as there are True flags, to those places.

    Args:
        places: rows of the destination, whose dtype is `dtype`.
        flags: `[rows]`, which of them receive one.
        parts: `[n, width]` on the host, without a need for autograd to know; of any dtypes and strides; or lists of
            small tensors of one dtype, joined when their turn comes.
    """
    # All is looked at before the first copy: each copy drives the interpreter out of the processor's cache.
    found: list[Records | Tensor | list[Tensor]] = []
    counts = []
    for part in parts:
        rows = records_of(part) if isinstance(part, Tensor) and can_be_put(part.dtype, dtype) else None
        for piece in (rows,) if rows is not None else _chunks(part) if isinstance(part, Tensor) else (part,):
            count = sum(map(len, piece)) if isinstance(piece, list) else piece.shape[0]
            if count:
                found.append(piece)
                counts.append(count)
    convert = _converter(dtype)
    past = sum(counts) * places.itemsize >= PAST_CACHE
    start = 0
    for piece, end in zip(found, ends_of(flags, counts)):
        if isinstance(piece, list):
            piece = as_one(piece)
        if isinstance(piece, Tensor):
            rows = records_of(piece) if can_be_put(piece.dtype, dtype) else None
            piece = convert(piece) if rows is None else rows
        put(places[start:end], flags[start:end], piece, past)
        start = end


def _chunks(source: Tensor) -> Sequence[Tensor]:
    """The rows of a source in parts that stay in the cache when they are converted."""
    count, width = source.shape
    step = max(1, chunk_elements() // width)
    if count <= step:
        return (source,) if count else ()
    return source.chunk(-(-count // step))


def _converter(dtype: torch.dtype) -> Callable[[Tensor], Records]:
    """A function that converts rows in a buffer of its own: use what it returns before the next call."""
    buffer = view = torch.empty(0, 0, dtype=dtype)

    def convert(rows: Tensor) -> Records:
        nonlocal buffer, view
        count, width = rows.shape
        if count > buffer.shape[0]:
            buffer = view = torch.empty(count, width, dtype=dtype)
        elif count != view.shape[0]:
            view = buffer[:count]
        view.copy_(rows)  # which returns what rows of a class of their own make of it
        records = records_of(view)
        assert records is not None
        return records

    return convert


def _copy_runs(target: Tensor, rows: Tensor, block: Block) -> None:
    """Rows for which there are no records, or that autograd wants to see written; converted if need be."""
    if block.runs is None and target.element_size() > 1:  # no indexed copies of the smallest float types
        target.index_copy_(0, torch.from_numpy(block.indices()), rows.to(target.dtype))
    else:
        copy_evenly(target, rows, evenly_spaced(block.stretches()))


def _views(target: Tensor, rows: Tensor, runs: Sequence[tuple[int, int]]) -> Iterable[tuple[Tensor, Tensor]]:
    """Where rows go, and these rows: views for each run, or for evenly spaced ones together."""
    evenly = evenly_spaced(runs)
    if len(evenly) <= _FEW_CALLS:
        return _evenly(target, rows, evenly)
    # All views in two calls: for runs of a few rows a call for each would cost as much as the copies.
    sizes: list[int] = []
    end = 0
    for start, length in runs:
        sizes += (start - end, length)
        end = start + length
    sizes.append(target.shape[0] - end)
    return zip(torch.split(target, sizes)[1::2], torch.split(rows, [length for _, length in runs]))


def copy_evenly(target: Tensor, rows: Tensor, groups: Sequence[tuple[int, int, int, int]]) -> None:
    """One strided copy for each group of runs."""
    for place, part in _evenly(target, rows, groups):
        place.copy_(part, non_blocking=True)


def _evenly(
    target: Tensor, rows: Tensor, groups: Sequence[tuple[int, int, int, int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    step, column = target.stride()
    for start, length, count, pitch in groups:
        part = rows[done : done + count * length]
        done += count * length
        if count == 1:
            yield target[start : start + length], part
        else:
            shape, strides = (count, length, target.shape[1]), (pitch * step, step, column)
            yield target.as_strided(shape, strides, target.storage_offset() + start * step), part.view(shape)


def _serial(runs: Sequence[tuple[int, int]], width: int) -> Sequence[tuple[int, int]]:
    """The runs in pieces that PyTorch copies on one thread.

    Many small copies on several threads stall at a barrier each, where the cores are shared.
    """
    if torch.get_num_threads() == 1:
        return runs
    most = max(1, _SERIAL_ELEMENTS // max(1, width))
    return [
        (begin, min(most, start + length - begin))
        for start, length in runs
        for begin in range(start, start + length, most)
    ]
