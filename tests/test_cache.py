"""What a cache does, on both forms: one process, and a scheduler's ledger with two workers' stores."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of
from split_engine import SplitEngine

from mmcache import (
    CacheConfig,
    EmbeddingError,
    EncoderLedger,
    ItemStatus,
    Lookup,
    MergePlan,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
    ReleasedError,
    RequestError,
    UnresolvedItemError,
    UnsupportedError,
    encoder_inputs,
    make_policy,
)

COVERED, STORED, IN_FLIGHT, MISSING, LATER = (
    ItemStatus.COVERED,
    ItemStatus.STORED,
    ItemStatus.IN_FLIGHT,
    ItemStatus.MISSING,
    ItemStatus.LATER,
)


class OneProcess(MultimodalCache):
    def held_bytes(self) -> int:
        """Bytes in the store."""
        return self._store.nbytes


@pytest.fixture(params=["one process", "split"])
def make(request: pytest.FixtureRequest) -> Any:
    form = OneProcess if request.param == "one process" else SplitEngine

    def build(rows: int = 1000, **settings: Any) -> Any:
        settings.setdefault("row_bytes", {"image": ROW_BYTES})
        return form(CacheConfig(capacity_bytes=rows * ROW_BYTES, **settings))

    return build


def fill(cache: Any, lookup: Any) -> list[str]:
    """Encode what is missing; returns the contents."""
    items = [lookup.request.items[i] for i in lookup.missing]
    cache.insert(lookup, {i: rows_of(it.identifier, it.placeholder.num_embeds) for i, it in zip(lookup.missing, items)})
    return [item.identifier for item in items]


def step(cache: Any, req: MultimodalRequest, start: int = 0, scheduled: int | None = None) -> list[str]:
    """One whole step; returns the contents that it encoded. What it merges is checked."""
    lookup = cache.lookup(req, num_computed_tokens=start, num_scheduled_tokens=scheduled)
    encoded = fill(cache, lookup)
    check_merge(lookup)
    end = lookup.window[1]
    lookup.release()
    cache.commit(req, end)
    return encoded


def check_merge(lookup: Any) -> None:
    start, end = lookup.window
    target = torch.zeros(end - start, WIDTH)
    lookup.merge_into(target)
    for item in lookup.request.items:
        place = item.placeholder
        rows = rows_of(item.identifier, place.num_embeds)
        first, last = max(start, place.offset), min(end, place.offset + place.length)
        if first < last:
            row, row_end = place.embed_rows(first - place.offset, last - place.offset)
            if place.num_embeds == place.length:
                assert torch.equal(target[first - start : last - start], rows[row:row_end])


def one_image(name: str, identifier: str, length: int = 4, **kwargs: Any) -> MultimodalRequest:
    return request(name, length + 2, images((1, length), ids=[identifier]), **kwargs)


# -- reuse --------------------------------------------------


def test_content_is_encoded_once_and_then_reused(make: Any) -> None:
    cache = make()
    assert step(cache, one_image("r1", "a")) == ["a"]
    assert step(cache, one_image("r2", "a")) == []
    assert cache.stats().encodes == 1


def test_a_text_hit_makes_no_image_covered(make: Any) -> None:
    """A prefix hit on the text before an image says nothing about the image."""
    cache = make()
    req = request("r", 20, images((0, 4), (10, 4)))
    lookup = cache.lookup(req, num_computed_tokens=9)
    assert [lookup.status(0), lookup.status(1)] == [COVERED, MISSING]


@pytest.mark.parametrize(
    ("computed", "status", "rows"),
    [(3, MISSING, (0, 10)), (7, MISSING, (4, 10)), (12, MISSING, (9, 10)), (13, COVERED, None)],
)
def test_a_prefix_hit_may_end_inside_an_item(make: Any, computed: int, status: ItemStatus, rows: Any) -> None:
    cache = make()
    req = request("r", 15, images((3, 10)))
    lookup = cache.lookup(req, num_computed_tokens=computed)
    assert lookup.status(0) is status
    if rows:
        fill(cache, lookup)
        target = torch.zeros(15 - computed, WIDTH)
        lookup.merge_into(target)
        assert torch.equal(target[: rows[1] - rows[0]], rows_of("a", 10)[rows[0] :])
        assert not target[rows[1] - rows[0] :].any()


def test_chunks_encode_once_and_merge_the_whole(make: Any) -> None:
    cache = make()
    req = request("r", 30, images((3, 10), (15, 10)))
    encoded = [step(cache, req, start, 4) for start in range(0, 30, 4)]
    assert [name for names in encoded for name in names] == ["a", "b"]
    assert cache.stats().pinned_bytes == 0


def test_an_item_beyond_the_window_is_later_unless_looked_ahead_at(make: Any) -> None:
    cache = make()
    req = request("r", 30, images((2, 4), (12, 4)))
    assert cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=12).status(1) is LATER
    assert cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=12, lookahead=1).status(1) is MISSING


def test_one_content_twice_in_a_request_is_encoded_and_charged_once(make: Any) -> None:
    """And kept until its last use, whoever asks for room in between."""
    cache = make(rows=4)
    req = request("r", 30, images((0, 4), (10, 4), ids="aa"))
    lookup = cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=8)
    assert lookup.missing == (0,)
    fill(cache, lookup)
    lookup.release()
    cache.commit(req, 8)
    assert cache.stats().used_bytes == 4 * ROW_BYTES
    other = cache.lookup(one_image("other", "b"), num_computed_tokens=0)
    fill(cache, other)
    check_merge(other)
    other.release()
    again = cache.lookup(req, num_computed_tokens=8)
    assert again.stored == (1,)
    check_merge(again)
    again.release()
    cache.commit(req, 30)
    assert cache.stats().pinned_bytes == 0
    assert cache.stats().uncached == {"all room is pinned": 1}


def test_a_fully_cached_prompt_still_needs_the_item_of_its_last_token(make: Any) -> None:
    cache = make()
    req = request("r", 10, images((6, 4)))
    step(cache, req)
    lookup = cache.lookup(req, num_computed_tokens=9)
    assert lookup.stored == (0,)
    target = torch.zeros(1, WIDTH)
    lookup.merge_into(target)
    assert torch.equal(target[0], rows_of("a", 4)[3])


def test_a_rolling_window_merges_what_is_stored(make: Any) -> None:
    """The oldest image leaves, the prefix behind it misses: the others are stored, not covered, and not encoded."""
    cache = make()
    step(cache, request("r1", 40, images((0, 5), (10, 5), (20, 5), ids="abc")))
    assert step(cache, request("r2", 40, images((0, 5), (10, 5), (20, 5), ids="bcd"))) == ["d"]


def test_salts_and_adapters_share_nothing(make: Any) -> None:
    cache = make()
    for salt in (None, "", "s1", "s2"):
        assert step(cache, one_image(f"salt {salt!r}", "a", salt=salt)) == ["a"]
        assert step(cache, one_image(f"again {salt!r}", "a", salt=salt)) == []
    assert step(cache, one_image("adapter", "a", adapter="x")) == ["a"]
    assert step(cache, one_image("adapter again", "a", adapter="x")) == []


def test_adapters_that_do_not_touch_the_encoder_share(make: Any) -> None:
    cache = make(adapter_touches_encoder=False)
    assert step(cache, one_image("r1", "a", adapter="x")) == ["a"]
    assert step(cache, one_image("r2", "a", adapter="y")) == []


def test_a_hit_with_other_rows_is_a_miss(make: Any) -> None:
    """A collision, a reused id, changed options: the entry is dropped and counted, and the content encoded anew."""
    cache = make()
    step(cache, one_image("r1", "a", 4))
    lookup = cache.lookup(one_image("r2", "a", 9), num_computed_tokens=0)
    assert lookup.missing == (0,)
    cache.insert(lookup, [rows_of("a", 9)])
    assert lookup.rows(0).shape == (9, WIDTH)
    assert cache.stats().stale == 1
    assert cache.stats().used_bytes == 9 * ROW_BYTES


def test_holders_of_an_entry_keep_it_when_another_row_count_replaces_it(make: Any) -> None:
    cache = make()
    first = cache.lookup(one_image("r1", "a", 4), num_computed_tokens=0)
    fill(cache, first)
    second = cache.lookup(one_image("r2", "a", 9), num_computed_tokens=0)
    fill(cache, second)
    assert [first.rows(0).shape[0], second.rows(0).shape[0]] == [4, 9]
    for lookup in (first, second):
        lookup.release()
        cache.finish(lookup.request)
    assert cache.stats().used_bytes == cache.held_bytes() == 9 * ROW_BYTES


def test_two_row_counts_in_flight_do_not_mix(make: Any) -> None:
    cache = make()
    first = cache.lookup(one_image("r1", "a", 4), num_computed_tokens=0)
    second = cache.lookup(one_image("r2", "a", 9), num_computed_tokens=0)
    assert first.missing == second.missing == (0,)
    fill(cache, first)
    fill(cache, second)
    assert [first.rows(0).shape[0], second.rows(0).shape[0]] == [4, 9]


# -- one encode for all --------------------------------------------------


def test_of_two_requests_one_encodes_and_the_other_is_told(make: Any) -> None:
    cache = make()
    first = cache.lookup(one_image("r1", "a"), num_computed_tokens=0)
    second = cache.lookup(one_image("r2", "a"), num_computed_tokens=0)
    assert (first.status(0), second.status(0)) == (MISSING, IN_FLIGHT)
    assert not second.poll()
    fill(cache, first)
    progress = second.poll()
    assert (progress.ready, progress.mine) == ((0,), ())
    assert second.stored == (0,)
    assert not second.poll()
    check_merge(second)


@pytest.mark.parametrize("how", ["release", "finish"])
def test_when_the_owner_gives_up_exactly_one_takes_over(make: Any, how: str) -> None:
    cache = make()
    owner, *others = [cache.lookup(one_image(f"r{i}", "a"), num_computed_tokens=0) for i in range(4)]
    owner.release() if how == "release" else cache.finish(owner.request)
    mine = [lookup.poll().mine for lookup in others]
    assert sorted(mine) == [(), (), (0,)]
    heir = others[mine.index((0,))]
    assert heir.missing == (0,)
    fill(cache, heir)
    assert all(lookup.stored == (0,) for lookup in others)
    assert cache.stats().takeovers == 1


def test_the_last_to_give_up_leaves_nothing(make: Any) -> None:
    cache = make()
    lookups = [cache.lookup(one_image(f"r{i}", "a"), num_computed_tokens=0) for i in range(3)]
    for lookup in lookups:
        lookup.release()
    assert cache.stats().used_bytes == cache.stats().entries == 0
    assert cache.lookup(one_image("r9", "a"), num_computed_tokens=0).status(0) is MISSING


def test_a_lease_that_ran_out_is_taken_over_and_the_late_rows_still_serve_their_own(make: Any) -> None:
    cache = make(lease_seconds=0.02)
    slow = cache.lookup(one_image("r1", "a"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2", "a"), num_computed_tokens=0)
    threading.Event().wait(0.03)
    assert waiter.poll().mine == (0,)
    assert slow.missing == (0,)
    fill(cache, slow)
    check_merge(slow)
    assert waiter.missing == (0,)
    fill(cache, waiter)
    check_merge(waiter)
    for lookup in (slow, waiter):
        lookup.release()
        cache.finish(lookup.request)
    assert cache.stats().used_bytes == cache.held_bytes() == 4 * ROW_BYTES


# -- room --------------------------------------------------


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


def test_items_that_cannot_fit_together_are_served_all_the_same(make: Any) -> None:
    cache = make(rows=8)
    req = request("r", 40, images((0, 5), (10, 5), ids="ab"))
    assert step(cache, req) == ["a", "b"]
    assert cache.stats().uncached == {"all room is pinned": 1}
    assert cache.stats().used_bytes <= 8 * ROW_BYTES


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


def test_widths_are_learned_where_they_are_not_configured(make: Any) -> None:
    cache = make(rows=8, row_bytes={})
    assert step(cache, one_image("r1", "a")) == ["a"]
    assert cache.stats().used_bytes == 4 * ROW_BYTES
    assert step(cache, one_image("r2", "a")) == []
    cache.lookup(one_image("r3", "b"), num_computed_tokens=0)
    assert cache.stats().used_bytes == 8 * ROW_BYTES


def test_several_items_of_unknown_width_stay_within_the_budget(make: Any) -> None:
    cache = make(rows=9, row_bytes={})
    req = request("r", 60, images((0, 4), (10, 4), (20, 4), ids="abc"))
    assert step(cache, req) == ["a", "b", "c"]
    assert cache.stats().used_bytes == 8 * ROW_BYTES
    cache.finish(req)
    assert cache.held_bytes() == 8 * ROW_BYTES


# -- memory of its own --------------------------------------------------


def test_an_entry_owns_its_memory(make: Any) -> None:
    cache = make()
    batch = torch.randn(1000, WIDTH)
    expected = batch[1:5].clone()
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    cache.insert(lookup, [batch[1:5]], copy=False)
    batch.zero_()
    rows = lookup.rows(0)
    assert torch.equal(rows, expected)
    assert rows.untyped_storage().nbytes() == 4 * ROW_BYTES


def test_an_entry_owns_its_memory_though_numpy_lent_it(make: Any) -> None:
    """A tensor over a view of an array looks whole, and holds all of the array."""
    cache = make()
    array = rows_of("a", 1000).numpy()
    expected = torch.from_numpy(array[1:5].copy())
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    cache.insert(lookup, [torch.from_numpy(array[1:5])], copy=False)
    array[:] = 0
    assert torch.equal(lookup.rows(0), expected)


def test_rows_handed_over_whole_are_not_copied() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    mine = rows_of("a", 4)
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    cache.insert(lookup, [mine], copy=False)
    assert lookup.rows(0).data_ptr() == mine.data_ptr()


def test_rows_that_need_grad_are_stored_without_their_graph(make: Any) -> None:
    cache = make()
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    cache.insert(lookup, [rows_of("a", 4).requires_grad_() * 1])
    assert not lookup.rows(0).requires_grad
    check_merge(lookup)


# -- ends --------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_abort_returns_everything(make: Any, moment: str) -> None:
    cache = make()
    req = request("r", 40, images((0, 5), (10, 5)))
    lookup = cache.lookup(req, num_computed_tokens=0)
    if moment == "after":
        cache.insert(lookup, {0: rows_of("a", 5)})
    for _ in range(2):
        lookup.release()
        cache.finish(req)
    stats = cache.stats()
    assert stats.pinned_bytes == 0
    assert stats.used_bytes == cache.held_bytes() == (5 * ROW_BYTES if moment == "after" else 0)


def test_release_keeps_the_pins_of_what_is_still_to_be_merged(make: Any) -> None:
    cache = make(rows=4)
    req = one_image("r", "a")
    lookup = cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=2)
    fill(cache, lookup)
    lookup.release()
    cache.commit(req, 2)
    assert cache.stats().pinned_bytes == 4 * ROW_BYTES
    cache.commit(req, 5)
    assert cache.stats().pinned_bytes == 0


def test_a_commit_before_the_release_unpins_at_the_release(make: Any) -> None:
    """An open lookup finds what its plan calls stored, even when its step is committed first."""
    cache = make(rows=4)
    req = one_image("r", "a")
    lookup = cache.lookup(req, num_computed_tokens=0)
    fill(cache, lookup)
    cache.commit(req, 6)
    cache.invalidate()
    cache.lookup(one_image("other", "b"), num_computed_tokens=0).release()
    check_merge(lookup)
    lookup.release()
    assert cache.stats().pinned_bytes == 0


def test_nothing_works_after_release(make: Any) -> None:
    cache = make()
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    lookup.release()
    lookup.release()
    for use in (lambda: lookup.status(0), lambda: lookup.missing, lambda: lookup.rows(0), lookup.poll):
        with pytest.raises(ReleasedError, match="'r'"):
            use()
    with pytest.raises(ReleasedError):
        cache.insert(lookup, {})


USES: dict[str, Any] = {
    "status": lambda lookup: lookup.status(0),
    "action": lambda lookup: lookup.action(0, "pixel_values"),
    "metadata": lambda lookup: lookup.metadata("image_grid_thw"),
    "rows": lambda lookup: lookup.rows(0),
    "key": lambda lookup: lookup.key(0),
    "holds": lambda lookup: lookup.holds(0),
    "merge_into": lambda lookup: lookup.merge_into(torch.zeros(6, WIDTH)),
    "poll": lambda lookup: lookup.poll(),
    "wait": lambda lookup: lookup.wait(0),
    "ready": lambda lookup: asyncio.run(lookup.ready(0)),
    "shrink": lambda lookup: lookup.shrink(0),
    "__enter__": lambda lookup: lookup.__enter__(),
}


@pytest.mark.parametrize("end", ["release", "finish"])
def test_of_a_lookup_that_has_ended_only_release_and_its_request_are_left(end: str) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    lookup.release() if end == "release" else cache.finish(lookup.request)
    names = {name for name in dir(Lookup) if not name.startswith("_")} - {"release", "request"} | {"__enter__"}
    assert set(USES) <= names
    for name in names:
        use = USES.get(name, lambda lookup, name=name: getattr(lookup, name))
        with pytest.raises(ReleasedError, match="'r'"):
            use(lookup)
    for batch in (lambda: encoder_inputs([lookup], "cpu"), lambda: MergePlan([lookup]).merge_into(torch.zeros(6, 4))):
        with pytest.raises(ReleasedError):
            batch()
    lookup.release()
    assert lookup.request.request_id == "r"
    assert "released" in repr(lookup)


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lookup_has_no_copies(copy_of: Any) -> None:
    """One that went out of sight would end the step of the other."""
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    with pytest.raises(UnsupportedError, match="plan"):
        copy_of(lookup)
    assert copy_of(lookup.plan)
    cache.lookup(one_image("s", "b"), num_computed_tokens=0)
    assert lookup.missing == (0,)


def test_a_lookup_is_of_its_request_as_it_was(make: Any) -> None:
    """The next turn's tokens and items come while the step is under way."""
    cache = make()
    req = request("r", 20, [*images((2, 4), (12, 4)), *images((18, 2, [False, False]), ids="z")])
    lookup = cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=10, lookahead=10)
    before = lookup.plan.bytes
    statuses = [lookup.status(i) for i in range(3)]
    req.extend([1] * 10, [*images((20, 4), (26, 2), ids="cd"), *images((29, 1, [False]), ids="y")])
    assert lookup.plan.bytes == before
    assert (lookup.plan.num_items, lookup.window) == (3, (0, 10))
    assert [lookup.status(i) for i in range(3)] == statuses
    with pytest.raises(RequestError):
        lookup.status(3)
    if isinstance(cache, MultimodalCache):
        assert lookup.bytes == before
        assert len(lookup.metadata("image_grid_thw")) == 3
        lookup.shrink(4)
        assert (lookup.missing, lookup.bytes.total) == ((0, 1), before.total)
    fill(cache, lookup)
    lookup.release()
    stats = cache.stats()
    assert sum(stats.items.values()) == 3
    assert sum(stats.bytes.values()) == before.total
    again = cache.lookup(req, num_computed_tokens=10)
    assert again.missing == (3, 4)
    assert again.plan.bytes.total == 2 * before.total


