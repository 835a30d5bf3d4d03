"""What a cache reuses and encodes, and that it owns it, in both forms."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of
from cache_forms import COVERED, IN_FLIGHT, LATER, MISSING, both_forms, check_merge, fill, one_image, step

from mmcache import (
    CacheConfig,
    EmbeddingError,
    FieldConfig,
    ItemStatus,
    MultimodalCache,
    MultimodalItem,
    PlaceholderRange,
    encoder_inputs,
    split_fields,
)

# -- reuse --------------------------------------------------


@both_forms
def test_content_is_encoded_once_and_then_reused(make: Any) -> None:
    cache = make()
    assert step(cache, one_image("r1", "a")) == ["a"]
    assert step(cache, one_image("r2", "a")) == []
    assert cache.stats().encodes == 1


@both_forms
def test_a_text_hit_makes_no_image_covered(make: Any) -> None:
    """A prefix hit on the text before an image says nothing about the image."""
    cache = make()
    req = request("r", 20, images((0, 4), (10, 4)))
    lookup = cache.lookup(req, num_computed_tokens=9)
    assert [lookup.status(0), lookup.status(1)] == [COVERED, MISSING]


@both_forms
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


@both_forms
def test_chunks_encode_once_and_merge_the_whole(make: Any) -> None:
    cache = make()
    req = request("r", 30, images((3, 10), (15, 10)))
    encoded = [step(cache, req, start, 4) for start in range(0, 30, 4)]
    assert [name for names in encoded for name in names] == ["a", "b"]
    assert cache.stats().pinned_bytes == 0


@both_forms
def test_an_item_beyond_the_window_is_later_unless_looked_ahead_at(make: Any) -> None:
    cache = make()
    req = request("r", 30, images((2, 4), (12, 4)))
    assert cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=12).status(1) is LATER
    assert cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=12, lookahead=1).status(1) is MISSING


@both_forms
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


@both_forms
def test_a_fully_cached_prompt_still_needs_the_item_of_its_last_token(make: Any) -> None:
    cache = make()
    req = request("r", 10, images((6, 4)))
    step(cache, req)
    lookup = cache.lookup(req, num_computed_tokens=9)
    assert lookup.stored == (0,)
    target = torch.zeros(1, WIDTH)
    lookup.merge_into(target)
    assert torch.equal(target[0], rows_of("a", 4)[3])


@both_forms
def test_a_rolling_window_merges_what_is_stored(make: Any) -> None:
    """The oldest image leaves, the prefix behind it misses: the others are stored, not covered, and not encoded."""
    cache = make()
    step(cache, request("r1", 40, images((0, 5), (10, 5), (20, 5), ids="abc")))
    assert step(cache, request("r2", 40, images((0, 5), (10, 5), (20, 5), ids="bcd"))) == ["d"]


@both_forms
def test_salts_and_adapters_share_nothing(make: Any) -> None:
    cache = make()
    for salt in (None, "", "s1", "s2"):
        assert step(cache, one_image(f"salt {salt!r}", "a", salt=salt)) == ["a"]
        assert step(cache, one_image(f"again {salt!r}", "a", salt=salt)) == []
    assert step(cache, one_image("adapter", "a", adapter="x")) == ["a"]
    assert step(cache, one_image("adapter again", "a", adapter="x")) == []


@both_forms
def test_adapters_that_do_not_touch_the_encoder_share(make: Any) -> None:
    cache = make(adapter_touches_encoder=False)
    assert step(cache, one_image("r1", "a", adapter="x")) == ["a"]
    assert step(cache, one_image("r2", "a", adapter="y")) == []


@both_forms
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


@both_forms
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


@both_forms
def test_a_content_in_flight_with_other_rows_is_encoded_once_for_a_request_that_has_it_twice(make: Any) -> None:
    cache = make()
    first = cache.lookup(one_image("r1", "a", 4), num_computed_tokens=0)
    twice = cache.lookup(request("r2", 20, images((0, 5), (10, 5), ids="aa")), num_computed_tokens=0)
    assert (first.missing, twice.missing) == ((0,), (0,))
    assert [twice.status(index) for index in (0, 1)] == [MISSING, MISSING]
    assert (twice.plan.bytes.transfer, twice.plan.bytes.stored) == (32, 32)
    assert fill(cache, twice) == ["a"]
    check_merge(twice)
    assert cache.stats().encodes == 1


@both_forms
def test_two_row_counts_in_flight_do_not_mix(make: Any) -> None:
    cache = make()
    first = cache.lookup(one_image("r1", "a", 4), num_computed_tokens=0)
    second = cache.lookup(one_image("r2", "a", 9), num_computed_tokens=0)
    assert first.missing == second.missing == (0,)
    fill(cache, first)
    fill(cache, second)
    assert [first.rows(0).shape[0], second.rows(0).shape[0]] == [4, 9]


# -- one encode for all --------------------------------------------------


@both_forms
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


@both_forms
def test_who_waited_for_rows_keeps_them_until_they_are_merged(make: Any) -> None:
    """As if it had encoded them: the step's end, the owner's end and others' need of room take nothing away."""
    cache = make(rows=8)
    owner = cache.lookup(one_image("owner", "a"), num_computed_tokens=0)
    req = one_image("waiter", "a")
    waiter = cache.lookup(req, num_computed_tokens=0, num_scheduled_tokens=3)
    fill(cache, owner)
    for lookup in (owner, waiter):
        lookup.release()
    cache.finish(owner.request)
    cache.commit(req, 3)
    for name in "bcd":
        assert step(cache, one_image(name, name)) == [name]
        cache.finish(one_image(name, name))
    assert cache.stats().pinned_bytes == 4 * ROW_BYTES
    assert step(cache, req, start=3) == []
    assert cache.stats().pinned_bytes == 0


