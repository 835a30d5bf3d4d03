"""`merge_embeddings`: rows into the True positions of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge.rows import Block, are_short, write_blocks
from mmcache.staging import Bits, as_bits

__all__ = ["Embeddings", "merge_embeddings", "rows_of"]

Embeddings: TypeAlias = "Tensor | Sequence[Embeddings]"
# Elements up to which rows are converted whole and written by index (measured).
_SMALL = 1 << 16
_Mask = np.ndarray[Any, np.dtype[np.bool_]]
_Positions = np.ndarray[Any, np.dtype[np.int64]]


def merge_embeddings(inputs_embeds: Tensor, embeddings: Embeddings, is_multimodal: Tensor) -> Tensor:
    """Write embedding rows over the True positions of a mask, in order, in place.

    Nothing is concatenated, no index tensor is made for long runs, and on a device the host waits for nothing. Rows of
    another floating-point dtype or another device are converted and moved as they are written; the sources themselves
    never change.

    Args:
        inputs_embeds: destination `[..., width]`, usually `[tokens, width]`, of any strides if rows do not overlap.
        embeddings: rows `[..., width]`, or a (nested) sequence of such tensors; in order they fill the True positions.
        is_multimodal: bool `[...]`, the shape of `inputs_embeds` without its last dimension, on the CPU.

    Returns:
        `inputs_embeds`.

    Raises:
        EmbeddingError: the number of rows is not the number of True positions (names the source, its rows and its
            slots), a width or dtype does not fit, or the mask is not a boolean CPU tensor. Nothing has been written.
    """
    target = rows_of(inputs_embeds)
    mask = _checked_mask(is_multimodal, inputs_embeds)
    sources = _flatten(embeddings)
    width, dtype = target.size(1), target.dtype
    rows = 0
    for index, source in enumerate(sources):
        if source.dim() != 2 or source.size(1) != width or source.dtype is not dtype:
            check_rows(source, width, dtype, item=index)
        rows += source.size(0)
    slots = int(np.count_nonzero(mask))
    if rows != slots:
        raise _misfit(sources, mask, rows, slots)
    first = _only_run(mask, slots)
    if first is not None and len(sources) == 1 and _plain_copy(target, sources[0]):
        target[first : first + slots].copy_(sources[0])
    elif rows * width <= _SMALL and target.is_cpu and all(source.is_cpu for source in sources):
        if rows:
            _write_few(target, sources, mask)
    else:
        write_blocks(target, _blocks(sources, mask, slots, first, width * target.element_size()))
    return inputs_embeds


def rows_of(inputs_embeds: Tensor) -> Tensor:
    """`inputs_embeds` `[..., width]` as `[rows, width]`, sharing memory.

    Raises:
        EmbeddingError: it is no floating-point tensor of two or more dimensions, its rows overlap, or it cannot be
            seen as one run of rows without a copy.
    """
    if (
        (type(inputs_embeds) is not Tensor and not isinstance(inputs_embeds, Tensor))
        or inputs_embeds.dim() < 2
        or not inputs_embeds.is_floating_point()
    ):
        raise EmbeddingError(
            "inputs_embeds is a floating-point tensor [tokens, width]",
            found=f"{inputs_embeds.dtype} {tuple(inputs_embeds.shape)}"
            if isinstance(inputs_embeds, Tensor)
            else type(inputs_embeds).__name__,
        )
    target = inputs_embeds
    if inputs_embeds.dim() > 2:
        try:
            target = inputs_embeds.view(-1, inputs_embeds.shape[-1])
        except RuntimeError:
            raise EmbeddingError(
                "inputs_embeds can be seen as [tokens, width] without a copy",
                found=f"shape {tuple(inputs_embeds.shape)} with strides {inputs_embeds.stride()}",
            ) from None
    if 0 in target.stride() and _overlaps(target):
        raise EmbeddingError("the rows of inputs_embeds do not overlap", found=f"strides {inputs_embeds.stride()}")
    return target


def check_rows(source: Tensor, width: int, dtype: torch.dtype, **where: Any) -> None:
    """Raise unless `source` is `[n, width]` of a dtype that converts to `dtype`."""
    if source.dim() != 2 or source.shape[1] != width:
        raise EmbeddingError(
            "embedding rows are as wide as inputs_embeds",
            expected=f"[rows, {width}]",
            found=tuple(source.shape),
            **where,
        )
    if source.dtype != dtype and not source.is_floating_point():
        raise EmbeddingError("embedding rows are floating-point", found=source.dtype, **where)


def _overlaps(target: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride()))


def _checked_mask(is_multimodal: Tensor, inputs_embeds: Tensor) -> _Mask:
    if (
        type(is_multimodal) is Tensor
        and is_multimodal.dtype is torch.bool
        and is_multimodal.dim() == 1
        and inputs_embeds.dim() == 2
        and is_multimodal.size(0) == inputs_embeds.size(0)
        and is_multimodal.is_cpu
    ):
        flat: _Mask = is_multimodal.numpy()
        return flat
    if not isinstance(is_multimodal, Tensor) or is_multimodal.dtype != torch.bool:
        found = is_multimodal.dtype if isinstance(is_multimodal, Tensor) else type(is_multimodal).__name__
        raise EmbeddingError("is_multimodal is a boolean tensor", found=found)
    if not is_multimodal.is_cpu:
        raise EmbeddingError("is_multimodal stays on the CPU: reading it must not wait", found=is_multimodal.device)
    if is_multimodal.dim() != inputs_embeds.dim() - 1 or is_multimodal.shape != inputs_embeds.shape[:-1]:
        raise EmbeddingError(
            "is_multimodal has one entry for each row of inputs_embeds",
            expected=tuple(inputs_embeds.shape[:-1]),
            found=tuple(is_multimodal.shape),
        )
    mask: _Mask = is_multimodal.numpy().reshape(-1)
    return mask


def _flatten(embeddings: Embeddings) -> list[Tensor]:
    if type(embeddings) is list and all(type(part) is Tensor and part.dim() == 2 for part in embeddings):
        return embeddings
    if isinstance(embeddings, Tensor):
        if embeddings.dim() > 2:
            embeddings = embeddings.flatten(0, -2)
        return [embeddings]
    if isinstance(embeddings, (list, tuple)):
        return [tensor for part in embeddings for tensor in _flatten(part)]
    raise EmbeddingError(
        "embeddings are a tensor [rows, width] or a sequence of such tensors", found=type(embeddings).__name__
    )


def _edges(mask: _Mask) -> _Positions:
    """Where runs begin and end, alternating."""
    padded = np.zeros(len(mask) + 2, np.bool_)
    padded[1:-1] = mask
    return np.flatnonzero(padded[1:] != padded[:-1])


def _only_run(mask: _Mask, slots: int) -> int | None:
    """Where the mask's only run begins; None where it has none or several."""
    flags = mask.tobytes()
    first = flags.find(1)
    return first if slots and flags.rfind(1) - first + 1 == slots else None


