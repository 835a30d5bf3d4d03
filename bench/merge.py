"""Merging embedding rows into `inputs_embeds`: mmcache against memcpy and against what engines do.

    python bench/merge.py [--rounds N] [--json FILE]

All ways run in one process on one thread, in another order each round; times are medians of the thread's CPU time,
which other work on the machine disturbs less than the clock on the wall, given as a ratio to a plain copy of the same
bytes into contiguous memory (where dtypes differ: to one converting copy). Short calls are repeated back to back.
Transient memory is the peak of what a call allocates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which counts allocations, has much to say

import numpy as np
import torch
from torch import Tensor

from mmcache.merge import merge_embeddings

TOKENS, HIDDEN = 8192, 4096


def mask_of(lengths: list[int], gap: int) -> Tensor:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    start = gap
    for length in lengths:
        mask[start : start + length] = True
        start += length + gap
    return mask


def case(name: str, lengths: list[int], gap: int, sources: int, source_dtype: torch.dtype) -> dict[str, Any]:
    count = sum(lengths)
    rows = torch.randn(count, HIDDEN).to(source_dtype)
    parts = [part.clone() for part in rows.split(count // sources)]
    return {"name": name, "mask": mask_of(lengths, gap), "parts": parts, "rows": count}


CASES = [
    case("16 images of 256 rows", [256] * 16, 200, 16, torch.bfloat16),
    case("256 runs of 16 rows", [16] * 256, 15, 16, torch.bfloat16),
    case("one run of 4096 rows", [4096], 1000, 1, torch.bfloat16),
    case("one image of 64 rows", [64], 1000, 1, torch.bfloat16),
    case("64 single rows", [1] * 64, 1, 1, torch.bfloat16),
    case("4096 single rows", [1] * 4096, 1, 16, torch.bfloat16),
    case("float32 into bf16, 16 images", [256] * 16, 200, 16, torch.float32),
    case("float32 into bf16, 256 runs", [16] * 256, 15, 16, torch.float32),
]


def ways(inputs: Tensor, mask: Tensor, parts: list[Tensor]) -> dict[str, Callable[[], object]]:
    rows = torch.cat(parts)
    out = torch.empty(rows.shape, dtype=inputs.dtype)
    index = mask.nonzero()[:, 0]
    if rows.dtype == inputs.dtype:
        source, target = rows.view(torch.int16).numpy(), out.view(torch.int16).numpy()
        copy: Callable[[], object] = lambda: np.copyto(target, source)  # noqa: E731
    else:
        copy = lambda: out.copy_(rows)  # noqa: E731

    def by_mask() -> None:
        inputs[mask] = torch.cat(parts).to(inputs.dtype)

    def by_scatter() -> None:
        inputs.masked_scatter_(mask.unsqueeze(-1), torch.cat(parts).to(inputs.dtype))

    def by_index() -> None:
        inputs.index_copy_(0, index, torch.cat(parts).to(inputs.dtype))

    return {
        "plain copy": copy,
        "mmcache": lambda: merge_embeddings(inputs, parts, mask),
        "cat + index_copy_": by_index,
        "inputs[mask] = cat": by_mask,
        "masked_scatter_": by_scatter,
    }


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of CPU time of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeat = {name: max(1, min(20, int(2e-3 / seconds(call, 1)))) for name, call in calls.items()}
    for _ in range(rounds):
        for name, call in random.sample(list(calls.items()), len(calls)):
            times[name].append(seconds(call, repeat[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def seconds(call: Callable[[], object], repeat: int) -> float:
    start = time.thread_time()
    for _ in range(repeat):
        call()
    return (time.thread_time() - start) / repeat


def transient_bytes(call: Callable[[], object]) -> int:
    """Peak of what PyTorch and numpy allocate during a call."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    call()
    python = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    level = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return python + peak


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    inputs = torch.randn(TOKENS, HIDDEN).to(torch.bfloat16)
    results = []
    for entry in CASES:
        calls = ways(inputs, entry["mask"], entry["parts"])
        times = medians(calls, arguments.rounds)
        written = entry["rows"] * HIDDEN * inputs.element_size()
        print(f"{entry['name']}: {written / 1e6:.1f} MB, plain copy {times['plain copy'] * 1e3:.3f} ms")
        for name, seconds in times.items():
            ratio, extra = seconds / times["plain copy"], transient_bytes(calls[name])
            results.append(
                {"case": entry["name"], "way": name, "ratio": ratio, "seconds": seconds, "transient_bytes": extra}
            )
            print(f"  {name:20} {ratio:6.2f} x   {extra / written:6.3f} x the bytes written allocated")
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
