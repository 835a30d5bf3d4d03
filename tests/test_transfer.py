"""`encoder_inputs`: only the payload of missing items moves, each content once, joined as the model takes it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcache.cache import CacheConfig, MultimodalCache
from mmcache.errors import ConfigError, MissingContentError
from mmcache.fields import FieldConfig, ItemFields, join_fields, split_fields
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.staging import PinnedRing, Staging
from mmcache.testing import Move, SimulatedDevice
from mmcache.transfer import EncoderBatch, Transfer, encoder_inputs

torch.set_num_threads(1)

FLAT = FieldConfig.flat("image", [])
KEPT = FieldConfig.batched("image", keep_on_cpu=True)


def image(rows: int = 4, width: int = 6, seed: int = 0) -> ItemFields:
    """Qwen's layout: flat pixels, and a grid that stays on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return ItemFields(
        {
            "pixel_values": torch.randn(rows, width, generator=generator),
            "image_grid_thw": torch.tensor([1, 2, rows // 2]),
        },
        {"pixel_values": FLAT, "image_grid_thw": KEPT},
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


def missing(request: MultimodalRequest, indices: Sequence[int] | None = None) -> SimpleNamespace:
    """What a transfer asks of a lookup of which these items are missing."""
    indices = range(len(request.items)) if indices is None else indices
    return SimpleNamespace(
        request=request,
        window=(0, request.num_tokens),
        missing=tuple(indices),
        key=lambda i: request.items[i].identifier,
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


def flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in flat(v)]


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


# Staging


@pytest.mark.parametrize("pinned_bytes", [0, 4096, 1 << 20])
def test_without_room_in_pinned_memory_the_way_is_slower_and_right(pinned_bytes: int) -> None:
    fields = [image(50, 100, seed=i) for i in range(3)]
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", staging=Staging(sim.device, PinnedRing(pinned_bytes)))
        [batch] = transfer.encoder_inputs([missing(request_of(fields))])
        assert same(batch.kwargs["pixel_values"], torch.cat([f["pixel_values"] for f in fields]))
        assert transfer.moved_bytes == 60000
        assert transfer.pageable_bytes == (60000 if pinned_bytes < 60000 else 0)


def test_large_fields_go_in_pieces_that_fit_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcache.transfer.sending._PIECE_BYTES", 4096)
    fields = [image(rows, 100, seed=rows) for rows in (50, 2, 4, 30)]
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", staging=Staging(sim.device, PinnedRing(1 << 20)))
        [batch] = transfer.encoder_inputs([missing(request_of(fields))])
        assert same(batch.kwargs["pixel_values"], torch.cat([f["pixel_values"] for f in fields]))
        assert max(m.nbytes for m in sent(sim)) <= 4096
        assert sum(m.nbytes for m in sent(sim)) == 86 * 400
        assert not [m for m in sent(sim) if m.blocks]


def test_tensors_of_any_strides_are_staged_right() -> None:
    base = torch.randn(6, 40)
    fields = [
        ItemFields({"x": x}, {"x": FLAT}) for x in (base.t()[::2], base.t()[1::2], torch.randn(1, 6).expand(5, 6))
    ]
    with SimulatedDevice("cuda:0"):
        [batch] = encoder_inputs([missing(request_of(fields))], "cuda:0")
        assert same(batch.kwargs["x"], torch.cat([f["x"] for f in fields]))


def test_a_pinned_tensor_is_sent_as_it_is() -> None:
    with SimulatedDevice("cuda:0") as sim:
        pinned = sim.pin(torch.randn(4, 6))
        ring = PinnedRing(1 << 20)
        transfer = Transfer("cuda:0", staging=Staging(sim.device, ring))
        [batch] = transfer.encoder_inputs([missing(request_of([ItemFields({"x": pinned}, {"x": FLAT})]))])
        assert same(batch.kwargs["x"], pinned)
        assert [(m.nbytes, m.blocks) for m in sent(sim)] == [(96, False)]
        assert ring.used_bytes == 0


def test_what_is_on_the_device_already_is_not_sent() -> None:
    with SimulatedDevice("cuda:0") as sim:
        here, there = torch.randn(4, 6), sim.to_device(torch.randn(2, 6))
        fields = [ItemFields({"x": x}, {"x": FLAT}) for x in (here, there)]
        [batch] = encoder_inputs([missing(request_of(fields))], "cuda:0")
        assert batch.moved_bytes == 96 == sum(m.nbytes for m in sent(sim))
        assert same(batch.kwargs["x"], torch.cat([here, there.cpu()]))


def test_payload_on_a_device_comes_to_a_cpu_encoder_and_metadata_never_leaves() -> None:
    with SimulatedDevice("cuda:0") as sim:
        fields = ItemFields(
            {
                "x": sim.to_device(torch.ones(2, 2)),
                "grid": [sim.to_device(torch.ones(3)), [sim.to_device(torch.ones(1))]],
            },
            {"x": FLAT, "grid": KEPT},
        )
        request = request_of([fields])
        sim.clear()
        for device in ("cpu", "cuda:0"):
            [batch] = encoder_inputs([missing(request)], device)
            assert str(batch.kwargs["x"].device) == device  # type: ignore[union-attr]
            assert all(t.device.type == "cpu" for t in flat(batch.kwargs["grid"]))
        assert len(sim.moves) == 1


# Again


def test_a_tensor_on_the_device_is_not_sent_again_while_it_lives() -> None:
    fields = [image(4, seed=i) for i in range(3)]
    request = request_of(fields)
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", staging=Staging(sim.device, PinnedRing(1 << 20)))
        [first] = transfer.encoder_inputs([missing(request, (0, 1))])
        [again] = transfer.encoder_inputs([missing(request_of(fields, "s", ["r-0", "r-1", "r-2"]))])
        assert (first.moved_bytes, again.moved_bytes) == (192, 96)
        assert same(again.kwargs["pixel_values"], torch.cat([f["pixel_values"] for f in fields]))
        del first, again
        gc.collect()
        [anew] = transfer.encoder_inputs([missing(request)])
        assert anew.moved_bytes == 288


def test_caches_share_nothing_on_the_device_even_for_one_identifier() -> None:
    first, second = image(seed=1), image(seed=2)  # one content, two models' processors
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", staging=Staging(sim.device, PinnedRing(1 << 20)))
        lookups = [cache_of().lookup(request_of([f], ids=["a"]), num_computed_tokens=0) for f in (first, second)]
        [one], [two] = (transfer.encoder_inputs([lookup]) for lookup in lookups)
        assert same(one.kwargs["pixel_values"], first["pixel_values"])
        assert same(two.kwargs["pixel_values"], second["pixel_values"])
        [both] = transfer.encoder_inputs(lookups)
        assert len(both.items) == 2
        for lookup in lookups:
            lookup.release()


def test_a_tensor_that_the_model_wrote_to_is_sent_again() -> None:
    request = request_of([image()])
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", staging=Staging(sim.device, PinnedRing(1 << 20)))
        [first] = transfer.encoder_inputs([missing(request)])
        first.kwargs["pixel_values"].mul_(2)  # type: ignore[union-attr]
        [again] = transfer.encoder_inputs([missing(request)])
        assert again.moved_bytes == 96
        assert same(again.kwargs["pixel_values"], request.items[0].fields["pixel_values"])  # type: ignore[index]


def test_chunks_move_an_item_when_its_window_comes() -> None:
    cache = cache_of()
    request = request_of([image(seed=i) for i in range(3)])
    moved = []
    with SimulatedDevice("cuda:0"):
        for start in range(0, 20, 4):
            with cache.lookup(request, num_computed_tokens=start, num_scheduled_tokens=4) as lookup:
                batches = encoder_inputs([lookup], "cuda:0")
                moved.append(sum(b.moved_bytes for b in batches))
                assert moved[-1] == lookup.bytes.transfer
                for batch in batches:
                    cache.insert(lookup, {index: torch.ones(4, 4) for _, index in batch.items})
            cache.commit(request, start + 4)
    assert moved == [96, 0, 96, 96, 0]


def test_prefetch_sends_the_next_window_ahead_within_its_bounds() -> None:
    cache = cache_of()
    fields = [image(4, seed=i) for i in range(4)]
    request = request_of(fields)
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", prefetch_bytes=200, staging=Staging(sim.device, PinnedRing(1 << 20)))
        with cache.lookup(request, num_computed_tokens=0, num_scheduled_tokens=8) as lookup:
            [batch] = transfer.encoder_inputs([lookup])
            assert batch.moved_bytes == 96
            assert transfer.prefetch([lookup], 6) == 96  # item 1 begins at token 8
            assert transfer.prefetch([lookup], 6) == 0
            cache.insert(lookup, [torch.ones(4, 4)])
        cache.commit(request, 8)
        with cache.lookup(request, num_computed_tokens=8, num_scheduled_tokens=6) as lookup:
            [batch] = transfer.encoder_inputs([lookup])
            assert batch.moved_bytes == 0
            assert same(batch.kwargs["pixel_values"], fields[1]["pixel_values"])
            assert not [move for move in sent(sim) if move.blocks]
            del batch
            assert transfer.prefetch([lookup], 100) == 192
        small = Transfer("cuda:0", prefetch_bytes=100, staging=Staging(sim.device, PinnedRing(1 << 20)))
        with cache.lookup(request, num_computed_tokens=8, num_scheduled_tokens=6) as lookup:
            assert small.prefetch([lookup], 100) == 192  # one after the other: the older gave way
        with cache.lookup(request, num_computed_tokens=14) as lookup:
            [batch] = small.encoder_inputs([lookup])
            assert batch.moved_bytes == 96
        assert Transfer("cuda:0", prefetch_bytes=95).prefetch([missing(request, ())], 100) == 0
    assert Transfer("cpu", prefetch_bytes=1000).prefetch([missing(request, ())], 100) == 0


@pytest.mark.parametrize("size", [-1, 1.5, True])
def test_sizes_are_counts(size: Any) -> None:
    with pytest.raises(ConfigError):
        Transfer("cpu", prefetch_bytes=size)
    with pytest.raises(ConfigError):
        PinnedRing(size)


# The ring: a buffer is used again only after the copy out of it


class LateEvents:
    """Streams whose events pass when the test says so."""

    def __init__(self) -> None:
        self.events: list[SimpleNamespace] = []
        self.order: list[str] = []

    def side(self) -> Any:
        streams = self

        class Side:
            def __enter__(self) -> None:
                streams.order.append("side")

            def __exit__(self, *exc: object) -> None:
                streams.order.append("back")

        return Side()

    def record(self) -> Any:
        event = SimpleNamespace(passed=False)
        event.query = lambda: event.passed
        self.events.append(event)
        self.order.append("record")
        return event

    def wait(self, event: Any) -> None:
        assert any(event is known for known in self.events)
        self.order.append("wait")

    def used(self, tensor: Tensor) -> None:
        self.order.append("used")


def test_a_region_is_used_again_only_after_its_event() -> None:
    with SimulatedDevice("cuda:0") as sim:
        streams, ring = LateEvents(), PinnedRing(4096)
        transfer = Transfer("cuda:0", staging=Staging(sim.device, ring, streams))

        def send(seed: int) -> EncoderBatch:
            return transfer.encoder_inputs([missing(request_of([image(100, 6, seed)], ids=[f"x{seed}"]))])[0]

        first = send(0)
        assert ring.used_bytes == 2560
        second = send(1)  # the first copy may be under way: no room
        assert transfer.pageable_bytes == 2400
        assert ring.used_bytes == 2560
        for event in streams.events:
            event.passed = True
        assert ring.used_bytes == 0
        third = send(2)
        assert transfer.pageable_bytes == 2400
        for seed, batch in enumerate((first, second, third)):
            assert same(batch.kwargs["pixel_values"], image(100, 6, seed)["pixel_values"])


def test_copies_run_beside_and_the_consumer_waits_for_them() -> None:
    with SimulatedDevice("cuda:0") as sim:
        streams = LateEvents()
        transfer = Transfer("cuda:0", staging=Staging(sim.device, PinnedRing(4096), streams))
        held = transfer.encoder_inputs([missing(request_of([image()]))])
        assert streams.order == ["side", "record", "back", "wait", "used", "record"]
        streams.order.clear()
        transfer.encoder_inputs([missing(request_of([image()]))])  # may run on another stream than the first
        assert streams.order == ["wait", "used", "record"]
        del held


def test_the_ring_hands_out_regions_that_never_overlap() -> None:
    with SimulatedDevice("cuda:0"):
        ring = PinnedRing(8 * 512)
        live: list[Any] = []
        generator = torch.Generator().manual_seed(0)
        taken = refused = 0
        for step in range(800):
            size = int(torch.randint(1, 2000, (1,), generator=generator))
            region = ring.take(size)
            if region is None:
                refused += 1
            else:
                taken += 1
                assert region.buffer.shape == (size,)
                assert region.buffer.is_pinned()
                region.buffer.fill_(step % 251)
                live.append((region, step % 251))
            for held, value in live:
                assert held.buffer.eq(value).all()
            if live and (region is None or step % 3 == 0):
                live.pop(int(torch.randint(0, len(live), (1,), generator=generator)))[0].release()
            assert ring.used_bytes <= ring.limit_bytes
        for held, _ in live:
            held.release()
        assert ring.used_bytes == 0
        assert taken > 200
        assert refused > 40


def test_memory_that_cannot_be_pinned_is_not_needed() -> None:
    if torch.cuda.is_available():
        pytest.skip("memory can be pinned here")
    assert PinnedRing(4096).take(100) is None
    staged, region = Staging(torch.device("meta"), PinnedRing(4096)).take((2, 3), torch.float32)
    assert (staged.shape, region) == ((2, 3), None)


def test_a_failed_write_gives_its_region_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no")

    with SimulatedDevice("cuda:0") as sim:
        ring = PinnedRing(4096)
        transfer = Transfer("cuda:0", staging=Staging(sim.device, ring))
        monkeypatch.setattr("mmcache.transfer.sending.fill", fail)
        with pytest.raises(RuntimeError, match="no"):
            transfer.encoder_inputs([missing(request_of([image()]))])
        assert ring.used_bytes == 0
