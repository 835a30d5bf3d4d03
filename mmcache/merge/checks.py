"""What may be merged into what: all that is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from operator import ne
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge.records import Flags, flags_of, memory_at, record

__all__ = [
    "FLOATS",
    "check_autograd",
    "check_readable",
    "check_rows",
    "checked_flags",
    "extent",
    "is_tensor",
    "no_memory",
    "overlap",
    "rows_of",
    "share_memory",
]

_PLAIN_VIEW = torch._C._autograd.CreationMeta.DEFAULT
# Candidates to look at for a byte that two tensors share: some milliseconds.
_MOST_WORK = 100_000
# What rows may be of. Not of two numbers a byte: such a tensor is not of the width that its shape says, and PyTorch
# does not convert it.
FLOATS = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and name != "float4_e2m1fn_x2"
)


def rows_of(inputs_embeds: Tensor) -> Tensor:
    """`inputs_embeds` `[..., width]` as `[rows, width]`, sharing memory.

    Raises:
        EmbeddingError: it is no dense floating-point tensor of two or more dimensions, its rows overlap, it cannot be
            seen as one run of rows without a copy, or autograd forbids writing to it.
    """
    if not is_tensor(inputs_embeds) or inputs_embeds.dim() < 2 or not _holds_numbers(inputs_embeds):
        raise EmbeddingError(
            "inputs_embeds is a dense floating-point tensor [tokens, width]", found=_described(inputs_embeds)
        )
    if inputs_embeds.is_neg() and inputs_embeds.element_size() == 1:
        raise EmbeddingError(
            "inputs_embeds is not negated lazily: PyTorch negates none of its dtype", found=_described(inputs_embeds)
        )
    target = inputs_embeds
    if inputs_embeds.dim() > 2:
        *rows, width = inputs_embeds.shape
        try:
            target = inputs_embeds.view(prod(rows), width)
        except RuntimeError:
            raise EmbeddingError(
                "inputs_embeds can be seen as [tokens, width] without a copy",
                found=f"shape {tuple(inputs_embeds.shape)} with strides {inputs_embeds.stride()}",
            ) from None
    if not target.is_contiguous() and _overlaps_itself(target):
        raise EmbeddingError("the rows of inputs_embeds do not overlap", found=f"strides {inputs_embeds.stride()}")
    check_autograd(target)
    return target


def check_autograd(target: Tensor, sources: Iterable[Tensor] = ()) -> None:
    """Raise EmbeddingError if autograd forbids to write these sources to `target`."""
    if not torch.is_grad_enabled() or target.is_inference():
        return
    if not target.requires_grad and not any(source.requires_grad for source in sources):
        return
    viewed = target._is_view()
    base = target._base if viewed else target
    if target.requires_grad and (base is None or base.is_leaf):
        kind = "a leaf that requires grad"
    elif viewed and torch._C._autograd._get_creation_meta(target) != _PLAIN_VIEW:
        kind = "a view that was made without grad, or as one of several (as by `split`, `chunk` or `unbind`)"
    else:
        return
    raise EmbeddingError(
        f"inputs_embeds is written in place, which autograd forbids for {kind}", found=_described(target)
    )


def check_readable(source: Tensor, **where: Any) -> None:
    """Raise EmbeddingError, with `where`, if autograd forbids to read rows: of a view whose base was overwritten."""
    if source.requires_grad and torch.is_grad_enabled():
        try:
            _ = source.grad_fn
        except RuntimeError as error:
            raise EmbeddingError("autograd can follow the rows", found=str(error), **where) from None


def checked_flags(is_multimodal: Tensor, inputs_embeds: Tensor) -> Flags:
    """The mask as a one-dimensional array.

    Raises:
        EmbeddingError: it is no boolean tensor on the CPU with one entry for each row of `inputs_embeds`.
    """
    if not is_tensor(is_multimodal) or is_multimodal.dtype is not torch.bool:
        found = is_multimodal.dtype if is_tensor(is_multimodal) else type(is_multimodal).__name__
        raise EmbeddingError("is_multimodal is a tensor of dtype torch.bool", found=found)
    if is_multimodal.layout is not torch.strided:
        raise EmbeddingError("is_multimodal is dense", found=is_multimodal.layout)
    if not is_multimodal.is_cpu:
        raise EmbeddingError("is_multimodal stays on the CPU: reading it must not wait", found=is_multimodal.device)
    shape, wanted = is_multimodal.shape, inputs_embeds.shape
    if len(shape) != len(wanted) - 1 or any(map(ne, shape, wanted)):
        raise EmbeddingError(
            "is_multimodal has one entry for each row of inputs_embeds",
            expected=tuple(wanted[:-1]),
            found=tuple(shape),
        )
    try:
        return flags_of(is_multimodal)
    except RuntimeError:
        raise no_memory() from None


def check_rows(source: Tensor, width: int, **where: Any) -> None:
    """Raise EmbeddingError, with `where`, unless `source` is `[n, width]` of numbers that can be converted."""
    if source.is_nested:
        raise EmbeddingError("embedding rows are dense and floating-point", found=_described(source), **where)
    if source.dim() != 2 or source.shape[1] != width:
        raise EmbeddingError(
            "embedding rows are as wide as inputs_embeds",
            expected=f"[rows, {width}]",
            found=tuple(source.shape),
            **where,
        )
    if source.is_meta:
        raise EmbeddingError("embedding rows have values", found=_described(source), **where)
    if not _holds_numbers(source):
        raise EmbeddingError("embedding rows are dense and floating-point", found=_described(source), **where)


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether the stretches of memory that the tensors span meet. Whose storage it is called does not matter."""
    start, end = extent(first)
    other, other_end = extent(second)
    return start < other_end and other < end


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two dense tensors have a byte in common: slices that interleave in one buffer have none.

    In the rare case that this takes long to find out they are said to have one.
    """
    if not (first.numel() and second.numel() and overlap(first, second)):
        return False
    try:
        return np.shares_memory(_places_of(first), _places_of(second), max_work=_MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _places_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """An array that is never read, with elements at the tensor's addresses: they may be a device's."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    return np.ndarray(tuple(tensor.shape), record(size), memory_at(tensor.data_ptr()), 0, strides)


def extent(tensor: Tensor) -> tuple[int, int]:
    """Address of a dense tensor's first byte, and of the one behind its last.

    Raises:
        EmbeddingError: it has no memory of its own.
    """
    try:
        start = tensor.data_ptr()
    except RuntimeError:
        raise no_memory() from None
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


def no_memory() -> EmbeddingError:
    """A transform's stand-in for a tensor cannot be written to, nor read from."""
    return EmbeddingError(
        "tensors have memory of their own", found="one that has none, as inside torch.func's transforms"
    )


def _overlaps_itself(target: Tensor) -> bool:
    """Whether two elements may share memory: a dimension steps less far than those inside it reach."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(target.shape, target.stride()) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """As `isinstance`, which asks a metaclass, but quicker for plain tensors."""
    return type(value) is Tensor or isinstance(value, Tensor)


def _holds_numbers(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS and tensor.layout is torch.strided and not tensor.is_nested


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return f"a nested tensor of {value.dtype}"
    kind = "" if value.layout is torch.strided else f" ({value.layout})"
    grad = " that requires grad" if value.requires_grad else ""
    return f"{value.dtype} {tuple(value.shape)}{kind}{grad} on {value.device}"
