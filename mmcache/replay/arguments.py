"""Options that say which workload runs on which simulated engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmcache.errors import ConfigError, TraceError
from mmcache.replay.costs import EngineModel, parse_costs, parse_size, parse_tier
from mmcache.replay.generate import WORKLOADS, generate
from mmcache.replay.page import write_page
from mmcache.replay.traces import read_trace
from mmcache.replay.workload import Turn

__all__ = ["BadLines", "add_workload_options", "engine_of", "targets_of", "workload_of", "write_report"]

_SHOWN = 5


class BadLines:
    """Lines that were skipped: the first ones are told on standard error, all are counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, error: TraceError) -> None:
        """Count one."""
        self.count += 1
        if self.count <= _SHOWN:
            print(f"mmcache: skipped: {error}", file=sys.stderr)


def add_workload_options(parser: Any) -> None:
    """Add the options to a parser or a group of one."""
    defaults = EngineModel()
    parser.add_argument(
        "--generate", choices=WORKLOADS, metavar="NAME", help=f"a made workload: {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="of a made one (default: %(default)s)")
    parser.add_argument(
        "--size",
        type=int,
        default=None,
        metavar="N",
        help="its size: images of a history (26) or window (8), steps of an agent, documents (64), pictures of the"
        " catalogue (5000), frames of a video",
    )
    parser.add_argument("--rate", type=float, default=2.0, metavar="R", help="and a second (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: %(default)s)")
    parser.add_argument(
        "--image-share",
        type=_share,
        default=0.2,
        metavar="X",
        help="of a Mooncake trace's blocks (default: %(default)s)",
    )
    parser.add_argument(
        "--reuse", type=_share, default=0.0, metavar="X", help="share of ServeGen's images seen before (default: 0)"
    )
    parser.add_argument(
        "--row-bytes", type=int, default=defaults.row_bytes, metavar="N", help="of an embedding (default: %(default)s)"
    )
    parser.add_argument(
        "--prefix-blocks",
        type=int,
        default=defaults.prefix_blocks,
        metavar="N",
        help="KV blocks of 16 tokens kept for reuse; 0: none (default: %(default)s)",
    )
    parser.add_argument("--slots", type=int, default=defaults.slots, metavar="N", help="running (default: %(default)s)")
    parser.add_argument("--queue", type=int, default=defaults.queue, metavar="N", help="waiting (default: %(default)s)")
    parser.add_argument("--saturate", action="store_true", help="requests come as soon as the queue has room")
    parser.add_argument(
        "--costs",
        default="",
        metavar="NAME=X,...",
        help="item, row, decode: seconds; link, prefill: bytes, tokens a second",
    )


def engine_of(
    arguments: argparse.Namespace, *, capacity: str = "8GB", policy: str, tiers: Iterable[str] = ()
) -> EngineModel:
    """The engine that the options describe.

    Raises:
        ConfigError: one of them is out of range.
    """
    costs = parse_costs(arguments.costs) if arguments.costs else EngineModel().costs
    return EngineModel(
        capacity_bytes=parse_size(capacity),
        policy=policy,
        row_bytes=arguments.row_bytes,
        prefix_blocks=arguments.prefix_blocks,
        slots=arguments.slots,
        queue=arguments.queue,
        saturate=arguments.saturate,
        tiers=tuple(parse_tier(tier) for tier in tiers),
        costs=costs,
    )


def workload_of(arguments: argparse.Namespace, on_bad: BadLines) -> tuple[str, Callable[[], Iterable[Turn]]]:
    """The workload's name, and a function that gives it anew each time.

    Raises:
        ConfigError: both a trace and a made workload are named, or neither.
    """
    if (arguments.trace is None) == (arguments.generate is None):
        raise ConfigError("either a trace or --generate NAME says what runs")
    if arguments.generate is not None:
        name, seed = arguments.generate, arguments.seed
        size, rate = arguments.size, arguments.rate
        return name, lambda: generate(name, arguments.requests, seed=seed, rate=rate, size=size)
    path = Path(arguments.trace)
    told: list[BadLines] = []

    def read() -> Iterable[Turn]:
        # A trace is read several times; its bad lines are told of and counted once.
        skip = (_ignore if told else on_bad) if arguments.skip_bad_lines else None
        told.append(on_bad)
        return read_trace(
            path, image_share=arguments.image_share, reuse=arguments.reuse, seed=arguments.seed, on_bad=skip
        )

    return path.name, read


def targets_of(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The files that `--json` and `--html` name.

    Raises:
        ConfigError: one of them could not be written; that is found before the run, not after it.
    """
    targets = [None if file is None else Path(file) for file in (arguments.json, arguments.html)]
    for target in targets:
        if target is None:
            continue
        if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
            raise ConfigError(f"{target} cannot be written")
    return targets[0], targets[1]


def write_report(json_file: Path | None, page: Path | None, name: str, report: dict[str, Any]) -> None:
    """Write a report as JSON and as a page, where these are asked for."""
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if page is not None:
        write_page(page, name, report)


def _ignore(error: TraceError) -> None:
    """The line was told of when the trace was read first."""


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value
