"""A scheduler and its workers: who loses what, and whom to believe."""

from __future__ import annotations

import io
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of
from cache_forms import check_merge, fill, one_image, step
from split_engine import SplitEngine

from mmcache import (
    CacheConfig,
    ConfigError,
    EmbeddingError,
    EmbeddingStore,
    EncoderLedger,
    ItemStatus,
    MultimodalItem,
    PlaceholderRange,
    ReleasedError,
    RequestError,
    WindowError,
    make_policy,
)
from mmcache.policies import LruPolicy

# -- what a scheduler sends ----------------------------------------------------


class NoTensors(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        assert not isinstance(value, torch.Tensor)
        return NotImplemented


def test_a_plan_is_a_frozen_message_without_tensors() -> None:
    """Of every status: what a process of its own gets is the decision, and nothing of the media."""
    ledger = EncoderLedger(1 << 20, "lru", row_bytes={"image": ROW_BYTES})
    ledger.plan(one_image("other", "c"), num_computed_tokens=0)
    *items, last = images((0, 4), (6, 4), (11, 4), (16, 4), (30, 4))
    given = MultimodalItem("image", last.fields, PlaceholderRange(21, 1), "given", embeds=torch.ones(1, WIDTH))
    req = request("r", 40, [*items, given, last])
    plan = ledger.plan(req, num_computed_tokens=4, num_scheduled_tokens=20)
    assert len({plan.status(index) for index in range(6)}) == 5
    message = io.BytesIO()
    NoTensors(message).dump(plan)
    assert pickle.loads(message.getvalue()) == plan
    for value in (plan, plan.items[0], plan.bytes):
        for field in fields(value):
            with pytest.raises(FrozenInstanceError):
                setattr(value, field.name, None)
    ledger.settle(plan, {1: 4 * ROW_BYTES})
    assert plan.status(1) is ItemStatus.MISSING  # a snapshot, whatever comes later
    assert ledger.refresh(plan).status(1) is ItemStatus.STORED


def test_a_handle_to_drop_is_in_one_plan_only() -> None:
    ledger = EncoderLedger(4 * ROW_BYTES, "lru", row_bytes={"image": ROW_BYTES})
    old = ledger.plan(one_image("r", "a"), num_computed_tokens=0)
    ledger.settle(old, {0: 4 * ROW_BYTES})
    ledger.finish("r")
    new = ledger.plan(one_image("s", "b"), num_computed_tokens=0)
    assert (old.drop, new.drop) == ((), (old.items[0].handle,))
    assert ledger.refresh(new).drop == ledger.plan(request("text", 1), num_computed_tokens=0).drop == ()


def test_rows_that_come_late_for_an_older_plan_are_not_those_of_a_newer() -> None:
    """A handle is of one admission: a slow worker's rows of older weights do not take the place of the new ones."""
    ledger, store = EncoderLedger(1 << 20, "lru", row_bytes={"image": ROW_BYTES}), EmbeddingStore()
    old = ledger.plan(one_image("r", "a"), num_computed_tokens=0)
    ledger.finish("r")
    ledger.invalidate()
    new = ledger.plan(one_image("s", "a"), num_computed_tokens=0)
    for plan in (old, new):
        store.apply(plan)
    store.put_planned(new, [rows_of("a", 4)])
    store.put_planned(old, [rows_of("older weights", 4)])
    assert torch.equal(store.rows(new, 0), rows_of("a", 4))


# -- workers that lose things --------------------------------------------------


def test_a_worker_that_starts_anew_is_believed() -> None:
    cache = SplitEngine(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}))
    step(cache, one_image("r1", "a"))
    cache.restart_worker()
    assert step(cache, one_image("r2", "a")) == ["a"]
    assert cache.stats().lost == 1
    assert step(cache, one_image("r3", "a")) == []


def test_a_worker_of_another_start_holds_nothing_unless_it_says_so() -> None:
    ledger = EncoderLedger(1 << 20, "lru")
    plan = ledger.plan(one_image("r", "a"), num_computed_tokens=0)
    handle = plan.items[0].handle
    for worker in (0, 1):
        ledger.reconcile(f"first start of {worker}", (), (), worker=worker)
    ledger.settle(plan, {0: 4 * ROW_BYTES})
    for worker in (0, 1):
        ledger.reconcile(f"first start of {worker}", None, (), worker=worker)
    ledger.reconcile("second start of 0", (handle,), (), worker=0)
    assert ledger.refresh(plan).stored == (0,)
    ledger.reconcile("second start of 1", None, (), worker=1)
    assert (ledger.refresh(plan).missing, ledger.stats().lost) == ((0,), 1)


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


