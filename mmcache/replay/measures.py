"""What a simulation measures, in memory that does not grow with the number of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log
from operator import add
from typing import Any

__all__ = ["REASONS", "Latencies", "Simulation", "TimeSeries", "TurnMeans"]

REASONS = ("transfer", "covered", "stored", "in_flight", "kept_on_cpu")
"""What becomes of bytes; with whole prompts scheduled at once nothing is `later`."""

_BINS = 25  # to a factor of e: quantiles are within 2 %
_BUCKETS = 96
_NUMBERS = 64


class Latencies:
    """A distribution of seconds, in logarithmic bins."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._bins: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Count one."""
        self.count += 1
        self.total += seconds
        if seconds > self.most:
            self.most = seconds
        place = round(_BINS * log(seconds)) if seconds > 1e-9 else -(10**9)
        self._bins[place] = self._bins.get(place, 0) + 1

    @property
    def mean(self) -> float:
        """The mean, exact; 0 where there is none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Seconds that the share of them does not exceed, within 2 %."""
        wanted = share * self.count
        seen = 0
        for place, number in sorted(self._bins.items()):
            seen += number
            if seen >= wanted:
                return min(self.most, exp(place / _BINS)) if place > -(10**9) else 0.0
        return self.most

    def as_json(self) -> dict[str, float]:
        """Mean, quantiles and maximum."""
        quantiles = {f"p{round(100 * share)}": self.quantile(share) for share in (0.5, 0.9, 0.99)}
        return {"count": self.count, "mean": self.mean, **quantiles, "max": self.most}


class TimeSeries:
    """Sums over equal spans of time. When there are too many spans, each becomes twice as long."""

    def __init__(self, width: int) -> None:
        self.span = 1.0
        self.buckets: list[list[int]] = []
        self._width = width

    def add(self, time: float, values: tuple[int, ...]) -> None:
        """Add to the span that the time, in seconds from the start, lies in."""
        place = int(time / self.span)
        while place >= _BUCKETS:
            merged = [[sum(pair) for pair in zip(*self.buckets[i : i + 2])] for i in range(0, len(self.buckets), 2)]
            self.buckets = merged
            self.span *= 2
            place = int(time / self.span)
        while place >= len(self.buckets):
            self.buckets.append([0] * self._width)
        self.buckets[place] = list(map(add, self.buckets[place], values))

    def totals(self) -> list[int]:
        """Sums over all time."""
        return [sum(column) for column in zip(*self.buckets)] or [0] * self._width


class TurnMeans:
    """Means of latency and of bytes moved by the number of the turn; the last one stands for all later turns."""

    def __init__(self) -> None:
        self.sums: list[tuple[int, float, int]] = []

    def add(self, number: int, seconds: float, moved: int) -> None:
        """Count one turn."""
        place = min(number, _NUMBERS) - 1
        while place >= len(self.sums):
            self.sums.append((0, 0.0, 0))
        count, total, nbytes = self.sums[place]
        self.sums[place] = (count + 1, total + seconds, nbytes + moved)

    def rows(self) -> list[dict[str, float]]:
        """(turn, requests, mean seconds, mean bytes moved) of each number that occurred."""
        return [
            {"turn": place, "requests": count, "ttft": total / count, "moved": nbytes / count}
            for place, (count, total, nbytes) in enumerate(self.sums, 1)
            if count
        ]


