"""Simulations and sizings as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmcache.replay.curves import CurvePoint
from mmcache.replay.measures import Simulation
from mmcache.replay.size import Sizing
from mmcache.replay.table import count_text, size_text, time_text

__all__ = ["simulation_text", "sizing_text"]


def simulation_text(name: str, runs: Sequence[Simulation]) -> str:
    """Runs of one workload side by side."""
    rows: list[tuple[str, list[str]]] = [
        ("room for embeddings", [size_text(run.capacity_bytes) for run in runs]),
        ("most used", [size_text(run.most_used_bytes) for run in runs]),
        ("requests", [f"{run.requests:,}" for run in runs]),
        ("prompt tokens from the prefix", [f"{run.prefix_ratio:.1%}" for run in runs]),
        ("hit ratio of embeddings", [f"{run.hit_ratio:.1%}" for run in runs]),
        *((f"items {status}", [f"{run.items[status]:,}" for run in runs]) for status in runs[0].items),
        *((f"bytes {reason}", [size_text(run.bytes[reason]) for run in runs]) for reason in runs[0].bytes),
        ("share of bytes moved", [f"{run.moved_share:.1%}" for run in runs]),
        ("encoder runs", [f"{run.encodes:,}" for run in runs]),
        ("encoder seconds", [f"{run.encode_seconds:,.1f}" for run in runs]),
        ("  if every item were encoded", [f"{run.plain_encode_seconds:,.1f}" for run in runs]),
        ("evicted", [f"{sum(run.evictions.values()):,}" for run in runs]),
        ("served uncached", [f"{sum(run.uncached.values()):,}" for run in runs]),
        ("first token, mean", [time_text(run.ttft.mean) for run in runs]),
        (
            "first token, 50 % / 99 %",
            [" / ".join(time_text(run.ttft.quantile(q)) for q in (0.5, 0.99)) for run in runs],
        ),
        ("simulated time", [f"{run.seconds:,.0f} s" for run in runs]),
    ]
    tiers = list(dict.fromkeys(tier for run in runs for tier in run.tier_hits))
    rows += [(f"loaded from {tier}", [f"{run.tier_hits.get(tier, 0):,}" for run in runs]) for tier in tiers]
    if any(run.skipped_lines for run in runs):
        rows.append(("lines skipped", [f"{run.skipped_lines:,}" for run in runs]))
    return "\n".join([f"{name}, simulated", *_aligned([("", [run.policy for run in runs]), *rows])])


def sizing_text(name: str, sizing: Sizing) -> str:
    """The curve, and what it recommends."""
    requests = f"{count_text(sizing.requests, 'request')} {'needs' if sizing.requests == 1 else 'need'}"
    lines = [f"{name}: {requests} {count_text(sizing.needed, 'item')} that no prefix covers"]
    lines.append(
        f"the prefix cache alone saves {sizing.covered_seconds:,.1f} encoder seconds"
        f" and {size_text(sizing.covered_bytes)}"
    )
    lines += ["", *_curve_lines("room", "LRU hits", _thinned(sizing.lru))]
    for policy, curve in sizing.simulated.items():
        lines += ["", *_curve_lines(f"{policy}, simulated", "hits", curve)]
        for tier, saved in sizing.simulated_tiers[policy].items():
            lines += ["", *_curve_lines(f"{policy}, of which {tier} gives", "of all", saved)]
    for level in sizing.tiers:
        title = f"{level.name}, behind {size_text(sizing.knee_bytes or 0)}"
        if not level.points or level.points[-1].hit_ratio == 0:
            lines += ["", f"{title}: saves nothing."]
        else:
            lines += ["", *_curve_lines(title, "of its misses", _thinned(level.points))]
    lines.append("")
    if sizing.knee_bytes is None:
        lines.append("No capacity saves anything: nothing that a prefix does not cover is needed twice.")
    else:
        lines.append(
            f"Knee: {size_text(sizing.knee_bytes)}. Nothing is gained beyond {size_text(sizing.working_set_bytes)}."
        )
    if sizing.target is not None:
        best = sizing.lru[-1].hit_ratio if sizing.lru else 0.0
        reached = (
            f"{size_text(sizing.target_bytes)}"
            if sizing.target_bytes is not None
            else f"not reached; at most {best:.1%}"
        )
        lines.append(f"For a hit ratio of {sizing.target:.1%}: {reached}.")
    return "\n".join(lines)


def _curve_lines(title: str, ratio: str, points: Iterable[CurvePoint]) -> list[str]:
    table = [(title, [ratio, "seconds saved", "not moved"])]
    return _aligned([*table, *((size_text(point.capacity_bytes), _cells(point)) for point in points)])


def _cells(point: CurvePoint) -> list[str]:
    return [f"{point.hit_ratio:.1%}", f"{point.seconds_saved:,.1f}", size_text(point.bytes_saved)]


def _thinned(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """At most two points to a doubling and no more than fill a screen, the last one included."""
    step = max(1, -(-len(points) // 20))
    return [*points[:-1:step], *points[-1:]]


def _aligned(rows: Iterable[tuple[str, list[str]]]) -> list[str]:
    rows = list(rows)
    first = max(len(label) for label, _ in rows)
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(rows[0][1]))]
    return [
        "  ".join([label.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths))]).rstrip()
        for label, cells in rows
    ]
