"""The sources of a merge: one list of tensors `[rows, width]`, checked, with small neighbours grouped."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge.checks import check_readable, check_rows, extent, is_tensor, no_memory, overlap

__all__ = ["Embeddings", "as_one", "check_sources", "flatten", "grouped", "without_neg"]

Embeddings: TypeAlias = "Tensor | Sequence[Embeddings]"
_kind_of = attrgetter("dtype", "device")


def flatten(embeddings: Embeddings) -> list[Tensor]:
    """The sources as a list of the merge's own; leading dimensions stay.

    Raises:
        EmbeddingError: they are no tensor and no sequence of what is, or nest without an end.
    """
    try:
        return _flat(embeddings)
    except RecursionError:
        raise EmbeddingError("embeddings nest a few sequences deep", found="too many, or one within itself") from None


def _flat(embeddings: Embeddings) -> list[Tensor]:
    if is_tensor(embeddings):
        return [embeddings]
    if isinstance(embeddings, Sequence) and not isinstance(embeddings, (str, bytes)):
        if all(map(is_tensor, embeddings)):
            return list(embeddings)  # type: ignore[arg-type]
        return [tensor for part in embeddings for tensor in _flat(part)]
    raise EmbeddingError(
        "embeddings are a tensor [rows, width] or a sequence of such tensors", found=type(embeddings).__name__
    )


def check_sources(sources: list[Tensor], target: Tensor) -> tuple[list[int], bool, bool]:
    """Rows of each source; whether all are plain tensors on the host, as autograd need not know; whether of one dtype.

    That dtype is the target's. Leading dimensions are flattened in place, and a source that shares memory with the
    target gives way to a copy.

    Raises:
        EmbeddingError: a source is not `[..., n, width]`, or holds no numbers that can be converted. Names it.
    """
    width, dtype = target.shape[1], target.dtype
    tracked = torch.is_grad_enabled()
    plain = alike = True
    known = dtype
    first, end = extent(target)
    counts = []
    for index, source in enumerate(sources):
        shape = _shape_of(source)
        if (
            type(source) is not Tensor
            or source.dtype is not known
            or not source.is_cpu
            or source.requires_grad
            or source.layout is not torch.strided
            or len(shape) != 2
            or shape[1] != width
        ):
            check_readable(source, item=index)
            if len(shape) > 2:
                source = sources[index] = source.flatten(0, -2)
            elif shape == (0,):  # no rows, as for `torch.cat`
                source = sources[index] = source.reshape(0, width)
            shape = _shape_of(source)
            check_rows(source, width, item=index)
            known = source.dtype
            alike = alike and known is dtype
            plain = plain and source.is_cpu and type(source) is Tensor and not (tracked and source.requires_grad)
        try:
            start = source.data_ptr()
        except RuntimeError:
            raise no_memory() from None
        if start < end and (start + source.nbytes > first or not source.is_contiguous()) and overlap(source, target):
            sources[index] = source.clone()
        counts.append(shape[0])
    # What only fits is copied by PyTorch, which knows the sign then.
    if (not alike or not plain or dtype.itemsize == 1) and any(map(Tensor.is_neg, sources)):
        sources[:] = map(without_neg, sources)
    return counts, plain, alike


def without_neg(source: Tensor) -> Tensor:
    """The same numbers, not negated lazily: a copy into another dtype may forget about the sign (PyTorch 2.13)."""
    if not source.is_neg():
        return source
    if source.element_size() > 1:
        return source.resolve_neg()
    return torch._neg_view(source).float().neg().to(source.dtype)  # PyTorch negates no smallest floats


def _shape_of(source: Tensor) -> tuple[int, ...]:
    return () if source.is_nested else source.shape


def grouped(sources: Sequence[Tensor], counts: Sequence[int], most: int) -> list[Tensor | list[Tensor]]:
    """The same rows in order, neighbours of a dtype and device as one list, to be joined, of `most` rows at most.

    Args:
        sources: `[n, width]`.
        counts: rows of each.
        most: rows.
    """
    groups: list[Tensor | list[Tensor]] = []
    start = rows = 0
    for index, count in enumerate([*counts, most + 1]):
        if index > start and (rows + count > most or _kind_of(sources[index]) != _kind_of(sources[start])):
            groups.append(sources[start] if index == start + 1 else list(sources[start:index]))
            start, rows = index, 0
        rows += count
    return groups


def as_one(group: Tensor | list[Tensor]) -> Tensor:
    """The rows of a group as one tensor."""
    return group if isinstance(group, Tensor) else torch.cat(group)
