"""Metrics: every exported number is exact after a scripted history."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mmcache import CacheConfig, MultimodalCache, MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.tiers import MemoryTier

prometheus = pytest.importorskip("prometheus_client")

ROW = 8


def exported(cache: MultimodalCache) -> dict[tuple[str, ...], float]:
    """(name, label values but the cache's) to value."""
    from mmcache.metrics import CacheCollector

    registry = prometheus.CollectorRegistry()
    registry.register(CacheCollector(cache, "c"))
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            assert sample.labels["cache"] == "c"
            found[sample.name, *(v for k, v in sample.labels.items() if k != "cache")] = sample.value
    return found


def request(name: str, *identifiers: str) -> MultimodalRequest:
    items = [MultimodalItem("image", None, PlaceholderRange(4 * i, 4), x) for i, x in enumerate(identifiers)]
    return MultimodalRequest(name, list(range(4 * len(identifiers))), items)


def run(cache: MultimodalCache, what: MultimodalRequest, computed: int = 0) -> None:
    with cache.lookup(what, num_computed_tokens=computed) as lookup:
        cache.insert(lookup, {index: torch.zeros(4, ROW // 4) for index in lookup.missing})
    cache.commit(what, what.num_tokens)
    cache.finish(what)


def test_a_scripted_history_is_exported_exactly() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=2 * 4 * ROW, row_bytes={"image": ROW}, policy="lru"))
    run(cache, request("1", "a", "b"))
    run(cache, request("2", "b", "c"))  # evicts a
    run(cache, request("3", "b", "c"), computed=4)  # b is covered
    waiting = request("4", "z")
    with cache.lookup(waiting, num_computed_tokens=0):
        pass  # given up: encodes nothing, and is counted as missing, not as an empty success
    cache.finish(waiting)
    values = exported(cache)
    assert values["mmcache_lookups_total",] == 4
    assert values["mmcache_encodes_total",] == 3
    assert values["mmcache_items_total", "covered"] == 1
    assert values["mmcache_items_total", "missing"] == 4  # a, b, c encoded; z given up
    assert values["mmcache_items_total", "stored"] == 2  # b in the second request, c in the third
    assert values["mmcache_evictions_total", "room"] == cache.stats().evictions["room"]
    assert values["mmcache_capacity_bytes",] == 2 * 4 * ROW
    assert values["mmcache_used_bytes",] == cache.stats().used_bytes
    assert values["mmcache_pinned_bytes",] == 0
    for name, value in cache.stats().bytes.items():
        assert values["mmcache_bytes_total", name] == value
    assert not any(name[0].startswith("mmcache_tier") for name in values)


def test_tiers_are_exported_by_name() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=4 * ROW, row_bytes={"image": ROW}), [MemoryTier(1 << 20)])
    run(cache, request("1", "a"))
    stats = cache.tier_stats()
    assert stats is not None
    (tier,) = stats.tiers
    values = exported(cache)
    assert values["mmcache_tier_breaker_closed", tier.name] == 1
    assert values["mmcache_tier_lookups_total", tier.name, "hits"] == tier.hits
    cache.close()


def test_every_query_of_the_dashboard_names_an_exported_metric() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=4 * ROW, row_bytes={"image": ROW}), [MemoryTier(1 << 20)])
    from mmcache.metrics import CacheCollector

    kinds = {"counter": "_total", "gauge": ""}
    names = {family.name + kinds[family.type] for family in CacheCollector(cache).collect()}
    cache.close()
    dashboard = json.loads((Path(__file__).parents[1] / "docs" / "grafana" / "mmcache.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 10
    for query in queries:
        used = re.findall(r"mmcache_\w+", query)
        assert used
        assert set(used) <= names, query
