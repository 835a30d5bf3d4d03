"""`mmcache audit`: prove the field configs of a model of transformers, or of a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmcache.errors import ConfigError

__all__ = ["add_audit_command", "run_audit"]


def add_audit_command(commands: Any) -> None:
    """Add `audit` to the subparsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="prove where the fields of a model belong: on the device or on the CPU",
        description="Run a model's real encoder on a simulated device, no GPU needed, and report for each field whether"
        " its place is right, with the consumer's file and line. Exit status 1 if a mark is wrong or the consumer lacks"
        " a copy of a field.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_TYPE",
        help="a folder with a config.json and perhaps weights, or a model_type, of which a tiny model is built"
        " (any other name prints which there are)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON of field names and their keep_on_cpu, or what --suggest writes, in place of the marks that ship",
    )
    parser.add_argument(
        "--attention", default="sdpa", choices=("sdpa", "eager"), help="attention to run (default: %(default)s)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the report as JSON (a flag: to standard output, no FILE as in replay and size)",
    )
    parser.add_argument(
        "--suggest",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the config that would be right, as --config takes it, to FILE or standard output",
    )
    parser.set_defaults(run=run_audit)


def run_audit(arguments: argparse.Namespace) -> int:
    """Run `mmcache audit`; returns the exit status.

    Raises:
        MMCacheError: the model or the config is unknown or cannot be read, or transformers is missing.
    """
    from mmcache.audit.consumers import audit_model
    from mmcache.models import field_table

    marks = None if arguments.config is None else _read_marks(Path(arguments.config))
    subject, report = audit_model(arguments.model, marks=marks, attention=arguments.attention)
    import transformers

    head = {
        "model": str(arguments.model),
        "model_type": subject.model_type,
        "consumer": f"transformers {transformers.__version__}",
        "attention": arguments.attention,
        "evidence": str(field_table(subject.model_type).evidence),
    }
    if arguments.json:
        print(json.dumps({**head, **report.as_json()}, indent=1))
    elif arguments.suggest != "-":
        print(f"{subject.model_type}, {head['consumer']}, {arguments.attention} attention; {head['evidence']}")
        print(report)
    if arguments.suggest is not None and not (arguments.json and arguments.suggest == "-"):
        _write_suggestion(arguments.suggest, {"fields": report.suggestion()})
    return report.exit_status


def _read_marks(path: Path) -> dict[str, bool]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    fields = data.get("fields", data) if isinstance(data, Mapping) else data
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{path} is no object of field names", found=type(fields).__name__)
    marks = {}
    for name, value in fields.items():
        mark = value.get("keep_on_cpu", False) if isinstance(value, Mapping) else value
        if not isinstance(mark, bool):
            raise ConfigError(f"in {path}, a field's keep_on_cpu is true or false", field=name, found=repr(mark))
        marks[name] = mark
    return marks


def _write_suggestion(target: str, suggestion: Mapping[str, Any]) -> None:
    text = json.dumps(suggestion, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
