"""What a field holds: a tensor, or a nested list of tensors where shapes differ."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import FieldError

__all__ = [
    "FieldValue",
    "as_value",
    "content_of",
    "describe",
    "on_cpu",
    "owned_value",
    "owns_memory",
    "shape_of",
    "value_bytes",
]

FieldValue: TypeAlias = "Tensor | list[FieldValue]"


def value_bytes(value: FieldValue) -> int:
    """Bytes of a field's elements (of a view: of what it shows)."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(value_bytes, value))


def owns_memory(tensor: Tensor) -> bool:
    """Whether the tensor is all that its memory holds, so that keeping it keeps nothing else alive.

    Memory that torch did not allocate (an array of numpy's, a mapped file) may be part of anything.
    """
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.numel() * tensor.element_size() and storage.resizable()


def as_value(raw: Any, name: str, keep_on_cpu: bool) -> FieldValue:
    """What a processor gave, as tensors; on the CPU if it is to be kept there.

    Raises:
        FieldError: it holds something else than tensors, arrays and numbers.
    """
    if isinstance(raw, Tensor):
        return raw.cpu() if keep_on_cpu and raw.device.type != "cpu" else raw
    if isinstance(raw, np.ndarray):
        return _from_numpy(raw, name)
    if isinstance(raw, (bool, int, float, complex, np.generic)):
        return _from_numpy(np.asarray(raw), name) if isinstance(raw, np.generic) else _from_numbers(raw, name)
    if isinstance(raw, (list, tuple)):
        if raw and all(isinstance(entry, (bool, int, float)) for entry in raw):
            return _from_numbers(raw, name)
        values = [as_value(entry, name, keep_on_cpu) for entry in raw]
        # A list that is right already stays the same object: a shared one counts once for all who share it.
        return raw if type(raw) is list and all(new is old for new, old in zip(values, raw)) else values
    raise FieldError(
        "a field holds tensors, arrays, numbers, or nested lists of these", field=name, found=type(raw).__name__
    )


def _from_numbers(raw: Any, name: str) -> Tensor:
    try:
        return torch.tensor(raw)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise FieldError("a field's numbers fit a tensor", field=name, found=str(error)) from None


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise FieldError("a field's array holds numbers", field=name, found=f"dtype {array.dtype}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise FieldError("a field's array has a dtype of torch's", field=name, found=f"dtype {array.dtype}") from None


def describe(value: FieldValue) -> str:
    """The value in a few words, for messages."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"list of {len(value)}"


def shape_of(value: FieldValue) -> Any:
    """Dtypes and shapes of a value, as something comparable."""
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else tuple(map(shape_of, value))


def on_cpu(value: FieldValue) -> bool:
    """Whether all of its bits can be read without waiting for a device."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.layout is torch.strided
    return all(map(on_cpu, value))


def owned_value(value: FieldValue) -> FieldValue:
    """The value in memory of its own; the same object where it is so already."""
    if isinstance(value, list):
        owned = [owned_value(entry) for entry in value]
        return value if all(a is b for a, b in zip(owned, value)) else owned
    value = value.detach() if value.requires_grad else value
    return value if owns_memory(value) else value.clone()


def content_of(value: FieldValue) -> Hashable:
    """A value on the CPU as something comparable, of at most a few kB a tensor: equal for equal dtype, shape and bits.

    More than 4096 bytes are held as their BLAKE2b digest: what is taken for one value must not be two that somebody
    made collide.
    """
    if isinstance(value, list):
        return tuple(map(content_of, value))
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    # One element may have any stride, and a view of bytes needs a stride of 1.
    if not flat.is_contiguous() or flat.numel() <= 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8).numpy()
    bits = data.tobytes() if data.nbytes <= 4096 else hashlib.blake2b(data.data, digest_size=32).digest()
    return (value.dtype, tuple(value.shape), bits)
