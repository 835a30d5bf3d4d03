"""Prometheus metrics of a cache, its tiers and processed features, read when they are scraped: extra `prometheus`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from mmcache.cache import MultimodalCache
from mmcache.errors import ConfigError
from mmcache.features import FeatureCache, FeatureStats
from mmcache.ledger import EncoderLedger
from mmcache.stats import CacheStats
from mmcache.tiers import LATENCY_BOUNDS, TieredStats, TierUsage

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
    ("mmcache_hit_ratio", "hit_ratio", "Share of the needed items that ran no encoder, since the start"),
    ("mmcache_prefix_hit_ratio", "prefix_hit_ratio", "Share of the prompt tokens found in the index, since the start"),
)
_FEATURES = (
    ("Counter", "mmcache_feature_hits", "hits", "Processed contents that were held"),
    ("Counter", "mmcache_feature_misses", "misses", "Contents that were processed"),
    ("Counter", "mmcache_feature_joins", "joins", "Contents that were being processed for somebody else"),
    ("Counter", "mmcache_feature_collisions", "collisions", "Contents unlike those held under their identifiers"),
    ("Counter", "mmcache_feature_oversized", "oversized", "Contents too large to be held"),
    ("Gauge", "mmcache_feature_entries", "entries", "Processed contents held"),
    ("Gauge", "mmcache_feature_bytes", "nbytes", "Bytes of these"),
    ("Gauge", "mmcache_feature_hit_ratio", "hit_ratio", "Share that needed no processing, since the start"),
)
_LABELLED = (
    ("mmcache_items", "items", "status", "Items of lookups by their status when the lookup was released"),
    ("mmcache_bytes", "bytes", "reason", "Bytes of fields by what had become of them when the lookup was released"),
    ("mmcache_evictions", "evictions", "cause", "Entries dropped"),
    ("mmcache_uncached_items", "uncached", "reason", "Items served without being cached"),
)


class CacheCollector:
    """A collector for a Prometheus registry: `REGISTRY.register(CacheCollector(cache))`.

    Every number is one of `cache.stats()`, `cache.tier_stats()`, `cache.tier_usage()` or `features.stats()` at the
    moment of the scrape; nothing is counted twice and the path of a lookup does no more than without it.
    """

    def __init__(
        self, cache: MultimodalCache | EncoderLedger, name: str = "default", *, features: FeatureCache | None = None
    ) -> None:
        """Read a cache, or the ledger of an engine whose tensors lie elsewhere.

        Args:
            cache: what is read.
            name: the label `cache` of all metrics; another one for each collector of a registry.
            features: the processed features that belong to it, if there are any.

        Raises:
            ConfigError: prometheus-client is not installed, or an argument is of another kind.
        """
        for value, kinds, field in (
            (cache, (MultimodalCache, EncoderLedger), "cache"),
            (name, (str,), "name"),
            (features, (FeatureCache, type(None)), "features"),
        ):
            if not isinstance(value, kinds):
                expected = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError("a collector cannot read this", field=field, expected=expected, found=repr(value))
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ConfigError("metrics need prometheus-client: pip install mmcache[prometheus]") from error
        self._core: Any = core
        self._cache = cache
        self._name = name
        self._features = features

    def collect(self) -> Iterator[Any]:
        """The metric families, for the registry."""
        yield from self._of_cache(self._cache.stats())
        if self._features is not None:
            yield from self._of_features(self._features.stats())
        if isinstance(self._cache, MultimodalCache):
            tiers = self._cache.tier_stats()
            if tiers is not None:
                yield from self._of_tiers(tiers, self._cache.tier_usage())

    def _of_cache(self, stats: CacheStats) -> Iterator[Any]:
        for name, attribute, text in _COUNTERS:
            yield self._family("Counter", name, text, {(): getattr(stats, attribute)})
        for name, attribute, text in _GAUGES:
            yield self._family("Gauge", name, text, {(): getattr(stats, attribute)})
        for name, attribute, label, text in _LABELLED:
            values = {(key,): value for key, value in getattr(stats, attribute).items()}
            yield self._family("Counter", name, text, values, label)

    def _of_features(self, stats: FeatureStats) -> Iterator[Any]:
        for kind, name, attribute, text in _FEATURES:
            yield self._family(kind, name, text, {(): getattr(stats, attribute)})

    def _of_tiers(self, stats: TieredStats, usage: Mapping[str, TierUsage]) -> Iterator[Any]:
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
        for name, attribute, text in (
            ("mmcache_tier_used_bytes", "nbytes", "Bytes that a tier holds"),
            ("mmcache_tier_capacity_bytes", "capacity_bytes", "Its budget"),
            ("mmcache_tier_entries", "entries", "Embeddings that it holds"),
        ):
            known = {(tier,): getattr(use, attribute) for tier, use in usage.items()}
            yield self._family("Gauge", name, text, {k: v for k, v in known.items() if v is not None}, "tier")
        text = "Calls of a tier by how long they took"
        calls = self._core.HistogramMetricFamily(
            "mmcache_tier_call_seconds", text, labels=["cache", "tier", "operation"]
        )
        bounds = [*map(str, LATENCY_BOUNDS), "+Inf"]
        for tier in tiers:
            for operation, latency in (("read", tier.reads), ("write", tier.writes)):
                buckets = list(zip(bounds, accumulate(latency.counts)))
                calls.add_metric([self._name, tier.name, operation], buckets, latency.seconds)
        yield calls

    def _family(self, kind: str, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Any:
        make = getattr(self._core, f"{kind}MetricFamily")
        family = make(name, text, labels=["cache", *labels])
        for key, value in values.items():
            family.add_metric([self._name, *key], value)
        return family