def test_a_preempted_request_that_starts_over_keeps_what_it_needs_again(make: Any) -> None:
    """Its tokens are computed anew: what was committed before is needed once more, and until it is committed again."""
    cache = make(rows=4)
    req = one_image("r", "a")
    first = cache.lookup(req, num_computed_tokens=0)
    fill(cache, first)
    cache.commit(req, 6)
    second = cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=3)
    assert second.stored == (0,)
    first.release()
    second.release()
    cache.commit(req, 3)
    assert cache.stats().pinned_bytes == 4 * ROW_BYTES
    assert step(cache, one_image("other", "b")) == ["b"]
    assert cache.stats().uncached == {"all room is pinned": 1}
    assert step(cache, req, start=3) == []
    assert cache.stats().pinned_bytes == 0
    assert step(cache, one_image("third", "c")) == ["c"]
    assert step(cache, req) == ["a"]


def test_a_request_that_waits_gives_up_its_pins_when_its_step_ends(make: Any) -> None:
    cache = make(rows=4)
    req = one_image("r", "a")
    lookup = cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=3)
    fill(cache, lookup)
    cache.announce(req)  # preempted while its step runs: that step still merges
    cache.lookup(one_image("other", "b"), num_computed_tokens=0).release()
    check_merge(lookup)
    lookup.release()
    assert cache.stats().pinned_bytes == 0
    again = cache.lookup(req, num_computed_tokens=0)
    again.release()
    assert cache.stats().pinned_bytes == 4 * ROW_BYTES


