"""`merge_embeddings`: rows into the True positions of a mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge.blocks import Block, Positions, are_short
from mmcache.merge.checks import check_rows, extent, overlap, rows_of
from mmcache.merge.host import SHORT_CONVERSION, chunk_elements, converted
from mmcache.merge.write import write_blocks, wrote
from mmcache.staging import Bits, as_bits

__all__ = ["Embeddings", "merge_embeddings"]

Embeddings: TypeAlias = "Tensor | Sequence[Embeddings]"
# Sources that are looked at one by one (measured).
_MANY = 8
_kind_of = attrgetter("dtype", "device")
# Elements of a source, on average, below which a call for each would cost more than copying them twice (measured).
_SMALL_SOURCE = 1 << 14
_Mask = np.ndarray[Any, np.dtype[np.bool_]]


def merge_embeddings(inputs_embeds: Tensor, embeddings: Embeddings, is_multimodal: Tensor) -> Tensor:
    """Write embedding rows over the True positions of a mask, in order, in place.

    Nothing is concatenated that could be large, no index tensor is made for long runs, and on a device the host waits
    for nothing. Rows of another floating-point dtype or another device are converted and moved as they are written; the
    sources themselves never change. They may be views of the destination: they are read before anything is written.

    Args:
        inputs_embeds: destination `[..., width]`, usually `[tokens, width]`, floating-point, on any device, of any
            strides if rows do not overlap. Autograd sees what is written; an inference tensor is taken anywhere.
        embeddings: rows `[..., width]`, or a (nested) sequence of such tensors; in order they fill the True positions.
            Any floating-point dtypes, devices and strides; they may differ.
        is_multimodal: bool `[...]`, the shape of `inputs_embeds` without its last dimension, on the CPU.

    Returns:
        `inputs_embeds`.

    Raises:
        EmbeddingError: the number of rows is not the number of True positions (names the source, its rows and its
            slots), a width or dtype does not fit, the mask is not a boolean CPU tensor of the right shape, or
            `inputs_embeds` cannot be written to. Nothing has been written.
    """
    target = rows_of(inputs_embeds)
    if target.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # elsewhere PyTorch refuses to write to it
            return merge_embeddings(inputs_embeds, embeddings, is_multimodal)
    mask = _checked_mask(is_multimodal, inputs_embeds)
    given = _flatten(embeddings)
    sources = _together(given) if len(given) > _MANY else given
    rows, on_host, alike = _check_sources(sources, target)
    width, dtype = target.shape[1], target.dtype
    few = rows * width <= chunk_elements()
    bounds, positions, slots = _runs_of(mask, few, width * dtype.itemsize, on_host and alike)
    if rows != slots:
        raise _misfit(given, mask, rows, slots)
    if not rows:
        return inputs_embeds
    if on_host and len(sources) == 1 and len(bounds) == 2:
        target[bounds[0] : bounds[1]].copy_(sources[0])
        return inputs_embeds
    small = rows * width < len(sources) * _SMALL_SOURCE
    bits = as_bits(target) if on_host else None
    # Long runs are converted straight into their places.
    long = positions is None and rows * width >= len(bounds) // 2 * SHORT_CONVERSION
    if bits is None or (long and not alike and not small):
        write_blocks(target, _blocks(_joined(sources) if small else sources, bounds, positions))
        return inputs_embeds
    if few:
        parts: Iterable[Bits] = [_bits_of(_as_one(sources, dtype))]
    elif alike and not small:
        # All of them are looked at before the first is copied: that keeps the code in the processor's cache.
        parts = [_bits_of(source) for source in sources]
    else:
        parts = map(_bits_of, _converted(_joined(sources), dtype))
    _write_bits(bits, parts, bounds, positions)
    wrote(target)
    return inputs_embeds


def _check_sources(sources: list[Tensor], target: Tensor) -> tuple[int, bool, bool]:
    """How many rows; whether all are on the host, and autograd need not know; whether all are of the target's dtype.

    A source that shares memory with the target gives way to a copy.
    """
    width, dtype = target.shape[1], target.dtype
    tracked = torch.is_grad_enabled()
    on_host, alike = target.is_cpu, True
    known = dtype
    first, end = extent(target)
    rows = 0
    for index, source in enumerate(sources):
        shape = source.shape
        if source.dtype is not known or len(shape) != 2 or shape[1] != width or source.layout is not torch.strided:
            check_rows(source, width, item=index)
            known = source.dtype
            alike = alike and known is dtype
        if not source.is_cpu or type(source) is not Tensor or (tracked and source.requires_grad):
            check_rows(source, width, item=index)
            on_host = False
        start = source.data_ptr()
        if start < end and (start + source.nbytes > first or not source.is_contiguous()) and overlap(source, target):
            sources[index] = source.clone()
        rows += shape[0]
    return rows, on_host, alike


def _checked_mask(is_multimodal: Tensor, inputs_embeds: Tensor) -> _Mask:
    if not _is_tensor(is_multimodal) or is_multimodal.dtype is not torch.bool:
        found = is_multimodal.dtype if _is_tensor(is_multimodal) else type(is_multimodal).__name__
        raise EmbeddingError("is_multimodal is a tensor of dtype torch.bool", found=found)
    if not is_multimodal.is_cpu:
        raise EmbeddingError("is_multimodal stays on the CPU: reading it must not wait", found=is_multimodal.device)
    if is_multimodal.shape != inputs_embeds.shape[:-1]:
        raise EmbeddingError(
            "is_multimodal has one entry for each row of inputs_embeds",
            expected=tuple(inputs_embeds.shape[:-1]),
            found=tuple(is_multimodal.shape),
        )
    mask: _Mask = is_multimodal.numpy()
    return mask if mask.ndim == 1 else mask.reshape(-1)


def _flatten(embeddings: Embeddings) -> list[Tensor]:
    """The sources as a list of the merge's own."""
    if _is_tensor(embeddings):
        return [embeddings.flatten(0, -2) if embeddings.dim() > 2 else embeddings]
    if isinstance(embeddings, (list, tuple)):
        for part in embeddings:
            if not _is_tensor(part) or part.dim() > 2:
                return [tensor for part in embeddings for tensor in _flatten(part)]
        return list(embeddings)
    raise EmbeddingError(
        "embeddings are a tensor [rows, width] or a sequence of such tensors", found=type(embeddings).__name__
    )


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    """As `isinstance`, which asks a metaclass, but quicker for plain tensors."""
    return type(value) is Tensor or isinstance(value, Tensor)


