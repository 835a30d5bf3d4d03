"""The compiled part, which is optional: copies that pass the processor's cache by, rows to where a mask has them, and
small tensors at once.

A copy that is larger than the cache takes 0.6 of the time of `memcpy`, and leaves the cache to what is in use. Where
this was not built (no compiler, or not again since its source changed) NumPy, `memmove` and PyTorch do the same.

Addresses are taken on trust: whoever calls has looked at the tensors and keeps them alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["Gather", "Scatter", "copy", "gather", "scatter", "scatter_rounded"]

_VERSION = 1
"""Of the functions' arguments and meaning; what has another one was built from another source."""

Scatter: TypeAlias = Callable[[int, int, int, int, int, int, int, int, bool], bool]
"""`(to, to_step, marks, total, start, start_step, rows, nbytes, past)`: the `rows` at `start`, in order, to the marked
ones of the `total` rows at `to`, of `nbytes` each.

Steps are the bytes from one row to the next, `marks` is the address of `total` booleans, `past` asks to pass the cache
by. False, with nothing written, where not exactly `rows` are marked. Releases the GIL for what takes long.
"""


def _memmove(to: int, start: int, nbytes: int) -> None:
    ctypes.memmove(to, start, nbytes)


copy: Callable[[int, int, int], None] = _memmove
"""`copy(to, start, nbytes)`: copy bytes from one address to another; they do not overlap. Releases the GIL."""

scatter: Scatter | None = None
"""Rows as they are; None where the compiled part is missing."""

scatter_rounded: Scatter | None = None
"""Rows of float32 into rows of bfloat16, rounded as they are written; None without the compiled part or AVX2."""

Gather: TypeAlias = Callable[[list[Any]], bytes | None]
"""The bytes, one behind the other, of tensors of whole numbers or booleans that are small, contiguous, on the CPU and
alike in dtype and shape. None for any others, and for what are no tensors."""

gather: Gather | None = None
"""None where the compiled part is missing, or PyTorch has no C table of DLPack yet (2.13 has)."""

try:
    from mmcache.native import _rows
except ImportError:
    pass
else:
    if _rows.VERSION == _VERSION:
        copy, scatter = _rows.copy, _rows.scatter
        if _rows.ROUNDS:
            scatter_rounded = _rows.scatter_rounded

try:
    from mmcache.native import _tensors
except ImportError:
    pass
else:
    if _tensors.VERSION == _VERSION and hasattr(Tensor, "__dlpack_c_exchange_api__"):
        gather = partial(_tensors.gather, Tensor.__dlpack_c_exchange_api__, Tensor)
