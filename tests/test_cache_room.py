"""Room: made before the encoder runs, never for what cannot fit, and never held by those who wait."""

from __future__ import annotations

from typing import Any

import pytest
from builders import ROW_BYTES, images, request, rows_of
from cache_forms import both_forms, check_merge, fill, one_image, step

from mmcache import CacheConfig, EncoderLedger, MultimodalCache, MultimodalRequest


@both_forms
def test_room_is_made_before_the_encoder_runs(make: Any) -> None:
    cache = make(rows=8, policy="lru")
    step(cache, one_image("r1", "a"))
    step(cache, one_image("r2", "b"))
    cache.finish(one_image("r1", "a"))
    lookup = cache.lookup(one_image("r3", "c"), num_computed_tokens=0)
    assert cache.stats().used_bytes == 8 * ROW_BYTES
    assert cache.stats().evictions == {"room": 1}
    assert cache.held_bytes() == 4 * ROW_BYTES
    lookup.release()
    assert step(cache, one_image("r4", "b")) == []
    assert step(cache, one_image("r5", "a")) == ["a"]


@both_forms
def test_an_item_larger_than_the_budget_is_served_uncached_and_evicts_nothing(make: Any) -> None:
    cache = make(rows=8)
    step(cache, one_image("r1", "a"))
    big = one_image("big", "b", 9)
    lookup = cache.lookup(big, num_computed_tokens=0)
    waiter = cache.lookup(one_image("waiter", "b", 9), num_computed_tokens=0)
    assert (lookup.missing, waiter.in_flight) == ((0,), (0,))
    fill(cache, lookup)
    check_merge(lookup)
    check_merge(waiter)
    assert cache.stats().uncached == {"larger than the budget": 1}
    assert cache.lookup(one_image("r9", "b", 9), num_computed_tokens=0).missing == (0,)
    lookup.release()
    check_merge(waiter)
    waiter.release()
    assert step(cache, one_image("r2", "a")) == []
    cache.finish(one_image("r9", "b"))
    assert cache.held_bytes() == 4 * ROW_BYTES


@both_forms
def test_items_that_cannot_fit_together_are_served_all_the_same(make: Any) -> None:
    cache = make(rows=8)
    req = request("r", 40, images((0, 5), (10, 5), ids="ab"))
    assert step(cache, req) == ["a", "b"]
    assert cache.stats().uncached == {"all room is pinned": 1}
    assert cache.stats().used_bytes <= 8 * ROW_BYTES


@both_forms
def test_what_cannot_fit_beside_its_own_request_evicts_nothing(make: Any) -> None:
    cache = make(rows=8)
    step(cache, one_image("r1", "x", 3))
    cache.finish(one_image("r1", "x", 3))
    lookup = cache.lookup(request("r", 40, images((0, 5), (10, 5), ids="ab")), num_computed_tokens=0)
    assert lookup.missing == (0, 1)
    assert (cache.stats().evictions, cache.stats().uncached) == ({}, {"all room is pinned": 1})
    fill(cache, lookup)
    check_merge(lookup)
    assert step(cache, one_image("r2", "x", 3)) == []
    assert cache.stats().used_bytes == 8 * ROW_BYTES


@both_forms
def test_a_request_never_evicts_what_it_needs_itself(make: Any) -> None:
    """Room for two, and [A stored, B, C] in one request: A survives though it is the oldest."""
    cache = make(rows=8, policy="lru")
    step(cache, one_image("r1", "z"))
    step(cache, one_image("r2", "a"))
    for name in ("r1", "r2"):
        cache.finish(one_image(name, "a"))
    lookup = cache.lookup(request("r", 40, images((0, 4), (10, 4), (20, 4), ids="bac")), num_computed_tokens=0)
    assert lookup.stored == (1,)
    assert lookup.missing == (0, 2)


