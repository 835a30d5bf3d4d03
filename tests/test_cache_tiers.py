"""A cache over tiers: what one process encoded another loads, and no tier's fault reaches a request."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of
from tier_caches import flush, learn, make, one_image, one_item, step
from tier_faults import FaultyTier, LateTier
from tier_helpers import until

from mmcache import (
    CacheEvent,
    ConfigError,
    Namespace,
    WaitTimeoutError,
)
from mmcache.tiers import DiskTier, MemoryTier


def test_nothing_in_a_scheduler_s_path_waits_for_a_tier_that_hangs() -> None:
    tier = FaultyTier(MemoryTier(1 << 20))
    cache = make(tier, rows=8, tier_deadline=600.0)
    tier.hang()
    done: list[str] = []

    def steps() -> None:
        for name in "abcab":
            req = one_image(f"r{len(done)}", name)
            cache.announce(req)
            with cache.lookup(req, num_computed_tokens=0) as lookup:
                if lookup.missing:
                    cache.insert(lookup, [rows_of(name, 4)])
                if not lookup.in_flight:  # else it comes from what waits to be written, on another thread
                    lookup.merge_into(torch.zeros(6, WIDTH))
                lookup.poll()
            cache.commit(req, 6)
            cache.finish(req)
            cache.withdraw(req)
            cache.stats()
            cache.tier_stats()
            done.append(name)
        cache.invalidate(identifier="a")
        cache.clear()

    engine = threading.Thread(target=steps, daemon=True)
    engine.start()
    engine.join(30)
    assert "".join(done) == "abcab"
    assert not engine.is_alive()
    tier.go_on()
    cache.close()


def test_what_was_evicted_is_loaded_and_not_encoded_again() -> None:
    cache = make(MemoryTier(1 << 20), rows=4)
    assert step(cache, one_image("r1", "a")) == ["a"]
    assert step(cache, one_image("r2", "b")) == ["b"]
    flush(cache)
    assert step(cache, one_image("r3", "a")) == []
    assert cache.stats().loads == 1
    cache.close()


def test_another_process_loads_from_disk(tmp_path: Path) -> None:
    first = make(DiskTier(tmp_path, 1 << 20))
    step(first, one_image("r1"))
    first.close()
    second = make(DiskTier(tmp_path, 1 << 20))
    req = one_image("r2")
    learn(second, req)
    until(lambda: second.stats().loads == 1)
    lookup = second.lookup(req, num_computed_tokens=0)
    assert lookup.stored == (0,)
    assert torch.equal(lookup.rows(0), rows_of("a", 4))
    second.close()


@pytest.mark.parametrize(
    "other",
    [{"salt": "s"}, {"salt": ""}, {"adapter": "x"}, {"namespace": Namespace(model="other", digest_scheme="blake3")}],
)
def test_other_salts_adapters_and_models_never_hit(tmp_path: Path, other: dict[str, Any]) -> None:
    namespace = other.pop("namespace", None)
    first = make(DiskTier(tmp_path, 1 << 20))
    step(first, one_image("r1"))
    first.close()
    second = make(DiskTier(tmp_path, 1 << 20), **({"namespace": namespace} if namespace else {}))
    req = one_image("r2", **other)
    second.announce(req)
    step(second, one_image("r3", "b", **other))
    flush(second)
    assert step(second, req) == ["a"]
    assert second.stats().loads == 0
    second.close()


def test_one_identifier_of_two_modalities_is_never_served_for_the_other(tmp_path: Path) -> None:
    widths = {"row_bytes": {"image": ROW_BYTES, "video": ROW_BYTES}}
    for modality in ("image", "video"):  # the same number of rows, of the same width: nothing else tells them apart
        cache = make(DiskTier(tmp_path, 1 << 20), **widths)
        req = one_item("r1", modality)
        cache.announce(req)
        lookup = cache.lookup(req, num_computed_tokens=0)
        cache._tiers.tiers.fetch([])  # whatever the tiers were asked, they have answered
        assert lookup.missing == (0,)
        cache.insert(lookup, [rows_of(modality, 4)])
        cache.close()
    for modality in ("image", "video"):
        cache = make(DiskTier(tmp_path, 1 << 20), **widths)
        req = one_item("r2", modality)
        learn(cache, req)
        until(lambda cache=cache: cache.stats().loads == 1)
        lookup = cache.lookup(req, num_computed_tokens=0)
        assert torch.equal(lookup.rows(0), rows_of(modality, 4))
        cache.close()


def test_a_content_is_forgotten_in_every_modality(tmp_path: Path) -> None:
    for modality in ("image", "video", "lidar"):
        cache = make(DiskTier(tmp_path, 1 << 20), row_bytes=dict.fromkeys(("image", "video", "lidar"), ROW_BYTES))
        lookup = cache.lookup(one_item("r1", modality), num_computed_tokens=0)
        cache.insert(lookup, [rows_of(modality, 4)])
        lookup.release()
        cache.invalidate(identifier="other")
        flush(cache)
        if modality == "lidar":
            cache.invalidate(identifier="logo")
            flush(cache)
        cache.close()
    assert list(DiskTier(tmp_path, 1 << 20).scan()) == []


def test_a_load_that_fails_makes_the_item_this_request_s_to_encode(tmp_path: Path) -> None:
    cache = make(DiskTier(tmp_path, 1 << 20), rows=4)
    step(cache, one_image("r1", "a"))
    flush(cache)
    step(cache, one_image("r2", "b"))
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size and "sqlite" not in path.name and "index" not in path.name:
            path.write_bytes(b"\0" * path.stat().st_size)
    assert step(cache, one_image("r3", "a")) == ["a"]
    assert cache.stats().failed_loads == 1
    cache.close()


def test_waiters_share_one_load_and_one_takes_over_when_it_fails() -> None:
    tier = FaultyTier(MemoryTier(1 << 20))
    cache = make(tier, rows=4)
    step(cache, one_image("r1", "a"))
    step(cache, one_image("r2", "b"))
    flush(cache)
    tier.hang()
    lookups = [cache.lookup(one_image(f"w{i}", "a"), num_computed_tokens=0) for i in range(3)]
    assert [lookup.in_flight for lookup in lookups] == [(0,)] * 3
    until(lambda: any(lookup.missing for lookup in lookups))
    tier.go_on()
    assert sorted(len(lookup.missing) for lookup in lookups) == [0, 0, 1]
    for lookup in lookups:
        if lookup.missing:
            cache.insert(lookup, [rows_of("a", 4)])
    assert all(lookup.stored == (0,) for lookup in lookups)
    cache.close()


def test_rows_that_do_not_fit_are_a_miss() -> None:
    memory = MemoryTier(1 << 20)
    first = make(memory)
    lookup = first.lookup(request("r1", 9, images((1, 7), ids="a")), num_computed_tokens=0)
    first.insert(lookup, [rows_of("a", 7)])
    flush(first)
    second = make(memory)
    req = one_image("r2", "a")
    learn(second, req)
    until(lambda: second.stats().failed_loads == 1)
    assert step(second, req) == ["a"]


def test_invalidated_contents_are_gone_from_the_tiers_as_well(tmp_path: Path) -> None:
    cache = make(DiskTier(tmp_path, 1 << 20))
    for name in ("a", "b"):
        step(cache, one_image(name, name))
    flush(cache)
    cache.invalidate(identifier="a")
    assert step(cache, one_image("r1", "a")) == ["a"]
    assert step(cache, one_image("r2", "b")) == []
    cache.invalidate()
    assert step(cache, one_image("r3", "b")) == ["b"]
    cache.close()


def test_a_shared_tier_refuses_a_namespace_without_strong_digests(tmp_path: Path) -> None:
    from mmcache import ConfigError
    from mmcache.tiers import RedisTier

    with pytest.raises(ConfigError, match="digest"):
        make(RedisTier("redis://127.0.0.1:1"), namespace=Namespace(model="m", digest_scheme="xxh3_128"))


def test_listeners_learn_what_is_stored_and_removed_in_order() -> None:
    cache = make(MemoryTier(1 << 20), rows=4)
    events: list[CacheEvent] = []
    stop = cache.subscribe(events.append)
    cache.subscribe(lambda event: 1 / 0)
    step(cache, one_image("r1", "a"))
    step(cache, one_image("r2", "b"))
    flush(cache)
    until(lambda: sum(event.tier != "device" for event in events) == 2)
    device = [(event.kind, event.identifier) for event in events if event.tier == "device"]
    assert device == [("stored", "a"), ("removed", "a"), ("stored", "b")]
    assert len({event.namespace for event in events}) == 1
    stop()
    step(cache, one_image("r3", "c"))
    assert len(events) == 5
    cache.close()


def test_a_content_is_not_removed_while_newer_rows_of_it_are_there() -> None:
    """Who keeps count of what the cache has sees no more than that: old rows go after new ones came."""
    cache = make(rows=20)
    events: list[tuple[str, str]] = []
    cache.subscribe(lambda event: events.append((event.kind, event.identifier)))
    holder = cache.lookup(one_image("r1", "a"), num_computed_tokens=0)
    cache.insert(holder, [rows_of("a", 4)])
    cache.invalidate()
    step(cache, one_image("r2", "a"))
    cache.finish(holder.request)
    assert events == [("stored", "a")] * 2
    assert cache.stats().entries == 1
    cache.clear()
    assert events == [("stored", "a")] * 2 + [("removed", "a")]


def test_one_may_listen_twice_and_end_it_once() -> None:
    cache = make(rows=4)
    events: list[CacheEvent] = []
    stop, _ = cache.subscribe(events.append), cache.subscribe(events.append)
    step(cache, one_image("r1", "a"))
    stop()
    stop()
    step(cache, one_image("r2", "b"))
    assert [(event.kind, event.identifier) for event in events] == [
        *[("stored", "a")] * 2, ("removed", "a"), ("stored", "b")
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="listener"):
        cache.subscribe(None)  # type: ignore[arg-type]


def test_who_waits_for_a_tier_beyond_the_lease_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes over from a tier, whose own deadline ends its turn: there is nothing to look at again and again."""
    tier = LateTier(MemoryTier(1 << 20))
    cache = make(tier, rows=4, lease_seconds=1e-9, tier_deadline=600.0)
    step(cache, one_image("r1", "a"))
    flush(cache)
    step(cache, one_image("r2", "b"))
    tier.gate.clear()
    lookup = cache.lookup(one_image("r3", "a"), num_computed_tokens=0)
    assert lookup.in_flight == (0,)
    pauses: list[float | None] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            pauses.append(timeout)
        return wait(event, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", noted)
        with pytest.raises(WaitTimeoutError):
            lookup.wait(0.05)
    assert 0 < len(pauses) < 10
    tier.gate.set()
    cache.close()


@pytest.mark.parametrize("seed", range(4))
def test_faults_cost_time_and_nothing_else(seed: int) -> None:
    """Random faults of the tier under random requests: no wrong row (`step` compares them), no failed request."""
    rng = random.Random(seed)
    tier = FaultyTier(MemoryTier(40 * ROW_BYTES * 20), seed=seed, rate=0.3)
    cache = make(tier, rows=12)
    for turn in range(60):
        names = rng.sample("abcdefgh", rng.randint(1, 3))
        req = request(f"r{turn}", 20, images(*((i * 5, 4) for i in range(len(names))), ids=names))
        if rng.random() < 0.5:
            cache.announce(req)
        step(cache, req)
        cache._ledger.check()
    cache.close()
