"""How steps, requests and entries end, in whatever order."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of
from cache_forms import both_forms, check_merge, fill, one_image, step

from mmcache import (
    CacheConfig,
    ConfigError,
    FieldConfig,
    Lookup,
    MergePlan,
    MultimodalCache,
    MultimodalItem,
    PlaceholderRange,
    ReleasedError,
    RequestError,
    UnsupportedError,
    encoder_inputs,
    split_fields,
)

# -- ends --------------------------------------------------


@both_forms
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


@both_forms
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


@both_forms
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


@both_forms
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


@both_forms
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


@both_forms
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


@both_forms
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


@both_forms
@pytest.mark.parametrize("who", ["owner", "waiter"])
def test_a_request_that_waits_keeps_no_rows_that_arrive_after_it_was_announced(make: Any, who: str) -> None:
    """It is preempted while its step still runs: what that encodes, or joins, is droppable once the step has ended."""
    cache = make(rows=4)
    req, other = one_image("r", "a"), one_image("s", "a")
    owner = cache.lookup(req if who == "owner" else other, num_computed_tokens=0)
    waiter = cache.lookup(other if who == "owner" else req, num_computed_tokens=0)
    cache.announce(req)
    fill(cache, owner)
    for lookup in (owner, waiter):
        check_merge(lookup)
        lookup.release()
    cache.finish(other)
    assert cache.stats().pinned_bytes == 0
    assert step(cache, one_image("third", "b")) == ["b"]
    assert cache.stats().uncached == {}


@both_forms
def test_finish_ends_open_lookups(make: Any) -> None:
    cache = make()
    lookup = cache.lookup(one_image("r", "a"), num_computed_tokens=0)
    cache.finish(lookup.request)
    with pytest.raises(ReleasedError):
        lookup.poll()
    assert cache.lookup(one_image("r", "a"), num_computed_tokens=0).missing == (0,)


# -- validity --------------------------------------------------


@both_forms
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


@both_forms
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


@both_forms
@pytest.mark.parametrize("identifier", [5, True, b"a", ["a"]], ids=range(4))
def test_a_content_is_invalidated_by_its_identifier(make: Any, identifier: Any) -> None:
    cache = make()
    step(cache, one_image("r1", "a"))
    with pytest.raises(RequestError, match="identifier"):
        cache.invalidate(identifier=identifier)
    assert cache.stats().epoch == 0
    assert step(cache, one_image("r2", "a")) == []


@pytest.mark.parametrize("forget", ["clear", "invalidate"])
def test_prefixes_outlive_embeddings_unless_they_are_to_go_too(forget: str) -> None:
    """Other weights of the encoder: the language model's KV may stay, and whoever changes both says so."""
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, block_size=2))
    req = one_image("r", "a")
    step(cache, req)
    getattr(cache, forget)()
    with cache.lookup(req) as lookup:
        assert (lookup.num_computed_tokens, lookup.missing) == (5, ())
    getattr(cache, forget)(prefix=True)
    with cache.lookup(req) as lookup:
        assert (lookup.num_computed_tokens, lookup.missing) == (0, (0,))


@pytest.mark.parametrize("namespace", [5, True, b"", ["m"]], ids=range(4))
def test_another_namespace_is_a_name_too(namespace: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, namespace="m"))
    with pytest.raises(ConfigError, match="namespace"):
        cache.invalidate(namespace=namespace)
    cache.invalidate(namespace="other")
    assert cache.stats().epoch == 0
    cache.invalidate(namespace="m")
    assert cache.stats().epoch == 1


@both_forms
def test_invalidating_one_content_leaves_the_others(make: Any) -> None:
    cache = make()
    step(cache, one_image("r1", "a"))
    step(cache, one_image("r2", "b"))
    cache.invalidate(identifier="a")
    assert step(cache, one_image("r3", "a")) == ["a"]
    assert step(cache, one_image("r4", "b")) == []


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


def test_a_forgotten_lookup_is_released_by_whatever_is_asked_next() -> None:
    asked = {
        "stats": lambda cache, waiter: cache.stats(),
        "finish": lambda cache, waiter: cache.finish("nobody"),
        "announce": lambda cache, waiter: cache.announce(one_image("other", "b")),
        "invalidate": lambda cache, waiter: cache.invalidate(identifier="b"),
        "status": lambda cache, waiter: waiter.status(0),
        "missing": lambda cache, waiter: waiter.missing,
    }
    for name, ask in asked.items():
        cache = MultimodalCache(CacheConfig(capacity_bytes=100 * ROW_BYTES, row_bytes={"image": ROW_BYTES}))
        owner = cache.lookup(one_image("owner", "a"), num_computed_tokens=0)
        waiter = cache.lookup(one_image("waiter", "a"), num_computed_tokens=0)
        assert waiter.in_flight == (0,)
        del owner
        gc.collect()
        ask(cache, waiter)
        assert waiter.missing == (0,), name
        assert cache.stats().forgotten_lookups == 1, name
        waiter.release()
        assert cache.stats().used_bytes == 0, name


@pytest.mark.parametrize("difference", ["modality", "rows", "epoch"])
def test_a_batch_encodes_for_each_lookup_whose_rows_serve_no_other(difference: str) -> None:
    """One identifier, and two encodes all the same: each lookup's inputs are in the batches."""
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES, "video": ROW_BYTES}))
    one = cache.lookup(one_image("r", "same"), num_computed_tokens=0)
    if difference == "epoch":
        cache.invalidate()
    modality, length = ("video" if difference == "modality" else "image"), (5 if difference == "rows" else 4)
    pixels = {"pixels": torch.ones(1, length, 2)}
    (fields,) = split_fields(pixels, {"pixels": FieldConfig.batched(modality)})[modality]
    item = MultimodalItem(modality, fields, PlaceholderRange(1, length), "same")
    other_request = request("s", 8, [item])
    other = cache.lookup(other_request, num_computed_tokens=0)
    assert (one.missing, other.missing) == ((0,), (0,))
    assert one.key(0) != other.key(0)
    places = [place for batch in encoder_inputs([one, other], "cpu") for place in batch.items]
    assert {(lookup.request.request_id, index) for lookup, index in places} == {("r", 0), ("s", 0)}
    for lookup, index in places:
        rows = lookup.request.items[index].placeholder.num_embeds
        cache.insert(lookup, {index: torch.full((rows, WIDTH), float(rows))})
    targets = [torch.zeros(6, WIDTH), torch.zeros(8, WIDTH)]
    MergePlan([one, other]).merge_into(whole := torch.cat(targets))
    assert (whole[1:5] == 4).all()
    assert (whole[7 : 7 + length] == length).all()
