"""The command `mmcache replay`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mmcache.errors import TraceError
from mmcache.replay.arguments import (
    SIMULATION_OPTIONS,
    BadLines,
    add_workload_options,
    refuse_idle,
    targets_of,
    write_report,
)
from mmcache.replay.chat import DEMO_TRACE, read_chat

__all__ = ["add_replay_command"]

_MODEL = "qwen2_5_vl"


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
    parser.add_argument(
        "--model",
        metavar="FAMILY",
        help=f"{families} (default: {_MODEL}); qwen2_audio needs a trace with audio: the demo has pictures",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--html", metavar="FILE", help="also write a page to FILE")
    parser.add_argument("--skip-bad-lines", action="store_true", help="tell of lines that cannot be read, and go on")
    parser.add_argument("--no-cache", action="store_true", help="run without a cache only")
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument("--simulate", action="store_true", help="without a model; sizes stand in for tensors")
    simulation.add_argument("--capacity", metavar="SIZE", help="for embeddings (default: 8GB)")
    simulation.add_argument(
        "--policy", action="append", default=[], metavar="NAME", help="lru, gdsf, queue-aware; repeatable: side by side"
    )
    simulation.add_argument(
        "--tier", action="append", default=[], metavar="NAME:SIZE:RATE[:US]", help="as host:64GB:20GB:50; repeatable"
    )
    add_workload_options(simulation)
    parser.set_defaults(run=run_replay)


def run_replay(arguments: argparse.Namespace) -> int:
    """Run `mmcache replay`; returns the exit status.

    Raises:
        MMCacheError: the trace cannot be read, the model is unknown, an extra is missing, an option has no effect.
    """
    if arguments.simulate:
        refuse_idle(arguments, ("model", "no_cache"), "a real model, a run without --simulate")
        from mmcache.replay.size_command import run_simulation

        return run_simulation(arguments)
    refuse_idle(arguments, SIMULATION_OPTIONS, "--simulate")
    import torch

    from mmcache.replay.live import replay_live
    from mmcache.replay.table import make_console, print_replay

    console = make_console()
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    model = _MODEL if arguments.model is None else arguments.model
    trace = Path(arguments.trace) if arguments.trace is not None else DEMO_TRACE
    # What cannot work fails before the run, not after it: every line is read, and the file can be written.
    bad = BadLines()
    turns = list(read_chat(trace, bad if arguments.skip_bad_lines else None))
    if not turns:
        raise TraceError("holds no requests", path=str(trace))
    target, page = targets_of(arguments)
    # Operations of a tiny model are too small to share: threads would mostly wait for each other.
    torch.set_num_threads(1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=make_console_for_progress(), transient=True) as progress:
        task = progress.add_task(f"{trace.name} on {model}", total=len(turns))
        result = replay_live(
            turns,
            trace=str(trace),
            model=model,
            use_cache=not arguments.no_cache,
            on_turn=lambda turn: progress.advance(task),
        )
    print_replay(result, console)
    if bad.count:
        print(bad)
    write_report(target, page, trace.name, {**result.as_json(), "skipped_lines": bad.count})
    return 1 if result.equal is False else 0


def make_console_for_progress() -> Any:
    """The progress bar goes to standard error, so that the tables can be piped."""
    from rich.console import Console

    return Console(file=sys.stderr)
