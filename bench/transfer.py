"""Moving encoder inputs: a chat whose history grows by a frame a turn, and one whose window rolls.

    python bench/transfer.py [--frames N] [--turns N] [--rounds N] [--json FILE]

A frame is `pixel_values` float32 `(5040, 768)`, 15.5 MB, with a grid that stays on the CPU. Reported are the bytes that
move each turn (on the simulated device, or a GPU if there is one), the time of joining and staging the missing bytes as
a ratio to memcpy of as many bytes, a turn without a new frame as a ratio to 26 dict look-ups, and peak memory. Where a
GPU is present: memcpy, a plain pinned copy and `encoder_inputs` end to end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from mmcache.cache import CacheConfig, MultimodalCache
from mmcache.fields import FieldConfig, ItemFields
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.staging import PinnedRing, Staging, fill
from mmcache.testing import SimulatedDevice
from mmcache.transfer import Transfer

PATCHES, PATCH = 5040, 768
TOKENS, HIDDEN = PATCHES // 4, 256
TEXT = 20
FRAME_BYTES = PATCHES * PATCH * 4
DEVICE = "cuda:0"
CONFIGS = {
    "pixel_values": FieldConfig.flat("image", []),
    "image_grid_thw": FieldConfig.batched("image", keep_on_cpu=True),
}


def frame(number: int) -> ItemFields:
    pixels = torch.full((PATCHES, PATCH), float(number))
    return ItemFields({"pixel_values": pixels, "image_grid_thw": torch.tensor([1, 84, 60])}, CONFIGS)


def request_of(name: str, frames: list[tuple[int, ItemFields]]) -> MultimodalRequest:
    """Each frame's tokens, then some text."""
    step = TOKENS + TEXT
    items = [
        MultimodalItem("image", fields, PlaceholderRange(index * step, TOKENS), f"frame-{number}")
        for index, (number, fields) in enumerate(frames)
    ]
    return MultimodalRequest(name, np.zeros(step * len(frames), np.int32), items)


def turn(
    cache: MultimodalCache, transfer: Transfer, request: MultimodalRequest, computed: int, rows: torch.Tensor
) -> dict[str, int]:
    """One step of an engine with an encoder that costs nothing."""
    with cache.lookup(request, num_computed_tokens=computed) as lookup:
        batches = transfer.encoder_inputs([lookup])
        moved = sum(batch.moved_bytes for batch in batches)
        planned, stored = lookup.bytes.transfer, len(lookup.stored)
        for batch in batches:
            cache.insert(lookup, {index: rows for _, index in batch.items})
        inputs = torch.zeros(lookup.window[1] - lookup.window[0], HIDDEN)
        lookup.merge_into(inputs)
        merged = int((inputs[:, 0] != 0).sum()) // TOKENS
    return {"moved": moved, "planned": planned, "stored": stored, "merged": merged}


def workload(kind: str, frames: int, turns: int, transfer: Transfer) -> list[dict[str, int]]:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 30, row_bytes={"image": HIDDEN * 4}))
    rows = torch.ones(TOKENS, HIDDEN)
    history = [(number, frame(number)) for number in range(frames)]
    results = []
    for number in range(turns + 1):
        request = request_of(f"{kind}-{number}", history)
        # A growing history is covered up to its new frame; in a rolling window the prefix behind the oldest misses.
        covered = (frames + number - 1) * (TOKENS + TEXT) if kind == "growing" and number else 0
        results.append(turn(cache, transfer, request, covered, rows))
        cache.finish(request)
        history = [*(history if kind == "growing" else history[1:]), (frames + number, frame(frames + number))]
    return results


