"""Counters that say what a cache did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A moment's view of a cache.

    Attributes:
        lookups: lookups made.
        items: needed and unneeded items of all lookups, by status when the lookup was released.
        bytes: bytes of their fields, by what became of them.
        encodes: encoder outputs that came in.
        loads, failed_loads: outputs that tiers gave, and that they were believed to have and did not give.
        joins: lookups that got rows which another one encoded while they waited.
        takeovers: times that a waiter became the one to encode.
        evictions: entries dropped, by cause.
        uncached: items served without being cached, by reason.
        stale: entries passed over because rows, width or dtype did not fit.
        lost: entries that a worker reported lost.
        forgotten_lookups: lookups that were never released and whose garbage collection did it.
        capacity_bytes, used_bytes, pinned_bytes: of the budget; pinned includes reservations.
        entries: embeddings held or reserved.
        prefix_tokens, prefix_queries_tokens: tokens found in, and asked of, the cache's own prefix index.
        epoch: number of invalidations.
    """

    lookups: int
    items: Mapping[str, int]
    bytes: Mapping[str, int]
    encodes: int
    loads: int
    failed_loads: int
    joins: int
    takeovers: int
    evictions: Mapping[str, int]
    uncached: Mapping[str, int]
    stale: int
    lost: int
    forgotten_lookups: int
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    entries: int
    prefix_tokens: int
    prefix_queries_tokens: int
    epoch: int

    @property
    def hit_ratio(self) -> float:
        """Of the items that lookups needed in their windows, the share that ran no encoder; 0 where none was needed."""
        missing = self.items.get("missing", 0)
        needed = missing + self.items.get("stored", 0) + self.items.get("in_flight", 0)
        return 1 - missing / needed if needed else 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of the tokens asked of the cache's own prefix index that it knew; 0 where it was not asked."""
        return self.prefix_tokens / self.prefix_queries_tokens if self.prefix_queries_tokens else 0.0
