"""Counters of a tiered store. Every key that is looked up ends in exactly one of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from threading import Lock

__all__ = ["Counters", "TierStats", "TieredStats"]


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
        self._counts: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            self._counts.update(amounts)

    def read(self) -> Counter[str]:
        """All counters, of one moment."""
        with self._lock:
            return self._counts.copy()
