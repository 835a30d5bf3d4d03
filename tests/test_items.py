"""Placeholder ranges, items and requests: what they are, and what is refused."""

from __future__ import annotations

import array
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from builders import image_fields, images, request, rows_of
from hypothesis import given
from hypothesis import strategies as st

from mmcache import (
    CacheConfig,
    ConfigError,
    EmbeddingError,
    FeatureCache,
    FieldConfig,
    FieldError,
    ItemFields,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderError,
    PlaceholderRange,
    RequestError,
    UnsupportedError,
    WindowError,
)
from mmcache.models import field_configs

# -- ranges --------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 5), st.data())
def test_rows_of_a_masked_range_are_counted_one_by_one(mask: list[bool], offset: int, data: st.DataObject) -> None:
    place = PlaceholderRange(offset, len(mask), torch.tensor(mask, dtype=torch.bool))
    assert place.num_embeds == sum(mask)
    start = data.draw(st.integers(0, len(mask)))
    end = data.draw(st.integers(start, len(mask)))
    assert place.embed_rows(start, end) == (sum(mask[:start]), sum(mask[:end]))
    here = data.draw(st.integers(0, offset + len(mask) + 2))
    rows = [offset + i for i, flag in enumerate(mask) if flag and offset + i >= here]
    assert place.next_row(here) == (rows[0] if rows else None)
    again = pickle.loads(pickle.dumps(place))
    assert again == place
    assert hash(again) == hash(place)
    kept = place.is_embed
    assert (kept is None) == all(mask)
    assert kept is None or kept.tolist() == mask


def test_a_slice_of_a_mask() -> None:
    place = PlaceholderRange(0, 12, [bool(int(c)) for c in "110111011101"])
    assert (place.num_embeds, place.embed_rows(5, 9)) == (9, (4, 7))


def test_a_mask_of_all_true_is_no_mask() -> None:
    assert PlaceholderRange(3, 4, [True] * 4) == PlaceholderRange(3, 4)
    assert PlaceholderRange(3, 4, np.ones(4, bool)).is_embed is None


def test_a_mask_is_copied() -> None:
    mask = torch.tensor([True, False])
    place = PlaceholderRange(0, 2, mask)
    mask[1] = True
    assert place.num_embeds == 1


@pytest.mark.parametrize(
    "arguments",
    [(-1, 2), (0, -2), (0.5, 2), ("0", 2), (True, 2), (0, 2, [True]), (0, 2, [1, 0]), (0, 2, torch.ones(1, 2).bool())],
)
def test_bad_ranges(arguments: Any) -> None:
    with pytest.raises(PlaceholderError):
        PlaceholderRange(*arguments)


@pytest.mark.parametrize("offsets", [(-1, 2), (3, 2), (0, 5)])
def test_offsets_outside_a_range(offsets: tuple[int, int]) -> None:
    with pytest.raises(PlaceholderError, match="found"):
        PlaceholderRange(9, 4).embed_rows(*offsets)


def test_values_do_not_change() -> None:
    place = PlaceholderRange(0, 4)
    item = images((0, 4))[0]
    for owner, name in ((place, "offset"), (place, "runs"), (item, "identifier"), (item, "placeholder")):
        with pytest.raises(AttributeError):
            setattr(owner, name, None)


# -- items ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("image", None, (0, 4), "a"), RequestError),
        (("image", None, PlaceholderRange(0, 4), ""), RequestError),
        (("image", None, PlaceholderRange(0, 4), b"a"), RequestError),
        (("", None, PlaceholderRange(0, 4), "a"), RequestError),
        (("image", {"x": torch.ones(1)}, PlaceholderRange(0, 4), "a"), RequestError),
        (("audio", image_fields(1)[0], PlaceholderRange(0, 4), "a"), RequestError),
    ],
)
def test_bad_items(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        MultimodalItem(*arguments)


def test_what_is_out_of_scope_says_so() -> None:
    with pytest.raises(UnsupportedError, match="cross-attention"):
        MultimodalItem("image", None, None, "a")  # type: ignore[arg-type]
    for embeds in (torch.ones(3, 4, dtype=torch.bfloat16), np.ones((3, 4), np.float32), [[0.5, 1.0]]):
        with pytest.raises(UnsupportedError, match="prompt embeddings"):
            MultimodalRequest("r", embeds)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="mllama"):
        field_configs("mllama", {})