@both_forms
def test_waiting_requests_cannot_block_each_other(make: Any) -> None:
    """Two half-processed requests wait for each other's room: what a waiting request holds is droppable."""
    cache = make(rows=10)
    first, second = one_image("w1", "a", 6), one_image("w2", "b", 6)
    step_lookup = cache.lookup(first, num_computed_tokens=0, num_scheduled_tokens=3)
    fill(cache, step_lookup)
    step_lookup.release()
    cache.announce(first)  # preempted: no KV blocks for it
    assert cache.stats().pinned_bytes == 0
    assert step(cache, second) == ["b"]
    assert cache.stats().uncached == {}
    assert step(cache, first) == ["a"]


@both_forms
def test_a_scheduler_whose_requests_wait_for_each_other_s_room_gets_through(make: Any) -> None:
    """KV blocks for 14 tokens, and room for the rows of two images; three requests of 14 tokens and two images each.

    Two begin; soon there are no blocks for both, and the later one gives up its tokens and waits, in the middle of an
    image. Did it keep that image's rows, the other would not find room for two of its own.
    """
    cache = make(rows=12)
    waiting = [request(f"r{i}", 14, images((0, 6), (6, 6), ids=[f"a{i}", f"b{i}"])) for i in range(3)]
    computed = {req.request_id: 0 for req in waiting}
    running: list[MultimodalRequest] = []
    preempted, encoded = 0, []
    for _ in range(30):
        while waiting and sum(computed.values()) + 8 <= 14:
            running.append(waiting.pop(0))
            encoded += step(cache, running[-1], 0, 4)
            computed[running[-1].request_id] = 4
        while len(running) > 1 and sum(computed.values()) + 8 > 14:
            last = running.pop()
            waiting.insert(0, last)
            computed[last.request_id] = 0
            cache.announce(last)
            preempted += 1
        for req in list(running):
            encoded += step(cache, req, computed[req.request_id], 4)
            computed[req.request_id] = min(14, computed[req.request_id] + 4)
            if computed[req.request_id] == 14:
                running.remove(req)
                computed[req.request_id] = 0
                cache.finish(req)
    assert not running
    assert not waiting
    assert preempted
    assert set(encoded) == {f"{image}{i}" for image in "ab" for i in range(3)}
    assert cache.stats().uncached == {}
    assert cache.stats().pinned_bytes == 0


@both_forms
def test_a_queue_decides_what_goes_first(make: Any) -> None:
    cache = make(rows=12)
    for name in "abc":
        req = one_image(name, name)
        step(cache, req)
        cache.finish(req)
    soon, late = one_image("soon", "a"), one_image("late", "b")
    cache.announce(soon)
    cache.announce(late)
    step(cache, one_image("d", "d"))
    assert step(cache, one_image("probe", "a")) == []
    cache.finish(one_image("probe", "a"))
    cache.finish(one_image("d", "d"))
    cache.withdraw(late)
    lookup = cache.lookup(soon, num_computed_tokens=0)
    assert lookup.stored == (0,)


@both_forms
def test_widths_are_learned_where_they_are_not_configured(make: Any) -> None:
    cache = make(rows=8, row_bytes={})
    assert step(cache, one_image("r1", "a")) == ["a"]
    assert cache.stats().used_bytes == 4 * ROW_BYTES
    assert step(cache, one_image("r2", "a")) == []
    lookup = cache.lookup(one_image("r3", "b"), num_computed_tokens=0)
    assert cache.stats().used_bytes == 8 * ROW_BYTES
    lookup.release()


@both_forms
def test_several_items_of_unknown_width_stay_within_the_budget(make: Any) -> None:
    cache = make(rows=9, row_bytes={})
    req = request("r", 60, images((0, 4), (10, 4), (20, 4), ids="abc"))
    assert step(cache, req) == ["a", "b", "c"]
    assert cache.stats().used_bytes == 8 * ROW_BYTES
    cache.finish(req)
    assert cache.held_bytes() == 8 * ROW_BYTES


