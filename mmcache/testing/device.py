"""The simulated device: a function mode that answers for devices, over a dispatch mode that carries their labels."""

from __future__ import annotations

from typing import Self

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mmcache.testing.functions import Functions
from mmcache.testing.labels import CPU
from mmcache.testing.operators import Operators
from mmcache.testing.recorder import Recorder

__all__ = ["SimulatedDevice"]


class SimulatedDevice:
    """CPU tensors that pass for tensors of `device` while the block lasts; see the package's docstring.

    Args:
        device: any device but the CPU, e.g. `"cuda:0"`. Others of its type (`"cuda:1"`) are simulated along with it.

    Attributes:
        device: the device, with an index.
        host_reads, mixes, moves: what was recorded, oldest first.
    """

    def __init__(self, device: str | torch.device = "cuda:0") -> None:
        device = torch.device(device)
        self.device = torch.device(device.type, device.index or 0)
        self._recorder = Recorder(self.device)
        self._modes: list[tuple[Functions, Operators]] = []
        self.host_reads = self._recorder.host_reads
        self.mixes = self._recorder.mixes
        self.moves = self._recorder.moves

    def __enter__(self) -> Self:
        modes = Functions(self._recorder), Operators(self._recorder)
        modes[1].__enter__()  # type: ignore[no-untyped-call]
        modes[0].__enter__()  # type: ignore[no-untyped-call]
        self._modes.append(modes)
        return self

    def __exit__(self, *exc: object) -> None:
        functions, operators = self._modes.pop()
        functions.__exit__(*exc)  # type: ignore[no-untyped-call]
        operators.__exit__(*exc)  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Forget what was recorded; labels and names stay."""
        self.host_reads.clear()
        self.mixes.clear()
        self.moves.clear()
        self._recorder.origins.touched.clear()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` that lies on the device; nothing is recorded."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            copy = tensor.detach().clone()
            self._recorder.labels.put(copy, self.device)
            return copy

    def adopt(self, tensor: torch.Tensor) -> None:
        """Let `tensor`, a dense CPU tensor, pass for one of the device while the block lasts, without a copy."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._recorder.labels.put(tensor, self.device)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Follow a value: whatever is computed from `tensor` says so in the `origins` of records."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self._recorder.origins.add(tensor, frozenset((name,)))

    @property
    def touched(self) -> frozenset[str]:
        """Names whose values an operation took or the host looked at (the shape of a tensor is not its value)."""
        return frozenset(self._recorder.origins.touched)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in what passes for pinned host memory; nothing is recorded."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            copy = tensor.detach().clone()
            self._recorder.labels.put(copy, CPU, pinned=True)
            return copy

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where `tensor` lies."""
        with torch._C.DisableTorchFunction():
            return self._recorder.labels.device(tensor)
