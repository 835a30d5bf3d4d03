"""Field values as flat bytes and back: tensors of any dtype and stride, nested lists of them.

A value is described by `nest`, its lists in preorder (-1 a tensor, n a list of n values), and by one leaf a tensor:
dtype, shape and where its bytes lie in a block. Nothing is executed to read one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache import native
from mmcache.errors import FieldError, MessageError
from mmcache.fields import FieldValue

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "Bytes",
    "Leaf",
    "aligned",
    "bytes_at",
    "bytes_of",
    "flatten",
    "is_plain",
    "leaf_bytes",
    "leaf_of",
    "same_bytes",
    "unflatten",
    "write_tensor",
]

ALIGNMENT = 64
MAX_DEPTH = 16
MAX_DIMS = 64
_SMALL = 4096
_MAX_ELEMENTS = 1 << 48  # of an empty tensor, were its empty dimensions not empty; strides have to fit 64 bits

Leaf: TypeAlias = tuple[str, tuple[int, ...], int]
"""(dtype name, shape, offset in the block)."""
Bytes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"

_NAMES = (
    "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}
"""The dtypes that travel, by name."""

_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def flatten(value: FieldValue, field: str, start: int = 0) -> tuple[list[int], list[Leaf], list[Tensor], int]:
    """Lay a value out in a block of bytes, each tensor at a multiple of `ALIGNMENT`.

    Returns:
        (nest, leaves, tensors, end): the tensors to write at the leaves' offsets, and the end of the last one.

    Raises:
        FieldError: a tensor is sparse, quantised or of another dtype than `DTYPES`, or lists nest too deep.
    """
    nest: list[int] = []
    leaves: list[Leaf] = []
    tensors: list[Tensor] = []
    stack: list[tuple[FieldValue, int]] = [(value, 0)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, list):
            if depth >= MAX_DEPTH:
                raise FieldError(f"lists nest at most {MAX_DEPTH} deep", field=field)
            nest.append(len(node))
            stack.extend((child, depth + 1) for child in reversed(node))
            continue
        if not isinstance(node, Tensor):
            raise FieldError("a field holds tensors, and lists of them", field=field, found=type(node).__name__)
        nest.append(-1)
        leaf, end = leaf_of(node, field, start)
        leaves.append(leaf)
        tensors.append(node.detach())
        start = end
    return nest, leaves, tensors, start


def leaf_of(tensor: Tensor, field: str, start: int) -> tuple[Leaf, int]:
    """The leaf of a tensor that lies at the next multiple of `ALIGNMENT`, and its end.

    Raises:
        FieldError: it is sparse, quantised or of another dtype than `DTYPES`.
    """
    name = _NAME_OF.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "nested" if tensor.is_nested else "without values" if tensor.is_meta else tensor.layout
        raise FieldError("the tensor cannot travel", field=field, found=f"{tensor.dtype}, {kind}")
    start = aligned(start)
    return (name, tuple(tensor.shape), start), start + tensor.numel() * _SIZES[name]


def unflatten(nest: Sequence[int], leaves: Sequence[Leaf], read: Callable[[Leaf], Tensor]) -> FieldValue:
    """The value that `flatten` laid out.

    Raises:
        MessageError: `nest` and `leaves` do not describe one value.
    """
    shape = iter(nest)
    tensors = iter(leaves)
    value = _next_value(shape, tensors, read, 0)
    if next(shape, None) is not None or next(tensors, None) is not None:
        raise MessageError("a field's description has more parts than its value")
    return value


def _next_value(shape: Iterator[int], leaves: Iterator[Leaf], read: Callable[[Leaf], Tensor], depth: int) -> FieldValue:
    count = next(shape, None)
    if count is None or count < -1 or depth > MAX_DEPTH:
        raise MessageError("a field's description ends early or nests too deep")
    if count >= 0:
        return [_next_value(shape, leaves, read, depth + 1) for _ in range(count)]
    leaf = next(leaves, None)
    if leaf is None:
        raise MessageError("a field's description has fewer tensors than its value")
    return read(leaf)


def leaf_bytes(leaf: Leaf, limit: int) -> int:
    """Bytes of a leaf's tensor, checked to lie within a block of `limit` bytes.

    Raises:
        MessageError: unknown dtype, impossible shape, or outside the block.
    """
    name, shape, offset = leaf
    size = _SIZES.get(name)
    if size is None or len(shape) > MAX_DIMS or min(shape, default=0) < 0:
        raise MessageError("a tensor's description is impossible", found=f"{name[:32]!r} {shape[:8]}")
    nbytes = math.prod(shape) * size
    if not nbytes and math.prod(extent or 1 for extent in shape) > _MAX_ELEMENTS:
        raise MessageError("an empty tensor's shape is impossible", found=shape[:8])
    if offset < 0 or offset % size or offset + nbytes > limit:
        raise MessageError(
            "a tensor lies outside its block", expected=f"within {limit} bytes", found=f"{nbytes} bytes at {offset}"
        )
    return nbytes


def bytes_of(tensor: Tensor) -> bytes | memoryview:
    """A tensor's elements in order, without a copy where they are many and lie so in CPU memory."""
    if not tensor.numel():
        return b""
    try:
        array = tensor.numpy()
    except (TypeError, RuntimeError):  # on a device, with a gradient, or of a dtype that numpy has not
        if not is_plain(tensor):
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        flat = tensor.detach().reshape(-1)
        if flat.stride(0) != 1:  # one element may have any stride, and a view of bytes needs a stride of 1
            flat = flat.clone(memory_format=torch.contiguous_format)
        array = flat.view(torch.uint8).numpy()
    if array.nbytes < _SMALL or not array.flags.c_contiguous:
        return array.tobytes()
    return array.reshape(-1).view(np.uint8).data


def write_tensor(address: int, tensor: Tensor) -> None:
    """Write a tensor's elements, in order, from an address on that this process may write to."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return
    if is_plain(tensor):
        native.copy(address, tensor.data_ptr(), nbytes)
    else:
        torch.from_numpy(bytes_at(address, nbytes)).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def bytes_at(address: int, nbytes: int) -> Bytes:
    """The bytes at an address of this process as an array, without a copy; the caller keeps them mapped."""
    if not nbytes:
        return np.empty(0, np.uint8)
    # Through ctypes, since torch warns about arrays that say that they are read-only.
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), np.uint8)


def same_bytes(address: int, offset: int, tensor: Tensor) -> bool:
    """Whether a CPU tensor's elements are bit for bit what lies there; a tensor elsewhere is never the same."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return True
    if not is_plain(tensor):
        if tensor.device.type != "cpu" or type(tensor) is not Tensor:
            return False
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return bool(_memcmp(address + offset, tensor.data_ptr(), nbytes) == 0)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in CPU memory as they are read, one behind the other."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
