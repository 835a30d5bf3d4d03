"""Caches over tiers, and steps of an engine that runs on one."""

from __future__ import annotations

from typing import Any

import torch
from builders import ROW_BYTES, images, request, rows_of
from tier_helpers import until

from mmcache import CacheConfig, MultimodalCache, MultimodalItem, MultimodalRequest, Namespace, PlaceholderRange
from mmcache.tiers import Tier


def one_image(name: str, identifier: str = "a", **kwargs: Any) -> MultimodalRequest:
    return request(name, 6, images((1, 4), ids=[identifier]), **kwargs)


def make(*tiers: Tier, rows: int = 100, **settings: Any) -> MultimodalCache:
    settings.setdefault("namespace", Namespace(model="m", digest_scheme="blake3"))
    settings.setdefault("row_bytes", {"image": ROW_BYTES})
    return MultimodalCache(CacheConfig(capacity_bytes=rows * ROW_BYTES, **settings), tiers)


def flush(cache: MultimodalCache) -> None:
    assert cache._tiers is not None
    assert cache._tiers.tiers.flush(20)


def step(cache: MultimodalCache, req: MultimodalRequest) -> list[str]:
    """One step that waits for what is in flight; returns what it encoded."""
    encoded = []
    with cache.lookup(req, num_computed_tokens=0) as lookup:
        while lookup.missing or lookup.in_flight:
            for index in lookup.missing:
                item = req.items[index]
                encoded.append(item.identifier)
                cache.insert(lookup, {index: rows_of(item.identifier, item.placeholder.num_embeds)})
            if lookup.in_flight:
                lookup.wait(20)
        for index in lookup.stored:
            item = req.items[index]
            assert torch.equal(lookup.rows(index), rows_of(item.identifier, item.placeholder.num_embeds))
    cache.finish(req)
    return encoded


def look(cache: MultimodalCache, req: MultimodalRequest) -> None:
    """The request waits in the queue, which is when the tiers are asked what they have of it."""
    cache.announce(req)
    assert cache._tiers is not None
    keys = [cache._tiers.key(req, item.identifier, item.modality) for item in req.items]
    until(lambda: cache._tiers.tiers.known(keys) == set(keys))


def learn(cache: MultimodalCache, req: MultimodalRequest) -> None:
    """As `look`; then it is loaded, as far as there is room."""
    look(cache, req)
    cache.announce(req)


def one_item(name: str, modality: str, identifier: str = "logo") -> MultimodalRequest:
    return request(name, 6, [MultimodalItem(modality, None, PlaceholderRange(1, 4), identifier)])
