"""ServeGen clients: distributions of a production service, from which requests are drawn.

A client is two files: `NAME-trace.csv`, of each period its first second, rate, coefficient of variation, and family and
two parameters (shape, scale) of the times between arrivals; and `NAME-dataset.json`, of each longer period
distributions `"{value: probability}"` of text tokens, images, tokens of an image and output tokens. Either may be
gzipped. A folder is all clients in it. The files say nothing of which images are equal; `reuse` does.
"""

from __future__ import annotations

import ast
import csv
import heapq
import json
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mmcache.errors import TraceError
from mmcache.replay.lines import OnBadLine, brief, finite, parsed, read_lines
from mmcache.replay.workload import PAYLOAD_BYTES_PER_ROW, Clip, Serial, Turn, tokens_from

__all__ = ["is_servegen", "read_servegen"]

_RECENT = 4096  # images among which one that is seen again is drawn
_COLUMNS = ("text_tokens", "image_count", "image_tokens", "output_tokens")
_STRIDE = 1 << 24  # token ids of one client, before they begin anew


def is_servegen(path: Path) -> bool:
    """Whether the path is a client's file, or a folder of clients."""
    if path.is_dir():
        return bool(_names(path))
    return path.name.removesuffix(".gz").endswith(("-trace.csv", "-dataset.json"))


def read_servegen(path: str | Path, *, seed: int = 0, reuse: float = 0.0, on_bad: OnBadLine = None) -> Iterator[Turn]:
    """Draw the requests of a client, or of all clients of a folder, in the order of their arrival.

    Args:
        path: a folder, or one of a client's two files.
        seed: of everything that is drawn.
        reuse: share of the images that are one of the client's recent ones, instead of new.
        on_bad: told of each line of arrivals that is skipped; None: the first bad line ends the reading.

    Raises:
        TraceError: names the file, the line and what is wrong with it.
    """
    path = Path(path)
    if path.is_dir():
        folder, names = path, _names(path)
    else:
        name = path.name.removesuffix(".gz").removesuffix("-trace.csv").removesuffix("-dataset.json")
        folder, names = path.parent, [name]
    if not names:
        raise TraceError("holds no clients (NAME-trace.csv and NAME-dataset.json)", path=str(path))
    clients = [_client(folder, name, place, seed, reuse, on_bad) for place, name in enumerate(names)]
    return heapq.merge(*clients, key=lambda turn: turn.time or 0.0)


def _names(folder: Path) -> list[str]:
    """The clients of a folder."""
    files = [*folder.glob("*-trace.csv"), *folder.glob("*-trace.csv.gz")]
    return sorted({file.name.removesuffix(".gz").removesuffix("-trace.csv") for file in files})


