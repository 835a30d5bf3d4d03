"""Rows as numpy records over a tensor's memory: NumPy copies runs of records that a mask picks at the speed of memory.

A boolean assignment to a one-dimensional array looks for the runs of the mask in native code and moves each with one
`memmove`, so that neither the number of runs nor their lengths matter. Seeing a tensor through its address takes a
tenth of the time of `Tensor.numpy()`, which for a window of a few rows is most of what there is to save.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mmcache import native

__all__ = [
    "FLAG",
    "PAST_CACHE",
    "Flags",
    "Records",
    "can_be_put",
    "flags_of",
    "is_followed",
    "memory_at",
    "put",
    "record",
    "records_of",
]

Records: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"
Flags: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"

memory_at: Callable[[int], Any] = (ctypes.c_char * sys.maxsize).from_address
FLAG = np.dtype(np.bool_)
# Bytes of a whole merge from which on it passes the cache by (measured). The text around has just been written: some of
# the destination is in the cache, so that this takes more of them than a copy to anywhere.
PAST_CACHE = 8 << 20


def records_of(tensor: Tensor) -> Records | None:
    """A dense floating-point tensor `[rows, width]` as an array `[rows]` of its rows' bytes, over the same memory.

    The array keeps the tensor alive. None where the bytes are not what the tensor says or not for everybody to write:
    it is on a device, of a class of its own, negated lazily, empty, followed by autograd, or the elements of a row do
    not lie side by side.
    """
    kind = type(tensor)
    if (kind is not Tensor and kind is not torch.nn.Parameter) or not tensor.is_cpu or tensor.is_neg():
        return None
    if is_followed(tensor):
        return None
    rows, width = tensor.shape
    step, column = tensor.stride()
    address = tensor.data_ptr()
    if not address or (column != 1 and width != 1):
        return None
    size = tensor.element_size()
    memory = memory_at(address)
    memory.tensor = tensor
    return np.ndarray((rows,), record(width * size), memory, 0, (step * size,))


def is_followed(tensor: Tensor) -> bool:
    """Whether autograd, forward or backward, follows what is done with a tensor. Forward: any, in case of doubt."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def flags_of(mask: Tensor) -> Flags:
    """A boolean tensor on the CPU as a one-dimensional, contiguous array of its own.

    What becomes of the mask after it was checked, by another thread or because it lies in what is written, is nothing
    to the merge.
    """
    address = mask.data_ptr() if type(mask) is Tensor and mask.is_contiguous() else 0
    if address:
        return np.ndarray((mask.numel(),), FLAG, memory_at(address)).copy()
    return mask.numpy(force=True).flatten()


def put(places: Records, flags: Flags | EllipsisType, rows: Records, past: bool) -> None:
    """`places[flags] = rows`, for as many rows as there are True flags, or places for `...`.

    Args:
        places, flags: the destination; the flags are contiguous and nobody else's.
        rows: of its dtype; or of float32, for bfloat16, where `native.scatter_rounded` is there.
        past: past the processor's cache, if the compiled part is there.
    """
    rounded = rows.itemsize != places.itemsize
    scatter = native.scatter_rounded if rounded else native.scatter if past else None
    if scatter is None:
        places[flags] = rows
        return
    marks = np.ones(len(places), np.bool_) if flags is ... else flags
    (to_step,), (step,) = places.strides, rows.strides
    to, start = places.ctypes.data, rows.ctypes.data
    if not scatter(to, to_step, marks.ctypes.data, len(marks), start, step, len(rows), places.itemsize, past):
        raise ValueError(f"{len(rows)} rows for {np.count_nonzero(marks)} places")


def can_be_put(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether `put` takes rows of one dtype for places of another."""
    return source is target or (
        source is torch.float32 and target is torch.bfloat16 and native.scatter_rounded is not None
    )


@lru_cache(maxsize=64)
def record(nbytes: int) -> np.dtype[np.void]:
    """The dtype of a row of so many bytes."""
    return np.dtype((np.void, nbytes))
