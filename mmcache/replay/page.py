"""One self-contained page that shows a simulation or a sizing: no script, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mmcache.replay.table import size_text, time_text

__all__ = ["write_page"]

_COLOURS = 5
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #4d5763; --paper: #ffffff; --line: #c8ced6;
  --c0: #0b5cad; --c1: #b3430b; --c2: #1a7a3c; --c3: #7a3fb0; --c4: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #adb6c2; --paper: #14171b; --line: #3b434d;
  --c0: #6db3ff; --c1: #ff9a63; --c2: #63d38a; --c3: #cf9bff; --c4: #e6bd55; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 13px; }
svg .axis { stroke: var(--line); stroke-width: 1; } svg .curve { fill: none; stroke-width: 2.5; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .25rem 0; list-style: none; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } p { color: var(--soft); }
""" + "\n".join(
    f".s{i} {{ stroke: var(--c{i}); }} .f{i} {{ fill: var(--c{i}); background: var(--c{i}); }}" for i in range(_COLOURS)
)


def write_page(path: Path, name: str, report: dict[str, Any]) -> None:
    """Write the page of a report, which is what `--json` writes."""
    sections = _sizing(report["sizing"]) if "sizing" in report else _simulations(report["simulations"])
    title = f"mmcache: {name}"
    path.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + "\n</main></body></html>\n",
        encoding="utf-8",
    )


def _sizing(sizing: dict[str, Any]) -> list[str]:
    curves = {"lru (exact)": sizing["lru"], **{f"{p} (simulated)": c for p, c in sizing["simulated"].items()}}
    sections = [f"<p>{_recommendation(sizing)}</p>"]
    for title, field, text in (
        ("Hit ratio by room for embeddings", "hit_ratio", "{:.0%}".format),
        ("Encoder seconds saved", "seconds_saved", "{:,.0f}".format),
        ("Bytes not moved", "bytes_saved", size_text),
    ):
        series = {name: [(p["capacity_bytes"], p[field]) for p in curve] for name, curve in curves.items()}
        sections.append(_chart(title, series, size_text, text, logarithmic=True))
    rows = [
        [
            name,
            size_text(p["capacity_bytes"]),
            f"{p['hit_ratio']:.1%}",
            f"{p['seconds_saved']:,.1f}",
            size_text(p["bytes_saved"]),
        ]
        for name, curve in curves.items()
        for p in curve
    ]
    sections.append(_table("All points", ["policy", "room", "hits", "seconds saved", "not moved"], rows))
    if sizing["tier"]:
        series = {"tier": [(p["capacity_bytes"], p["hit_ratio"]) for p in sizing["tier"]]}
        title = f"A tier behind {size_text(sizing['knee_bytes'])}: hit ratio of what misses there"
        sections.append(_chart(title, series, size_text, "{:.0%}".format, logarithmic=True))
    return sections


def _recommendation(sizing: dict[str, Any]) -> str:
    if sizing["knee_bytes"] is None:
        return "No capacity saves anything: nothing that a prefix does not cover is needed twice."
    text = f"Knee of the curve: {size_text(sizing['knee_bytes'])}. Nothing is gained beyond "
    text += f"{size_text(sizing['working_set_bytes'])}."
    if sizing["target"] is not None:
        reached = "is not reached" if sizing["target_bytes"] is None else f"takes {size_text(sizing['target_bytes'])}"
        text += f" A hit ratio of {sizing['target']:.0%} {reached}."
    return text


def _simulations(runs: list[dict[str, Any]]) -> list[str]:
    head = ["", *(run["policy"] for run in runs)]
    rows = [
        ["room for embeddings", *(size_text(run["capacity_bytes"]) for run in runs)],
        ["requests", *(f"{run['requests']:,}" for run in runs)],
        ["tokens from the prefix", *(f"{run['prefix_ratio']:.1%}" for run in runs)],
        ["hit ratio of embeddings", *(f"{run['hit_ratio']:.1%}" for run in runs)],
        ["encoder runs", *(f"{run['encodes']:,}" for run in runs)],
        ["encoder seconds", *(f"{run['encode_seconds']:,.1f}" for run in runs)],
        *([f"bytes {reason}", *(size_text(run["bytes"][reason]) for run in runs)] for reason in runs[0]["bytes"]),
        ["first token, mean", *(time_text(run["ttft"]["mean"]) for run in runs)],
        ["first token, 99 %", *(time_text(run["ttft"]["p99"]) for run in runs)],
    ]
    sections = [_table("Policies side by side", head, rows)]
    for title, field, text in (
        ("Time to the first token by turn", "ttft", time_text),
        ("Bytes moved by turn", "moved", size_text),
    ):
        series = {run["policy"]: [(row["turn"], row[field]) for row in run["turns"]] for run in runs}
        sections.append(_chart(title, series, "{:.0f}".format, text))
    for run in runs:
        spans = run["series"]
        series = {
            reason: [((i + 0.5) * spans["span_seconds"], bucket[place]) for i, bucket in enumerate(spans["bytes"])]
            for place, reason in enumerate(spans["reasons"])
        }
        title = f"Bytes by reason over time, {run['policy']}"
        sections.append(_chart(title, series, "{:,.0f} s".format, size_text))
    return sections


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<h2>{escape(title)}</h2><div class="wide" tabindex="0"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 280, 76, 28


def _chart(
    title: str, series: dict[str, list[tuple[float, float]]], x_text: Any, y_text: Any, *, logarithmic: bool = False
) -> str:
    """Lines over one axis; x may be logarithmic."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    scale = math.log if logarithmic else float
    low, high = scale(min(x for x, _ in points)), scale(max(x for x, _ in points))
    top = max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = (scale(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + across * (_WIDTH - _LEFT - 12), 12 + (1 - y / top) * (_HEIGHT - _BOTTOM - 12)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for share in (0.0, 0.5, 1.0):
        _, y = place(min(x for x, _ in points), share * top)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_text(share * top))}</text>')
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = low + share * (high - low)
        text = escape(x_text(math.exp(value) if logarithmic else value))
        x = _LEFT + share * (_WIDTH - _LEFT - 12)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    for number, line in enumerate(series.values()):
        where = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(f'<polyline class="curve s{number % _COLOURS}" points="{where}"/>')
        if len(line) <= 12:
            dots = (place(x, y) for x, y in line)
            parts += [f'<circle class="f{number % _COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in dots]
    legend = "".join(f'<li><i class="f{i % _COLOURS}"></i>{escape(name)}</li>' for i, name in enumerate(series))
    return f'<h2>{escape(title)}</h2><ul class="legend">{legend}</ul>{"".join(parts)}</svg>'
