"""The way to the device: staging in pinned memory, what is there already, prefetching, the ring and its events."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transfer_helpers import FLAT, KEPT, cache_of, flat, image, missing, request_of, same, sent

from mmcache.errors import ConfigError, WindowError
from mmcache.fields import FieldConfig, ItemFields, join_fields
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.planning import ItemStatus
from mmcache.staging import PinnedRing, Staging, fill
from mmcache.testing import SimulatedDevice
from mmcache.transfer import EncoderBatch, Transfer, encoder_inputs

torch.set_num_threads(1)

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


@pytest.mark.parametrize("inference", [False, True])
def test_what_the_model_writes_in_inference_mode_is_noticed_too(inference: bool) -> None:
    request = request_of([image(), image(seed=1)])
    with SimulatedDevice("cuda:0") as sim, torch.inference_mode(inference):
        transfer = Transfer("cuda:0", prefetch_bytes=1000, staging=Staging(sim.device, PinnedRing(1 << 20)))
        assert transfer.prefetch([missing(request, (), (0, 2))], 6) == 96
        [first] = transfer.encoder_inputs([missing(request)])
        assert first.moved_bytes == 96
        first.kwargs["pixel_values"].mul_(2)  # type: ignore[union-attr]
        [again] = transfer.encoder_inputs([missing(request)])
        assert again.moved_bytes == 192
        expected = join_fields([request.items[0].fields, request.items[1].fields])  # type: ignore[list-item]
        assert same(again.kwargs["pixel_values"], expected["pixel_values"])


def test_payload_that_requires_grad_arrives_without() -> None:
    with SimulatedDevice("cuda:0") as sim:
        for x in (torch.ones(4, 6), sim.pin(torch.ones(4, 6))):
            [batch] = encoder_inputs(
                [missing(request_of([ItemFields({"x": x.requires_grad_()}, {"x": FLAT})]))], "cuda:0"
            )
            assert not batch.kwargs["x"].requires_grad  # type: ignore[union-attr]


def test_prefetch_leaves_out_what_is_stored_given_or_on_its_way() -> None:
    cache = cache_of()
    fields = [image(4, seed=i) for i in range(4)]
    items = [*request_of(fields[:3]).items]
    items.append(MultimodalItem("image", fields[3], PlaceholderRange(20, 4), "given", embeds=torch.ones(4, 4)))
    request = MultimodalRequest("r", list(range(26)), items)
    other = request_of(fields, "s", ["r-0", "r-1", "s-2", "s-3"])
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", prefetch_bytes=1 << 20, staging=Staging(sim.device, PinnedRing(1 << 20)))
        with cache.lookup(other, num_computed_tokens=0, num_scheduled_tokens=12) as first:
            assert first.missing == (0, 1)
            cache.insert(first, {0: torch.ones(4, 4)})  # stored; item 1 is being encoded
            with cache.lookup(request, num_computed_tokens=0, num_scheduled_tokens=2) as lookup:
                assert [lookup.holds(i) for i in range(4)] == [True, True, False, True]
                assert transfer.prefetch([lookup], 100) == 96
                assert lookup.status(2) is ItemStatus.LATER


@pytest.mark.parametrize("num_tokens", [-1, 1.5, None, True])
def test_prefetch_takes_a_number_of_tokens(num_tokens: Any) -> None:
    for device in ("cpu", "cuda:0"):
        with SimulatedDevice("cuda:0"), pytest.raises(WindowError):
            Transfer(device, prefetch_bytes=1000).prefetch([missing(request_of([image()]), ())], num_tokens)


def test_prefetched_bytes_stay_bounded_over_a_long_chat() -> None:
    shared = torch.ones(50)
    configs = {"pixel_values": FLAT, "s": FieldConfig.shared("image", 1), "list": FieldConfig.batched("image")}
    fields = [
        ItemFields({"pixel_values": torch.full((4, 6), float(i)), "s": shared, "list": [torch.ones(i % 3)]}, configs)
        for i in range(30)
    ]
    request = request_of(fields)
    with SimulatedDevice("cuda:0") as sim:
        transfer = Transfer("cuda:0", prefetch_bytes=250, staging=Staging(sim.device, PinnedRing(1 << 20)))
        for index in range(30):
            window = missing(request, (), (0, 6 * index))
            assert transfer.prefetch([window], 8) == fields[index]["pixel_values"].nbytes + 4 * (index % 3)
            if index % 4 == 0:
                [batch] = transfer.encoder_inputs([missing(request, (index,))])
                assert batch.moved_bytes == shared.nbytes  # the rest is there


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


@pytest.mark.parametrize("first", [True, False])
def test_a_ring_that_was_pinned_in_inference_mode_serves_everybody(first: bool) -> None:
    with SimulatedDevice("cuda:0") as sim:
        staging = Staging(sim.device, PinnedRing(1 << 20))
        for inference in (first, not first):
            with torch.inference_mode(inference):
                staged, region = staging.take((4, 3), torch.bfloat16)
                assert region is not None
                assert not region.buffer.is_inference()  # PyTorch would refuse to write to it elsewhere
                fill(staged, torch.ones(4, 3))
                region.release()
                assert staged.eq(1).all()
