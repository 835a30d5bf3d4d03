"""What the connector counts, and how it comes to vLLM's metrics: names, meanings, and the difference between two looks.

Names are flat (`hits.redis`), since vLLM sends them between processes as a plain dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["METRICS", "Interval", "Metric", "merge"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: before the first dot of the flat name.
        label: what stands behind the dot, or None where there is no dot.
        help: what is counted.
        gauge: the last value counts, not the sum.
    """

    name: str
    label: str | None
    help: str
    gauge: bool = False


METRICS = (
    Metric("hits", "tier", "Items that were offered to vLLM instead of encoding them, by where they were found."),
    Metric("encodes", None, "Items that vLLM was left to encode."),
    Metric("loads", None, "Items that workers copied into the encoder cache."),
    Metric("load_bytes", None, "Bytes of these items."),
    Metric("load_seconds", None, "Seconds that workers spent copying them."),
    Metric("saves", None, "Items that workers wrote into the shared memory."),
    Metric("save_bytes", None, "Bytes of these items."),
    Metric("save_seconds", None, "Seconds that workers spent writing them."),
    Metric("deferred", None, "Requests that waited for a store or for hashing."),
    Metric("deferred_seconds", None, "Seconds that they waited."),
    Metric("refused", "reason", "Items that were not loaded or not saved, by reason."),
    Metric("failed_requests", None, "Requests failed because an item without media was not to be had."),
    Metric("store_hits", "tier", "Items read from a store."),
    Metric("store_bytes_read", "tier", "Bytes read from a store, of hits."),
    Metric("store_bytes_written", "tier", "Bytes written to a store."),
    Metric("store_misses", "tier", "Items that a store did not have."),
    Metric("store_damaged", "tier", "Entries of a store that were not what was asked for; they were dropped."),
    Metric("store_errors", "tier", "Items asked for when a store failed or did not answer in time."),
    Metric("store_dropped", "tier", "Items that were not written: queue full, no room, or the store was down."),
    Metric("store_up", "tier", "Whether a store is asked: 1, or 0 while it fails.", gauge=True),
    Metric("memory_used_bytes", None, "Bytes of the shared memory in use.", gauge=True),
    Metric("memory_evictions", None, "Items that left the shared memory for others."),
)
_GAUGES = frozenset(metric.name for metric in METRICS if metric.gauge)


def is_gauge(name: str) -> bool:
    """Whether a flat name is of a gauge."""
    return name.partition(".")[0] in _GAUGES


def merge(earlier: Mapping[str, float], later: Mapping[str, float]) -> dict[str, float]:
    """Two intervals as one."""
    merged = dict(earlier)
    for name, value in later.items():
        merged[name] = value if is_gauge(name) else merged.get(name, 0) + value
    return merged


class Interval:
    """Turns totals that only grow into what was added since the last look."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, totals: Mapping[str, float]) -> dict[str, float]:
        """What changed, by flat name; empty when nothing did."""
        changed = {}
        for name, value in totals.items():
            before = self._before.get(name, 0)
            if value != before:
                changed[name] = value if is_gauge(name) else value - before
        self._before = dict(totals)
        return changed
