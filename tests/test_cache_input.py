"""Bad input: a typed error, nothing stored, and the next request works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import WIDTH, images, request, rows_of
from cache_forms import both_forms, check_merge, fill, one_image, step

from mmcache import (
    CacheConfig,
    ConfigError,
    EmbeddingError,
    MultimodalCache,
    MultimodalItem,
    PlaceholderRange,
    RequestError,
    UnresolvedItemError,
    make_policy,
)


@both_forms
@pytest.mark.parametrize(
    "bad",
    [
        {0: torch.zeros(3, WIDTH)},
        {0: torch.zeros(4, WIDTH, 1)},
        {0: torch.zeros(4, 0)},
        {0: torch.zeros(4, WIDTH, dtype=torch.int64)},
        {0: [[0.0] * WIDTH] * 4},
        {0: torch.zeros(4, WIDTH), 1: torch.zeros(5, WIDTH)},
        {2: torch.zeros(4, WIDTH)},
        {0: torch.zeros(4, WIDTH), -1: torch.zeros(4, WIDTH)},
        [torch.zeros(4, WIDTH)],
        [torch.zeros(4, WIDTH)] * 3,
        [torch.zeros(4, WIDTH).to_sparse(), torch.zeros(4, WIDTH)],
        [torch.zeros(4, WIDTH, device="meta"), torch.zeros(4, WIDTH)],
        {0: torch.zeros(4, WIDTH), 1: torch.zeros(4, WIDTH, dtype=torch.complex64)},
        {0: torch.zeros(4, WIDTH), True: torch.zeros(4, WIDTH)},
        {0.0: torch.zeros(4, WIDTH)},
    ],
)
def test_bad_embeddings_change_nothing(make: Any, bad: Any) -> None:
    cache = make()
    req = request("bad one", 40, images((0, 4), (10, 4), (20, 4), ids="aba"))
    lookup = cache.lookup(req, num_computed_tokens=0)
    before = cache.stats().used_bytes
    with pytest.raises(EmbeddingError, match="bad one"):
        cache.insert(lookup, bad)
    assert lookup.missing == (0, 1)
    assert (cache.stats().used_bytes, cache.held_bytes()) == (before, 0)
    with pytest.raises(UnresolvedItemError):
        lookup.rows(0)
    target = torch.full((40, WIDTH), 3.0)
    with pytest.raises(UnresolvedItemError):
        lookup.merge_into(target)
    assert (target == 3.0).all()
    fill(cache, lookup)
    check_merge(lookup)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), True, "1"])
def test_an_encode_that_took_no_time_that_can_be(seconds: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    with pytest.raises(EmbeddingError, match="seconds"):
        cache.insert(lookup, [rows_of("a", 4)], seconds=seconds)
    assert lookup.missing == (0,)
    cache.insert(lookup, [rows_of("a", 4)], seconds=0)
    lookup.release()
    cache.finish("r")
    assert cache.stats().pinned_bytes == 0


def test_rows_for_what_is_no_lookup_of_this_cache() -> None:
    one, other = (MultimodalCache(CacheConfig(capacity_bytes=1 << 20)) for _ in range(2))
    lookup = other.lookup(one_image("r", "a"), num_computed_tokens=0)
    for target in (lookup, lookup.plan, "r"):
        with pytest.raises(RequestError):
            one.insert(target, [rows_of("a", 4)])
    assert lookup.missing == (0,)


@both_forms
def test_a_stored_item_is_nobodys_to_insert(make: Any) -> None:
    cache = make()
    step(cache, one_image("r1", "a"))
    lookup = cache.lookup(one_image("r2", "a"), num_computed_tokens=0)
    with pytest.raises(EmbeddingError):
        cache.insert(lookup, {0: rows_of("a", 4)})


def test_another_width_or_dtype_is_refused() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    step(cache, one_image("r1", "a"))
    lookup = cache.lookup(one_image("r2", "b"), num_computed_tokens=0)
    with pytest.raises(EmbeddingError, match="width"):
        cache.insert(lookup, [torch.zeros(4, WIDTH + 1)])
    for shapeless in (torch.zeros(()), None, "ab"):
        with pytest.raises(EmbeddingError):
            cache.insert(lookup, shapeless)
    with pytest.raises(EmbeddingError, match="dtype"):
        cache.insert(
            lookup, [torch.zeros(4, WIDTH, dtype=torch.int32).view(torch.float32).to(torch.float16).repeat(1, 2)]
        )
    cache.insert(lookup, [torch.zeros(4, WIDTH)])


@both_forms
@pytest.mark.parametrize("encoded", [False, True], ids=["in flight", "stored"])
def test_rows_of_another_modality_are_never_served(make: Any, encoded: bool) -> None:
    """A picture and a clip may hold the same bytes; their encoders differ."""
    cache = make(row_bytes={"image": WIDTH * 4, "video": WIDTH * 4})
    picture = cache.lookup(one_image("r", "same"), num_computed_tokens=0)
    if encoded:
        fill(cache, picture)
    clip = MultimodalItem("video", None, PlaceholderRange(1, 4), "same")
    lookup = cache.lookup(request("s", 6, [clip]), num_computed_tokens=0)
    assert lookup.missing == (0,)
    cache.insert(lookup, {0: torch.full((4, WIDTH), 7.0)})
    target = torch.zeros(6, WIDTH)
    lookup.merge_into(target)
    assert (target[1:5] == 7).all()
    if not encoded:
        fill(cache, picture)
    check_merge(picture)
    for open_lookup in (picture, lookup):
        open_lookup.release()
        cache.finish(open_lookup.request)
    stats = cache.stats()
    assert stats.stale == 1
    assert stats.pinned_bytes == 0


def test_a_policy_of_ones_own_or_its_name() -> None:
    policy = make_policy("lru")
    cache = MultimodalCache(CacheConfig(capacity_bytes=8 * WIDTH * 4, policy=policy, row_bytes={"image": WIDTH * 4}))
    for name in "abc":  # room for two
        step(cache, one_image(name, name))
        cache.finish(name)
    assert policy.victim() is not None
    for wrong in ("fifo", None, 3, [], object()):
        with pytest.raises(ConfigError, match="policy"):
            CacheConfig(capacity_bytes=1, policy=wrong)
