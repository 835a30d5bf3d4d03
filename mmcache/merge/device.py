"""Writing blocks of rows to a destination on a device: the host waits for nothing.

A block of few runs, or of evenly spaced ones, is a strided copy or a few, any other one an indexed copy, with all
indices of a call sent over at once from pinned memory: the number of launches does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmcache.merge.blocks import Block, evenly_spaced
from mmcache.merge.host import copy_evenly
from mmcache.merge.records import is_followed
from mmcache.staging import BITS, Event, Staging, fill

__all__ = ["Places", "send_places", "write_device"]

# Up to this number of (strided) copies a block is written by one call each.
_FEW_CALLS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Destination rows of blocks, on a device.

    Attributes:
        of: for each block of many runs int64 `[count]`, None for the others.
        arrival: the point in the sending stream behind their arrival; None if none were sent.
    """

    of: Sequence[Tensor | None]
    arrival: Event | None = None

    def on_this_stream(self, staging: Staging) -> Sequence[Tensor | None]:
        """`of`, for the current stream, which may be another one than the one that sent them."""
        if self.arrival is not None:
            staging.streams.wait(self.arrival)
            for place in self.of:
                if place is not None:
                    staging.streams.used(place)
        return self.of


def send_places(blocks: Sequence[Block], staging: Staging) -> Places:
    """Send the destination rows of all blocks of many runs in one copy, on the current stream."""
    indexed = [block for block in blocks if _is_indexed(block)]
    if not indexed:
        return Places([None] * len(blocks))
    buffer, region = staging.take((sum(block.count for block in indexed),), torch.int64)
    arrival = None
    try:
        np.concatenate([block.indices() for block in indexed], out=buffer.numpy())
        sent = buffer.to(staging.device, non_blocking=True)
        arrival = staging.streams.record()
    finally:
        if region is not None:
            region.release(arrival)
    parts = iter(torch.split(sent, [block.count for block in indexed]))
    return Places([next(parts) if _is_indexed(block) else None for block in blocks], arrival)


def _is_indexed(block: Block) -> bool:
    return block.runs is None or len(evenly_spaced(block.runs)) > _FEW_CALLS


def write_device(
    target: Tensor, blocks: Sequence[tuple[Tensor, Block]], places: Sequence[Tensor | None], staging: Staging
) -> None:
    """Write rows of each source `[n, width]`, from wherever they are, to their places in `target` on the device."""
    for (source, block), place in zip(blocks, places):
        rows = source[block.first : block.first + block.count]
        if rows.is_cpu and not is_followed(rows):
            _write_staged(target, rows.detach(), block, place, staging)
            continue
        if not rows.is_cpu:
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
        copy_evenly(target, rows, evenly_spaced(block.runs or ()))
        return
    rows = rows.to(target.device, target.dtype, non_blocking=True)
    if not (is_followed(target) or is_followed(rows) or target.is_neg()):
        # As integers of that size: indexed copies of the smallest float types are not everywhere.
        kind = BITS[target.element_size()]
        target, rows = target.detach().view(kind), rows.detach().view(kind)
    elif target.element_size() == 1:
        copy_evenly(target, rows, evenly_spaced(block.stretches()))
        return
    target.index_copy_(0, place, rows)