def _runs_of(mask: _Mask, few: bool, row_bytes: int, bits: bool) -> tuple[list[int], Positions | None, int]:
    """Where runs begin and end, alternating; or, where runs are short or all is `few`, all positions. And how many."""
    if few:
        positions: Positions = mask.nonzero()[0]
        slots = len(positions)
        if slots and int(positions[-1]) - int(positions[0]) == slots - 1:
            return [int(positions[0]), int(positions[-1]) + 1], None, slots
        return [], positions, slots
    flags = mask.tobytes()
    start = flags.find(1)
    if start < 0:
        return [], None, 0
    end = flags.find(0, start)
    if end < 0:
        end = len(flags)
    if flags.find(1, end) < 0:
        return [start, end], None, end - start
    edges = _edges(mask)
    slots = int(np.count_nonzero(mask))
    if are_short(len(edges) // 2, slots, row_bytes, bits=bits):
        return [], mask.nonzero()[0], slots
    return edges.tolist(), None, slots


def _edges(mask: _Mask) -> Positions:
    padded = np.zeros(len(mask) + 2, np.bool_)
    padded[1:-1] = mask
    edges: Positions = (padded[1:] != padded[:-1]).nonzero()[0]
    return edges


def _as_one(sources: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All rows as one tensor of `dtype`."""
    if len(sources) == 1:
        return sources[0].to(dtype)
    if any(source.dtype is not sources[0].dtype for source in sources):
        sources = [source.to(dtype) for source in sources]
    return torch.cat(sources).to(dtype)  # type: ignore[arg-type]


def _together(sources: list[Tensor]) -> list[Tensor]:
    """Many sources of one kind as one, if that is small: to look at each would take longer."""
    if sum(map(Tensor.numel, sources)) > chunk_elements() or len(set(map(_kind_of, sources))) > 1:
        return sources
    try:
        return [torch.cat(sources)]
    except RuntimeError:  # they do not fit together, and the checks say which does not fit
        return sources


def _joined(sources: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same rows in order, neighbours of a kind joined as long as they have a chunk's elements at most."""
    most = chunk_elements()
    group: list[Tensor] = []
    size = 0
    for source in sources:
        count = source.numel()
        if group and (size + count > most or source.dtype is not group[0].dtype or source.device != group[0].device):
            yield group[0] if len(group) == 1 else torch.cat(group)
            group, size = [], 0
        group.append(source)
        size += count
    if group:
        yield group[0] if len(group) == 1 else torch.cat(group)


def _converted(sources: Iterable[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """The same rows in order, as `dtype`; use each tensor before the next."""
    for source in sources:
        if source.dtype is dtype:
            yield source
        else:
            yield from converted(source, dtype)


def _bits_of(source: Tensor) -> Bits:
    bits = as_bits(source)
    if bits is None:  # PyTorch negates it lazily
        bits = as_bits(source.resolve_neg())
    assert bits is not None
    return bits


def _write_bits(target: Bits, sources: Iterable[Bits], bounds: Sequence[int], positions: Positions | None) -> None:
    """Copy rows of the target's dtype run by run, or by index."""
    done = start = end = 0
    edge = iter(bounds)
    for source in sources:
        count = len(source)
        if positions is not None:
            target[positions[done : done + count]] = source
            done += count
            continue
        row = 0
        while row < count:
            if start == end:
                start, end = next(edge), next(edge)
            length = min(end - start, count - row)
            target[start : start + length] = source[row : row + length]
            start += length
            row += length


def _blocks(
    parts: Iterable[Tensor], bounds: Sequence[int], positions: Positions | None
) -> Iterator[tuple[Tensor, Block]]:
    done = start = end = 0
    edge = iter(bounds)
    for part in parts:
        left = count = part.shape[0]
        if not count:
            continue
        if positions is not None:
            yield part, Block(0, count, None, positions[done : done + count])
            done += count
            continue
        runs = []
        while left:
            if start == end:
                start, end = next(edge), next(edge)
            length = min(left, end - start)
            runs.append((start, length))
            start += length
            left -= length
        yield part, Block(0, count, runs)


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
