"""Merge, transfer and store together: on the simulated device, with a fake accelerator's streams, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcache.cache import CacheConfig, MultimodalCache
from mmcache.fields import FieldConfig, ItemFields
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.merge import MergePlan, merge_embeddings
from mmcache.staging import PinnedRing, Staging, streams_for
from mmcache.testing import SimulatedDevice
from mmcache.transfer import Transfer, encoder_inputs

torch.set_num_threads(1)

CONFIGS = {"pixel_values": FieldConfig.flat("image", []), "grid": FieldConfig.batched("image", keep_on_cpu=True)}


def request_of(name: str, contents: str) -> MultimodalRequest:
    """An item of 6 tokens, the last of them without a row, for each letter; 2 text tokens before each."""
    items = []
    for number, content in enumerate(contents):
        pixels = torch.full((4, 8), float(ord(content)))
        fields = ItemFields({"pixel_values": pixels, "grid": torch.tensor([1, 2, 2])}, CONFIGS)
        place = PlaceholderRange(8 * number + 2, 6, [True] * 5 + [False])
        items.append(MultimodalItem("image", fields, place, content))
    return MultimodalRequest(name, [0] * (8 * len(contents) + 2), items)


def encode(pixels: Tensor) -> list[Tensor]:
    """An encoder on the device: 5 rows an item, each row the item's letter."""
    return [item.mean() * torch.ones(5, 8, device=pixels.device) for item in pixels.split(4)]


def step(cache: MultimodalCache, requests: list[MultimodalRequest], start: int, size: int, device: str) -> Tensor:
    lookups = [
        cache.lookup(request, num_computed_tokens=min(start, request.num_tokens), num_scheduled_tokens=size)
        for request in requests
    ]
    for batch in encoder_inputs(lookups, device):
        pixels = batch.kwargs["pixel_values"]
        assert isinstance(pixels, Tensor)
        for (lookup, index), rows in zip(batch.items, encode(pixels)):
            cache.insert(lookup, {index: rows})
    plan = MergePlan(lookups)
    inputs = torch.zeros(plan.num_rows, 8, device=device)
    plan.merge_into(inputs)
    for lookup in lookups:
        lookup.release()
    return inputs


def expected(requests: list[MultimodalRequest], start: int, size: int) -> list[int]:
    values = []
    for request in requests:
        letters = [0] * request.num_tokens
        for item in request.items:
            offset = item.placeholder.offset
            letters[offset : offset + 5] = [ord(item.identifier)] * 5
        values += letters[start : start + size]
    return values


@pytest.mark.parametrize("size", [3, 5, 8, 100])
@pytest.mark.parametrize("held_on", ["cpu", "cuda:0"])
def test_a_whole_step_waits_for_nothing_on_the_simulated_device(size: int, held_on: str) -> None:
    with SimulatedDevice("cuda:0") as sim:
        cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, device=held_on))
        requests = [request_of("p", "abc"), request_of("q", "cad")]
        for start in range(0, 26, size):
            inputs = step(cache, requests, start, size, "cuda:0")
            assert sim.mixes == []
            if held_on != "cpu":  # rows that are kept on the host have to be fetched from the device once
                assert sim.host_reads == []
                assert not [move for move in sim.moves if move.blocks]
            assert inputs[:, 3].tolist() == expected(requests, start, size)
            for request in requests:
                cache.commit(request, min(start + size, request.num_tokens))
            sim.clear()


