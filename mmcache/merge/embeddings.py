"""`merge_embeddings`: rows into the True positions of a mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge.blocks import blocks_of, edges_of
from mmcache.merge.checks import check_autograd, checked_flags, rows_of
from mmcache.merge.host import chunk_elements, convert_flagged, write_flagged
from mmcache.merge.quick import merge_quickly
from mmcache.merge.records import Flags, records_of
from mmcache.merge.sources import Embeddings, as_one, check_sources, flatten, grouped
from mmcache.merge.write import write_blocks, wrote

__all__ = ["Embeddings", "merge_embeddings"]

# Bytes of a source, on average, below which a call for each would cost more than copying them twice (measured).
_SMALL_SOURCE = 16 << 10


def merge_embeddings(inputs_embeds: Tensor, embeddings: Embeddings, is_multimodal: Tensor) -> Tensor:
    """Write embedding rows over the True positions of a mask, in order, in place.

    Nothing is concatenated that is large (small sources are, up to 4 MiB), no index tensor is made on the CPU, and on a
    device the host waits for nothing. Rows of another floating-point dtype or another device are converted and moved as
    they are written; the sources themselves never change. They may be views of the destination: they are read before
    anything is written.

    Args:
        inputs_embeds: destination `[..., width]`, usually `[tokens, width]`, floating-point, on any device, of any
            strides if rows do not overlap. Autograd sees what is written, backward and forward (dual tensors), but not
            inside the transforms of `torch.func`, whose tensors have no memory. An inference tensor is taken anywhere.
        embeddings: rows `[..., width]`, or a (nested) sequence of such tensors; in order they fill the True positions.
            Any floating-point dtypes, devices and strides; they may differ. A tensor `[0]` is no rows.
        is_multimodal: bool `[...]`, the shape of `inputs_embeds` without its last dimension, on the CPU.

    Returns:
        `inputs_embeds`.

    Raises:
        EmbeddingError: the number of rows is not the number of True positions (names the source, its rows and its
            slots), a width or dtype does not fit, the mask is not a boolean CPU tensor of the right shape, or
            `inputs_embeds` cannot be written to (autograd forbids it for leaves that require grad, and for views made
            without grad or as one of several). Nothing has been written.
    """
    if merge_quickly(inputs_embeds, embeddings, is_multimodal):
        return inputs_embeds
    target = rows_of(inputs_embeds)
    if target.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():  # elsewhere PyTorch refuses to write to it
            return merge_embeddings(inputs_embeds, embeddings, is_multimodal)
    flags = checked_flags(is_multimodal, inputs_embeds)
    sources = flatten(embeddings)
    counts, plain, alike = check_sources(sources, target)
    rows, slots = sum(counts), int(np.count_nonzero(flags))
    if rows != slots:
        raise _misfit(counts, flags, rows, slots)
    if not plain:
        check_autograd(target, sources)
    elements = slots * target.shape[1]
    if not elements:
        return inputs_embeds
    parts: Sequence[Tensor | list[Tensor]] = sources
    if len(sources) > 1 and elements * target.element_size() < len(sources) * _SMALL_SOURCE:
        parts = grouped(sources, counts, chunk_elements() // target.shape[1])
    places = records_of(target) if plain else None
    if places is None:
        write_blocks(target, blocks_of(map(as_one, parts), flags))
        return inputs_embeds
    if alike:
        write_flagged(places, flags, parts, target.dtype)
    else:
        convert_flagged(target, flags, parts)
    wrote(target)
    return inputs_embeds


def _misfit(counts: Sequence[int], flags: Flags, rows: int, slots: int) -> EmbeddingError:
    """Which source to blame: the one whose run has another length where runs and sources pair up, else the one that
    no longer fits, else the last."""
    edges = edges_of(flags)
    lengths = (edges[1::2] - edges[::2]).tolist()
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