def test_finish_ends_open_lookups(make: Any) -> None:
    cache = make()
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    cache.finish(lookup.request)
    with pytest.raises(ReleasedError):
        lookup.poll()
    assert cache.lookup(one_image("r", "a"), num_computed_tokens=0).missing == (0,)


# -- validity --------------------------------------------------


def test_invalidate_forgets_but_holders_keep_theirs(make: Any) -> None:
    cache = make()
    first = cache.lookup(one_image("r1", "a"), num_computed_tokens=0)
    fill(cache, first)
    cache.invalidate()
    check_merge(first)
    second = cache.lookup(one_image("r2", "a"), num_computed_tokens=0)
    assert second.missing == (0,)
    first.release()
    cache.finish(first.request)
    assert cache.stats().used_bytes == 4 * ROW_BYTES
    assert cache.stats().epoch == 1


def test_an_encode_that_began_before_does_not_publish(make: Any) -> None:
    cache = make()
    old = cache.lookup(one_image("r1", "a"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2", "a"), num_computed_tokens=0)
    cache.invalidate()
    assert waiter.poll().mine == (0,)
    fill(cache, old)
    check_merge(old)
    assert waiter.missing == (0,)
    third = cache.lookup(one_image("r3", "a"), num_computed_tokens=0)
    assert third.in_flight == (0,)
    fill(cache, waiter)
    assert third.poll().ready == (0,)
    for lookup in (old, waiter, third):
        lookup.release()
        cache.finish(lookup.request)
    assert cache.stats().used_bytes == cache.held_bytes() == 4 * ROW_BYTES


def test_invalidating_one_content_leaves_the_others(make: Any) -> None:
    cache = make()
    step(cache, one_image("r1", "a"))
    step(cache, one_image("r2", "b"))
    cache.invalidate(identifier="a")
    assert step(cache, one_image("r3", "a")) == ["a"]
    assert step(cache, one_image("r4", "b")) == []


# -- counters --------------------------------------------------


def test_what_a_lookup_encoded_counts_as_transferred() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    step(cache, request("r1", 40, images((0, 4), (10, 4), (20, 4), ids="aba")))
    step(cache, request("r2", 40, images((0, 4), (10, 4), ids="ac")))
    stats = cache.stats()
    assert (stats.items["missing"], stats.items["stored"]) == (4, 1)
    assert (stats.bytes["transfer"], stats.bytes["stored"]) == (3 * 32, 2 * 32)


# -- bad input --------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {0: torch.zeros(3, WIDTH)},
        {0: torch.zeros(4, WIDTH, 1)},
        {0: torch.zeros(4, 0)},
        {0: torch.zeros(4, WIDTH, dtype=torch.int64)},
        {0: [[0.0] * WIDTH] * 4},
        {0: torch.zeros(4, WIDTH), 1: torch.zeros(5, WIDTH)},
        {2: torch.zeros(4, WIDTH)},
        {0: torch.zeros(4, WIDTH), -1: torch.zeros(4, WIDTH)},
        [torch.zeros(4, WIDTH)],
        [torch.zeros(4, WIDTH)] * 3,
        [torch.zeros(4, WIDTH).to_sparse(), torch.zeros(4, WIDTH)],
        [torch.zeros(4, WIDTH, device="meta"), torch.zeros(4, WIDTH)],
        {0: torch.zeros(4, WIDTH), 1: torch.zeros(4, WIDTH, dtype=torch.complex64)},
        {0: torch.zeros(4, WIDTH), True: torch.zeros(4, WIDTH)},
        {0.0: torch.zeros(4, WIDTH)},
    ],
)
def test_bad_embeddings_change_nothing(make: Any, bad: Any) -> None:
    cache = make()
    req = request("bad one", 40, images((0, 4), (10, 4), (20, 4), ids="aba"))
    lookup = cache.lookup(req, num_computed_tokens=0)
    before = cache.stats().used_bytes
    with pytest.raises(EmbeddingError, match="bad one"):
        cache.insert(lookup, bad)
    assert lookup.missing == (0, 1)
    assert (cache.stats().used_bytes, cache.held_bytes()) == (before, 0)
    with pytest.raises(UnresolvedItemError):
        lookup.rows(0)
    target = torch.full((40, WIDTH), 3.0)
    with pytest.raises(UnresolvedItemError):
        lookup.merge_into(target)
    assert (target == 3.0).all()
    fill(cache, lookup)
    check_merge(lookup)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), True, "1"])
