"""The upper half of the simulation: answers `.device`, serves factories, `.to` and the reads that reach no operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from mmcache.testing.labels import CPU
from mmcache.testing.recorder import Recorder, tensors_in

__all__ = ["Functions"]

_T = torch.Tensor

# Methods of a tensor that read it without any operator that a dispatch mode sees.
_SILENT_READS = {
    _T.tolist: "tolist",
    _T.numpy: "numpy",
    _T.__array__: "numpy",
    _T.__dlpack__: "dlpack",
    _T.__repr__: "repr",
}
_FROM_DATA: set[Any] = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, _T.new_tensor}


class Functions(TorchFunctionMode):
    """Answers `.device`, serves factories, `.to` and the reads that reach no operator."""

    def __init__(self, sim: Recorder) -> None:
        super().__init__()
        self.sim = sim

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        serve = _SERVED.get(func)
        if serve is not None:
            return serve(self.sim, func, args, kwargs)
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func in _SILENT_READS:
            self.sim.read(_SILENT_READS[func], args[0])
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        sim = self.sim
        given = kwargs.get("device")
        device = None if given is None else sim.resolve(given)
        pin = bool(kwargs.pop("pin_memory", False))
        if device is not None and device.type == sim.device.type:
            kwargs["device"] = CPU
        # Composite operators make their intermediate tensors where their arguments lie.
        previous = sim.ambient
        sim.ambient = next((d for d in map(sim.labels.device, tensors_in((args, kwargs))) if d != CPU), CPU)
        try:
            result = func(*args, **kwargs)
        finally:
            sim.ambient = previous
        if device is not None or pin:
            for tensor in tensors_in((result,)):
                sim.labels.put(tensor, device or CPU, pinned=pin)
        return result


def _device_of(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    return sim.labels.device(args[0])


def _is_type(kind: str) -> Callable[..., bool]:
    def answer(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        return sim.labels.device(args[0]).type == kind

    return answer


def _get_device(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    device = sim.labels.device(args[0])
    return -1 if device == CPU else device.index


def _is_pinned(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return sim.labels.pinned(args[0])


def _pin_memory(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = args[0]
    if sim.labels.device(tensor) != CPU:
        raise RuntimeError(f"cannot pin a tensor that lies on {sim.labels.device(tensor)}")
    if sim.labels.pinned(tensor):
        return tensor
    copy = tensor.clone()
    sim.labels.put(copy, CPU, pinned=True)
    return copy


def _parse_to(sim: Recorder, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[torch.device | None, dict[str, Any]]:
    """The target device of a `.to` call, and the call's other arguments by name."""
    rest = dict(kwargs)
    device = rest.pop("device", None)
    other = rest.pop("other", None)
    flags = []
    for value in args:
        if isinstance(value, torch.Tensor):
            other = value
        elif isinstance(value, torch.dtype):
            rest["dtype"] = value
        elif isinstance(value, (str, torch.device)) or (isinstance(value, int) and not isinstance(value, bool)):
            device = value
        elif value is not None:
            flags.append(bool(value))
    rest.update(zip(("non_blocking", "copy"), flags))
    if other is not None:
        rest.setdefault("dtype", other.dtype)
        return sim.labels.device(other), rest
    return (None if device is None else sim.resolve(device)), rest


def _to(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    device, rest = _parse_to(sim, args[1:], kwargs)
    return _move(sim, "to", args[0], device, rest)


def _move(
    sim: Recorder, op: str, tensor: torch.Tensor, device: torch.device | None, rest: dict[str, Any]
) -> torch.Tensor:
    source = sim.labels.device(tensor)
    if device is None or device == source:
        return tensor.to(**rest)
    if device.type not in ("cpu", sim.device.type):
        return tensor.to(device, **rest)
    non_blocking = bool(rest.pop("non_blocking", False))
    rest["copy"] = True
    result = tensor.to(**rest)
    # PyTorch makes the target of an asynchronous copy to the host in pinned memory.
    sim.labels.put(result, device, pinned=non_blocking and device == CPU)
    sim.moved(op, tensor, result, source, device, wait=not non_blocking)
    return result


def _cuda(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    target = sim.device if device is None else sim.resolve(device)
    return _move(sim, "cuda", args[0], target, {"non_blocking": non_blocking})


def _cpu(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    return _move(sim, "cpu", args[0], CPU, {})


def _type_as(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    return _move(sim, "type_as", args[0], sim.labels.device(args[1]), {"dtype": args[1].dtype})


def _deepcopy(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    with _disable_current_modes():
        copy: torch.Tensor = func(*args, **kwargs)
    sim.labels.put(copy, sim.labels.device(args[0]))
    sim.origins.add(copy, sim.origins.of(args[0]))
    return copy


def _from_data(sim: Recorder, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """`torch.tensor` and its kin: a device tensor made of host data is a copy that blocks."""
    home = CPU
    if func == _T.new_tensor:
        home, data = sim.labels.device(args[0]), args[1] if len(args) > 1 else kwargs["data"]
    else:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj", kwargs.get("s")))
        if isinstance(data, torch.Tensor):
            home = sim.labels.device(data)
    if func is torch.as_tensor and len(args) > 1:
        kwargs.update(zip(("dtype", "device"), args[1:]))
        args = args[:1]
    given = kwargs.pop("device", None)
    pin = bool(kwargs.pop("pin_memory", False))
    target = home if given is None else sim.resolve(given)
    if isinstance(data, torch.Tensor):
        copies = func is not torch.as_tensor and (func is not torch.asarray or bool(kwargs.get("copy")))
        rest = {"copy": copies} | ({"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {})
        return _move(sim, func.__name__, data, target, rest)
    if target.type not in ("cpu", sim.device.type):
        return func(*args, device=target, **kwargs)  # type: ignore[no-any-return]
    for part in tensors_in((data,)):
        sim.read(func.__name__, part)
    result: torch.Tensor = func(*args, device=CPU, **kwargs)
    if target != CPU:
        if func in (torch.as_tensor, torch.asarray):
            result = result.clone()  # of a numpy array it may be a view
        # A single number can be filled in by a kernel; anything else has to be copied over.
        if func is not torch.scalar_tensor:
            sim.moved(func.__name__, result, result, CPU, target, wait=True)
    if target != CPU or pin:
        sim.labels.put(result, target, pinned=pin)
    return result


_SERVED: dict[Any, Callable[..., Any]] = {
    _T.device.__get__: _device_of,
    _T.is_cuda.__get__: _is_type("cuda"),  # type: ignore[attr-defined]
    _T.is_cpu.__get__: _is_type("cpu"),  # type: ignore[attr-defined]
    _T.is_xpu.__get__: _is_type("xpu"),  # type: ignore[attr-defined]
    _T.get_device: _get_device,
    _T.is_pinned: _is_pinned,
    _T.pin_memory: _pin_memory,
    _T.to: _to,
    _T.cuda: _cuda,
    _T.cpu: _cpu,
    _T.type_as: _type_as,
    _T.__deepcopy__: _deepcopy,
    **dict.fromkeys(_FROM_DATA, _from_data),
}
