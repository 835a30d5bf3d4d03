"""Counters of a tiered store. Every key that is looked up ends in exactly one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from threading import Lock

__all__ = ["LATENCY_BOUNDS", "Counters", "Latency", "TierStats", "TieredStats"]

LATENCY_BOUNDS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Seconds that the spans of a `Latency` end with."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a tier's calls took, failed ones included.

    Attributes:
        counts: calls that took at most the bound of that place in `LATENCY_BOUNDS` and more than the one before; the
            last are those longer than all.
        seconds: of all calls together.
    """

    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in keys unless said.

    `asked = hits + misses + damaged + errors + timeouts + cancelled` once no fetch is under way.

    Attributes:
        name: the tier's name.
        closed: its breaker for reads is closed, that is, it is asked.
        asked: keys asked for.
        hits: found whole.
        misses: not there.
        damaged: there, but not what was asked for; dropped and counted as missing. `reasons` has them by reason.
        errors: asked for when the tier failed.
        timeouts: not answered within the deadline.
        cancelled: given up by the asker before the tier had answered.
        skipped: not asked for, since the breaker was open or the key was being removed.
        stored: written.
        dropped: not written: the queue was full, the tier had no room, failed or its breaker was open, or the rows were
            not storable.
        promoted: of those stored, read from another tier.
        removed: removals that the tier took.
        bytes_read: of hits, headers included.
        bytes_written: of stored entries, headers included.
        queued_bytes: waiting to be written.
        opened: how often a breaker opened.
        reasons: why entries were damaged.
        reads: calls that asked the tier for rows; one call asks for the keys of all fetches that wait.
        writes: calls that gave it rows.
    """

    name: str
    closed: bool
    asked: int
    hits: int
    misses: int
    damaged: int
    errors: int
    timeouts: int
    cancelled: int
    skipped: int
    stored: int
    dropped: int
    promoted: int
    removed: int
    bytes_read: int
    bytes_written: int
    queued_bytes: int
    opened: int
    reasons: dict[str, int]
    reads: Latency
    writes: Latency


@dataclass(frozen=True, slots=True)
class TieredStats:
    """A tiered store: `lookups = queue_hits + sum of the tiers' hits + misses` once no fetch is under way.

    Attributes:
        lookups: keys asked for by `fetch` and `prefetch`.
        queue_hits: found among the rows that wait to be written.
        misses: found nowhere in time.
        puts: rows given to `put`.
        refused: of those, not storable (not two-dimensional) or given after `close`.
        listener_errors: exceptions from `on_event` and from callbacks.
        tiers: one each, in their order.
    """

    lookups: int
    queue_hits: int
    misses: int
    puts: int
    refused: int
    listener_errors: int
    tiers: tuple[TierStats, ...]


class Counters:
    """Named counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[str, int] = {}
        self._calls: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def forked(self) -> None:
        """Another thread of the parent's may have held the lock."""
        self._lock = Lock()

    def add(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            counts = self._counts
            for name, amount in amounts.items():
                counts[name] = counts.get(name, 0) + amount

    def timed(self, name: str, seconds: float) -> None:
        """Count a call of that name by how long it took."""
        with self._lock:
            calls = self._calls.setdefault(name, [0] * (len(LATENCY_BOUNDS) + 1))
            calls[bisect_left(LATENCY_BOUNDS, seconds)] += 1
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def latency(self, name: str) -> Latency:
        """Calls of that name."""
        with self._lock:
            return Latency(tuple(self._calls.get(name, [0] * (len(LATENCY_BOUNDS) + 1))), self._seconds.get(name, 0.0))

    def read(self) -> Counter[str]:
        """All counters, of one moment."""
        with self._lock:
            return Counter(self._counts)
