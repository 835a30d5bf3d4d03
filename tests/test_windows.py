"""Windows, indices and other integers: of what kind they may be, and from where to where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import images, request, rows_of

from mmcache import (
    CacheConfig,
    ConfigError,
    EmbeddingError,
    FeatureCache,
    FieldConfig,
    FieldError,
    MultimodalCache,
    PlaceholderError,
    PlaceholderRange,
    RequestError,
    WindowError,
)


def test_windows_may_be_numpy_integers() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    req = request("r", 20, images((2, 4)))
    window = cache.lookup(req, num_computed_tokens=np.int64(3), num_scheduled_tokens=np.int32(9)).window  # type: ignore[arg-type]
    assert window == (3, 12)
    cache.commit(req, np.int64(20))  # type: ignore[arg-type]


@pytest.mark.parametrize("one", [np.int64(1), np.uint16(1), torch.tensor(1)], ids=repr)
def test_an_index_or_a_bound_may_be_an_integer_of_any_kind(one: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=one * 4096, block_size=one * 16))
    req = request("r", 20, [*images((0, 4), (6, 4), ids="ab")])
    lookup = cache.lookup(req, num_computed_tokens=one, num_scheduled_tokens=one * 15, needed_from=one, lookahead=one)
    assert (lookup.window, lookup.num_computed_tokens) == ((1, 16), 1)
    for view in (lookup, lookup.plan):
        assert view.status(one).value == "missing"
        assert view.action(one, "pixel_values").value == "transfer"
    cache.insert(lookup, {one: rows_of("b", 4)})
    assert torch.equal(lookup.rows(one), rows_of("b", 4))
    assert lookup.key(one) == lookup.key(1)
    lookup.shrink(one * 9)
    assert lookup.window == (1, 10)
    cache.announce(req, num_computed_tokens=one)
    cache.commit(req, one)
    assert req.items[1].placeholder.embed_rows(one, one * 3) == (1, 3)
    assert PlaceholderRange(one, one) == PlaceholderRange(1, 1)
    assert FieldConfig.shared("image", one) == FieldConfig.shared("image", 1)
    assert FieldConfig.flat("image", [slice(0, one)], one) == FieldConfig.flat("image", [slice(0, 1)], 1)
    assert FieldConfig.flat_from_sizes("image", [one], one) == FieldConfig.flat_from_sizes("image", [1], 1)
    assert FeatureCache(one).stats().nbytes == 0


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 1.0, np.float32(1), "1", None], ids=repr)
def test_a_truth_value_is_no_integer_and_neither_is_a_fraction(value: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=4096))
    req = request("r", 20, images((0, 4), (6, 4)))
    lookup = cache.lookup(req, num_computed_tokens=0)
    for view in (lookup, lookup.plan):
        for use in (lambda view=view: view.status(value), lambda view=view: view.action(value, "pixel_values")):
            with pytest.raises(RequestError):
                use()
    for use, error in (
        (lambda: lookup.rows(value), RequestError),
        (lambda: lookup.key(value), RequestError),
        (lambda: lookup.shrink(value), WindowError),
        (lambda: cache.commit(req, value), WindowError),
        (lambda: cache.announce(req, num_computed_tokens=value), WindowError),
        (lambda: cache.insert(lookup, {value: rows_of("b", 4)}), EmbeddingError),
        (lambda: PlaceholderRange(value, 4), PlaceholderError),
        (lambda: req.items[0].placeholder.embed_rows(0, value), PlaceholderError),
        (lambda: FieldConfig.shared("image", value), FieldError),
        (lambda: FieldConfig.flat("image", [], value), FieldError),
        (lambda: FieldConfig.flat_from_sizes("image", [value]), FieldError),
        (lambda: CacheConfig(capacity_bytes=value), ConfigError),
        (lambda: CacheConfig(capacity_bytes=1, row_bytes={"image": value}), ConfigError),
        (lambda: FeatureCache(value), ConfigError),
    ):
        with pytest.raises(error):
            use()
    assert lookup.missing == (0, 1)


@pytest.mark.parametrize(
    "window",
    [
        {"num_computed_tokens": -1},
        {"num_computed_tokens": 21},
        {"num_computed_tokens": 1.0},
        {"num_computed_tokens": True},
        {"num_computed_tokens": 0, "num_scheduled_tokens": -1},
        {"num_computed_tokens": 0, "num_scheduled_tokens": "1"},
        {"num_computed_tokens": 0, "needed_from": 21},
        {"num_computed_tokens": 0, "needed_from": -1},
        {"num_computed_tokens": 0, "lookahead": -1},
    ],
)
def test_bad_windows_pin_and_reserve_nothing(window: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    req = request("r", 20, images((0, 4)))
    with pytest.raises(WindowError, match="'r'"):
        cache.lookup(req, **window)
    assert cache.stats().entries == cache.stats().lookups == 0
    assert cache.lookup(req, num_computed_tokens=0).missing == (0,)


def test_what_is_asked_of_an_item_that_is_not_there() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(request("r", 20, images((0, 4))), num_computed_tokens=0)
    for view in (lookup, lookup.plan):
        for index in (-1, 1, "0"):
            with pytest.raises(RequestError, match="'r'"):
                view.status(index)
        with pytest.raises(FieldError, match="nothing"):
            view.action(0, "nothing")
        with pytest.raises(FieldError):
            view.action(0, ["pixel_values"])
    with pytest.raises(FieldError):
        lookup.metadata(["image_grid_thw"])


@pytest.mark.parametrize("num_tokens", [-1, 21, 2.0])
def test_bad_commits(num_tokens: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    with pytest.raises(WindowError):
        cache.commit(request("r", 20), num_tokens)


def test_commits_feed_the_cache_s_own_prefix_index() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, block_size=4))
    req = request("r", 20, images((2, 4), (12, 4)))
    assert cache.lookup(req).num_computed_tokens == 0
    cache.commit(req, 11)
    again = cache.lookup(request("again", 20, images((2, 4), (12, 4))))
    assert again.num_computed_tokens == 8
    assert [again.status(i).value for i in range(2)] == ["covered", "missing"]
    cache.commit(req, 20)
    assert cache.lookup(request("third", 20, images((2, 4), (12, 4)))).num_computed_tokens == 19
    assert cache.lookup(request("other image", 20, images((2, 4), (12, 4), ids="xb"))).num_computed_tokens == 0
    assert cache.lookup(request("other salt", 20, images((2, 4), (12, 4)), salt="s")).num_computed_tokens == 0
