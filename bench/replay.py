"""How fast a workload is simulated, and whether memory stays flat: `python bench/replay.py [--traces DIR]`.

Seconds are of one core (CPU time). Memory is what the process holds beyond what it held before, at a fifth of the
workload, when everything that is bounded is full, and at its end. Mooncake traces are run twice: as text, and with a
fifth of their blocks taken as images.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from mmcache.replay.costs import EngineModel
from mmcache.replay.generate import WORKLOADS, generate
from mmcache.replay.simulate import simulate
from mmcache.replay.traces import read_trace
from mmcache.replay.workload import Turn

PAGE = 4096


def resident() -> int:
    """Bytes of memory that the process holds now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except OSError:
        return 0


def watched(turns: Iterable[Turn], every: int, seen: list[int]) -> Iterator[Turn]:
    """The same turns; the memory held is noted each `every` of them."""
    for number, turn in enumerate(turns):
        if number % every == 0:
            seen.append(resident())
        yield turn


def row(name: str, make: Callable[[], Iterable[Turn]], requests: int, engine: EngineModel, repeats: int) -> str:
    seconds, memory = [], []
    for _ in range(repeats):
        seen: list[int] = []
        before, started = resident(), time.process_time()
        run = simulate(watched(make(), max(1, requests // 20), seen), engine)
        seconds.append(time.process_time() - started)
        seen.append(resident())
        memory.append([held - before for held in (seen[len(seen) // 5], seen[-1])])
    took = statistics.median(seconds)
    early, late = memory[0]  # later rounds find what the first one left
    return (
        f"{name:<24} {run.requests:>9,} {took:>8.1f} {1e6 * took / run.requests:>8.0f}"
        f" {early / 1e6:>9.0f} {late / 1e6:>7.0f} {run.hit_ratio:>7.1%} {run.prefix_ratio:>7.1%}"
    )


def traces_in(folder: Path) -> list[Path]:
    """Files of JSON lines, and folders of ServeGen clients."""
    clients = {file.parent for file in folder.rglob("*-trace.csv")}
    return sorted([*folder.rglob("*.jsonl"), *folder.rglob("*.jsonl.gz"), *clients])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=100_000, metavar="N", help="of a made workload (default: %(default)s)"
    )
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: growing; repeatable")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="run every trace in it, too; ServeGen's up to N")
    parser.add_argument("--repeats", type=int, default=1, help="medians of so many rounds (default: %(default)s)")
    arguments = parser.parse_args()
    engine = EngineModel()
    print(f"{'':<24} {'requests':>9} {'seconds':>8} {'us each':>8} {'MB at 1/5':>9} {'at end':>7} {'hits':>7} prefix")
    for name in arguments.workload or ["growing"]:
        make = partial(generate, name, arguments.requests)
        print(row(name, make, arguments.requests, engine, arguments.repeats), flush=True)
    for path in traces_in(arguments.traces) if arguments.traces else []:
        number = arguments.requests if path.is_dir() else sum(1 for _ in read_trace(path))
        for share in (0.0,) if path.is_dir() else (0.0, 0.2):
            label = path.name[:24] if path.is_dir() else f"{path.name[:18]}, {share:.0%}"

            def made(path: Path = path, share: float = share, number: int = number) -> Iterator[Turn]:
                return islice(read_trace(path, image_share=share), number)

            print(row(label, made, number, engine, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
