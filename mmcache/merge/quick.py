"""The common merge in the fewest steps: plain tensors on the host, without anything that asks for care.

For a window with a few rows of items, what there is to check takes longer than what there is to copy, and the whole has
to take less time than one call of `inputs[mask] = rows`. So each property is asked for once, and whatever is out of the
ordinary, errors included, is left to the careful way.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from mmcache import native
from mmcache.merge.checks import FLOATS, overlap
from mmcache.merge.host import convert_flagged
from mmcache.merge.records import FLAG, PAST_CACHE, Flags, can_be_put, memory_at, record

__all__ = ["merge_quickly"]

# Sources that are smaller on average are joined without a look at each, which would take longer than to copy them
# twice, as long as all together stay small (bytes, measured).
_SMALL_SOURCE = 256 << 10
_SMALL = 4 << 20
# Elements from which a look at the mask pays, whether rows of another dtype go to one run and can be converted straight
# into it; and up to which they are converted first and copied to their places then, if they go to several (measured).
_LONG_RUN = 64 << 10
_FEW_ELEMENTS = 512 << 10
# Looked up once: the way to a name takes as long as half a check.
_dtype_of, _array, _count, _bool = attrgetter("dtype"), np.ndarray, np.count_nonzero, torch.bool
_written = torch.autograd.graph.increment_version


def merge_quickly(inputs: Any, embeddings: Any, mask: Any) -> bool:
    """As `merge_embeddings`, or False, with nothing written and nothing said of what is wrong."""
    if type(inputs) is not Tensor or type(mask) is not Tensor or has_torch_function((inputs, mask)):
        return False
    try:
        total, width = inputs.shape
        (marks,) = mask.shape
        dtype = inputs.dtype
        if (
            marks != total
            or dtype not in FLOATS
            or mask.dtype is not _bool
            or not (inputs.is_cpu and mask.is_cpu and inputs.is_contiguous() and mask.is_contiguous())
            or inputs.requires_grad
            or inputs.is_neg()
            or forward_ad._current_level >= 0
        ):
            return False
        target, marked = inputs.data_ptr(), mask.data_ptr()
        if not target or not marked:
            return False
        flags = _array((total,), FLAG, memory_at(marked))
        nbytes = width * inputs.element_size()
        scatter = native.scatter
        if type(embeddings) is Tensor:
            rows = embeddings
        elif type(embeddings) is not list and type(embeddings) is not tuple:
            return False
        elif len(embeddings) == 1:
            (rows,) = embeddings
        else:
            limit = min(_SMALL, len(embeddings) * _SMALL_SOURCE)
            if total * nbytes > limit < int(_count(flags)) * nbytes:
                return False
            rows = _together(embeddings)
        slots, columns = rows.shape
        if columns != width or not rows.is_cpu or rows.requires_grad or rows.is_neg():
            return False
        if rows.dtype is not dtype:
            if rows.dtype not in FLOATS:
                return False
            if can_be_put(rows.dtype, dtype):
                scatter = native.scatter_rounded
            else:
                elements = slots * width
                if elements >= _LONG_RUN and _convert(inputs, flags, rows, elements > _FEW_ELEMENTS):
                    return True
                rows = rows.to(dtype)
        if not rows.is_contiguous():
            return False
        source, step, end = rows.data_ptr(), columns * rows.element_size(), target + total * nbytes
        if not source or (source < end and target < source + slots * step) or target - total < marked < end:
            return False
        if scatter is None:
            row, flags = record(nbytes), flags.copy()  # NumPy reads what it counted again
            if slots == 1 and _count(flags) != 1:  # and would repeat one row
                return False
            _array((total,), row, memory_at(target))[flags] = _array((slots,), row, memory_at(source))
        elif not scatter(target, nbytes, marked, total, source, step, slots, nbytes, slots * nbytes >= PAST_CACHE):
            return False
        if not inputs.is_inference():
            _written(inputs)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _together(sources: Any) -> Any:
    """Sources of one dtype as one tensor; None where they are not that."""
    if len(set(map(_dtype_of, sources))) != 1:
        return None
    return torch.cat(sources)


def _convert(inputs: Tensor, flags: Flags, rows: Tensor, many: bool) -> bool:
    """Convert rows straight into the one run that they go to, or, if they are `many`, into whatever runs there are."""
    flags = flags.copy()  # others may write to the mask
    slots, first = rows.shape[0], int(flags.argmax())
    if _count(flags) != slots or overlap(rows, inputs):
        return False
    if _count(flags[first : first + slots]) == slots:
        inputs[first : first + slots].copy_(rows)
        return True
    if many:
        convert_flagged(inputs, flags, (rows,))
        if not inputs.is_inference():
            _written(inputs)
    return many
