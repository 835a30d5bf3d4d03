"""The lower half of the simulation: carries labels from arguments to results; records reads, mixes and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmcache.testing.labels import CPU
from mmcache.testing.recorder import Recorder, tensors_in

__all__ = ["Operators"]

# Operators that hand a device's values to the host or size their output by them.
_READS = {
    "_local_scalar_dense": "item",
    "_unique": "unique",
    "_unique2": "unique",
    "allclose": "allclose",
    "bincount": "bincount",
    "equal": "equal",
    "masked_select": "masked_select",
    "nonzero": "nonzero",
    "unique_consecutive": "unique_consecutive",
    "unique_dim": "unique",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_MAY_MIX = _INDEXING | {"copy_", "_to_copy", "set_", "_copy_from", "is_same_size"}


class Operators(TorchDispatchMode):
    """Carries labels from arguments to results, and records reads, mixes and copies."""

    def __init__(self, sim: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sim = sim

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        sim, labels = self.sim, self.sim.labels
        name = func._schema.name.removeprefix("aten::")
        given = list(tensors_in((args, kwargs)))
        devices = [labels.device(tensor) for tensor in given]
        # A 0-dimensional CPU tensor is a number: it may join tensors of any device.
        homes = {d for t, d in zip(given, devices) if t.dim() > 0 or d != CPU}
        device = next((d for d in devices if d != CPU), CPU) if given else sim.ambient
        if name == "copy_":
            self._copied(args, kwargs, devices)
        elif name in _INDEXING:
            self._indexed(name, args, devices[0])
        if len(homes) > 1 and name not in _MAY_MIX:
            sim.mixed(name, given)
        if name in _READS and given:
            sim.read(_READS[name], next((t for t, d in zip(given, devices) if d != CPU), given[0]))
        elif name == "repeat_interleave" and given and kwargs.get("output_size") is None:
            sim.read(name, given[0])
        before = {tensor.untyped_storage()._cdata for tensor in given if tensor.layout == torch.strided}
        result = func(*args, **kwargs)
        if sim.origins:
            self._inherit(func, args, kwargs, given, result)
        if device != CPU:
            for tensor in tensors_in((result,)):
                if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in before:
                    labels.put(tensor, device)
        return result

    def _inherit(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[torch.Tensor], result: Any
    ) -> None:
        """What is computed, or written to, carries the names of what went in."""
        names = self.sim.origins.of_all(given)
        if not names:
            return
        self.sim.origins.touched |= names
        written = [
            args[i] if i < len(args) else kwargs.get(a.name)
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        for tensor in tensors_in((result, written)):
            self.sim.origins.add(tensor, names)

    def _copied(self, args: Sequence[Any], kwargs: dict[str, Any], devices: Sequence[torch.device]) -> None:
        target, source = devices[0], devices[1] if len(devices) > 1 else devices[0]
        if target == source or (source == CPU and args[1].dim() == 0):
            return
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        self.sim.moved("copy_", args[1], args[0], source, target, wait=not non_blocking)

    def _indexed(self, name: str, args: Sequence[Any], home: torch.device) -> None:
        sim = self.sim
        for index in tensors_in((args[1],)):
            device = sim.labels.device(index)
            if device == home:
                if index.dtype in (torch.bool, torch.uint8):
                    sim.read(name, index)
            elif device == CPU:
                sim.moved(name, index, index, CPU, home, wait=True)
            else:
                sim.mixed(name, (args[0], index))
        for values in tensors_in(args[2:3]):
            device = sim.labels.device(values)
            if device != home and (device != CPU or values.dim() > 0):
                sim.mixed(name, (args[0], values))
