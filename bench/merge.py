"""Merging embedding rows into `inputs_embeds`: mmcache against memcpy and against what engines do.

    python bench/merge.py [--rounds N] [--json FILE]
    python bench/merge.py --sweep [--windows N ...] [--widths N ...] [--json FILE]

All ways run in one process on one thread, in another order each round; times are medians of the thread's CPU time,
which other work on the machine disturbs less than the clock on the wall, given as a ratio to a plain copy of the same
bytes into contiguous memory (where dtypes differ: to one converting copy). Short calls are repeated back to back.
Transient memory is the peak of what a call allocates.

`--sweep` holds mmcache against the faster of `inputs[mask] = cat` and cat + `index_copy_`, which both have only the
mask and the sources to start from, over windows, widths, shares of item rows, run lengths, numbers of sources and
dtypes, and prints the worst ratios. What is slower than 1.05 is measured again, longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
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


# Name, run lengths, gap between runs, number of sources and their dtype.
CASES: list[tuple[str, list[int], int, int, torch.dtype]] = [
    ("16 images of 256 rows", [256] * 16, 200, 16, torch.bfloat16),
    ("256 runs of 16 rows", [16] * 256, 15, 16, torch.bfloat16),
    ("one run of 4096 rows", [4096], 1000, 1, torch.bfloat16),
    ("one image of 64 rows", [64], 1000, 1, torch.bfloat16),
    ("64 single rows", [1] * 64, 1, 1, torch.bfloat16),
    ("4096 single rows", [1] * 4096, 1, 16, torch.bfloat16),
    ("float32 into bf16, 16 images", [256] * 16, 200, 16, torch.float32),
    ("float32 into bf16, 256 runs", [16] * 256, 15, 16, torch.float32),
    ("float32 into bf16, one image of 64 rows", [64], 1000, 1, torch.float32),
    ("float32 into bf16, 64 single rows", [1] * 64, 1, 1, torch.float32),
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


def medians(calls: dict[str, Callable[[], object]], rounds: int, batch: float = 2e-3) -> dict[str, float]:
    """Median seconds of CPU time of each call; short calls are repeated for `batch` seconds, or twenty times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeat = {name: max(1, min(20, int(batch / seconds(call, 1)))) for name, call in calls.items()}
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


def cases(rounds: int) -> list[dict[str, Any]]:
    inputs = torch.randn(TOKENS, HIDDEN).to(torch.bfloat16)
    results = []
    for name, lengths, gap, sources, dtype in CASES:
        rows = torch.randn(sum(lengths), HIDDEN).to(dtype)
        calls = ways(inputs, mask_of(lengths, gap), [part.clone() for part in torch.tensor_split(rows, sources)])
        times = medians(calls, rounds)
        written = len(rows) * HIDDEN * inputs.element_size()
        print(f"{name}: {written / 1e6:.1f} MB, plain copy {times['plain copy'] * 1e3:.3f} ms")
        for way, taken in times.items():
            ratio, extra = taken / times["plain copy"], transient_bytes(calls[way])
            results.append({"case": name, "way": way, "ratio": ratio, "seconds": taken, "transient_bytes": extra})
            print(f"  {way:20} {ratio:6.2f} x   {extra / written:6.3f} x the bytes written allocated")
    return results


# The sweep

SHARES: dict[str, float] = {"1 row": 1, "3 rows": 3, "10 %": 0.1, "50 %": 0.5, "100 %": 1.0}
LENGTHS: dict[str, list[int]] = {"1": [1], "2": [2], "16": [16], "mixed": [1, 2, 3, 16, 40], "one run": []}
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
]


def spread(window: int, rows: int, lengths: list[int]) -> Tensor | None:
    """A mask of `rows` True positions in runs of these lengths in turn, gaps at random; None if they do not fit."""
    runs: list[int] = []
    for length in itertools.cycle(lengths or [rows]):
        left = rows - sum(runs)
        if not left:
            break
        runs.append(min(length, left))
    others = window - rows
    if others < len(runs) - 1:
        return None
    cuts = sorted(random.Random(window).sample(range(others + 1), len(runs)))
    mask = torch.zeros(window, dtype=torch.bool)
    for before, cut in enumerate(cuts):
        start = cut + sum(runs[:before])
        mask[start : start + runs[before]] = True
    return mask


def sweep_cases(windows: list[int], widths: list[int]) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
    """What a case is, its mask and the number of its sources."""
    for window, (share, part), (length, lengths) in itertools.product(windows, SHARES.items(), LENGTHS.items()):
        rows = int(part) if "row" in share else max(1, round(window * part))
        mask = spread(window, rows, lengths)
        if mask is None or (lengths and max(lengths) > rows):
            continue
        for width, sources, dtypes in itertools.product(widths, (1, 8, 64), DTYPES):
            if sources <= rows:
                names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
                case = {"window": window, "rows": share, "runs": length, "width": width, "sources": sources}
                yield {**case, "dtypes": " into ".join(names), "_dtypes": dtypes}, mask, sources


def sweep_ratio(case: dict[str, Any], mask: Tensor, sources: int, rounds: int) -> float:
    """mmcache's time over that of the faster of the others."""
    given, wanted = case["_dtypes"]
    rows = torch.randn(int(mask.sum()), case["width"]).to(given)
    parts = [part.clone() for part in torch.tensor_split(rows, sources)]
    inputs = torch.zeros(len(mask), case["width"], dtype=wanted)

    def joined() -> Tensor:
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(inputs.dtype)

    def by_mask() -> None:
        inputs[mask] = joined()

    times = medians(
        {
            "mmcache": lambda: merge_embeddings(inputs, parts, mask),
            "mask": by_mask,
            "index": lambda: inputs.index_copy_(0, mask.nonzero()[:, 0], joined()),
        },
        rounds,
        batch=2e-4,
    )
    case["us"] = times["mmcache"] * 1e6
    return times["mmcache"] / min(times["mask"], times["index"])


def sweep(windows: list[int], widths: list[int], rounds: int) -> list[dict[str, Any]]:
    results = []
    again = 0
    for case, mask, sources in sweep_cases(windows, widths):
        large = int(mask.sum()) * case["width"] > 1 << 22
        ratio = sweep_ratio(case, mask, sources, 5 if large else rounds)
        if ratio > 1.05:
            again += 1
            ratio = sweep_ratio(case, mask, sources, 9 if large else 4 * rounds)
        results.append({**{name: value for name, value in case.items() if name[0] != "_"}, "ratio": ratio})
    results.sort(key=lambda result: -result["ratio"])
    over = sum(result["ratio"] > 1.05 for result in results)
    print(f"{len(results)} cases; {again} measured twice; {over} slower than 1.05 x the fastest other way; the worst:")
    for result in results[:30]:
        named = ", ".join(f"{name} {value}" for name, value in result.items() if name not in ("ratio", "us"))
        print(f"  {result['ratio']:5.2f} x  {result['us']:9.1f} us   {named}")
    print(f"median ratio {statistics.median(result['ratio'] for result in results):.2f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--sweep", action="store_true", help="against the mask method, over many shapes")
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384], help="of the sweep")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512, 4096], help="of the sweep")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = (
        sweep(arguments.windows, arguments.widths, arguments.rounds) if arguments.sweep else cases(arguments.rounds)
    )
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
