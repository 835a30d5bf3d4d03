"""Prometheus metrics of a `MultimodalCache`, read when they are scraped. Needs the extra `prometheus`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmcache.cache import MultimodalCache
from mmcache.errors import ConfigError
from mmcache.stats import CacheStats
from mmcache.tiers import TieredStats

__all__ = ["CacheCollector"]

_OUTCOMES = ("hits", "misses", "damaged", "errors", "timeouts", "cancelled", "skipped")
_WRITES = ("stored", "dropped", "promoted", "removed")

# name, attribute of CacheStats, help
_COUNTERS = (
    ("mmcache_lookups", "lookups", "Lookups made"),
    ("mmcache_encodes", "encodes", "Encoder outputs that came in"),
    ("mmcache_loads", "loads", "Outputs that tiers gave instead of the encoder"),
    ("mmcache_failed_loads", "failed_loads", "Outputs that tiers were believed to have and did not give"),
    ("mmcache_joins", "joins", "Lookups that got what another one encoded while they waited"),
    ("mmcache_takeovers", "takeovers", "Times that a waiter became the one to encode"),
    ("mmcache_stale_entries", "stale", "Entries passed over because they did not fit"),
    ("mmcache_lost_entries", "lost", "Entries that a worker reported lost"),
    ("mmcache_forgotten_lookups", "forgotten_lookups", "Lookups that were never released"),
    ("mmcache_prefix_hit_tokens", "prefix_tokens", "Tokens found in the prefix index"),
    ("mmcache_prefix_asked_tokens", "prefix_queries_tokens", "Tokens asked of the prefix index"),
)
_GAUGES = (
    ("mmcache_capacity_bytes", "capacity_bytes", "Budget for embeddings"),
    ("mmcache_used_bytes", "used_bytes", "Bytes of the budget that are taken"),
    ("mmcache_pinned_bytes", "pinned_bytes", "Of these, pinned or reserved"),
    ("mmcache_entries", "entries", "Embeddings held or reserved"),
    ("mmcache_epoch", "epoch", "Number of invalidations"),
)
_LABELLED = (
    ("mmcache_items", "items", "status", "Items of lookups by their status when the lookup was released"),
    ("mmcache_bytes", "bytes", "reason", "Bytes of fields by what had become of them when the lookup was released"),
    ("mmcache_evictions", "evictions", "cause", "Entries dropped"),
    ("mmcache_uncached_items", "uncached", "reason", "Items served without being cached"),
)


class CacheCollector:
    """A collector for a Prometheus registry: `REGISTRY.register(CacheCollector(cache))`.

    Every number is one of `cache.stats()` or `cache.tier_stats()` at the moment of the scrape; nothing is counted twice
    and the path of a lookup does no more than without it.
    """

    def __init__(self, cache: MultimodalCache, name: str = "default") -> None:
        """Read `cache`; `name` becomes the label `cache` of all its metrics.

        Raises:
            ConfigError: prometheus-client is not installed.
        """
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ConfigError("metrics need prometheus-client: pip install mmcache[prometheus]") from error
        self._core: Any = core
        self._cache = cache
        self._name = name

    def collect(self) -> Iterator[Any]:
        """The metric families, for the registry."""
        yield from self._of_cache(self._cache.stats())
        tiers = self._cache.tier_stats()
        if tiers is not None:
            yield from self._of_tiers(tiers)

    def _of_cache(self, stats: CacheStats) -> Iterator[Any]:
        for name, attribute, text in _COUNTERS:
            yield self._family("Counter", name, text, {(): getattr(stats, attribute)})
        for name, attribute, text in _GAUGES:
            yield self._family("Gauge", name, text, {(): getattr(stats, attribute)})
        for name, attribute, label, text in _LABELLED:
            values = {(key,): value for key, value in getattr(stats, attribute).items()}
            yield self._family("Counter", name, text, values, label)

    def _of_tiers(self, stats: TieredStats) -> Iterator[Any]:
        tiers = stats.tiers
        asked = {(tier.name, outcome): getattr(tier, outcome) for tier in tiers for outcome in _OUTCOMES}
        yield self._family("Counter", "mmcache_tier_lookups", "Keys by what a tier answered", asked, "tier", "outcome")
        written = {(tier.name, event): getattr(tier, event) for tier in tiers for event in _WRITES}
        yield self._family("Counter", "mmcache_tier_writes", "Writes by what became of them", written, "tier", "event")
        damaged = {(tier.name, reason): count for tier in tiers for reason, count in tier.reasons.items()}
        text = "Entries that were not what was asked for"
        yield self._family("Counter", "mmcache_tier_damaged_entries", text, damaged, "tier", "reason")
        for kind, name, attribute, text in (
            ("Counter", "mmcache_tier_read_bytes", "bytes_read", "Bytes of hits"),
            ("Counter", "mmcache_tier_written_bytes", "bytes_written", "Bytes of stored entries"),
            ("Counter", "mmcache_tier_breaker_openings", "opened", "Times that a breaker opened"),
            ("Gauge", "mmcache_tier_queued_bytes", "queued_bytes", "Bytes that wait to be written"),
            ("Gauge", "mmcache_tier_breaker_closed", "closed", "1 while the tier is asked, 0 while it is left alone"),
        ):
            yield self._family(
                kind, name, text, {(tier.name,): int(getattr(tier, attribute)) for tier in tiers}, "tier"
            )

    def _family(self, kind: str, name: str, text: str, values: Mapping[Any, int], *labels: str) -> Any:
        make = getattr(self._core, f"{kind}MetricFamily")
        family = make(name, text, labels=["cache", *labels])
        for key, value in values.items():
            family.add_metric([self._name, *key], value)
        return family
