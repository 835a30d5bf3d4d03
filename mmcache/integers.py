"""What counts as an integer where one is asked for: sizes, bounds, indices."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

__all__ = ["as_int"]


def as_int(value: object) -> int | None:
    """The value as an int if it is an integer of whatever kind (Python's, numpy's, a CPU tensor's); None if it is not.

    Truth values are no integers, and a tensor on a device is none either: reading it would wait for the device.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and (not value.is_cpu or value.dtype is torch.bool)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # tensors and arrays that are no scalars raise what they like
        return None
