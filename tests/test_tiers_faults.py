"""A thousand mixed faults: no wrong rows, no failed request, no wait without end, and every look-up accounted for."""

import random
import threading
import time
from collections import Counter

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request
from builders import rows_of as cache_rows
from tier_devices import device_tier
from tier_faults import FAULTS, FaultyTier
from tier_helpers import NAMESPACE, rows_of, same_bits
from tier_servers import MooncakeCluster, RedisServer

from mmcache import CacheConfig, MultimodalCache
from mmcache.tiers import DiskTier, Expected, MemoryTier, MooncakeTier, RedisTier, TieredStore

DEADLINE = 0.05
CONTENTS = [f"content-{number}" for number in range(60)]
ROWS = {name: rows_of(name, 1 + index % 5) for index, name in enumerate(CONTENTS)}


def serve(store, tiers, faults, seed, restart=None):
    """Requests until so many faults have been injected; returns what there was to see."""
    choose = random.Random(seed)
    seen: Counter[str] = Counter()
    longest = 0.0
    while sum(sum(tier.injected.values()) for tier in tiers) < faults:
        seen["requests"] += 1
        names = choose.sample(CONTENTS, choose.randint(1, 8))
        salt = choose.choice([None, "tenant"])
        kinds = {name: Expected(*ROWS[name].shape, ROWS[name].dtype) for name in names}
        expected = {store.key(name, "image", salt=salt): kind for name, kind in kinds.items()}
        known = store.known(expected)
        start = time.monotonic()
        if choose.random() < 0.2:
            fetch = store.prefetch(expected)
            if choose.random() < 0.3:
                fetch.cancel()
            found = fetch.wait(60)
        else:
            found = store.fetch(expected, timeout=choose.choice([None, None, DEADLINE / 2]))
        longest = max(longest, time.monotonic() - start)
        for key, rows in found.items():
            seen["hits"] += 1
            assert same_bits(rows, ROWS[key.identifier]), f"wrong rows of {key}"
        seen["known and missing"] += len(known - found.keys())
        for key in expected.keys() - found.keys():
            seen["encoded"] += 1
            store.put(key, ROWS[key.identifier])
        if choose.random() < 0.05:
            store.remove(choose.sample(list(expected), 1))
        if restart is not None and seen["requests"] % 60 == 0:
            restart()
    seen["longest ms"] = round(longest * 1000)
    return seen


def settle_and_check(store, tiers, seen):
    for tier in tiers:
        tier.rate = 0.0
    store.close(timeout=20)
    stats = store.stats()
    assert stats.lookups == stats.queue_hits + sum(tier.hits for tier in stats.tiers) + stats.misses
    assert stats.queue_hits + sum(tier.hits for tier in stats.tiers) >= seen["hits"] > 0
    assert stats.puts == seen["encoded"]
    for tier in stats.tiers:
        ends = tier.hits + tier.misses + tier.damaged + tier.errors + tier.timeouts + tier.cancelled
        assert tier.asked == ends, tier
        assert sum(tier.reasons.values()) == tier.damaged
        assert tier.queued_bytes == 0
    assert stats.listener_errors == 0
    assert seen["longest ms"] < 1000 * (len(tiers) * DEADLINE + 10)  # not a speed, but an end


def faulty(*tiers, seed):
    return [FaultyTier(tier, seed=seed + n, rate=0.4, delay=2 * DEADLINE) for n, tier in enumerate(tiers)]


@pytest.mark.parametrize(
    "seed", [1, 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_thousand_faults_on_a_device_in_memory_and_on_disk(tmp_path, seed):
    near = device_tier("simulated device", 3000, name="near")
    tiers = faulty(near, DiskTier(tmp_path, 20_000), MemoryTier(1 << 20, name="far"), seed=10 * seed)
    store = TieredStore(tiers, namespace=NAMESPACE, deadline=DEADLINE, write_behind_bytes=2000)
    seen = serve(store, tiers, 1000, seed)
    settle_and_check(store, tiers, seen)
    injected = sum((tier.injected for tier in tiers), Counter())
    assert set(injected) == set(FAULTS)
    assert sum(injected.values()) >= 1000
    assert sum(tier.damaged for tier in store.stats().tiers) > 0
    assert sum(tier.timeouts for tier in store.stats().tiers) > 0


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_a_thousand_faults_with_a_real_server(kind):
    server_type = RedisServer if kind == "redis" else MooncakeCluster
    if why := server_type.why_not():
        pytest.skip(why)
    server = server_type()

    def restart():
        server.kill()
        server.start()

    try:
        inner = RedisTier(server.url, timeout=DEADLINE) if kind == "redis" else MooncakeTier(server.address)
        tiers = faulty(MemoryTier(3000), inner, seed=7)
        store = TieredStore(tiers, namespace=NAMESPACE, deadline=DEADLINE, write_behind_bytes=20_000)
        seen = serve(store, tiers, 1000, 7, restart if kind == "redis" else None)
        settle_and_check(store, tiers, seen)
        assert store.stats().tiers[1].hits > 0
    finally:
        server.kill()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_thousand_faults_behind_a_cache(tmp_path, seed):
    """Whole requests, several at a time: each ends with the right rows merged, whatever its tiers do."""
    tiers = faulty(DiskTier(tmp_path, 20_000), MemoryTier(1 << 20, name="far"), seed=seed)
    cache = MultimodalCache(
        CacheConfig(capacity_bytes=40 * ROW_BYTES, row_bytes={"image": ROW_BYTES}, namespace=NAMESPACE), tiers
    )
    failures: list[BaseException] = []
    served: Counter[str] = Counter()

    def work(number):
        choose = random.Random(seed * 100 + number)
        try:
            while sum(sum(tier.injected.values()) for tier in tiers) < 1000:
                names = choose.sample("abcdefghijklmnopqrstuvwxyz", 3)
                spans = [(2, 4), (8, 5), (15, 3)]
                ids = [f"{name}{length}" for name, (_, length) in zip(names, spans, strict=True)]
                req = request(
                    f"r{number}-{served[number]}", 20, images(*spans, ids=ids), salt=choose.choice(["s", None])
                )
                if choose.random() < 0.5:
                    cache.announce(req)
                with cache.lookup(req, num_computed_tokens=0) as lookup:
                    while lookup.missing or lookup.in_flight:
                        cache.insert(
                            lookup,
                            {i: cache_rows(ids[i], spans[i][1]) for i in lookup.missing},
                        )
                        if lookup.in_flight:
                            lookup.wait(60)
                    merged = lookup.merge_into(torch.zeros(20, WIDTH))
                cache.finish(req)
                for (offset, length), name in zip(spans, ids, strict=True):
                    assert same_bits(merged[offset : offset + length], cache_rows(name, length)), name
                served[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for tier in tiers:
        tier.rate = 0.0
    cache.close()
    stats = cache.tier_stats()
    assert stats.lookups == stats.queue_hits + sum(tier.hits for tier in stats.tiers) + stats.misses
    assert sum(tier.hits for tier in stats.tiers) > 0
    assert cache.stats().used_bytes <= 40 * ROW_BYTES