@pytest.mark.parametrize(
    "embeds",
    [
        torch.ones(3, 2),
        torch.ones(4),
        torch.ones(4, 0),
        torch.ones(4, 2).long(),
        torch.ones(4, 2).to_sparse(),
        torch.ones(4, 2, device="meta"),
        [[1.0]] * 4,
    ],
)
def test_given_embeddings_fit_their_placeholder(embeds: Any) -> None:
    with pytest.raises(EmbeddingError):
        MultimodalItem("image", None, PlaceholderRange(0, 4), "a", embeds=embeds)


# -- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        array.array("i", [1, 2, 3]),
        array.array("q", [1, 2, 3]),
        memoryview(array.array("i", [1, 2, 3])),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 3], np.uint8),
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
    ],
)
def test_tokens_of_any_kind_become_one_int32_buffer(tokens: Any) -> None:
    req = MultimodalRequest("r", tokens)
    req.extend(tokens)
    assert req.token_ids.dtype == np.int32
    assert req.token_ids.tolist() == [1, 2, 3, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        req.token_ids[0] = 9


def test_a_buffer_is_copied_so_that_its_owner_may_reuse_it() -> None:
    buffer = np.array([1, 2], np.int32)
    req = MultimodalRequest("r", buffer)
    buffer[:] = 9
    assert req.token_ids.tolist() == [1, 2]


def test_items_may_come_from_an_iterator() -> None:
    req = MultimodalRequest("r", range(20), iter(images((0, 4), (5, 4))))  # type: ignore[arg-type]
    req.extend(range(10), (item for item in images((21, 4), ids="z")))  # type: ignore[arg-type]
    assert [item.identifier for item in req.items] == ["a", "b", "z"]
    with pytest.raises(RequestError, match="'r'"):
        MultimodalRequest("r", range(20), images((0, 4))[0])  # type: ignore[arg-type]


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


def test_requests_items_and_ranges_may_be_of_classes_of_one_s_own() -> None:
    class Range(PlaceholderRange):
        pass

    class Item(MultimodalItem):
        def __init__(self, url: str, *args: Any) -> None:
            super().__init__(*args)
            self.url = url

    class Request(MultimodalRequest):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.priority = 3

    item = Item("file:a", "image", image_fields(1)[0], Range(0, 4), "a")
    req = Request("r", range(20), [item])
    req.extend([1, 2, 3, 4], images((20, 4), ids="b"))
    cache = MultimodalCache(CacheConfig(capacity_bytes=4096))
    with cache.lookup(req) as lookup:
        assert (lookup.missing, lookup.request.priority, lookup.request.items[0].url) == ((0, 1), 3, "file:a")
        cache.insert(lookup, [rows_of("a", 4), rows_of("b", 4)])
    cache.commit(req, 24)
    cache.finish(req)
    assert (pickle.loads(pickle.dumps(images((0, 4))[0])).placeholder) == Range(0, 4)


def test_a_view_of_the_tokens_outlives_extensions() -> None:
    req = MultimodalRequest("r", [1, 2])
    view = req.token_ids
    req.extend(range(100))
    assert view.tolist() == [1, 2]


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [[1]], [2**31], [None], "abc", 5, [1, [2]], np.array([1.0])])
def test_bad_tokens(tokens: Any) -> None:
    with pytest.raises(RequestError, match="'r'"):
        MultimodalRequest("r", tokens)


def test_bad_names() -> None:
    for arguments in ({"request_id": ""}, {"request_id": 3}, {"cache_salt": 3}, {"adapter": b"x"}):
        with pytest.raises(RequestError):
            MultimodalRequest(**({"request_id": "r", "token_ids": [1]} | arguments))


@pytest.mark.parametrize(
    ("items", "error", "item"),
    [
        (lambda: images((5, 4), (0, 4)), RequestError, 1),
        (lambda: images((0, 4), (18, 4)), PlaceholderError, 1),
        (lambda: images((0, 4), (3, 4)), RequestError, 1),
        (lambda: images((0, 10, [True] * 3 + [False] * 4 + [True] * 3), (3, 5)), RequestError, 1),
        (lambda: images((0, 10), (2, 0), (12, 4), (13, 1)), RequestError, 3),
        (lambda: images((0, 4), (10, 5), ids="aa"), RequestError, 1),
        (lambda: [images((0, 4))[0], "item"], RequestError, 1),
    ],
)
def test_a_bad_item_is_named_and_nothing_changes(items: Any, error: type[Exception], item: int) -> None:
    with pytest.raises(error, match="'r'") as info:
        request("r", 20, items())
    assert info.value.item == item
    req = request("r", 20)
    with pytest.raises(error) as info:
        req.extend([], items())
    assert (req.items, req.num_tokens, info.value.item) == ([], 20, item)
    good = images((3, 4))
    req.extend([1], good)
    assert (req.items, req.num_tokens) == (good, 21)


