"""One self-contained page that shows a simulation or a sizing: no script, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mmcache.replay.charts import Axis, Mark, line_chart, stacked_chart
from mmcache.replay.style import STYLE
from mmcache.replay.table import size_text, time_text

__all__ = ["write_page"]

_REASONS = {
    "transfer": "moved to the encoder",
    "covered": "covered by the prefix",
    "stored": "embedding held",
    "in_flight": "being encoded",
    "kept_on_cpu": "kept on the CPU",
}


def _rounded(size: float) -> str:
    """Bytes at a tick, `100 MB`."""
    return size_text(round(size)).replace(".0 ", " ")


_ROOM = Axis("room for embeddings", _rounded, logarithmic=True)
_HITS = Axis("share of the needed items", "{:.0%}".format)
_SAVED = Axis("encoder seconds saved", "{:,.4g}".format)
_BYTES = Axis("bytes", _rounded)


def write_page(path: Path, name: str, report: dict[str, Any]) -> None:
    """Write the page of a report, which is what `--json` writes."""
    if "sizing" in report:
        title, sections = f"Sizing for {name}", _sizing(report["sizing"])
    elif "simulations" in report:
        title, sections = f"Simulation of {name}", _simulations(report["simulations"])
    else:
        title, sections = f"{name} on {report['model']}", _live(report)
    path.write_text(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - mmcache</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>\n'
        f'<body><main><p class="brand">mmcache</p><h1>{escape(title)}</h1>\n'
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n",
        encoding="utf-8",
    )


# -- sizing ------------------------------------------------------------------------------------------------------------


def _sizing(sizing: dict[str, Any]) -> list[str]:
    curves = {"lru (exact)": sizing["lru"], **{f"{p} (simulated)": c for p, c in sizing["simulated"].items()}}
    marks = []
    if sizing["knee_bytes"] is not None:
        marks.append(Mark(sizing["knee_bytes"], f"knee {size_text(sizing['knee_bytes'])}"))
    if sizing["target_bytes"] is not None:
        text = f"{sizing['target']:.0%} at {size_text(sizing['target_bytes'])}"
        marks.append(Mark(sizing["target_bytes"], text))

    def chart(title: str, field: str, y: Axis) -> str:
        series = {name: [(p["capacity_bytes"], p[field]) for p in curve] for name, curve in curves.items()}
        return line_chart(title, _ROOM, y, series, marks)

    charts = [
        chart("Hit ratio", "hit_ratio", _HITS),
        chart("Encoder seconds saved", "seconds_saved", _SAVED),
        chart("Bytes not moved", "bytes_saved", _BYTES),
    ]
    charts += [_tier_chart(tier, sizing["knee_bytes"]) for tier in sizing["tiers"]]
    return [
        f'<p class="lead">{escape(_recommendation(sizing))}</p>',
        _facts(_sizing_facts(sizing)),
        _grid("What room for embeddings saves", charts),
        _note(
            "LRU is exact at every point, from one pass over the requests one after the other; other policies are"
            " simulated at some. Room, hits and seconds are about items that no prefix covers."
        ),
        _points_table(curves, sizing),
    ]


def _recommendation(sizing: dict[str, Any]) -> str:
    if sizing["knee_bytes"] is None:
        text = "No room for embeddings saves anything: nothing that a prefix does not cover is needed twice."
    else:
        text = f"Take {size_text(sizing['knee_bytes'])}: more than that gains least."
    if sizing["target"] is not None and sizing["target_bytes"] is None:
        text += f" A hit ratio of {sizing['target']:.0%} is not reached."
    return text


def _sizing_facts(sizing: dict[str, Any]) -> list[tuple[str, str]]:
    at_knee = [point for point in sizing["lru"] if point["capacity_bytes"] == sizing["knee_bytes"]]
    facts = [("requests", f"{sizing['requests']:,}"), ("items needed", f"{sizing['needed']:,}")]
    if at_knee:
        facts += [
            ("knee", size_text(sizing["knee_bytes"])),
            ("hit ratio there", f"{at_knee[0]['hit_ratio']:.1%}"),
            ("encoder time saved there", time_text(at_knee[0]["seconds_saved"])),
            ("no gain beyond", size_text(sizing["working_set_bytes"])),
        ]
    if sizing["target_bytes"] is not None:
        facts.append((f"for {sizing['target']:.0%} hits", size_text(sizing["target_bytes"])))
    facts.append(("saved by the prefix alone", time_text(sizing["covered_seconds"])))
    if sizing["skipped_lines"]:
        facts.append(("lines skipped", f"{sizing['skipped_lines']:,}"))
    return facts


def _tier_chart(tier: dict[str, Any], knee: int) -> str:
    if not any(point["hit_ratio"] for point in tier["points"]):
        return ""
    series = {tier["name"]: [(p["capacity_bytes"], p["hit_ratio"]) for p in tier["points"]]}
    room = Axis(f"room in {tier['name']}", _ROOM.text, logarithmic=True)
    title = f"{tier['name']}, behind {size_text(knee)} on the device"
    return line_chart(title, room, Axis("share of what misses before it", _HITS.text), series)


def _points_table(curves: dict[str, Any], sizing: dict[str, Any]) -> str:
    named = dict(curves)
    for policy, tiers in sizing["simulated_tiers"].items():
        named |= {f"{policy}, from {tier}": curve for tier, curve in tiers.items()}
    rows = [
        [
            name,
            size_text(p["capacity_bytes"]),
            f"{p['hit_ratio']:.1%}",
            f"{p['seconds_saved']:,.1f}",
            size_text(p["bytes_saved"]),
        ]
        for name, curve in named.items()
        for p in curve
    ]
    table = _table(["policy", "room", "hits", "seconds saved", "not moved"], rows)
    return f"<details><summary>All points</summary>{table}</details>"


# -- simulations -------------------------------------------------------------------------------------------------------


def _simulations(runs: list[dict[str, Any]]) -> list[str]:
    first = runs[0]
    turn = Axis("turn of its conversation", "{:.0f}".format)
    by_turn = [
        line_chart(title, turn, y, {run["policy"]: [(row["turn"], row[field]) for row in run["turns"]] for run in runs})
        for title, field, y in (
            ("Time to the first token", "ttft", Axis("mean", time_text)),
            ("Bytes moved a request", "moved", Axis("mean", _BYTES.text)),
        )
    ]
    times = Axis("simulated time", lambda seconds: f"{seconds:,.0f} s")
    over_time = []
    for run in runs:
        span = run["series"]["span_seconds"]
        series = {
            _REASONS[reason]: [((i + 0.5) * span, bucket[place]) for i, bucket in enumerate(run["series"]["bytes"])]
            for place, reason in enumerate(run["series"]["reasons"])
        }
        title = f"Bytes by reason, {run['policy']}" if len(runs) > 1 else "Bytes by reason"
        over_time.append(stacked_chart(title, times, Axis(f"bytes in {span:g} s", _BYTES.text), series))
    facts = [
        ("requests", f"{first['requests']:,}"),
        ("items", f"{sum(first['items'].values()):,}"),
        ("room for embeddings", size_text(first["capacity_bytes"])),
        ("tokens from the prefix", f"{first['prefix_ratio']:.1%}"),
        ("if every item were encoded", time_text(first["plain_encode_seconds"])),
    ]
    return [
        f'<p class="lead">{escape(_summary(runs))}</p>',
        _facts(facts),
        f"<h2>{'Policies side by side' if len(runs) > 1 else 'In numbers'}</h2>",
        _table(["", *(run["policy"] for run in runs)], _comparison(runs)),
        _grid("Turn by turn", by_turn),
        _grid("Over time", over_time),
        _note(
            "Hits and bytes are decisions of the cache's own ledger and policies. Times come from the cost model"
            " (--costs): set your engine's before you read them."
        ),
    ]


def _summary(runs: Sequence[dict[str, Any]]) -> str:
    best = min(runs, key=lambda run: run["encode_seconds"])
    plain = best["plain_encode_seconds"]
    share = best["bytes"]["transfer"] / max(1, best["total_bytes"])
    kept = 1 - best["encode_seconds"] / plain if plain else 0.0
    return (
        f"{best['policy']} moves {share:.1%} of the bytes and spares {kept:.1%} of the encoder's time;"
        f" of the items that no prefix covers {best['hit_ratio']:.1%} run no encoder."
    )


def _comparison(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    def row(title: str, text: Callable[[dict[str, Any]], str]) -> list[str]:
        return [title, *map(text, runs)]

    rows = [
        row("hit ratio of embeddings", lambda run: f"{run['hit_ratio']:.1%}"),
        row("encoder runs", lambda run: f"{run['encodes']:,}"),
        row("encoder time", lambda run: time_text(run["encode_seconds"])),
        row("first token, mean", lambda run: time_text(run["ttft"]["mean"])),
        row("first token, 99 %", lambda run: time_text(run["ttft"]["p99"])),
        row("evicted", lambda run: f"{sum(run['evictions'].values()):,}"),
        row("served uncached", lambda run: f"{sum(run['uncached'].values()):,}"),
        row("most room used", lambda run: size_text(run["most_used_bytes"])),
    ]
    tiers = dict.fromkeys(tier for run in runs for tier in run["tier_hits"])
    rows += [row(f"loaded from {tier}", lambda run, tier=tier: f"{run['tier_hits'].get(tier, 0):,}") for tier in tiers]  # type: ignore[misc]
    rows += [
        row(f"bytes {name}", lambda run, reason=reason: size_text(run["bytes"][reason]))  # type: ignore[misc]
        for reason, name in _REASONS.items()
    ]
    if any(run["skipped_lines"] for run in runs):
        rows.append(row("lines skipped", lambda run: f"{run['skipped_lines']:,}"))
    return rows


# -- runs of a real model ----------------------------------------------------------------------------------------------


def _live(report: dict[str, Any]) -> list[str]:
    turns, totals = report["turns"], report["totals"]
    runs = {"with mmcache": "cached", "without": "plain"} if totals["cached"] else {"without": "plain"}
    request = Axis("request of the trace", "{:.0f}".format)

    def by_turn(title: str, y: Axis, value: Callable[[dict[str, Any]], float]) -> str:
        lines = {name: [(i, value(turn[run])) for i, turn in enumerate(turns, 1)] for name, run in runs.items()}
        return line_chart(title, request, y, lines)

    charts = [
        by_turn("Time to the first token", Axis("seconds", time_text), lambda run: run["ttft"]),
        by_turn("Bytes moved to the encoder", _BYTES, lambda run: run["bytes"]["transferred"]),
    ]
    first = totals[next(iter(runs.values()))]
    reasons = {name: "transferred" if reason == "transfer" else reason for reason, name in _REASONS.items()}
    areas = {
        name: [(i, turn[next(iter(runs.values()))]["bytes"].get(reason, 0)) for i, turn in enumerate(turns, 1)]
        for name, reason in reasons.items()
    }
    charts.append(stacked_chart("What became of the bytes", request, _BYTES, areas))
    texts: dict[str, Callable[[dict[str, Any]], str]] = {
        "prompt tokens": lambda run: f"{run['prompt_tokens']:,}",
        "of these from the prefix": lambda run: f"{run['prefix_tokens']:,}",
        "bytes moved": lambda run: size_text(run["bytes"]["transferred"]),
        "items preprocessed": lambda run: f"{run['preprocessed']:,}",
        "encoder runs": lambda run: f"{run['encoder_runs']:,}",
        "first token, mean": lambda run: time_text(run["ttft"] / max(1, len(turns))),
    }
    rows = [[title, *(text(totals[run]) for run in runs.values())] for title, text in texts.items()]
    facts = [("requests", f"{len(turns):,}"), ("encoder runs", f"{first['encoder_runs']:,}")]
    if report["skipped_lines"]:
        facts.append(("lines skipped", f"{report['skipped_lines']:,}"))
    lead = "Run without a cache."
    if report["equal"] is not None:
        lead = "Both runs generated the same tokens" if report["equal"] else "The two runs DIFFER"
        lead += f"; largest difference of logits {report['largest_logit_difference']:.1e}."
    return [
        f'<p class="lead">{escape(lead)}</p>',
        _facts(facts),
        _grid("Request by request", charts),
        "<h2>In all</h2>",
        _table(["", *runs], rows),
    ]


# -- parts of a page ---------------------------------------------------------------------------------------------------


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    pairs = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def _grid(title: str, charts: Iterable[str]) -> str:
    content = "".join(charts)
    return f'<h2>{escape(title)}</h2><div class="charts">{content}</div>' if content else ""


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Table"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
