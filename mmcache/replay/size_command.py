"""The command `mmcache size`, and what `mmcache replay --simulate` does."""

from __future__ import annotations

import argparse
from typing import Any

from mmcache.errors import ConfigError, TraceError
from mmcache.replay.arguments import (
    BadLines,
    add_workload_options,
    engine_of,
    refuse_idle,
    targets_of,
    workload_of,
    write_report,
)
from mmcache.replay.costs import parse_size
from mmcache.replay.simulate import simulate
from mmcache.replay.size import size_workload
from mmcache.replay.text import simulation_text, sizing_text

__all__ = ["add_size_command", "run_simulation"]


def add_size_command(commands: Any) -> None:
    """Add `size` to the subparsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "size",
        help="say how much memory for embeddings a workload is worth",
        description="Say what room for embeddings saves on a workload: for LRU exactly, at every capacity, in one pass;"
        " for other policies by simulation at some capacities.",
    )
    parser.add_argument(
        "trace",
        nargs="?",
        default=None,
        metavar="TRACE",
        help="chat or Mooncake lines, or ServeGen (default: the demo that ships)",
    )
    parser.add_argument("--target", type=float, default=None, metavar="X", help="a hit ratio to reach, from 0 to 1")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="simulate it too: lru, gdsf, queue-aware; repeatable",
    )
    parser.add_argument(
        "--capacity", action="append", default=[], metavar="SIZE", help="a point to look at; repeatable"
    )
    parser.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="NAME:SIZE:RATE[:US]",
        help="a place behind the device, as host:64GB:20GB:50; repeatable, fastest first",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--html", metavar="FILE", help="also write a page to FILE")
    parser.add_argument("--skip-bad-lines", action="store_true", help="tell of lines that cannot be read, and go on")
    add_workload_options(parser)
    parser.set_defaults(run=run_size)


def run_size(arguments: argparse.Namespace) -> int:
    """Run `mmcache size`; returns the exit status.

    Raises:
        MMCacheError: the trace cannot be read, or an option is out of range.
    """
    if arguments.target is not None and not 0 < arguments.target <= 1:
        raise ConfigError("a hit ratio lies between 0 and 1", field="target", found=arguments.target)
    if not arguments.policy:
        refuse_idle(arguments, ("slots", "queue", "saturate"), "--policy NAME, which is simulated")
    bad = BadLines()
    name, make_turns = workload_of(arguments, bad)
    engine = engine_of(arguments, policy="lru", tiers=arguments.tier)
    targets = targets_of(arguments)
    for policy in arguments.policy:
        engine_of(arguments, policy=policy)  # raises for an unknown one, before the pass
    sizing = size_workload(
        make_turns,
        engine,
        target=arguments.target,
        policies=list(dict.fromkeys(arguments.policy)),
        capacities=[parse_size(text) for text in arguments.capacity],
    )
    if not sizing.requests:
        raise TraceError("holds no requests", path=name)
    print(sizing_text(name, sizing))
    if bad.count:
        print(bad)
    sizing = sizing.with_skipped(bad.count)
    write_report(*targets, name, {"workload": name, "sizing": sizing.as_json()})
    return 0


def run_simulation(arguments: argparse.Namespace) -> int:
    """Run `mmcache replay --simulate`; returns the exit status.

    Raises:
        MMCacheError: the trace cannot be read, or an option is out of range.
    """
    bad = BadLines()
    name, make_turns = workload_of(arguments, bad)
    policies = list(dict.fromkeys(arguments.policy)) or ["queue-aware"]
    engines = [
        engine_of(arguments, capacity=arguments.capacity, policy=policy, tiers=arguments.tier) for policy in policies
    ]
    targets = targets_of(arguments)
    runs = [simulate(make_turns(), engine) for engine in engines]
    if not runs[0].requests:
        raise TraceError("holds no requests", path=name)
    for run in runs:
        run.skipped_lines = bad.count
    print(simulation_text(name, runs))
    write_report(*targets, name, {"workload": name, "simulations": [run.as_json() for run in runs]})
    return 0
