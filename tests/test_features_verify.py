"""Checking what a digest claims: with a hash of 8 bits contents collide, and none is served as another."""

from __future__ import annotations

import pytest
import torch
from builders import WIDTH, request, rows_of

from mmcache import (
    CacheConfig,
    ConfigError,
    ContentHasher,
    FeatureCache,
    FieldConfig,
    ItemFields,
    MultimodalCache,
    MultimodalItem,
    PlaceholderRange,
)


class EightBits:
    """A hasher that keeps 8 bits of a digest."""

    def __init__(self) -> None:
        self._hasher = ContentHasher()

    def digest(self, *parts: object, **named: object) -> str:
        return self._hasher.digest(*parts, **named)[:2]


def fields(number: int) -> ItemFields:
    return ItemFields({"x": torch.full((4,), float(number))}, {"x": FieldConfig.batched("image")})


def test_every_collision_is_found_when_every_hit_is_verified() -> None:
    hasher = EightBits()
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    features = FeatureCache(1 << 20, verify=1.0, on_collision=lambda name: cache.invalidate(identifier=name))
    collisions, seen = 0, {}
    for number in range(400):
        content = torch.tensor([number])
        identifier = hasher.digest(content)
        collisions += seen.get(identifier, number) != number
        seen[identifier] = number
        got = features.get_or_process(identifier, lambda number=number: fields(number))
        assert torch.equal(got["x"], fields(number)["x"])
        item = MultimodalItem("image", got, PlaceholderRange(0, 2), identifier)
        with cache.lookup(request(f"r{number}", 2, [item]), num_computed_tokens=0) as lookup:
            for index in lookup.missing:
                cache.insert(lookup, {index: rows_of(f"content {number}", 2)})
            assert torch.equal(lookup.merge_into(torch.zeros(2, WIDTH)), rows_of(f"content {number}", 2))
        cache.finish(lookup.request)
    assert collisions > 100
    assert features.stats().collisions == collisions


def test_a_sample_of_the_hits_is_verified_evenly() -> None:
    features = FeatureCache(1 << 20, verify=0.25)
    processed = []

    def process() -> ItemFields:
        processed.append(1)
        return fields(1)

    for _ in range(41):
        features.get_or_process("a", process)
    assert len(processed) == 1 + 10
    assert features.stats().collisions == 0


@pytest.mark.parametrize("verify", [-0.1, 1.1, True, "all"])
def test_a_share_is_a_share(verify: object) -> None:
    with pytest.raises(ConfigError, match="verify"):
        FeatureCache(1, verify=verify)  # type: ignore[arg-type]