def _plain_copy(target: Tensor, source: Tensor) -> bool:
    """Whether `copy_` does it: both on the CPU, in different memory."""
    return (
        target.is_cpu and source.is_cpu and target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    )


def _write_few(target: Tensor, sources: Sequence[Tensor], mask: _Mask) -> None:
    """For so few elements that a choice of ways would not pay, and that a converted copy of them is small."""
    dtype = target.dtype
    bits = as_bits(target)
    parts: list[Bits] = []
    for source in sources if bits is not None else ():
        part = None
        if source.dtype is not dtype:
            part = as_bits(source.to(dtype))
        elif _plain_copy(target, source):
            part = as_bits(source)
        if part is not None:
            parts.append(part)
    if bits is None or len(parts) < len(sources):  # for autograd, or rows of the destination itself
        target[torch.from_numpy(mask)] = torch.cat([source.to(dtype) for source in sources])
        return
    positions = np.flatnonzero(mask)
    done = 0
    for part in parts:
        bits[positions[done : done + len(part)]] = part
        done += len(part)


def _blocks(
    sources: Sequence[Tensor], mask: _Mask, slots: int, first: int | None, row_bytes: int
) -> list[tuple[Tensor, Block]]:
    if first is not None:
        bounds = [first, first + slots]
    else:
        edges = _edges(mask)
        if are_short(len(edges) // 2, slots, row_bytes):
            return _scattered(sources, np.flatnonzero(mask))
        bounds = edges.tolist()
    runs = iter(zip(bounds[::2], bounds[1::2]))
    blocks = []
    start = end = 0
    for source in sources:
        left = count = source.shape[0]
        mine = []
        while left:
            if start == end:
                start, end = next(runs)
            length = min(left, end - start)
            mine.append((start, length))
            start += length
            left -= length
        if count:
            blocks.append((source, Block(0, count, mine)))
    return blocks


def _scattered(sources: Sequence[Tensor], positions: _Positions) -> list[tuple[Tensor, Block]]:
    done = 0
    blocks = []
    for source in sources:
        count = source.shape[0]
        if count:
            blocks.append((source, Block(0, count, None, positions[done : done + count])))
        done += count
    return blocks


def _misfit(sources: Sequence[Tensor], mask: _Mask, rows: int, slots: int) -> EmbeddingError:
    """Which source to blame: the one whose run has another length where runs and sources pair up, else the one that
    no longer fits, else the last."""
    edges = _edges(mask)
    lengths = (edges[1::2] - edges[::2]).tolist()
    counts = [source.shape[0] for source in sources]
    if len(lengths) == len(counts):
        index = next(i for i, (count, length) in enumerate(zip(counts, lengths)) if count != length)
        return EmbeddingError(
            f"source {index} has {counts[index]} rows for {lengths[index]} slots; {rows} rows for {slots} slots in all",
            item=index,
            found=counts[index],
            expected=lengths[index],
        )
    left, index = slots, 0
    for index, count in enumerate(counts):
        if count > left:
            return EmbeddingError(
                f"source {index} has {count} rows for the {left} slots left; {rows} rows for {slots} slots in all",
                item=index,
                found=count,
                expected=left,
            )
        left -= count
    return EmbeddingError(
        f"{len(counts)} sources have {rows} rows for {slots} slots",
        item=index if counts else None,
        found=rows,
        expected=slots,
    )