@both_forms
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


@both_forms
def test_the_last_to_give_up_leaves_nothing(make: Any) -> None:
    cache = make()
    lookups = [cache.lookup(one_image(f"r{i}", "a"), num_computed_tokens=0) for i in range(3)]
    for lookup in lookups:
        lookup.release()
    assert cache.stats().used_bytes == cache.stats().entries == 0
    assert cache.lookup(one_image("r9", "a"), num_computed_tokens=0).status(0) is MISSING


@both_forms
def test_a_lease_that_ran_out_is_taken_over_and_the_late_rows_still_serve_their_own(make: Any) -> None:
    cache = make(lease_seconds=1)  # a loaded machine must reach the second look-up in time
    slow = cache.lookup(one_image("r1", "a"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2", "a"), num_computed_tokens=0)
    threading.Event().wait(1.1)
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


# -- memory of its own --------------------------------------------------


@both_forms
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


@both_forms
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


@both_forms
def test_rows_that_need_grad_are_stored_without_their_graph(make: Any) -> None:
    cache = make()
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    cache.insert(lookup, [rows_of("a", 4).requires_grad_() * 1])
    assert not lookup.rows(0).requires_grad
    check_merge(lookup)


# -- counters --------------------------------------------------


def test_what_a_lookup_encoded_counts_as_transferred() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    step(cache, request("r1", 40, images((0, 4), (10, 4), (20, 4), ids="aba")))
    step(cache, request("r2", 40, images((0, 4), (10, 4), ids="ac")))
    stats = cache.stats()
    assert (stats.items["missing"], stats.items["stored"]) == (4, 1)
    assert (stats.bytes["transfer"], stats.bytes["stored"]) == (3 * 32, 2 * 32)


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


def test_a_field_of_embeddings_is_what_the_client_gave() -> None:
    """Processors hand them over under the modality's name."""
    given = rows_of("x", 4)
    batch = {"image_embeds": given[None], "image_grid_thw": torch.tensor([[1, 4, 4]])}
    configs = {
        "image_embeds": FieldConfig.batched("image"),
        "image_grid_thw": FieldConfig.batched("image", keep_on_cpu=True),
    }
    (fields,) = split_fields(batch, configs)["image"]
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(request("r", 6, [MultimodalItem("image", fields, PlaceholderRange(1, 4), "x")]))
    assert (lookup.missing, lookup.stored, lookup.bytes.transfer) == ((), (0,), 0)
    assert encoder_inputs([lookup], "cpu") == []
    assert len(lookup.metadata("image_grid_thw")) == 1
    target = torch.zeros(6, WIDTH)
    lookup.merge_into(target)
    assert torch.equal(target[1:5], given)
    with pytest.raises(EmbeddingError, match="one row for each"):
        MultimodalItem("image", fields, PlaceholderRange(1, 5), "x")