def _plain_or_packed(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.exists() and not path.exists() else path


def _client(folder: Path, name: str, place: int, seed: int, reuse: float, on_bad: OnBadLine) -> Iterator[Turn]:
    periods = _periods(_plain_or_packed(folder / f"{name}-dataset.json"))
    starts = [start for start, _ in periods]
    # Text seeds are hashed by `random` itself, so they do not depend on the process.
    rng = random.Random(f"{seed} {name}")
    tokens = Serial(place * _STRIDE % (2**31 - 1))
    recent: deque[Clip] = deque(maxlen=_RECENT)
    for count, time in enumerate(_arrivals(_plain_or_packed(folder / f"{name}-trace.csv"), rng, on_bad)):
        sizes = periods[max(0, bisect_right(starts, time) - 1)][1]
        clips = []
        for _ in range(sizes["image_count"](rng)):
            rows = sizes["image_tokens"](rng)
            if recent and rng.random() < reuse:
                clips.append(recent[int(rng.random() * len(recent))])
            elif rows:
                recent.append(Clip(f"{name} {count} {len(clips)}", rows, rows * PAYLOAD_BYTES_PER_ROW))
                clips.append(recent[-1])
        prompt, placed = tokens_from(*clips, tokens(max(1, sizes["text_tokens"](rng))))
        yield Turn(f"{name} {count}", prompt, placed, time, sizes["output_tokens"](rng))


_Draw = Callable[[random.Random], int]


def _periods(path: Path) -> list[tuple[float, dict[str, _Draw]]]:
    """(first second, how to draw each size) of each period, in order."""
    try:
        record = json.loads(b"".join(line for _, line in read_lines(path)))
    except ValueError as error:
        raise TraceError(f"is not JSON: {error}", path=str(path)) from error
    if not isinstance(record, dict) or not record:
        raise TraceError("a data set maps the first second of each period to distributions", path=str(path))
    periods = []
    for start, columns in record.items():
        try:
            second = float(start)
        except ValueError:
            raise TraceError("a period begins at a second", path=str(path), found=brief(start)) from None
        if not isinstance(columns, dict):
            raise TraceError(f"period {start} has no columns", path=str(path), found=brief(columns))
        periods.append((second, {name: _draw(columns.get(name), f"{start}.{name}", path) for name in _COLUMNS}))
    return sorted(periods, key=lambda period: period[0])


def _draw(text: object, field: str, path: Path) -> _Draw:
    """How to draw from `"{value: probability}"`."""

    def bad() -> TraceError:
        return TraceError(
            "a distribution is text of the form {value: probability}", path=str(path), field=field, found=brief(text)
        )

    try:
        table: Any = ast.literal_eval(text) if isinstance(text, str) else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise bad() from None
    if not isinstance(table, dict) or not table:
        raise bad()
    values = list(table)
    weights = [finite(weight) for weight in table.values()]
    if not all(type(value) is int and value >= 0 for value in values):
        raise bad()
    sums = list(accumulate(-1.0 if weight is None or weight < 0 else weight for weight in weights))
    if None in weights or any(weight is not None and weight < 0 for weight in weights) or not sums[-1] > 0:
        raise bad()
    return lambda rng: values[min(len(values) - 1, bisect_right(sums, rng.random() * sums[-1]))]


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """One period of arrivals."""

    start: float
    rate: float
    family: str
    shape: float
    scale: float

    def gap(self, rng: random.Random) -> float:
        """Seconds to the next arrival."""
        if self.family == "Gamma":
            return rng.gammavariate(self.shape, self.scale)
        if self.family == "Weibull":
            return rng.weibullvariate(self.scale, self.shape)
        return rng.expovariate(self.rate)


def _arrivals(path: Path, rng: random.Random, on_bad: OnBadLine) -> Iterator[float]:
    """Seconds of the arrivals; each period ends where the next begins, the last is as long as the one before."""
    period: _Arrivals | None = None
    length = 600.0
    for following in parsed(path, lambda number, line: _row(line, number, path), on_bad):
        if period is not None:
            if following.start <= period.start:
                raise TraceError("periods follow each other", path=str(path), found=f"{following.start:g}")
            length = following.start - period.start
            yield from _within(period, length, rng)
        period = following
    if period is not None:
        yield from _within(period, length, rng)


def _within(period: _Arrivals, length: float, rng: random.Random) -> Iterator[float]:
    if not period.rate:
        return
    time = period.start + period.gap(rng) * rng.random()
    while time < period.start + length:
        yield time
        time += period.gap(rng)


def _row(line: bytes, number: int, path: Path) -> _Arrivals:
    def bad(message: str, found: object) -> TraceError:
        return TraceError(message, path=str(path), line=number, found=brief(found))

    try:
        row = next(csv.reader([line.decode()]))
    except (UnicodeDecodeError, csv.Error) as error:
        raise bad(f"is not a row of text: {error}", line) from error
    if len(row) != 6:
        raise bad("a period has six columns", row)
    try:
        start, rate, _, shape, scale = (float(row[i] or 0) for i in (0, 1, 2, 4, 5))
    except ValueError:
        raise bad("start, rate, variation and the two parameters are numbers", row) from None
    if not all(math.isfinite(value) and value >= 0 for value in (start, rate, shape, scale)):
        raise bad("start, rate and parameters are finite and not negative", row)
    family = row[3].strip()
    if rate and family not in ("Gamma", "Weibull", "Exponential"):
        raise bad("the family is Gamma, Weibull or Exponential", family)
    if rate and family in ("Gamma", "Weibull") and not (shape > 0 and scale > 0):
        raise bad(f"a {family} distribution has positive parameters", row)
    return _Arrivals(start, rate, family, shape, scale)