def test_nested_items_are_known_to_later_ones() -> None:
    """Contents that came within another range are contents of the request like the others."""
    outer = [True, True, False, False, False, False]
    req = request("r", 30, images((1, 6, outer), (3, 4), ids="ab"))
    for bad in (images((30, 5), ids="b"), images((30, 4), ids="a")):
        with pytest.raises(RequestError, match="identifier of item"):
            req.extend([1] * 5, bad)
    req.extend([1] * 5, images((30, 4), ids="b"))
    cache = MultimodalCache(CacheConfig(capacity_bytes=4096))
    assert cache.lookup(req, num_computed_tokens=0).missing == (0, 1)
    with pytest.raises(RequestError, match="identifier of item 0"):
        request("r", 30, images((1, 6, outer), (3, 4), (8, 4), (14, 3), ids="abac"))


def test_an_extension_checks_against_what_is_there() -> None:
    req = request("r", 20, images((0, 15, [True] + [False] * 13 + [True]), (3, 4)))
    for bad in (images((2, 1), ids="z"), images((3, 1), ids="z"), images((14, 1), ids="z"), images((16, 4), ids="aa")):
        with pytest.raises(RequestError):
            req.extend([1, 2], bad)
    req.extend([1, 2], images((13, 1), (18, 2), ids="xy"))
    assert req.num_tokens == 22


def test_items_of_one_identifier_are_one_content() -> None:
    def item(offset: int, fields: ItemFields | None, modality: str = "image") -> MultimodalItem:
        return MultimodalItem(modality, fields, PlaceholderRange(offset, 4), "same")

    def fields(value: float, grid: int = 2, dtype: torch.dtype = torch.float32) -> ItemFields:
        return ItemFields(
            {"x": torch.full((3,), value, dtype=dtype), "grid": torch.tensor([grid])},
            {"x": FieldConfig.batched("image"), "grid": FieldConfig.batched("image", keep_on_cpu=True)},
        )

    request("r", 20, [item(0, fields(1.0)), item(5, fields(1.0))])
    for other in (fields(1.0, dtype=torch.float64), fields(1.0, grid=3), None):
        with pytest.raises(RequestError, match="item 1"):
            request("r", 20, [item(0, fields(1.0)), item(5, other)])
    with pytest.raises(RequestError, match="item 1"):
        request("r", 20, [item(0, None), item(5, None, "audio")])


def test_ranges_may_nest_while_rows_do_not() -> None:
    outer = [True, True, False, False, True, False]
    req = request("r", 8, images((1, 6, outer), (3, 2), (6, 1)))
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(req, num_computed_tokens=4)
    assert [lookup.status(i).value for i in range(3)] == ["missing", "missing", "missing"]
    lookup = cache.lookup(req, num_computed_tokens=6)
    assert [lookup.status(i).value for i in range(3)] == ["covered", "covered", "in_flight"]


# -- metadata ------------------------------------------------------------------------------------


def test_metadata_survives_any_hit() -> None:
    req = request("r", 40, images((0, 4), (10, 4), (20, 4)))
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    for computed in (0, 5, 12, 40):
        grids = cache.lookup(req, num_computed_tokens=computed).metadata("image_grid_thw")
        assert [grid.tolist() for grid in grids] == [[1, 2, 2]] * 3
    req.extend([1] * 10, images((42, 4), ids="z"))
    assert len(req.metadata("image_grid_thw")) == 4


def test_metadata_leaves_out_items_without_the_field() -> None:
    audio = ItemFields({"lengths": torch.tensor(3)}, {"lengths": FieldConfig.batched("audio", keep_on_cpu=True)})
    items = [
        *images((0, 4)),
        MultimodalItem("audio", audio, PlaceholderRange(5, 2), "y"),
        MultimodalItem("image", None, PlaceholderRange(8, 2), "z"),
    ]
    req = request("r", 20, items)
    assert len(req.metadata("image_grid_thw")) == len(req.metadata("lengths")) == 1


def test_metadata_of_what_is_not_metadata_is_refused() -> None:
    req = request("r", 40, images((0, 4)))
    for field in ("pixel_values", "nothing"):
        for _ in range(2):
            with pytest.raises(FieldError, match=field):
                req.metadata(field)
            with pytest.raises(FieldError, match=field):
                MultimodalCache(CacheConfig(capacity_bytes=1)).lookup(req).metadata(field)
    assert request("r", 40).metadata("image_grid_thw") == []


# -- windows -------------------------------------------------------------------------------------


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