# Streams of an accelerator


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A `torch` module of an accelerator that writes down what is asked of it, with one current stream at a time."""
    log: list[str] = []
    current = ["main"]

    class Stream:
        def __init__(self, name: str = "side", device: Any = None) -> None:
            self.name = name

        def record_event(self, event: Any) -> Any:
            log.append(f"record on {self.name}")
            return event

        def wait_event(self, event: Any) -> None:
            log.append(f"{self.name} waits")

    @contextmanager
    def stream(on: Stream) -> Iterator[None]:
        current.append(on.name)
        yield
        current.pop()

    module = SimpleNamespace(
        is_available=lambda: True,
        Stream=Stream,
        Event=lambda: SimpleNamespace(query=lambda: True),
        stream=stream,
        current_stream=lambda device: Stream(current[-1]),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, on: log.append(f"used on {on.name}"))
    return log


def test_copies_run_on_the_side_stream_and_the_consumer_waits_for_their_event(accelerator: list[str]) -> None:
    with SimulatedDevice("cuda:0") as sim:
        staging = Staging(sim.device, PinnedRing(1 << 16), streams_for(sim.device))
        transfer = Transfer("cuda:0", staging=staging)
        cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
        with cache.lookup(request_of("p", "ab"), num_computed_tokens=0) as lookup:
            transfer.encoder_inputs([lookup])
    assert accelerator == ["record on side", "main waits", "used on main", "record on main"]


def test_row_numbers_that_one_stream_sent_are_awaited_by_the_others(
    accelerator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SimulatedDevice("cuda:0") as sim:
        staging = Staging(sim.device, PinnedRing(1 << 16), streams_for(sim.device))
        monkeypatch.setattr("mmcache.merge.plan.staging_for", lambda device: staging)
        monkeypatch.setattr("mmcache.merge.write.staging_for", lambda device: staging)
        cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
        uneven = PlaceholderRange(0, 20, [n not in (1, 3, 4, 8, 11, 15) for n in range(20)])
        item = MultimodalItem("image", None, uneven, "x", embeds=sim.to_device(torch.ones(14, 8)))
        with cache.lookup(MultimodalRequest("p", [0] * 20, [item]), num_computed_tokens=0) as lookup:
            plan = MergePlan([lookup])
            plan.merge_into(torch.zeros(20, 8, device="cuda:0"))
            assert accelerator == ["record on main", "used on main"]  # their arrival; the rows are read
            accelerator.clear()
            with staging.streams.side():
                plan.merge_into(torch.zeros(20, 8, device="cuda:0"))
            assert accelerator == ["side waits", "used on side", "used on side"]


def test_streams_hear_of_device_memory_only(accelerator: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with SimulatedDevice("cuda:0") as sim:
        staging = Staging(sim.device, PinnedRing(1 << 16), streams_for(sim.device))
        monkeypatch.setattr("mmcache.merge.write.staging_for", lambda device: staging)
        rows = torch.ones(3, 8, requires_grad=True)  # on the host, and autograd has to see the way to the device
        merged = merge_embeddings(torch.zeros(4, 8, device="cuda:0"), rows, torch.tensor([True, True, False, True]))
        assert [line for line in accelerator if line.startswith("used")] == []
        merged.sum().backward()
    assert rows.grad is not None
    assert rows.grad.eq(1).all()


def test_a_device_without_a_module_of_its_own_works_in_order() -> None:
    for device in ("cpu", "meta"):
        streams = streams_for(torch.device(device))
        with streams.side():
            event = streams.record()
        streams.wait(event)
        streams.used(torch.ones(1))
        assert event.query()


# A real GPU


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("lengths", [[256] * 16, [16] * 64, [1] * 500, [3, 1, 7, 2, 90, 4, 4, 5]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_merge_on_a_gpu_never_synchronises(lengths: list[int], dtype: torch.dtype, where: str) -> None:
    flags = [flag for length in lengths for flag in [True] * length + [False]]
    mask = torch.tensor(flags)
    rows = torch.randn(sum(lengths), 512).to(dtype)
    inputs = torch.randn(len(flags), 512, dtype=torch.bfloat16, device="cuda")
    right = inputs.clone()
    right[mask.cuda()] = rows.cuda().to(torch.bfloat16)
    source = rows.to(where)
    merge_embeddings(inputs.clone(), source, mask)  # the ring is pinned at first use
    torch.cuda.synchronize()
    with no_sync():
        merge_embeddings(inputs, source, mask)
    assert torch.equal(inputs, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_whole_step_on_a_gpu_never_synchronises() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, device="cuda:0"))
    requests = [request_of("p", "abc"), request_of("q", "cad")]
    step(MultimodalCache(CacheConfig(capacity_bytes=1 << 20, device="cuda:0")), requests, 0, 100, "cuda:0")
    for start in range(0, 26, 5):
        with no_sync():
            inputs = step(cache, requests, start, 5, "cuda:0")
        assert inputs[:, 3].tolist() == expected(requests, start, 5)
        for request in requests:
            cache.commit(request, min(start + 5, request.num_tokens))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_profiler_sees_no_wait_and_no_pageable_copy_in_a_step() -> None:
    config = CacheConfig(capacity_bytes=1 << 20, device="cuda:0")
    requests = [request_of("p", "abc"), request_of("q", "cad")]
    step(MultimodalCache(config), requests, 0, 100, "cuda:0")  # the ring is pinned, kernels are loaded
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        with torch.profiler.record_function("the step"):
            step(MultimodalCache(config), requests, 0, 100, "cuda:0")
        torch.cuda.synchronize()
    events = profile.events()
    [whole] = [event for event in events if event.name == "the step" and event.device_type.name == "CPU"]
    within = [e for e in events if whole.time_range.start <= e.time_range.start <= whole.time_range.end]
    assert [event.name for event in within if "Synchronize" in event.name] == []
    copies = [event.name for event in events if event.name.startswith("Memcpy")]
    assert copies
    assert [name for name in copies if "Pageable" in name] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_staging_buffer_is_not_refilled_before_its_copy_is_done() -> None:
    ring = PinnedRing(64 << 20)
    transfer = Transfer("cuda:0", staging=Staging(torch.device("cuda:0"), ring))
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    busy = torch.randn(8192, 8192, device="cuda")
    sent = []
    for number in range(12):
        busy @ busy  # queued ahead of everything that reads the result
        pixels = torch.full((3000, 1024), float(number))
        fields = ItemFields({"pixel_values": pixels}, CONFIGS)
        item = MultimodalItem("image", fields, PlaceholderRange(0, 4), f"frame-{number}")
        with cache.lookup(MultimodalRequest(f"r{number}", [0] * 4, [item]), num_computed_tokens=0) as lookup:
            [batch] = transfer.encoder_inputs([lookup])
        sent.append(batch.kwargs["pixel_values"].clone())  # type: ignore[union-attr]
    torch.cuda.synchronize()
    for number, tensor in enumerate(sent):
        assert tensor.eq(number).all()
