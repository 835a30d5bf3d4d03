"""A scheduler and its workers: who loses what, and whom to believe."""

from __future__ import annotations

from typing import Any

import pytest
from builders import ROW_BYTES, images, request, rows_of
from cache_forms import check_merge, fill, one_image, step
from split_engine import SplitEngine

from mmcache import (
    CacheConfig,
    EmbeddingError,
    EncoderLedger,
    make_policy,
)

# -- workers that lose things --------------------------------------------------


def test_a_worker_that_starts_anew_is_believed() -> None:
    cache = SplitEngine(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}))
    step(cache, one_image("r1", "a"))
    cache.restart_worker()
    assert step(cache, one_image("r2", "a")) == ["a"]
    assert cache.stats().lost == 1
    assert step(cache, one_image("r3", "a")) == []


def test_an_entry_lost_in_the_middle_of_a_request_is_encoded_once_more_for_all() -> None:
    cache = SplitEngine(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}))
    lookups = [cache.lookup(one_image(f"r{i}", "a"), num_computed_tokens=0) for i in range(3)]
    fill(cache, lookups[0])
    cache.restart_worker()
    assert sorted(len(lookup.missing) for lookup in lookups) == [0, 0, 1]
    for lookup in lookups:
        fill(cache, lookup)
    for lookup in lookups:
        check_merge(lookup)
        lookup.release()
        cache.finish(lookup.request)
    assert cache.stats().pinned_bytes == 0
    assert cache.stats().used_bytes == cache.held_bytes() == 4 * ROW_BYTES


def test_an_entry_evicted_and_admitted_within_one_step_is_not_dropped() -> None:
    cache = SplitEngine(CacheConfig(capacity_bytes=4 * ROW_BYTES, row_bytes={"image": ROW_BYTES}))
    for name in "abab":
        req = one_image(f"r {name}", name)
        lookup = cache.lookup(req, num_computed_tokens=0)
        fill(cache, lookup)
        check_merge(lookup)
        lookup.release()
        cache.finish(req)
    assert cache.stats().used_bytes == cache.held_bytes() == 4 * ROW_BYTES


def test_a_new_ledger_empties_the_stores() -> None:
    cache = SplitEngine(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}))
    step(cache, one_image("r1", "a"))
    stores = cache.stores
    cache = SplitEngine(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}))
    cache.stores = stores
    cache.lookup(request("text", 4), num_computed_tokens=0)
    assert [len(store) for store in stores] == [0, 0]


def test_a_plan_of_another_ledger_ends_no_step_here() -> None:
    mine, other = (EncoderLedger(1 << 20, make_policy("lru")) for _ in range(2))
    plan = mine.plan(request("r", 20, images((0, 4))), num_computed_tokens=0)
    stranger = other.plan(request("s", 20, images((0, 4))), num_computed_tokens=0)
    assert stranger.plan_id == plan.plan_id
    assert not mine.release(stranger)
    mine.settle(plan, {0: 4 * ROW_BYTES})
    assert mine.release(plan)
    assert not mine.release(plan)


def test_a_ledger_takes_requests_and_their_ids() -> None:
    for of in (lambda req: req, lambda req: req.request_id):
        ledger = EncoderLedger(1 << 20, make_policy("lru"))
        req = request("r", 20, images((0, 4)))
        ledger.announce(req)
        ledger.withdraw(of(req))
        ledger.plan(req, num_computed_tokens=0)
        ledger.finish(of(req))
        assert ledger.stats().entries == 0


@pytest.mark.parametrize("sizes", [{0: 65}, {0: 0}, {0: -64}, {0: 64, 1: 65}, {0: 128, 1: 128}, {0: 64, 1: 96}])
@pytest.mark.parametrize("row_bytes", [{"image": ROW_BYTES}, {}])
def test_a_worker_s_report_of_other_rows_than_were_reserved_is_refused(sizes: Any, row_bytes: Any) -> None:
    ledger = EncoderLedger(1 << 20, make_policy("lru"), row_bytes=row_bytes)
    plan = ledger.plan(request("r", 20, images((0, 4), (10, 5))), num_computed_tokens=0)
    before = ledger.stats()
    with pytest.raises(EmbeddingError, match="'r'"):
        ledger.settle(plan, sizes)
    assert ledger.stats() == before
    ledger.check()
    assert ledger.refresh(plan).missing == (0, 1)
    ledger.settle(plan, {0: 4 * ROW_BYTES, 1: 5 * ROW_BYTES})
    assert ledger.refresh(plan).stored == (0, 1)


def test_workers_drop_what_a_request_began_that_was_aborted() -> None:
    """The worker has the rows, and the request ends before the scheduler hears of them."""
    cache = SplitEngine(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}))
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    for store in cache.stores:
        store.put_planned(lookup.plan, {0: rows_of("a", 4)})
    cache.finish(lookup.request)
    cache.lookup(request("text", 4), num_computed_tokens=0)
    assert [len(store) for store in cache.stores] == [0, 0]


def test_settling_what_a_plan_does_not_need_changes_nothing() -> None:
    ledger = EncoderLedger(1 << 20, make_policy("lru"))
    plan = ledger.plan(request("r", 20, images((0, 4))), num_computed_tokens=0)
    ledger.settle(plan, {7: 64}, seconds=1.0)
    assert ledger.stats().encodes == 0
    ledger.check()
