"""Options that say which workload runs on which simulated engine; one that would have no effect is refused."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mmcache.errors import ConfigError, TraceError
from mmcache.replay.chat import DEMO_TRACE
from mmcache.replay.costs import EngineModel, parse_costs, parse_size, parse_tier
from mmcache.replay.generate import WORKLOADS, generate
from mmcache.replay.page import write_page
from mmcache.replay.table import count_text
from mmcache.replay.traces import kind_of, read_trace
from mmcache.replay.workload import Turn

__all__ = [
    "SIMULATION_OPTIONS",
    "BadLines",
    "add_workload_options",
    "engine_of",
    "refuse_idle",
    "targets_of",
    "workload_of",
    "write_report",
]

_SHOWN = 5
_DEFAULT = EngineModel()
_IMAGE_SHARE = 0.2

SIMULATION_OPTIONS = (
    *("capacity", "policy", "tier", "generate", "requests", "size", "rate", "seed", "image_share", "reuse"),
    *("row_bytes", "prefix_blocks", "slots", "queue", "saturate", "costs"),
)
"""What a run of a real model does not look at."""


class BadLines:
    """Lines that were skipped: the first ones are told on standard error, all are counted."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, error: TraceError) -> None:
        """Count one."""
        self.count += 1
        if self.count <= _SHOWN:
            print(f"mmcache: skipped: {error}", file=sys.stderr)

    def __str__(self) -> str:
        """How many there were, as a sentence."""
        return f"{count_text(self.count, 'line')} {'was' if self.count == 1 else 'were'} skipped."


def add_workload_options(parser: Any) -> None:
    """Add the options to a parser or a group of one. What is not given is None, an empty list or False."""
    parser.add_argument(
        "--generate", choices=WORKLOADS, metavar="NAME", help=f"a made workload: {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="of a made one (default: 1000)")
    parser.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="its size: images of a history (26) or window (8), steps of an agent, documents (64), pictures of the"
        " catalogue (5000), frames of a video",
    )
    parser.add_argument("--rate", type=float, metavar="R", help="and a second (default: 2.0)")
    parser.add_argument("--seed", type=int, metavar="N", help="of all that is drawn (default: 0)")
    parser.add_argument(
        "--image-share",
        type=_share,
        metavar="X",
        help=f"of a Mooncake trace's blocks (default: {_IMAGE_SHARE})",
    )
    parser.add_argument("--reuse", type=_share, metavar="X", help="share of ServeGen's images seen before (default: 0)")
    parser.add_argument("--row-bytes", type=int, metavar="N", help=f"of an embedding (default: {_DEFAULT.row_bytes})")
    parser.add_argument(
        "--prefix-blocks",
        type=int,
        metavar="N",
        help=f"KV blocks of 16 tokens kept for reuse; 0: none (default: {_DEFAULT.prefix_blocks})",
    )
    parser.add_argument("--slots", type=int, metavar="N", help=f"running (default: {_DEFAULT.slots})")
    parser.add_argument("--queue", type=int, metavar="N", help=f"waiting (default: {_DEFAULT.queue})")
    parser.add_argument("--saturate", action="store_true", help="requests come as soon as the queue has room")
    parser.add_argument(
        "--costs",
        metavar="NAME=X,...",
        help="item, row, decode: seconds; link, prefill: bytes, tokens a second",
    )


def refuse_idle(arguments: argparse.Namespace, options: Iterable[str], needs: str) -> None:
    """Refuse options that have no effect in this run.

    Raises:
        ConfigError: one of them was given; names it and what it needs.
    """
    for option in options:
        if _given(arguments, option):
            raise ConfigError(f"--{option.replace('_', '-')} has no effect here: it needs {needs}")


def engine_of(
    arguments: argparse.Namespace, *, capacity: str | None = None, policy: str, tiers: Iterable[str] = ()
) -> EngineModel:
    """The engine that the options describe.

    Raises:
        ConfigError: one of them is out of range.
    """
    numbers = ("row_bytes", "prefix_blocks", "slots", "queue")
    return EngineModel(
        capacity_bytes=_DEFAULT.capacity_bytes if capacity is None else parse_size(capacity),
        policy=policy,
        saturate=arguments.saturate,
        tiers=tuple(parse_tier(tier) for tier in tiers),
        costs=_DEFAULT.costs if arguments.costs is None else parse_costs(arguments.costs),
        **{name: getattr(arguments, name) for name in numbers if _given(arguments, name)},
    )


def workload_of(arguments: argparse.Namespace, on_bad: BadLines) -> tuple[str, Callable[[], Iterable[Turn]]]:
    """The workload's name, and a function that gives it anew each time; the demo's trace where none is named.

    Raises:
        ConfigError: both a trace and a made workload are named, or an option has no effect on the one that is.
        TraceError: the trace cannot be read.
    """
    seed = arguments.seed if _given(arguments, "seed") else 0
    if arguments.generate is not None:
        if arguments.trace is not None:
            raise ConfigError("either a trace or --generate NAME says what runs")
        refuse_idle(arguments, ("image_share",), "a Mooncake trace")
        refuse_idle(arguments, ("reuse",), "a ServeGen trace")
        refuse_idle(arguments, ("skip_bad_lines",), "a trace")
        if arguments.saturate:
            refuse_idle(arguments, ("rate",), "a run without --saturate")
        name, size = arguments.generate, arguments.size
        requests = arguments.requests if _given(arguments, "requests") else 1000
        rate = arguments.rate if _given(arguments, "rate") else 2.0
        generate(name, requests, seed=seed, rate=rate, size=size)  # raises for what is out of range
        return name, lambda: generate(name, requests, seed=seed, rate=rate, size=size)
    refuse_idle(arguments, ("requests", "size", "rate"), "--generate")
    path = DEMO_TRACE if arguments.trace is None else Path(arguments.trace)
    kind = kind_of(path, _ignore if arguments.skip_bad_lines else None)
    if kind == "chat":
        refuse_idle(arguments, ("seed",), "--generate, or a Mooncake or ServeGen trace")
    if kind != "mooncake":
        refuse_idle(arguments, ("image_share",), "a Mooncake trace")
    if kind != "servegen":
        refuse_idle(arguments, ("reuse",), "a ServeGen trace")
    image_share = arguments.image_share if _given(arguments, "image_share") else _IMAGE_SHARE
    told: list[BadLines] = []

    def read() -> Iterable[Turn]:
        # A trace is read several times; its bad lines are told of and counted once.
        skip = (_ignore if told else on_bad) if arguments.skip_bad_lines else None
        told.append(on_bad)
        return read_trace(path, image_share=image_share, reuse=arguments.reuse or 0.0, seed=seed, on_bad=skip)

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


def _given(arguments: argparse.Namespace, option: str) -> bool:
    value = getattr(arguments, option)
    return value is not None and value is not False and value != []


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value
