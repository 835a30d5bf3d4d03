"""Lines of a trace, plain or gzipped, and what becomes of those that cannot be read."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from mmcache.errors import TraceError

__all__ = ["OnBadLine", "brief", "finite", "json_object", "parsed", "read_lines"]

OnBadLine: TypeAlias = "Callable[[TraceError], object] | None"
"""Told of each line that is skipped; None: the first bad line ends the reading."""

_Read = TypeVar("_Read")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of each line that is not blank.

    Raises:
        TraceError: the file cannot be read, or ends in the middle of its compressed data.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            # A gzip file says so in its first two bytes, whatever its name.
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            lines = gzip.GzipFile(fileobj=raw) if packed else raw
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TraceError(f"cannot be read: {reason}", path=str(path), line=number + 1 if number else None) from error


def parsed(path: Path, parse: Callable[[int, bytes], _Read], on_bad: OnBadLine) -> Iterator[_Read]:
    """What `parse` makes of each line; where it raises TraceError the line is skipped, if there is an `on_bad`."""
    for number, line in read_lines(path):
        try:
            read = parse(number, line)
        except TraceError as error:
            if on_bad is None:
                raise
            on_bad(error)
        else:
            yield read


def json_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        TraceError: it is none.
    """
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise TraceError(f"is not UTF-8: {error}", path=str(path), line=number) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"is not JSON: {error}", path=str(path), line=number) from error
    if not isinstance(record, dict):
        raise TraceError("a request is a JSON object", path=str(path), line=number, found=type(record).__name__)
    return record


def finite(value: object) -> float | None:
    """The number as a float, or None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def brief(value: object) -> str:
    """The value as it is shown in a complaint."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
