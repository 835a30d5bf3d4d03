"""`encoder_inputs`: only the payload of missing items moves, each content once, joined as the model takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transfer_helpers import KEPT, QWEN, cache_of, flat, image, missing, places, request_of, same, sent

from mmcache.errors import ConfigError, MissingContentError, RequestError
from mmcache.fields import FieldConfig, ItemFields, join_fields, split_fields
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.staging import PinnedRing, Staging
from mmcache.testing import SimulatedDevice
from mmcache.transfer import Transfer, encoder_inputs

torch.set_num_threads(1)

# What moves


def test_only_missing_items_are_sent_and_metadata_stays() -> None:
    cache = cache_of()
    fields = [image(4, seed=i) for i in range(4)]
    request = request_of(fields)
    with cache.lookup(request, num_computed_tokens=0, num_scheduled_tokens=7) as lookup:
        cache.insert(lookup, [torch.ones(4, 4)])
    with (
        SimulatedDevice("cuda:0") as sim,
        cache.lookup(request, num_computed_tokens=0, num_scheduled_tokens=20) as lookup,
    ):
        [batch] = encoder_inputs([lookup], "cuda:0")
        assert lookup.missing == (1, 2)
        assert (batch.modality, batch.items, batch.num_embeds) == ("image", [(lookup, 1), (lookup, 2)], (4, 4))
        assert sorted(batch.kwargs) == ["image_grid_thw", "pixel_values"]
        assert batch.kwargs["pixel_values"].device == sim.device
        assert batch.kwargs["image_grid_thw"].device.type == "cpu"
        assert batch.moved_bytes == lookup.bytes.transfer == sum(move.nbytes for move in sim.moves)
        assert len(sim.moves) == 1
        assert not sim.moves[0].blocks
        assert sim.host_reads == sim.mixes == []
        expected = join_fields(fields[1:3])
        assert all(same(batch.kwargs[name], expected[name]) for name in expected)


def test_nothing_missing_is_no_batch() -> None:
    cache = cache_of()
    request = request_of([image()])
    for window in ((0, 2), (6, 8), (7, 1)):
        with cache.lookup(request, num_computed_tokens=window[0], num_scheduled_tokens=window[1]) as lookup:
            assert encoder_inputs([lookup], "cuda:0") == []
    assert encoder_inputs([], "cpu") == []


def test_what_is_no_lookup_is_refused() -> None:
    with cache_of().lookup(request_of([image()]), num_computed_tokens=0) as lookup:
        transfer = Transfer("cpu")
        for bad in (lookup, None, 7, [None], [lookup, "r"], [lookup.plan], "r"):
            for use in (lambda bad: encoder_inputs(bad, "cpu"), transfer.encoder_inputs):
                with pytest.raises(RequestError, match="lookups"):
                    use(bad)
        assert len(encoder_inputs(iter([lookup]), "cpu")) == 1  # type: ignore[arg-type]


def test_each_content_once_within_and_across_requests() -> None:
    fields = [image(4, seed=s) for s in (0, 1, 0)]
    first = missing(request_of(fields, "p", ["a", "b", "a"]), (0, 1))
    second = missing(request_of([image(4, seed=0), image(4, seed=2)], "q", ["a", "c"]))
    [batch] = encoder_inputs([first, second], "cpu")
    assert places(batch) == [("p", 0), ("p", 1), ("q", 1)]
    assert batch.kwargs["pixel_values"].shape == (12, 6)


def test_requests_of_one_step_share_an_encode() -> None:
    cache = cache_of()
    lookups = [cache.lookup(request_of([image()], name, ["a"]), num_computed_tokens=0) for name in "pqr"]
    [batch] = encoder_inputs(lookups, "cpu")
    assert places(batch) == [("p", 0)]
    for lookup in lookups:
        lookup.release()


@pytest.mark.parametrize("bare", [None, "metadata"])
def test_an_item_to_encode_that_came_as_metadata_only_is_named(bare: str | None) -> None:
    only = None if bare is None else ItemFields({"image_grid_thw": torch.tensor([1, 2, 2])}, {"image_grid_thw": KEPT})
    request = request_of([image(), only, image(), only], "bare")
    with pytest.raises(MissingContentError) as raised:
        encoder_inputs([missing(request)], "cpu")
    assert raised.value.request_id == "bare"
    assert raised.value.items == (1, 3)
    [batch] = encoder_inputs([missing(request, (0, 2))], "cpu")
    assert len(batch.items) == 2


def test_client_given_embeddings_run_no_encoder() -> None:
    given = MultimodalItem("image", image(), PlaceholderRange(0, 4), "given", embeds=torch.ones(4, 4))
    request = MultimodalRequest("r", [0] * 6, [given])
    with cache_of().lookup(request, num_computed_tokens=0) as lookup:
        assert encoder_inputs([lookup], "cpu") == []
        inputs = torch.zeros(6, 4)
        lookup.merge_into(inputs)
        assert inputs[:4].eq(1).all()


SHARED = torch.arange(5.0)
MIXED = {
    "flat": FieldConfig.flat("image", []),
    "wide": FieldConfig.flat("image", [], dim=1),
    "even": FieldConfig.batched("image"),
    "shared": FieldConfig.shared("image", 1),
    "grid": FieldConfig.batched("image", keep_on_cpu=True),
}


def mixed(letter: str) -> ItemFields:
    """Fields of several layouts, decided by a letter; capitals share a field, and vowels have another shape."""
    seed = ord(letter)
    size = 2 if letter.lower() in "aeiou" else 3
    data: dict[str, Any] = {
        "flat": torch.full((seed % 5, 4), float(seed)),
        "wide": torch.full((2, seed % 3 + 1), float(seed)),
        "even": torch.full((size,), float(seed)),
        "grid": torch.tensor([seed]),
    }
    return ItemFields(data | ({"shared": SHARED} if letter.isupper() else {}), MIXED)


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="abcefBCEF", max_size=8), min_size=1, max_size=3),
    windows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=5),
    insert=st.booleans(),
)
def test_the_bytes_that_move_are_the_bytes_of_the_plan(
    texts: list[str], windows: list[tuple[int, int]], insert: bool
) -> None:
    cache = cache_of()
    with SimulatedDevice("cuda:0") as sim:
        staging = Staging(sim.device, PinnedRing(1 << 20))
        for number, text in enumerate(texts):
            request = request_of([mixed(letter) for letter in text], f"r{number}", list(text))
            for start, size in windows:
                sim.clear()
                start = min(start, request.num_tokens)
                with cache.lookup(request, num_computed_tokens=start, num_scheduled_tokens=size) as lookup:
                    planned = lookup.bytes.transfer
                    batches = Transfer("cuda:0", staging=staging).encoder_inputs([lookup])  # nothing is there yet
                    assert sum(b.moved_bytes for b in batches) == planned == sum(m.nbytes for m in sent(sim))
                    assert sorted(i for b in batches for _, i in b.items) == list(lookup.missing)
                    for batch in batches:
                        expected = join_fields([mixed(text[i]) for _, i in batch.items])
                        assert all(same(batch.kwargs[name], value) for name, value in expected.items())
                    if insert:
                        cache.insert(lookup, [torch.ones(4, 4) for _ in lookup.missing])


# Layouts


def items_of(batch: dict[str, Any], configs: dict[str, FieldConfig]) -> list[ItemFields]:
    return split_fields(batch, configs)["image"]


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, FieldConfig]]] = {
    "flat": (
        {"x": torch.randn(9, 4), "n": torch.tensor([2, 3, 4])},
        {"x": FieldConfig.flat_from_sizes("image", [2, 3, 4]), "n": KEPT},
    ),
    "flat along dim 1": (
        {"x": torch.randn(5, 9)},
        {"x": FieldConfig.flat_from_sizes("image", [2, 3, 4], dim=1)},
    ),
    "batched": ({"x": torch.randn(3, 2, 4)}, {"x": FieldConfig.batched("image")}),
    "batched numbers": ({"x": torch.randn(3)}, {"x": FieldConfig.batched("image")}),
    "batched list": (
        {"x": [torch.randn(2, 3), torch.randn(5, 3), torch.randn(1, 3)]},
        {"x": FieldConfig.batched("image")},
    ),
    "nested list of two dtypes": (
        {"x": [[torch.randn(3), torch.arange(4)], [torch.randn(1)], []], "m": [[torch.ones(2)], [], [torch.ones(1)]]},
        {"x": FieldConfig.batched("image"), "m": KEPT},
    ),
    "flat list": (
        {"x": [torch.randn(i + 1) for i in range(6)]},
        {"x": FieldConfig.flat_from_sizes("image", [1, 2, 3])},
    ),
    "shared": (
        {"x": torch.randn(3, 2), "s": torch.randn(7), "k": torch.tensor(1)},
        {
            "x": FieldConfig.batched("image"),
            "s": FieldConfig.shared("image", 3),
            "k": FieldConfig.shared("image", 3, keep_on_cpu=True),
        },
    ),
    "several payload fields": (
        {"x": torch.randn(6, 4), "mask": torch.rand(6, 2) > 0.5, "half": torch.randn(3, 5).half()},
        {
            "x": FieldConfig.flat_from_sizes("image", [1, 2, 3]),
            "mask": FieldConfig.flat_from_sizes("image", [1, 2, 3]),
            "half": FieldConfig.batched("image"),
        },
    ),
    "empty tensors": (
        {"x": torch.randn(4, 3), "e": torch.randn(3, 0)},
        {"x": FieldConfig.flat_from_sizes("image", [0, 4, 0]), "e": FieldConfig.batched("image")},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pick", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("copied", [False, True])
def test_every_layout_joins_as_join_fields_does(layout: str, pick: tuple[int, ...], device: str, copied: bool) -> None:
    batch, configs = LAYOUTS[layout]
    items = items_of(batch, configs)
    if copied:  # items of different batches do not lie behind one another
        items = [items_of(batch, configs)[i] for i in range(3)]
        items = [
            ItemFields(
                {n: cloned(v) for n, v in f.items()},
                {n: f.config(n) for n in f},
                listed=frozenset(n for n in f if f.listed(n)),
            )
            for f in items
        ]
    expected = join_fields([items[i] for i in pick])
    with SimulatedDevice("cuda:0") as sim:
        [result] = encoder_inputs([missing(request_of(items), pick)], device)
        assert list(result.kwargs) == list(expected)
        assert sim.host_reads == sim.mixes == []
        assert not [move for move in sent(sim) if move.blocks]
        for name, value in expected.items():
            where = "cpu" if configs[name].keep_on_cpu else device
            assert all(str(t.device) == where for t in flat(result.kwargs[name]))
            assert same(result.kwargs[name], value)
        moved = [n for n in expected if not configs[n].keep_on_cpu and sum(t.numel() for t in flat(expected[n]))]
        assert len(sent(sim)) == (len(moved) if device != "cpu" else 0)  # one copy a field


def cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else [cloned(v) for v in value]


def test_on_the_cpu_neighbours_join_without_a_copy() -> None:
    pixels = torch.randn(9, 4)
    items = items_of({"x": pixels}, {"x": FieldConfig.flat_from_sizes("image", [2, 3, 4])})
    [batch] = encoder_inputs([missing(request_of(items), (1, 2))], "cpu")
    joined = batch.kwargs["x"]
    assert isinstance(joined, Tensor)
    assert joined.data_ptr() == pixels[2:].data_ptr()
    assert batch.moved_bytes == 0


def test_items_that_do_not_join_go_in_batches_of_their_own() -> None:
    fields = [image(4, 6), image(4, 8), image(6, 6)]
    batches = encoder_inputs([missing(request_of(fields))], "cpu")
    assert [places(b) for b in batches] == [[("r", 0), ("r", 2)], [("r", 1)]]
    sound = MultimodalItem(
        "audio", ItemFields({"x": torch.ones(3)}, {"x": FieldConfig.batched("audio")}), PlaceholderRange(8, 2), "s"
    )
    request = MultimodalRequest("m", [0] * 20, [*request_of([image()]).items, sound])
    assert [b.modality for b in encoder_inputs([missing(request)], "cpu")] == ["image", "audio"]


def test_shared_metadata_that_differs_parts_batches() -> None:
    def clip(flag: bool) -> ItemFields:
        return ItemFields(
            {"x": torch.ones(2), "use": torch.tensor(flag)},
            {"x": FieldConfig.batched("image"), "use": FieldConfig.shared("image", 1, keep_on_cpu=True)},
        )

    batches = encoder_inputs([missing(request_of([clip(True), clip(False), clip(True)]))], "cpu")
    assert [len(b.items) for b in batches] == [2, 1]


def test_a_shared_field_is_sent_once_however_many_batches_have_it() -> None:
    shared = torch.randn(100)
    configs = {"x": FieldConfig.batched("image"), "s": FieldConfig.shared("image", 2)}
    fields = [ItemFields({"x": torch.ones(n), "s": shared}, configs) for n in (2, 3)]
    request = request_of(fields)
    with SimulatedDevice("cuda:0") as sim, cache_of().lookup(request, num_computed_tokens=0) as lookup:
        batches = encoder_inputs([lookup], "cuda:0")
        assert len(batches) == 2
        assert sum(m.nbytes for m in sent(sim)) == lookup.bytes.transfer == 400 + 8 + 12


@pytest.mark.parametrize("device", ["cud", None, "cuda:x"])
def test_a_device_that_does_not_exist_is_named(device: Any) -> None:
    with pytest.raises(ConfigError, match="device"):
        encoder_inputs([missing(request_of([image()]))], device)
    with pytest.raises(ConfigError, match="device"):
        Transfer(device)


def test_batches_of_several_requests_whose_fields_differ() -> None:
    narrow, wide = image(4, 6), image(4, 8, seed=1)
    half = ItemFields({"pixel_values": torch.ones(2, 6).half(), "image_grid_thw": torch.tensor([1, 2, 1])}, QWEN)
    more = ItemFields(
        {"pixel_values": torch.ones(4, 6), "extra": torch.ones(1), "image_grid_thw": torch.tensor([1, 2, 2])},
        {**QWEN, "extra": FieldConfig.batched("image")},
    )
    lookups = [
        missing(request_of([narrow, wide, half], "p")),
        missing(request_of([more, image(6, 6, seed=3)], "q")),
        missing(request_of([image(2, 8, seed=4), half], "s", ["s-0", "p-2"])),
    ]
    for device in ("cpu", "cuda:0"):
        with SimulatedDevice("cuda:0") as sim:
            batches = encoder_inputs(lookups, device)
            assert sim.host_reads == sim.mixes == []
            assert [places(b) for b in batches] == [
                [("p", 0), ("q", 1)],
                [("p", 1), ("s", 0)],
                [("p", 2)],  # the same content again in "s"
                [("q", 0)],
            ]
            for batch in batches:
                expected = join_fields([lookup.request.items[index].fields for lookup, index in batch.items])
                assert all(same(batch.kwargs[name], value) for name, value in expected.items())
