"""Requests: tokens and items as they grow, their metadata, and what is refused."""

from __future__ import annotations

import array
import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from builders import image_fields, images, request, rows_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmcache import (
    CacheConfig,
    FieldConfig,
    FieldError,
    ItemFields,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderError,
    PlaceholderRange,
    RequestError,
    encoder_inputs,
    split_fields,
)


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
    lookup.release()
    lookup = cache.lookup(req, num_computed_tokens=6)
    assert [lookup.status(i).value for i in range(3)] == ["covered", "covered", "missing"]


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
    for _ in range(2):
        with pytest.raises(FieldError, match="pixel_values"):
            req.metadata("pixel_values")
        with pytest.raises(FieldError, match="pixel_values"):
            MultimodalCache(CacheConfig(capacity_bytes=1)).lookup(req).metadata("pixel_values")
    # A model asks for the grids of both modalities, whatever a request has.
    assert req.metadata("video_grid_thw") == []
    assert request("r", 40).metadata("image_grid_thw") == []


def sharing(offset: int, identifier: str, value: Any, name: str = "s") -> MultimodalItem:
    """An item from a processor call of its own: 12 bytes, and a value that others may share."""
    configs = {"x": FieldConfig.batched("image"), name: FieldConfig.shared("image", 1)}
    [fields] = split_fields({"x": torch.zeros(1, 3), name: value}, configs)["image"]
    return MultimodalItem("image", fields, PlaceholderRange(offset, 2), identifier)


def transferred(req: MultimodalRequest, num_computed_tokens: int = 0) -> int:
    """What a plan counts, which is what is sent."""
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    with cache.lookup(req, num_computed_tokens=num_computed_tokens) as lookup:
        sent = {id(v): v.nbytes for batch in encoder_inputs([lookup], "cpu") for v in batch.kwargs.values()}  # type: ignore[union-attr]
        assert lookup.bytes.transfer == sum(sent.values())
        assert lookup.bytes.total == lookup.bytes.transfer + lookup.bytes.covered
        return lookup.bytes.transfer


@pytest.mark.parametrize("size", [10, 4000])
def test_equal_shared_values_of_any_turn_count_once(size: int) -> None:
    value = torch.arange(float(size))
    req = MultimodalRequest("r", [1] * 4, [sharing(0, "a", value.clone())])
    req.extend([1] * 4, [sharing(4, "b", value.clone())])
    assert transferred(req) == 2 * 12 + 4 * size
    req.extend([1] * 8, [sharing(8, "c", value.numpy().copy()), sharing(12, "d", value.clone())])
    assert transferred(req) == 4 * 12 + 4 * size
    assert transferred(req, 8) == 2 * 12 + 4 * size  # with the first that is still needed


@pytest.mark.parametrize(
    "other",
    [
        sharing(4, "b", torch.arange(10.0) + 1),
        sharing(4, "b", torch.arange(10, dtype=torch.int32)),
        sharing(4, "b", torch.arange(10.0)[None]),
        sharing(4, "b", torch.arange(10.0), name="t"),
    ],
    ids=["bits", "dtype", "shape", "name"],
)
def test_shared_values_that_differ_in_anything_count_each(other: MultimodalItem) -> None:
    req = MultimodalRequest("r", [1] * 4, [sharing(0, "a", torch.arange(10.0))])
    req.extend([1] * 4, [other])
    assert transferred(req) == 2 * (12 + 40)


def test_a_value_may_be_shared_on_the_cpu_by_some_and_sent_for_others() -> None:
    value = torch.arange(10.0)
    configs = {"x": FieldConfig.batched("image"), "s": FieldConfig.shared("image", 1, keep_on_cpu=True)}
    [fields] = split_fields({"x": torch.zeros(1, 3), "s": value}, configs)["image"]
    kept = MultimodalItem("image", fields, PlaceholderRange(0, 2), "a")
    req = MultimodalRequest("r", [1] * 8, [kept, sharing(4, "b", value)])
    with MultimodalCache(CacheConfig(capacity_bytes=1 << 10)).lookup(req, num_computed_tokens=0) as lookup:
        assert (lookup.bytes.transfer, lookup.bytes.kept_on_cpu) == (2 * 12 + 40, 40)