@pytest.mark.parametrize("rows", [5, 11, 12])
def test_what_a_worker_lost_takes_no_room_from_what_is_encoded_anew(rows: int) -> None:
    """All that is lost goes first: it is neither evicted once more, nor in the way of those that need it again."""
    cache = SplitEngine(CacheConfig(capacity_bytes=rows * ROW_BYTES, row_bytes={"image": ROW_BYTES}))
    lookup = cache.lookup(one_image("r", "d", 5), num_computed_tokens=0)
    fill(cache, lookup)
    other = one_image("s", "e", 6)
    step(cache, other)
    cache.finish(other)
    cache.restart_worker()
    assert lookup.missing == (0,)
    assert cache.ledger.poll(lookup.plan).mine == (0,)
    cache.ledger.check()
    fill(cache, lookup)
    check_merge(lookup)
    stats = cache.stats()
    assert (stats.uncached, stats.evictions) == ({} if rows > 5 else {"larger than the budget": 1}, {})
    assert (stats.lost, stats.used_bytes) == (2 if rows > 5 else 1, 5 * ROW_BYTES)


@pytest.mark.parametrize("handles", [None, 5, "12", ["1"], [[]], [1.5], [True]], ids=range(7))
def test_a_report_of_what_are_no_handles_is_refused_and_changes_nothing(handles: Any) -> None:
    ledger = EncoderLedger(1 << 20, "lru")
    plan = ledger.plan(one_image("r", "a"), num_computed_tokens=0)
    ledger.settle(plan, {0: 4 * ROW_BYTES})
    before = ledger.stats()
    for held, lost in (((), handles), *([(handles, ())] if handles is not None else [])):
        with pytest.raises(RequestError, match="handles"):
            ledger.reconcile("start", held, lost)
    assert ledger.stats() == before
    ledger.reconcile("start", None, torch.tensor([plan.items[0].handle]))
    assert ledger.refresh(plan).missing == (0,)


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


def test_a_step_ends_once() -> None:
    """Whoever is first, of two threads that both saw it open."""
    ledger = EncoderLedger(1 << 20, "lru")
    ticket = ledger.open(one_image("r", "a"), 0, 6, 0, 0)
    assert [ledger.release(ticket) for _ in range(2)] == [True, False]
    assert sum(ledger.stats().items.values()) == 1
    ticket = ledger.open(one_image("r", "a"), 0, 6, 0, 0)
    ledger.finish("r")
    assert not ledger.release(ticket)
    ledger.check()


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


NOT_THE_PLAN_S: dict[str, Any] = {
    "an index that does not exist": {9: 64},
    "a covered item": {0: 64},
    "a later item": {4: 64},
    "an item with given rows": {3: 16},
    "one among others": {1: 64, 9: 64},
    "a truth value": {True: 64},
    "a name": {"1": 64},
    "a size that is no integer": {1: "x"},
    "half a byte": {1: 64.5},
    "nothing": None,
    "no mapping": [64],
}


@pytest.mark.parametrize("sizes", NOT_THE_PLAN_S.values(), ids=list(NOT_THE_PLAN_S))
def test_a_report_of_what_a_plan_does_not_need_is_refused_and_changes_nothing(sizes: Any) -> None:
    ledger = EncoderLedger(1 << 20, "lru")
    *items, last = images((0, 4), (6, 4), (11, 4), (30, 4))
    given = MultimodalItem("image", last.fields, PlaceholderRange(16, 1), "given", embeds=torch.ones(1, WIDTH))
    req = request("r", 40, [*items, given, last])
    plan = ledger.plan(req, num_computed_tokens=4, num_scheduled_tokens=20)
    assert (plan.missing, plan.stored) == ((1, 2), (3,))
    before = ledger.stats()
    with pytest.raises(EmbeddingError, match="'r'"):
        ledger.settle(plan, sizes)
    assert ledger.stats() == before
    ledger.check()
    ledger.settle(plan, {1: 4 * ROW_BYTES, 2: 4 * ROW_BYTES})
    assert ledger.refresh(plan).missing == ()


def test_what_another_has_taken_over_is_passed_over() -> None:
    now = [0.0]
    ledger = EncoderLedger(1 << 20, "lru", lease_seconds=1.0, clock=lambda: now[0])
    slow, waiter = (ledger.plan(one_image(name, "a"), num_computed_tokens=0) for name in "rs")
    now[0] = 2.0
    assert ledger.poll(waiter).mine == (0,)
    ledger.settle(waiter, {0: 4 * ROW_BYTES})
    ledger.settle(waiter, {0: 4 * ROW_BYTES})  # another worker's report of the same
    before = ledger.stats()
    ledger.settle(slow, {0: 4 * ROW_BYTES})
    assert ledger.stats().used_bytes == before.used_bytes == 4 * ROW_BYTES
    ledger.check()


# -- steps that the scheduler cuts ---------------------------------------------