@dataclass(slots=True)
class Simulation:
    """What came of a simulated run.

    Attributes:
        policy, capacity_bytes: of the run.
        requests, tokens, prefix_tokens: requests, their prompt tokens, and how many of these had KV.
        items: occurrences in prompts by status: covered, stored, loaded (given by a tier), in_flight, missing; repeats
            of a missing or loaded one within a request count as stored.
        encodes, encode_seconds: runs of the encoder, one an item, and their seconds.
        needed_seconds: seconds if every item that no prefix covers were encoded.
        plain_encode_seconds: seconds if every item of every request were encoded.
        tier_hits, tier_seconds, tier_bytes: contents loaded, by tier; encoder seconds and payload that this saved.
        evictions, uncached: as in `CacheStats`.
        seconds: simulated time from the first arrival to the last token.
        ttft: seconds from arrival to the first token.
        turns: the same by number of the turn.
        series: bytes by reason over time.
        most_used_bytes: the most that embeddings took at any time.
        skipped_lines: lines of the trace that could not be read.
        wall_seconds: what the simulation itself took.
    """

    policy: str
    capacity_bytes: int
    requests: int = 0
    tokens: int = 0
    prefix_tokens: int = 0
    items: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("covered", "stored", "loaded", "in_flight", "missing"), 0)
    )
    encodes: int = 0
    encode_seconds: float = 0.0
    needed_seconds: float = 0.0
    plain_encode_seconds: float = 0.0
    tier_hits: dict[str, int] = field(default_factory=dict)
    tier_seconds: dict[str, float] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    evictions: dict[str, int] = field(default_factory=dict)
    uncached: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    ttft: Latencies = field(default_factory=Latencies)
    turns: TurnMeans = field(default_factory=TurnMeans)
    series: TimeSeries = field(default_factory=lambda: TimeSeries(len(REASONS)))
    most_used_bytes: int = 0
    skipped_lines: int = 0
    wall_seconds: float = 0.0

    def loaded(self, tier: str, seconds: float, payload: int) -> None:
        """A tier gives what would have been encoded, and was counted as that."""
        self.items["missing"] -= 1
        self.items["loaded"] += 1
        self.tier_hits[tier] = self.tier_hits.get(tier, 0) + 1
        self.tier_seconds[tier] = self.tier_seconds.get(tier, 0.0) + seconds
        self.tier_bytes[tier] = self.tier_bytes.get(tier, 0) + payload

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of fields by `REASONS`."""
        return dict(zip(REASONS, self.series.totals()))

    @property
    def total_bytes(self) -> int:
        """All bytes of all fields of all requests."""
        return sum(self.bytes.values())

    @property
    def needed(self) -> int:
        """Occurrences of items that no prefix covered."""
        return sum(self.items.values()) - self.items["covered"]

    @property
    def hit_ratio(self) -> float:
        """Of the occurrences that no prefix covered, the share that ran no encoder; 0 where there were none."""
        return 1 - self.items["missing"] / self.needed if self.needed else 0.0

    @property
    def prefix_ratio(self) -> float:
        """Share of the prompt tokens whose KV existed."""
        return self.prefix_tokens / self.tokens if self.tokens else 0.0

    @property
    def moved_share(self) -> float:
        """Share of the bytes that moved to the encoder."""
        return self.bytes["transfer"] / self.total_bytes if self.total_bytes else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON can say it."""
        return {
            "policy": self.policy,
            "capacity_bytes": self.capacity_bytes,
            "requests": self.requests,
            "tokens": self.tokens,
            "prefix_tokens": self.prefix_tokens,
            "prefix_ratio": self.prefix_ratio,
            "items": self.items,
            "hit_ratio": self.hit_ratio,
            "bytes": self.bytes,
            "total_bytes": self.total_bytes,
            "encodes": self.encodes,
            "encode_seconds": self.encode_seconds,
            "needed_seconds": self.needed_seconds,
            "plain_encode_seconds": self.plain_encode_seconds,
            "tier_hits": self.tier_hits,
            "tier_seconds": self.tier_seconds,
            "tier_bytes": self.tier_bytes,
            "evictions": self.evictions,
            "uncached": self.uncached,
            "most_used_bytes": self.most_used_bytes,
            "seconds": self.seconds,
            "ttft": self.ttft.as_json(),
            "turns": self.turns.rows(),
            "series": {
                "span_seconds": self.series.span,
                "reasons": list(REASONS),
                "bytes": self.series.buckets,
            },
            "skipped_lines": self.skipped_lines,
            "wall_seconds": self.wall_seconds,
        }
