"""The command `mmcache replay`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mmcache.errors import ConfigError, TraceError
from mmcache.replay.arguments import add_workload_options, check_writable
from mmcache.replay.chat import DEMO_TRACE, read_chat

__all__ = ["add_replay_command"]


def add_replay_command(commands: Any) -> None:
    """Add `replay` to the subparsers of the command line."""
    from mmcache.engines.transformers import FAMILIES

    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="run a chat trace on a tiny real model, with the cache and without",
        description="Run a chat trace (JSON lines, OpenAI chat messages) on a tiny real model with random weights, with"
        " the cache and without, and show what each turn moved. Exit status 1 if the two runs do not agree. With"
        " --simulate, run any trace or made workload without a model, through the cache's own decisions.",
    )
    parser.add_argument(
        "trace", nargs="?", default=None, metavar="TRACE", help="default: the demo that ships with mmcache"
    )
    families = ", ".join(FAMILIES)
    parser.add_argument("--model", default="qwen2_5_vl", metavar="FAMILY", help=f"{families} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--no-cache", action="store_true", help="run without a cache only")
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument("--simulate", action="store_true", help="without a model; sizes stand in for tensors")
    simulation.add_argument("--capacity", default="8GB", metavar="SIZE", help="for embeddings (default: %(default)s)")
    simulation.add_argument(
        "--policy", action="append", default=[], metavar="NAME", help="lru, gdsf, queue-aware; repeatable: side by side"
    )
    simulation.add_argument(
        "--tier", action="append", default=[], metavar="NAME:SIZE:RATE[:US]", help="as host:64GB:20GB:50; repeatable"
    )
    simulation.add_argument("--html", metavar="FILE", help="also write a page to FILE")
    add_workload_options(simulation)
    parser.set_defaults(run=run_replay)


def run_replay(arguments: argparse.Namespace) -> int:
    """Run `mmcache replay`; returns the exit status.

    Raises:
        MMCacheError: the trace cannot be read, the model is unknown, an extra is missing.
    """
    if arguments.simulate:
        from mmcache.replay.size_command import run_simulation

        return run_simulation(arguments)
    if arguments.generate is not None or arguments.html is not None:
        raise ConfigError("a made workload and a page go with --simulate")
    import torch

    from mmcache.replay.live import replay_live
    from mmcache.replay.table import make_console, print_replay

    console = make_console()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    trace = Path(arguments.trace) if arguments.trace is not None else DEMO_TRACE
    # What cannot work fails before the run, not after it: every line is read, and the file can be written.
    turns = list(read_chat(trace))
    if not turns:
        raise TraceError("holds no requests", path=str(trace))
    target = Path(arguments.json) if arguments.json is not None else None
    check_writable(target)
    # Operations of a tiny model are too small to share: threads would mostly wait for each other.
    torch.set_num_threads(1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console_for_progress(), transient=True) as progress:
        task = progress.add_task(f"{trace.name} on {arguments.model}", total=len(turns))
        result = replay_live(
            turns,
            trace=str(trace),
            model=arguments.model,
            use_cache=not arguments.no_cache,
            on_turn=lambda turn: progress.advance(task),
        )
    print_replay(result, console)
    if target is not None:
        target.write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")
    return 1 if result.equal is False else 0


def make_console_for_progress() -> Any:
    """The progress bar goes to standard error, so that the tables can be piped."""
    from rich.console import Console

    return Console(file=sys.stderr)
