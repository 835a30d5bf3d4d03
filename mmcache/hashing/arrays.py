"""Arrays and tensors in canonical form: a dtype name, a shape, and the raw bits in C order, little-endian.

Where they lie, how they are strided and who owns them is not part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache.hashing.message import Unhashable, header

__all__ = ["TENSOR_VIEWS", "Array", "array_dtype", "array_head", "blocks", "host_array", "plain_array", "tensor_dtype"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_BLOCK = 4 << 20
_BIG = ">" if sys.byteorder == "little" else "="

# dtypes that numpy does not have: the same bits under a dtype that it has
_BITS = {
    torch.bfloat16: torch.int16,
    **{
        getattr(torch, name): torch.uint8
        for name in (
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        )
        if hasattr(torch, name)
    },
}
_PLAIN = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
_EXTENSION_DTYPES = frozenset(str(dtype).removeprefix("torch.") for dtype in _BITS)

TENSOR_VIEWS: dict[torch.dtype, torch.dtype | None] = {**dict.fromkeys(_PLAIN), **_BITS}
"""Dtypes that have an identity, and the dtype under which numpy can see their bits, or None for their own."""


def array_head(name: str, shape: tuple[int, ...], nbytes: int) -> bytes:
    """What stands before an array's bits: their number, the dtype's name and the shape."""
    dtype = name.encode()
    return (
        header(b"a", nbytes)
        + header(b"s", len(dtype))
        + dtype
        + header(b"l", len(shape))
        + b"".join(size.to_bytes(8, "little") for size in shape)
    )


def array_dtype(dtype: np.dtype[Any]) -> str:
    """The name of a dtype without its byte order; torch's name where torch has it too."""
    if dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return dtype.name
    if dtype.kind in "mM":
        return dtype.name  # with its unit: datetime64[us]
    if dtype.kind in "SU":
        return dtype.name  # with its length in bits
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes" and dtype.name in _EXTENSION_DTYPES:
        return dtype.name
    # objects are references, records and long doubles have padding of undefined content
    raise Unhashable(f"arrays of dtype {dtype} have no defined identity")


def plain_array(value: Array) -> Array:
    """`value` as an `ndarray` proper; subclasses may hide what the encoder sees, as masked arrays do."""
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.memmap | np.generic):
        return np.asarray(value)
    raise Unhashable(f"{type(value).__qualname__} is not a plain array")


def tensor_dtype(dtype: torch.dtype) -> str:
    """The name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def host_array(tensor: Tensor) -> tuple[str, tuple[int, ...], Array]:
    """The dtype's name, the shape, and the bits on the CPU as an array, without a copy where that is possible."""
    name = tensor_dtype(tensor.dtype)
    if tensor.dtype not in TENSOR_VIEWS and tensor.dtype != torch.complex32:
        raise Unhashable(f"tensors of dtype {name} have no defined identity")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise Unhashable("nested, sparse and opaque tensors have no defined identity")
    if tensor.is_meta:
        raise Unhashable("a meta tensor has no content")
    if type(tensor) is not Tensor and type(tensor) not in (torch.nn.Parameter, torch.nn.Buffer):
        raise Unhashable(f"{type(tensor).__qualname__} is not a plain tensor")
    try:
        # each of these costs as much as a small digest, so only where there is something to do
        plain = tensor.detach() if tensor.requires_grad else tensor
        if not plain.is_cpu:
            plain = plain.cpu()
        if plain.is_conj() or plain.is_neg() or plain._is_zerotensor():
            plain = plain.clone().resolve_conj().resolve_neg()
        if (bits := TENSOR_VIEWS.get(tensor.dtype)) is not None:
            plain = plain.view(bits)
        elif plain.dtype == torch.complex32:
            plain = torch.view_as_real(plain)
        values = plain.numpy()
        # not so where the storage was resized to nothing, or where a mode of torch (fake, functional) is active
        if values.size and values.__array_interface__["data"][0] != plain.data_ptr():
            raise Unhashable("the tensor has no memory here that could be read")
        return name, tuple(tensor.shape), values
    except (RuntimeError, TypeError, ValueError) as error:
        raise Unhashable(f"the tensor's content cannot be read: {error}") from error


def blocks(array: Array) -> Iterator[memoryview]:
    """The bits of an array in C order and little-endian: one view of it, or copies of a bounded size one by one."""
    big = array.dtype.itemsize > 1 and (array.dtype.byteorder == _BIG or array.dtype.byteorder == ">")
    if not array.size:
        return
    if array.flags.c_contiguous and not big:
        yield _bytes(array)
        return
    dtype = array.dtype.newbyteorder("<") if big else array.dtype
    for block in _split(array):
        yield _bytes(np.ascontiguousarray(block, dtype=dtype))


def _split(array: Array) -> Iterator[Array]:
    if array.ndim == 0 or array.nbytes <= _BLOCK:
        yield array
        return
    row = array.nbytes // array.shape[0]
    if row > _BLOCK and array.ndim > 1:
        for part in array:
            yield from _split(part)
        return
    step = max(1, _BLOCK // row)
    for start in range(0, array.shape[0], step):
        yield array[start : start + step]


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