@pytest.mark.parametrize("copied", [lambda req: pickle.loads(pickle.dumps(req)), copy.deepcopy], ids=["pickle", "copy"])
@pytest.mark.parametrize("size", [10, 4000])
def test_a_request_knows_its_shared_values_again_in_another_process(copied: Any, size: int) -> None:
    value = torch.arange(float(size))
    req = copied(MultimodalRequest("r", [1] * 8, [sharing(0, "a", value), sharing(4, "b", value)]))
    fields = req.items[0].fields
    req.extend([1] * 4, [MultimodalItem("image", fields, PlaceholderRange(8, 2), "c")])
    req.extend([1] * 4, [sharing(12, "d", value.clone())])
    assert transferred(req) == 4 * 12 + 4 * size
    req.extend([1] * 4, [sharing(16, "e", value + 1)])  # wherever it lies, it is another
    assert transferred(req) == 5 * 12 + 2 * 4 * size


def test_a_value_in_the_place_of_one_that_is_gone_is_not_taken_for_it() -> None:
    req = MultimodalRequest("r", [1] * 4, [sharing(0, "a", torch.zeros(10))])
    for turn in range(1, 30):
        req.items[-1] = MultimodalItem("image", None, PlaceholderRange(4 * (turn - 1), 2), req.items[-1].identifier)
        req.extend([1] * 4, [sharing(4 * turn, f"{turn}", torch.full((10,), float(turn)))])
    with MultimodalCache(CacheConfig(capacity_bytes=1 << 20)).lookup(req, num_computed_tokens=0) as lookup:
        assert lookup.bytes.total == 30 * (12 + 40)


def parts(kinds: list[str]) -> list[MultimodalItem]:
    """Items of these kinds, each within eight tokens of its own; all that are "again" are one content."""
    value = torch.arange(10.0)
    made: list[MultimodalItem] = []
    for n, kind in enumerate(kinds):
        fields = image_fields(1)[0]
        place = PlaceholderRange(8 * n + 1, 4)
        if kind == "bare":
            made.append(MultimodalItem("image", None, place, f"{n}"))
        elif kind == "again":
            made.append(MultimodalItem("image", fields, place, "again"))
        elif kind == "gaps":
            made.append(MultimodalItem("image", fields, PlaceholderRange(8 * n + 1, 4, [1, 0, 0, 1]), f"{n}"))
        elif kind == "nested":
            outer = PlaceholderRange(8 * n, 8, [1, 0, 0, 0, 0, 0, 0, 1])
            made.append(MultimodalItem("video", None, outer, f"{n} outer"))
            made.append(MultimodalItem("image", fields, PlaceholderRange(8 * n + 2, 3), f"{n}"))
        elif kind == "rowless":
            made.append(MultimodalItem("image", fields, PlaceholderRange(8 * n + 1, 4, [False] * 4), f"{n}"))
        elif kind == "given":
            made.append(MultimodalItem("image", None, place, f"{n}", embeds=torch.zeros(4, 2)))
        elif kind == "shared":
            made.append(sharing(8 * n + 1, f"{n}", value))
        else:
            made.append(MultimodalItem("image", fields, place, f"{n}"))
    return made


def seen(req: MultimodalRequest) -> list[Any]:
    """What lookups of a request say, from each token on, and what it still pins once these tokens are committed."""
    found: list[Any] = [req.items, req.metadata("image_grid_thw")]
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": 8, "video": 8}, prefix_blocks=0))
    for start in range(req.num_tokens + 1):
        with cache.lookup(req, num_computed_tokens=start) as lookup:
            statuses = [lookup.status(i) for i in range(len(req.items))]
            found.append((statuses, lookup.missing, lookup.bytes))
    with cache.lookup(req, num_computed_tokens=0) as lookup:
        cache.insert(lookup, {i: torch.zeros(req.items[i].placeholder.num_embeds, 2) for i in lookup.missing})
    for committed in range(req.num_tokens + 1):
        cache.commit(req, committed)
        found.append(cache.stats().pinned_bytes)
    return found


KINDS = st.sampled_from(["plain", "bare", "again", "gaps", "nested", "rowless", "given", "shared"])


@given(st.lists(KINDS, max_size=6), st.lists(st.integers(1, 3), max_size=8))
@example(["gaps", "again", "again"], [1, 1, 1])
@settings(max_examples=40, deadline=None)
def test_a_request_is_the_same_however_its_items_came(kinds: list[str], steps: list[int]) -> None:
    items = parts(kinds)
    tokens = list(range(8 * len(kinds) + 2))
    whole = MultimodalRequest("r", tokens, items)
    grown = MultimodalRequest("r", tokens)
    rest = list(items)
    for step in steps:
        grown.extend([], rest[:step])
        del rest[:step]
    grown.extend([], rest)
    assert seen(grown) == seen(whole)