@both_forms
def test_who_is_announced_again_keeps_its_place(make: Any) -> None:
    cache = make(rows=8)
    for name in "ab":
        step(cache, one_image(name, name))
        cache.finish(one_image(name, name))
    soon, late = one_image("soon", "a"), one_image("late", "b")
    for req in (soon, late, soon):
        cache.announce(req)
    step(cache, one_image("c", "c"))
    assert step(cache, soon) == []
    assert step(cache, late) == ["b"]


@both_forms
@pytest.mark.parametrize("end", ["withdraw", "finish"])
def test_what_no_longer_waits_is_no_longer_kept(make: Any, end: str) -> None:
    """The oldest entry was kept for a request that goes away: it is the first to go, as it would have been."""
    cache = make(rows=8)
    for name in "ab":
        step(cache, one_image(name, name))
        cache.finish(one_image(name, name))
    waits = one_image("waits", "a")
    cache.announce(waits)
    for _ in range(2):
        getattr(cache, end)(waits)
    step(cache, one_image("c", "c"))
    assert step(cache, one_image("again", "b")) == []


def serve(cache: MultimodalCache, seconds: float | None, **contents: int) -> list[str]:
    """One request with these contents, of so many rows, that takes so long to encode; returns what was encoded."""
    spans, position = [], 0
    for rows in contents.values():
        spans.append((position, rows))
        position += rows
    req = request("-".join(contents), position, images(*spans, ids=list(contents)))
    with cache.lookup(req, num_computed_tokens=0) as lookup:
        encoded = [req.items[index].identifier for index in lookup.missing]
        rows_by_index = {i: rows_of(req.items[i].identifier, contents[req.items[i].identifier]) for i in lookup.missing}
        cache.insert(lookup, rows_by_index, seconds=seconds)
    cache.finish(req)
    return encoded


@pytest.mark.parametrize("policy", ["gdsf", "queue-aware"])
class TestCosts:
    """What cost more encoder seconds for its bytes goes later, however long it was not used."""

    def test_measured_seconds_decide(self, policy: str) -> None:
        cache = MultimodalCache(
            CacheConfig(capacity_bytes=8 * ROW_BYTES, policy=policy, row_bytes={"image": ROW_BYTES})
        )
        serve(cache, 2.0, dear=4)
        serve(cache, 0.1, cheap=4)
        serve(cache, 1.0, new=4)
        assert serve(cache, None, dear=4) == []
        assert serve(cache, None, cheap=4) == ["cheap"]

    def test_an_item_that_nobody_measured_costs_one(self, policy: str) -> None:
        cache = MultimodalCache(
            CacheConfig(capacity_bytes=12 * ROW_BYTES, policy=policy, row_bytes={"image": ROW_BYTES})
        )
        serve(cache, None, unknown=4)
        serve(cache, 0.5, half=4)
        serve(cache, 2.0, two=4)
        serve(cache, 9.0, new=4)
        assert [serve(cache, 9.0, **{name: 4}) for name in ("two", "unknown", "half")] == [[], [], ["half"]]

    def test_items_share_the_time_of_their_encode_by_their_rows(self, policy: str) -> None:
        """Of 8 s for 2 and 6 rows each row took one: less than those of the third, which goes last."""
        cache = MultimodalCache(
            CacheConfig(capacity_bytes=12 * ROW_BYTES, policy=policy, row_bytes={"image": ROW_BYTES})
        )
        serve(cache, 4.4, third=4)
        serve(cache, 8.0, small=2, large=6)
        serve(cache, 99.0, new=7)
        assert serve(cache, 99.0, third=4) == []
        assert serve(cache, 99.0, small=2) == ["small"]

    def test_a_scheduler_reports_them_with_the_sizes(self, policy: str) -> None:
        ledger = EncoderLedger(8 * ROW_BYTES, policy, row_bytes={"image": ROW_BYTES})
        for name, seconds in (("dear", 2.0), ("cheap", 0.1), ("new", 1.0)):
            req = one_image(name, name)
            ledger.settle(ledger.plan(req, num_computed_tokens=0), {0: 4 * ROW_BYTES}, seconds)
            ledger.finish(req)
        assert ledger.plan(one_image("again", "dear"), num_computed_tokens=0).stored == (0,)