def timed(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, list[float]]:
    """Seconds of each call, interleaved: of CPU time, which other work on the machine disturbs least."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return times


def medians(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in timed(calls, rounds, clock).items()}


def join_and_stage(count: int, rounds: int) -> dict[str, float]:
    """Ratio of joining `count` frames in a region of the pinned ring to memcpy of their bytes.

    On a machine that others use too, the best of the rounds says more than their median.
    """
    pixels = [frame(number)["pixel_values"] for number in range(count)]
    joined = torch.cat(pixels)  # type: ignore[arg-type]
    # Both sides in memory from PyTorch, as items and the ring are: numpy's own comes in larger pages.
    source, target = joined.numpy(), torch.empty_like(joined).numpy()
    with SimulatedDevice(DEVICE) as sim:
        staged, _ = Staging(sim.device, PinnedRing(count * FRAME_BYTES)).take((count * PATCHES, PATCH), torch.float32)

    def stage() -> None:
        for number, tensor in enumerate(pixels):
            fill(staged[number * PATCHES : (number + 1) * PATCHES], tensor)  # type: ignore[arg-type]

    times = timed({"memcpy": lambda: np.copyto(target, source), "stage": stage}, rounds)
    return {
        "median": statistics.median(times["stage"]) / statistics.median(times["memcpy"]),
        "best": min(times["stage"]) / min(times["memcpy"]),
    }


def idle_turn(rounds: int) -> float:
    """A turn without a new frame, everything covered, as a ratio to 26 dict look-ups."""
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 30, row_bytes={"image": HIDDEN * 4}))
    small = ItemFields({"pixel_values": torch.zeros(4, 8), "image_grid_thw": torch.tensor([1, 2, 2])}, CONFIGS)
    request = request_of("idle", [(number, small) for number in range(26)])
    transfer = Transfer("cpu")
    names = [item.identifier for item in request.items]
    table = dict.fromkeys(names)
    inputs = torch.zeros(1, HIDDEN)

    def step() -> None:
        with cache.lookup(request, num_computed_tokens=request.num_tokens - 1) as lookup:
            transfer.encoder_inputs([lookup])
            lookup.merge_into(inputs)

    def look_up() -> None:
        for _ in range(100):
            for name in names:
                table[name]

    times = medians({"dict": look_up, "turn": step}, rounds * 50)
    return times["turn"] / (times["dict"] / 100)


def on_gpu(rounds: int) -> dict[str, float]:
    """Seconds for 6 frames: memcpy, a plain pinned copy, and `encoder_inputs` end to end."""
    frames = [(number, frame(number)) for number in range(6)]
    transfer = Transfer(DEVICE)
    pinned = torch.empty(PATCHES * 6, PATCH, pin_memory=True)
    target = torch.empty(PATCHES * 6, PATCH, device=DEVICE)
    source = torch.cat([fields["pixel_values"] for _, fields in frames])  # type: ignore[misc]
    host = torch.empty_like(source)
    number = 0

    def end_to_end() -> None:
        nonlocal number
        number += 1
        cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 30, row_bytes={"image": HIDDEN * 4}))
        with cache.lookup(request_of(f"gpu-{number}", frames), num_computed_tokens=0) as lookup:
            transfer.encoder_inputs([lookup])
        torch.cuda.synchronize()

    def copy() -> None:
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    calls = {"memcpy": lambda: host.copy_(source), "pinned copy": copy, "encoder_inputs": end_to_end}
    return medians(calls, rounds, time.perf_counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--frames", type=int, default=26)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    real = torch.cuda.is_available()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if real else "simulated"}
    for kind in ("growing", "rolling"):
        block: AbstractContextManager[Any] = nullcontext() if real else SimulatedDevice(DEVICE)
        with block:
            staging = Staging(torch.device(DEVICE), PinnedRing(64 << 20))
            turns = workload(kind, arguments.frames, arguments.turns, Transfer(DEVICE, staging=staging))
        report[kind] = turns
        print(
            f"{kind} history of {arguments.frames} frames of {FRAME_BYTES / 1e6:.1f} MB, {arguments.turns} more turns"
        )
        for number, result in enumerate(turns):
            print(
                f"  turn {number:2}: {result['moved'] / FRAME_BYTES:5.2f} frames moved"
                f" (planned {result['planned'] / FRAME_BYTES:5.2f}),"
                f" {result['stored']:2} stored before, {result['merged']:2} merged"
            )
    for count in (1, 6):
        report[f"join and stage {count} frames, ratio to memcpy"] = join_and_stage(count, arguments.rounds)
    report["idle turn, ratio to 26 dict look-ups"] = idle_turn(arguments.rounds)
    if real:
        report["6 frames on the GPU, seconds"] = on_gpu(arguments.rounds)
    report["peak memory, bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for name in list(report)[3:]:
        print(f"{name}: {report[name]}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
