"""What a simulated device writes down: reads by the host, mixes of devices and moves, each with its line of source."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch

__all__ = ["HostRead", "Mix", "Move", "Where"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep


@dataclass(frozen=True, slots=True)
class Where:
    """A line of source: the innermost one that is neither PyTorch's nor the simulator's."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @staticmethod
    def caller() -> Where:
        """The line whose operation is being recorded."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _HERE)):
            frame = frame.f_back
        return Where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host needed a value of a device tensor, so on a real device it would have waited for the device.

    `op` is the operation (`item`, `tolist`, `nonzero`, `index` with a mask ...); `shape` and `dtype` are those of the
    tensor that was read, `origins` the names (see `SimulatedDevice.name`) of what it was computed from.
    """

    op: str
    device: torch.device
    shape: tuple[int, ...]
    dtype: torch.dtype
    where: Where
    origins: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Mix:
    """One operation was given tensors of several devices; a real device would have raised.

    `devices`, `shapes` and `origins` (names of what each was computed from) are of the tensor arguments, in order.
    """

    op: str
    devices: tuple[torch.device, ...]
    shapes: tuple[tuple[int, ...], ...]
    where: Where
    origins: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes went from one device to another.

    `pinned`: the side on the host lay in pinned memory; `origins`: names of what the tensor was computed from.
    """

    op: str
    source: torch.device
    target: torch.device
    nbytes: int
    non_blocking: bool
    pinned: bool
    where: Where
    origins: frozenset[str] = frozenset()

    @property
    def blocks(self) -> bool:
        """Whether the host would have waited: the move was not asynchronous, or pageable memory did not let it be."""
        return not (self.non_blocking and self.pinned)