def test_an_encode_that_took_no_time_that_can_be(seconds: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    with pytest.raises(EmbeddingError, match="seconds"):
        cache.insert(lookup, [rows_of("a", 4)], seconds=seconds)
    assert lookup.missing == (0,)
    cache.insert(lookup, [rows_of("a", 4)], seconds=0)
    lookup.release()
    cache.finish("r")
    assert cache.stats().pinned_bytes == 0


def test_rows_for_what_is_no_lookup_of_this_cache() -> None:
    one, other = (MultimodalCache(CacheConfig(capacity_bytes=1 << 20)) for _ in range(2))
    lookup = other.lookup(one_image("r", "a"), num_computed_tokens=0)
    for target in (lookup, lookup.plan, "r"):
        with pytest.raises(RequestError):
            one.insert(target, [rows_of("a", 4)])
    assert lookup.missing == (0,)


def test_a_stored_item_is_nobodys_to_insert(make: Any) -> None:
    cache = make()
    step(cache, one_image("r1", "a"))
    lookup = cache.lookup(one_image("r2", "a"), num_computed_tokens=0)
    with pytest.raises(EmbeddingError):
        cache.insert(lookup, {0: rows_of("a", 4)})


def test_another_width_or_dtype_is_refused() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    step(cache, one_image("r1", "a"))
    lookup = cache.lookup(one_image("r2", "b"), num_computed_tokens=0)
    with pytest.raises(EmbeddingError, match="width"):
        cache.insert(lookup, [torch.zeros(4, WIDTH + 1)])
    for shapeless in (torch.zeros(()), None, "ab"):
        with pytest.raises(EmbeddingError):
            cache.insert(lookup, shapeless)
    with pytest.raises(EmbeddingError, match="dtype"):
        cache.insert(
            lookup, [torch.zeros(4, WIDTH, dtype=torch.int32).view(torch.float32).to(torch.float16).repeat(1, 2)]
        )
    cache.insert(lookup, [torch.zeros(4, WIDTH)])


# -- given embeddings --------------------------------------------------


def test_embeddings_that_the_client_gave_are_merged_and_not_stored() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    given = rows_of("x", 4).to(torch.float64)
    item = MultimodalItem("image", None, PlaceholderRange(1, 4), "x", embeds=given)
    lookup = cache.lookup(request("r", 6, [item]), num_computed_tokens=0)
    assert (lookup.missing, lookup.stored) == ((), (0,))
    target = torch.zeros(6, WIDTH)
    lookup.merge_into(target)
    assert torch.equal(target[1:5], given.float())
    assert cache.stats().entries == 0


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


def test_rows_of_an_encoder_before_the_invalidation_are_no_measure_for_the_next() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    before = cache.lookup(request("before", 20, images((0, 4))), num_computed_tokens=0)
    cache.invalidate()
    cache.insert(before, [rows_of("a", 4)])
    after = cache.lookup(request("after", 20, images((0, 4))), num_computed_tokens=0)
    cache.insert(after, [rows_of("a", 4, 8).bfloat16()])
    assert after.stored == (0,)
    assert before.merge_into(torch.zeros(20, WIDTH)).abs().sum() > 0


def test_late_rows_of_an_encoder_before_the_invalidation_still_serve_their_own() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    before = cache.lookup(request("before", 20, images((0, 4))), num_computed_tokens=0)
    cache.invalidate()
    after = cache.lookup(request("after", 20, images((0, 4))), num_computed_tokens=0)
    cache.insert(after, [rows_of("a", 4, 8).bfloat16()])
    cache.insert(before, [rows_of("a", 4)])
    assert torch.equal(before.merge_into(torch.zeros(20, WIDTH))[:4], rows_of("a", 4))


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
