"""What the tests of transfers share: small items, requests of them, and what a transfer asks of a lookup."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmcache.cache import CacheConfig, MultimodalCache
from mmcache.fields import FieldConfig, ItemFields
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.testing import Move, SimulatedDevice
from mmcache.transfer import EncoderBatch

FLAT = FieldConfig.flat("image", [])
KEPT = FieldConfig.batched("image", keep_on_cpu=True)
QWEN = {"pixel_values": FLAT, "image_grid_thw": KEPT}


def image(rows: int = 4, width: int = 6, seed: int = 0) -> ItemFields:
    """Qwen's layout: flat pixels, and a grid that stays on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return ItemFields(
        {
            "pixel_values": torch.randn(rows, width, generator=generator),
            "image_grid_thw": torch.tensor([1, 2, rows // 2]),
        },
        QWEN,
    )


def request_of(fields: Sequence[ItemFields | None], name: str = "r", ids: Sequence[str] = ()) -> MultimodalRequest:
    """A request with an item of 4 tokens for each of `fields`, 2 text tokens before each."""
    items = [
        MultimodalItem("image", f, PlaceholderRange(6 * i + 2, 4), ids[i] if ids else f"{name}-{i}")
        for i, f in enumerate(fields)
    ]
    return MultimodalRequest(name, list(range(6 * len(items) + 2)), items)


def cache_of(**config: Any) -> MultimodalCache:
    return MultimodalCache(CacheConfig(**{"capacity_bytes": 1 << 20, "row_bytes": {"image": 16}, **config}))


def missing(
    request: MultimodalRequest, indices: Sequence[int] | None = None, window: tuple[int, int] | None = None
) -> SimpleNamespace:
    """What a transfer asks of a lookup of which these items are missing."""
    indices = range(len(request.items)) if indices is None else indices
    return SimpleNamespace(
        request=request,
        window=window or (0, request.num_tokens),
        missing=tuple(indices),
        key=lambda i: request.items[i].identifier,
        holds=lambda i: False,
    )


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found.cpu(), expected)
    return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))


def sent(sim: SimulatedDevice) -> list[Move]:
    """The moves to the device (looking at results makes others)."""
    return [move for move in sim.moves if move.target == sim.device]


def places(batch: EncoderBatch) -> list[tuple[str, int]]:
    return [(lookup.request.request_id, index) for lookup, index in batch.items]


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in flat(v)]