def test_a_shorter_step_gives_up_what_only_the_cut_tokens_needed() -> None:
    ledger, store = EncoderLedger(1 << 20, "lru", row_bytes={"image": ROW_BYTES}), EmbeddingStore()
    plan = ledger.plan(request("r", 20, images((0, 4), (10, 4))), num_computed_tokens=0)
    waiter = ledger.plan(request("s", 20, images((10, 4), ids="b")), num_computed_tokens=0)
    store.apply(plan)
    store.put_planned(plan, [rows_of("a", 4), rows_of("b", 4)])
    shorter = ledger.shrink(plan, 10)
    assert (shorter.plan_id, shorter.window, shorter.missing) == (plan.plan_id, (0, 10), (0,))
    assert ledger.poll(waiter).mine == (0,)
    ledger.release(waiter)
    nothing = ledger.shrink(shorter, 0)
    assert (nothing.window, nothing.missing) == ((0, 0), ())
    for late in (shorter, nothing):
        store.apply(late)
    drops = ledger.plan(request("text", 1), num_computed_tokens=0)
    store.apply(drops)
    assert (len(store), ledger.stats().used_bytes) == (0, 0)
    ledger.check()


def test_a_step_that_was_cut_settles_what_it_kept() -> None:
    ledger = EncoderLedger(1 << 20, "lru")
    plan = ledger.plan(request("r", 20, images((0, 4), (10, 4))), num_computed_tokens=0)
    shorter = ledger.shrink(plan, 10)
    with pytest.raises(EmbeddingError, match="item 1"):
        ledger.settle(shorter, {0: 64, 1: 64})
    ledger.settle(plan, {0: 64, 1: 64})  # of workers that had not heard of the cut
    assert (ledger.refresh(plan).stored, ledger.stats().encodes) == ((0,), 1)
    ledger.check()


@pytest.mark.parametrize("number", [-1, 13, 3.0, True, "4", None])
def test_a_step_is_cut_to_no_more_than_it_has(number: Any) -> None:
    ledger = EncoderLedger(1 << 20, "lru")
    plan = ledger.plan(request("r", 20, images((0, 4), (10, 4))), num_computed_tokens=4, num_scheduled_tokens=12)
    with pytest.raises(WindowError, match="'r'"):
        ledger.shrink(plan, number)
    assert ledger.refresh(plan).window == (4, 16)
    ledger.release(plan)
    with pytest.raises(ReleasedError, match="'r'"):
        ledger.shrink(plan, 4)


# -- what a ledger is made of, and told ----------------------------------------


@pytest.mark.parametrize(
    "policy", ["lru", "gdsf", "queue-aware", LruPolicy()], ids=["lru", "gdsf", "queue-aware", "own"]
)
def test_a_ledger_takes_a_policy_or_its_name(policy: Any) -> None:
    ledger = EncoderLedger(8 * ROW_BYTES, policy, row_bytes={"image": ROW_BYTES})
    for name in "abc":
        req = one_image(name, name)
        plan = ledger.plan(req, num_computed_tokens=0)
        ledger.settle(plan, {0: 4 * ROW_BYTES})
        ledger.finish(req)
    assert ledger.stats().evictions == {"room": 1}
    ledger.clear()
    assert ledger.stats().entries == 0
    ledger.check()


@pytest.mark.parametrize("policy", ["fifo", "", None, [], 7, object(), LruPolicy], ids=range(7))
def test_a_ledger_without_a_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy"):
        EncoderLedger(1000, policy)


@pytest.mark.parametrize("capacity", [-1, 1.5, "1000", None, True, [1]])
def test_a_ledger_s_capacity_is_a_number_of_bytes(capacity: Any) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        EncoderLedger(capacity, "lru")


@pytest.mark.parametrize(
    "row_bytes",
    [{"image": -16}, {"image": 0}, {"image": True}, {"image": "x"}, {"image": 1.5}, {1: 16}, [1], "image"],
    ids=range(8),
)
def test_bytes_of_rows_are_positive_integers_by_modality(row_bytes: Any) -> None:
    with pytest.raises(ConfigError, match="row_bytes"):
        EncoderLedger(1000, "lru", row_bytes=row_bytes)
    with pytest.raises(ConfigError, match="row_bytes"):
        CacheConfig(capacity_bytes=1000, row_bytes=row_bytes)


@pytest.mark.parametrize("lease", [0, -1.0, float("nan"), True, "1", None])
def test_a_lease_is_a_time(lease: Any) -> None:
    with pytest.raises(ConfigError, match="lease_seconds"):
        EncoderLedger(1000, "lru", lease_seconds=lease)
    with pytest.raises(ConfigError, match="lease_seconds"):
        CacheConfig(capacity_bytes=1000, lease_seconds=lease)


@pytest.mark.parametrize("step", [None, 7, "r", ("r", 1)])
@pytest.mark.parametrize("use", ["release", "refresh", "poll", "shrink", "settle"])
def test_a_ledger_knows_steps_by_their_plans(use: str, step: Any) -> None:
    ledger = EncoderLedger(1 << 20, "lru")
    rest = {"shrink": (1,), "settle": ({},)}.get(use, ())
    with pytest.raises(RequestError, match="StepPlan"):
        getattr(ledger, use)(step, *rest)
