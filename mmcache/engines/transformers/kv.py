"""KV blocks by prefix: what a paged engine keeps in its block table, with plain tensors.

The `PrefixIndex` decides which blocks exist; this room holds their keys and values and lets go of them when the index
evicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor

from mmcache.items import MultimodalRequest
from mmcache.prefix import PrefixIndex, PrefixMatch

__all__ = ["KVBlocks", "Layers"]

Layers: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values `[heads, tokens, head_dim]` of each layer."""


class KVBlocks:
    """Keys and values of computed prefixes, in blocks of `block_size` tokens.

    Args:
        block_size: tokens a block.
        capacity_blocks: at most so many are held.
    """

    def __init__(self, *, block_size: int, capacity_blocks: int) -> None:
        self.block_size = block_size
        self.index = PrefixIndex(block_size=block_size, capacity_blocks=capacity_blocks)
        self.index.on_evict(self._drop)
        self._blocks: dict[int, Layers] = {}
        self._ids = count()

    def __len__(self) -> int:
        return len(self._blocks)

    def _drop(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._blocks.pop(block_id, None)

    def load(self, match: PrefixMatch) -> Layers:
        """Keys and values of a matched prefix, cut to its length; an empty list where nothing matched."""
        blocks = [self._blocks[block_id] for block_id in match.block_ids]
        if not match.num_tokens:
            return []
        return [
            (
                torch.cat([block[layer][0] for block in blocks], dim=1)[:, : match.num_tokens],
                torch.cat([block[layer][1] for block in blocks], dim=1)[:, : match.num_tokens],
            )
            for layer in range(len(blocks[0]))
        ]

    def save(self, request: MultimodalRequest, num_tokens: int, layers: Layers, match: PrefixMatch) -> PrefixMatch:
        """Keep the whole blocks of the first `num_tokens` tokens of a request.

        Args:
            request: the request.
            num_tokens: tokens whose keys and values exist.
            layers: keys and values of those tokens.
            match: of this request; released.

        Returns:
            The match of the request as it stands now, which pins its blocks.
        """
        size, whole = self.block_size, num_tokens // self.block_size
        ids = match.block_ids[: match.num_tokens // size]
        fresh = range(len(ids), whole)
        for block in fresh:
            tokens = slice(block * size, (block + 1) * size)
            ids.append(next(self._ids))
            # Copies: a slice would keep the whole sequence's storage alive.
            self._blocks[ids[-1]] = [(keys[:, tokens].clone(), values[:, tokens].clone()) for keys, values in layers]
        taken = self.index.insert(request, num_tokens, ids)
        # Another request may have brought the same blocks meanwhile, or there was no room.
        self._drop([ids[block] for block in fresh if block not in taken])
        renewed = self.index.match(request)
        match.release()
        return renewed
