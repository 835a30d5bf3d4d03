"""The command `mmcache`. Commands live in their rooms and are loaded when they are called."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from mmcache import __version__
from mmcache.errors import MMCacheError

__all__ = ["main"]

# name: (what it does, module, function that adds its parser; the parser's `run` takes the arguments, returns a status)
_COMMANDS = {
    "replay": (
        "run a chat trace on a tiny real model, with the cache and without",
        "mmcache.replay.command",
        "add_replay_command",
    ),
    "size": (
        "say how much memory for embeddings a workload is worth",
        "mmcache.replay.size_command",
        "add_size_command",
    ),
    "audit": (
        "prove where the fields of a model belong: on the device or on the CPU",
        "mmcache.audit.command",
        "add_audit_command",
    ),
    "store": ("look after stored embeddings", "mmcache.tiers.commands", "add_store_commands"),
}


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """The parser; only the wanted command's module is imported, so that help is quick."""
    parser = argparse.ArgumentParser(
        prog="mmcache", description="A prefix-cache-aware cache for the multimodal inputs of LLM serving engines."
    )
    parser.add_argument("--version", action="version", version=f"mmcache {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, module, function) in _COMMANDS.items():
        if name == wanted:
            getattr(importlib.import_module(module), function)(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 and one line on standard error where the input was at fault."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    parsed = _parser(wanted).parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except MMCacheError as error:
        print(f"mmcache: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`); nothing is to be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
