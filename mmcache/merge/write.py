"""Writing blocks of rows to a destination, wherever it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mmcache.merge.blocks import Block
from mmcache.merge.device import send_places, write_device
from mmcache.merge.host import write_host
from mmcache.staging import staging_for

__all__ = ["write_blocks", "wrote"]


def write_blocks(
    target: Tensor, blocks: Iterable[tuple[Tensor, Block]], places: Sequence[Tensor | None] | None = None
) -> None:
    """Write rows of each source `[n, width]` to their places in `target` `[rows, width]`.

    Sources may have another dtype or device, but share no memory with `target` and are not negated lazily, unless they
    are of its dtype and on the host. All has been checked before: nothing
    here raises for a caller's mistake.

    Args:
        target: the destination, in place.
        blocks: sources and what is written of them.
        places: on a device, where `send_places` put the rows of these blocks, if that is at hand.
    """
    if target.is_neg():  # see `without_neg`
        blocks = ((source.to(target.dtype), block) for source, block in blocks)
    if target.is_cpu:
        write_host(target, blocks)
        wrote(target)
        return
    blocks = list(blocks)
    staging = staging_for(target.device)
    if places is None:
        places = send_places([block for _, block in blocks], staging).of
    write_device(target, blocks, places, staging)


def wrote(target: Tensor) -> None:
    """Tell autograd of what was written behind its back: `target` is not what somebody saved of it before."""
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)
