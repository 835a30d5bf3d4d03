"""Metrics: every exported number is exact after a scripted history."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tier_faults import FaultyTier

from mmcache import (
    CacheConfig,
    ConfigError,
    EncoderLedger,
    FeatureCache,
    FieldConfig,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
    split_fields,
)
from mmcache.fields import ItemFields
from mmcache.metrics import CacheCollector
from mmcache.policies import make_policy
from mmcache.tiers import LATENCY_BOUNDS, MemoryTier, Tier

prometheus = pytest.importorskip("prometheus_client")

ROW = 8
ITEM = 4 * ROW
GRID = 24
PIXELS = 400
RATIOS = ("mmcache_hit_ratio", "mmcache_prefix_hit_ratio", "mmcache_feature_hit_ratio")
SHOWN = (
    "mmcache_items_total",
    "mmcache_bytes_total",
    "mmcache_encodes_total",
    "mmcache_joins_total",
    "mmcache_evictions_total",
    "mmcache_pinned_bytes",
    "mmcache_used_bytes",
    "mmcache_stale_entries_total",
    "mmcache_prefix_hit_tokens_total",
    "mmcache_feature_hits_total",
    "mmcache_tier_used_bytes",
    "mmcache_tier_damaged_entries_total",
    "mmcache_tier_call_seconds_bucket",
    "mmcache_tier_breaker_closed",
)


def exported(
    cache: MultimodalCache | EncoderLedger, features: FeatureCache | None = None
) -> dict[tuple[str, ...], float]:
    """(name, label values but the cache's) to value."""
    registry = prometheus.CollectorRegistry()
    registry.register(CacheCollector(cache, "c", features=features))
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            assert sample.labels["cache"] == "c"
            found[sample.name, *(v for k, v in sample.labels.items() if k != "cache")] = sample.value
    return found


def fields() -> ItemFields:
    batch = {"pixels": torch.zeros(1, PIXELS // 4), "grid": torch.ones(1, GRID // 8, dtype=torch.int64)}
    configs = {"pixels": FieldConfig.batched("image"), "grid": FieldConfig.batched("image", keep_on_cpu=True)}
    return split_fields(batch, configs)["image"][0]


def request(name: str, *identifiers: str) -> MultimodalRequest:
    items = [MultimodalItem("image", fields(), PlaceholderRange(4 * i, 4), x) for i, x in enumerate(identifiers)]
    return MultimodalRequest(name, list(range(4 * len(identifiers))), items)


def run(cache: MultimodalCache, what: MultimodalRequest, computed: int | None = 0) -> None:
    with cache.lookup(what, num_computed_tokens=computed) as lookup:
        cache.insert(lookup, {index: torch.zeros(4, ROW // 4) for index in lookup.missing})
    cache.commit(what, what.num_tokens)
    cache.finish(what)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a thread of a tier; what is counted is exact once it has happened."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_scripted_history_is_exported_exactly() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=2 * ITEM, row_bytes={"image": ROW}, policy="lru", block_size=4))
    run(cache, request("1", "a", "b"))
    run(cache, request("2", "b", "c"))  # b is stored; a goes
    run(cache, request("3", "b", "c"), computed=4)  # b is covered
    run(
        cache, request("4", "b", "d"), computed=None
    )  # the index has b's block of 8 tokens; d takes the place of c or b
    given_up = request("5", "z")
    with cache.lookup(given_up, num_computed_tokens=0):
        pass  # encodes nothing: it is missing, and no empty success
    cache.finish(given_up)
    first, second = request("6", "x"), request("7", "x")
    owner, waiter = (cache.lookup(each, num_computed_tokens=0) for each in (first, second))
    cache.insert(owner, {0: torch.zeros(4, ROW // 4)})  # joined by the waiter
    for each, lookup in ((first, owner), (second, waiter)):
        lookup.release()
        cache.finish(each)
    first, second = request("8", "y"), request("9", "y")
    owner, waiter = (cache.lookup(each, num_computed_tokens=0) for each in (first, second))
    cache.finish(first)  # dies: the waiter takes over
    assert exported(cache)["mmcache_pinned_bytes",] == ITEM  # its reservation
    cache.insert(waiter, {0: torch.zeros(4, ROW // 4)})
    waiter.release()
    cache.finish(second)
    run(cache, request("10", "p", "q", "r"))  # larger than the budget, together: r is served uncached
    cache.invalidate(identifier="q")

    assert exported(cache) == {
        ("mmcache_lookups_total",): 10,
        ("mmcache_items_total", "covered"): 2,
        ("mmcache_items_total", "stored"): 3,  # b of 2, c of 3, x of 7
        ("mmcache_items_total", "in_flight"): 0,
        ("mmcache_items_total", "missing"): 11,  # a b, c, d, z, x, y given up, y taken over, p q r
        ("mmcache_items_total", "later"): 0,
        ("mmcache_bytes_total", "covered"): 2 * PIXELS,
        ("mmcache_bytes_total", "stored"): 3 * PIXELS,
        ("mmcache_bytes_total", "in_flight"): 0,
        ("mmcache_bytes_total", "transfer"): 11 * PIXELS,
        ("mmcache_bytes_total", "later"): 0,
        ("mmcache_bytes_total", "kept_on_cpu"): 16 * GRID,
        ("mmcache_hit_ratio",): pytest.approx(3 / 14),
        ("mmcache_encodes_total",): 9,  # a b, c, d, x, y, p q r
        ("mmcache_joins_total",): 1,  # of x
        ("mmcache_takeovers_total",): 1,  # of y
        ("mmcache_loads_total",): 0,
        ("mmcache_failed_loads_total",): 0,
        ("mmcache_stale_entries_total",): 0,
        ("mmcache_lost_entries_total",): 0,
        ("mmcache_forgotten_lookups_total",): 0,
        ("mmcache_evictions_total", "room"): 6,  # for c, d, z, y, p, q; x takes the room that z left
        ("mmcache_evictions_total", "invalidated"): 1,
        ("mmcache_uncached_items_total", "all room is pinned"): 1,
        ("mmcache_capacity_bytes",): 2 * ITEM,
        ("mmcache_used_bytes",): ITEM,
        ("mmcache_entries",): 1,
        ("mmcache_pinned_bytes",): 0,
        ("mmcache_prefix_asked_tokens_total",): 8,
        ("mmcache_prefix_hit_tokens_total",): 4,
        ("mmcache_prefix_hit_ratio",): 0.5,
        ("mmcache_epoch",): 1,
    }


def test_what_went_wrong_is_counted_apart_from_misses() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=4 * ITEM, row_bytes={"image": ROW}))
    run(cache, request("1", "a"))
    longer = MultimodalRequest("2", [0] * 5, [MultimodalItem("image", fields(), PlaceholderRange(0, 5), "a")])
    with cache.lookup(longer, num_computed_tokens=0) as lookup:
        assert lookup.missing == (0,)  # what is held has other rows: stale, and encoded anew
    cache.finish(longer)
    forgotten = request("3", "b")
    cache.lookup(forgotten, num_computed_tokens=0)
    gc.collect()
    run(cache, request("4", "c"))  # the next lookup notices
    cache.finish(forgotten)
    values = exported(cache)
    assert values["mmcache_stale_entries_total",] == 1
    assert values["mmcache_forgotten_lookups_total",] == 1
    assert values["mmcache_items_total", "missing"] == 4
    assert values["mmcache_hit_ratio",] == 0


def test_nothing_asked_is_no_success() -> None:
    values = exported(MultimodalCache(CacheConfig(capacity_bytes=ITEM)), FeatureCache(100))
    assert {name: values[name,] for name in RATIOS} == dict.fromkeys(RATIOS, 0)


def test_a_split_engine_exports_its_ledger() -> None:
    ledger = EncoderLedger(2 * ITEM, make_policy("lru"), row_bytes={"image": ROW})
    plan = ledger.plan(request("1", "a"), num_computed_tokens=0)
    assert exported(ledger)["mmcache_pinned_bytes",] == ITEM
    ledger.settle(plan, {0: ITEM})
    ledger.reconcile("worker", held=[], lost=[])
    ledger.release(plan)
    values = exported(ledger)
    assert values["mmcache_encodes_total",] == values["mmcache_lost_entries_total",] == 1


# -- processed features ------------------------------------------------------------------------------------------------


def test_features_are_exported_beside_the_embeddings() -> None:
    features = FeatureCache(2 * (PIXELS + GRID))
    for identifier in ("a", "a", "b", "a"):
        features.get_or_process(identifier, fields)
    features.put("large", split_fields({"x": torch.zeros(1, 1000)}, {"x": FieldConfig.batched("image")})["image"][0])
    cache = MultimodalCache(CacheConfig(capacity_bytes=ITEM))
    values = exported(cache, features)
    assert {name: value for name, value in values.items() if "feature" in name[0]} == {
        ("mmcache_feature_hits_total",): 2,
        ("mmcache_feature_misses_total",): 2,
        ("mmcache_feature_joins_total",): 0,
        ("mmcache_feature_collisions_total",): 0,
        ("mmcache_feature_oversized_total",): 1,
        ("mmcache_feature_entries",): 2,
        ("mmcache_feature_bytes",): 2 * (PIXELS + GRID),
        ("mmcache_feature_hit_ratio",): 0.5,
    }
    assert not any("feature" in name[0] or "tier" in name[0] for name in exported(cache))


# -- tiers -------------------------------------------------------------------------------------------------------------


def tiered(*tiers: Tier) -> MultimodalCache:
    return MultimodalCache(CacheConfig(capacity_bytes=ITEM, row_bytes={"image": ROW}, policy="lru"), tiers)


def of_tier(cache: MultimodalCache, name: str) -> dict[tuple[str, ...], float]:
    found = {key: value for key, value in exported(cache).items() if key[0].startswith("mmcache_tier")}
    assert {key[1] for key in found} == {name}
    return {(key[0].removeprefix("mmcache_tier_"), *key[2:]): value for key, value in found.items()}


def load(cache: MultimodalCache, what: MultimodalRequest) -> None:
    """Look it up and let tiers answer; encode what they do not give."""
    with cache.lookup(what, num_computed_tokens=0) as lookup:
        until(lambda: lookup.poll() is not None and not lookup.in_flight)
        cache.insert(lookup, {index: torch.zeros(4, ROW // 4) for index in lookup.missing})
    cache.finish(what)


def test_a_tier_is_exported_exactly_with_its_latencies_and_its_budget() -> None:
    faulty = FaultyTier(MemoryTier(1 << 20, name="host"))
    cache = tiered(faulty)
    try:
        run(cache, request("1", "a"))
        until(lambda: of_tier(cache, "host")["writes_total", "stored"] == 1)
        run(cache, request("2", "b"))  # a is on the tier alone
        until(lambda: of_tier(cache, "host")["writes_total", "stored"] == 2)
        load(cache, request("3", "a"))
        faulty.next = ["flipped"]
        load(cache, request("4", "b"))  # damaged: dropped, counted, and encoded
        until(lambda: of_tier(cache, "host")["writes_total", "stored"] == 3)
        values = of_tier(cache, "host")
        stats = cache.tier_stats()
        assert stats is not None
        (tier,) = stats.tiers
        assert {key: values[key] for key in values if key[0] in ("lookups_total", "damaged_entries_total")} == {
            ("lookups_total", "hits"): 1,
            ("lookups_total", "misses"): 0,
            ("lookups_total", "damaged"): 1,
            ("lookups_total", "errors"): 0,
            ("lookups_total", "timeouts"): 0,
            ("lookups_total", "cancelled"): 0,
            ("lookups_total", "skipped"): 0,
            ("damaged_entries_total", "checksum"): 1,
        }
        for operation, method, latency in (("read", "get", tier.reads), ("write", "put", tier.writes)):
            assert values["call_seconds_count", operation] == faulty.calls[method] == sum(latency.counts)
            assert values["call_seconds_sum", operation] == latency.seconds > 0
            buckets = [value for key, value in values.items() if key[:2] == ("call_seconds_bucket", operation)]
            assert len(buckets) == len(LATENCY_BOUNDS) + 1
            assert buckets == sorted(buckets)
            assert buckets[-1] == faulty.calls[method]
        usage = faulty.usage()
        assert values["used_bytes",] == usage.nbytes == values["written_bytes_total",] * 2 / 3
        assert values["capacity_bytes",] == 1 << 20
        assert values["entries",] == 2
        assert values["read_bytes_total",] == values["written_bytes_total",] / 3
        assert values["queued_bytes",] == 0
        assert values["breaker_closed",] == 1
        assert exported(cache)["mmcache_loads_total",] == 1
        assert exported(cache)["mmcache_failed_loads_total",] == 1
    finally:
        cache.close()


def test_a_slow_call_lies_in_a_later_bucket() -> None:
    faulty = FaultyTier(MemoryTier(1 << 20, name="host"), delay=0.05)
    cache = tiered(faulty)
    try:
        run(cache, request("1", "a"))
        until(lambda: of_tier(cache, "host")["writes_total", "stored"] == 1)
        run(cache, request("2", "b"))
        until(lambda: of_tier(cache, "host")["writes_total", "stored"] == 2)  # or its write would be the slow call
        faulty.next = ["timeout"]
        load(cache, request("3", "a"))
        until(lambda: of_tier(cache, "host")["call_seconds_count", "read"] == 1)
        values = of_tier(cache, "host")
        assert values["call_seconds_bucket", "read", "0.03"] == 0
        assert values["call_seconds_sum", "read"] >= 0.05
    finally:
        cache.close()


def test_a_tier_that_fails_opens_its_breaker_and_says_no_more_how_full_it_is() -> None:
    faulty = FaultyTier(MemoryTier(1 << 20, name="host"))
    cache = tiered(faulty)
    try:
        run(cache, request("0", "a"))
        until(lambda: of_tier(cache, "host")["writes_total", "stored"] == 1)
        run(cache, request("00", "b"))
        until(lambda: of_tier(cache, "host")["writes_total", "stored"] == 2)
        faulty.always = "refused"
        for number in range(20):  # each is on the tier alone when its turn comes
            load(cache, request(str(number), "ab"[number % 2]))
        values = of_tier(cache, "host")
        assert values["breaker_closed",] == 0
        assert values["breaker_openings_total",] >= 1
        assert values["lookups_total", "errors"] >= 3
        assert ("used_bytes",) not in values
    finally:
        cache.close()


# -- the dashboard -----------------------------------------------------------------------------------------------------

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana" / "mmcache.json"


def test_every_query_of_the_dashboard_names_exported_metrics_and_their_labels() -> None:
    cache = tiered(MemoryTier(1 << 20))
    # Labels of families that have no sample yet are known, too.
    labels: dict[str, set[str]] = {}
    for family in CacheCollector(cache, features=FeatureCache(100)).collect():
        own = set(family._labelnames)
        names = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[family.type]
        for suffix in names:
            labels[family.name + suffix] = own | ({"le"} if suffix == "_bucket" else set())
    cache.close()
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    for query in queries:
        used = set(re.findall(r"mmcache_\w+", query))
        assert used, query
        assert used <= labels.keys(), query
        grouped = {name for group in re.findall(r"by \(([^)]*)\)", query) for name in re.split(r",\s*", group)}
        assert all(grouped <= labels[name] for name in used), query
        matched = set(re.findall(r"[{,]\s*(\w+)\s*(?:=|!=|=~|!~)", query))
        assert all(matched <= labels[name] for name in used), query
        assert query.count("(") == query.count(")")
    shown = {name for query in queries for name in re.findall(r"mmcache_\w+", query)}
    for wanted in SHOWN:
        assert wanted in shown, "the dashboard leaves out what an operator asks for first"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert {"type", "title", "gridPos", "datasource", "targets", "fieldConfig"} <= panel.keys()
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
        assert all(target.get("legendFormat") for target in panel["targets"])


def test_metrics_say_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"mmcache\[prometheus\]"):
        CacheCollector(MultimodalCache(CacheConfig(capacity_bytes=1)))
