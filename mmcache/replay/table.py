"""The tables that `mmcache replay` prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmcache.errors import ConfigError
from mmcache.replay.live import LiveReplay, Measures, TurnResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["count_text", "make_console", "print_replay", "size_text", "time_text"]

_WIDTH = 100
_LEGEND = """
cov: covered, the prefix cache had the item's keys and values; sto: stored, mmcache had its
embedding; miss: missing, the item was encoded. Times to the first token vary from run to run."""


def make_console() -> Console:
    """A console for standard output, at least as wide as the tables: a narrow terminal wraps, but nothing is cut off.

    Raises:
        ConfigError: rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ConfigError("the replay prints with rich: pip install mmcache[demo]") from error
    console = Console(highlight=False)
    return console if console.width >= _WIDTH else Console(highlight=False, width=_WIDTH)


def print_replay(result: LiveReplay, console: Console) -> None:
    """Print the turns, then the totals of both runs and how far their logits are apart."""
    with_cache = result.cached is not None
    console.print(_turn_table(result, with_cache))
    console.print(_LEGEND)
    console.print(_totals_table(result))
    if result.logit_difference is not None:
        same = "the same tokens" if all(turn.same_tokens for turn in result.turns) else "DIFFERENT tokens"
        verdict = "equal" if result.equal else "NOT EQUAL"
        console.print(
            f"Both runs generated {same}; largest difference of logits {result.logit_difference:.1e}"
            f" (float32): {verdict}."
        )


def _turn_table(result: LiveReplay, with_cache: bool) -> Table:
    from rich.table import Table

    which = "with mmcache" if with_cache else "without a cache"
    table = Table(
        title=f"{Path(result.trace).name} on {result.model}, {which}",
        title_justify="left",
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        box=None,
    )
    table.add_column("turn", justify="left", no_wrap=True)
    names = ["prompt\ntokens", "from\nprefix", "items cov/\nsto/miss", "moved", "kept\non CPU"]
    names += ["skipped\ncovered", "skipped\nstored", "pre-\nproc.", "encoder\nruns", "first\ntoken"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if with_cache:
        table.add_column("without\ncache", justify="right", no_wrap=True)
    for turn in result.turns:
        table.add_row(*_turn_row(turn))
    return table


def _turn_row(turn: TurnResult) -> list[str]:
    measures = turn.cached or turn.plain
    row = [
        f"{turn.line} {turn.conversation}",
        f"{measures.prompt_tokens:,}",
        f"{measures.prefix_tokens:,}",
        "/".join(str(measures.items[name]) for name in ("covered", "stored", "missing")),
        size_text(measures.bytes["transferred"]),
        size_text(measures.bytes["kept_on_cpu"]),
        size_text(measures.bytes["covered"]),
        size_text(measures.bytes["stored"]),
        str(measures.preprocessed),
        str(measures.encoder_runs),
        time_text(measures.ttft),
    ]
    return [*row, time_text(turn.plain.ttft)] if turn.cached is not None else row


def _totals_table(result: LiveReplay) -> Table:
    from rich.table import Table

    runs: list[Measures] = [result.plain] if result.cached is None else [result.cached, result.plain]
    table = Table(
        title=f"\nTotals of {count_text(len(result.turns), 'turn')}",
        title_justify="left",
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
        box=None,
    )
    table.add_column("", justify="left")
    if result.cached is not None:
        table.add_column("with mmcache", justify="right")
    table.add_column("without", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("prompt tokens", [f"{run.prompt_tokens:,}" for run in runs]),
        ("tokens from the prefix cache", [f"{run.prefix_tokens:,}" for run in runs]),
    ]
    rows += [
        (f"items {name.replace('_', ' ')}", [f"{run.items.get(name, 0):,}" for run in runs])
        for name in ("covered", "stored", "in_flight", "missing")
    ]
    rows.append(("bytes transferred", [size_text(run.bytes["transferred"]) for run in runs]))
    rows.append(("bytes kept on the CPU", [size_text(run.bytes["kept_on_cpu"]) for run in runs]))
    rows += [
        (f"bytes skipped: {name.replace('_', ' ')}", [size_text(run.bytes.get(name, 0)) for run in runs])
        for name in ("covered", "stored", "in_flight", "later")
    ]
    rows += [
        ("images preprocessed", [f"{run.preprocessed:,}" for run in runs]),
        ("encoder runs", [f"{run.encoder_runs:,}" for run in runs]),
        ("time to first token, mean", [time_text(run.ttft / max(1, len(result.turns))) for run in runs]),
    ]
    for label, values in rows:
        table.add_row(label, *values)
    return table


def count_text(number: int, noun: str) -> str:
    """So many of them: `1 line`, `2,000 lines`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_text(size: int) -> str:
    """Bytes for people: `0`, `24 B`, `18.8 MB`, in powers of ten."""
    if size < 1000:
        return f"{size} B" if size else "0"
    value = float(size)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95 or unit == "TB":
            break
    return f"{value:.1f} {unit}"


def time_text(seconds: float) -> str:
    """Seconds as milliseconds, or as seconds from ten on."""
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
