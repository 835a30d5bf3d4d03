"""What is removed is gone: no answer that was under way brings it back, is remembered, or is given."""

import threading

import pytest
from tier_faults import FaultyTier, LateTier
from tier_helpers import read, rows_of, same_bits, until, write

from mmcache.tiers import Expected, MemoryTier
from mmcache.tiers.removals import Removals

pytest_plugins = ["tier_fixtures"]


REMOVALS = {
    "remove": lambda store, key: store.remove([key]),
    "clear": lambda store, key: store.clear(key.namespace),
}


@pytest.fixture(params=REMOVALS)
def removal(request):
    return REMOVALS[request.param]


@pytest.fixture
def late(make_store):
    """A store of a near and a far tier, the far one late; a key that the far one holds."""
    near, far = MemoryTier(1 << 20, name="near"), LateTier(MemoryTier(1 << 20, name="far"))
    (key,) = write(far.inner, "a")
    store = make_store(near, far)
    far.hang()
    return store, near, far, key


def test_an_answer_under_way_is_neither_given_nor_promoted_nor_remembered(late, removal):
    store, near, far, key = late
    fetch = store.prefetch([key])
    until(lambda: far.calls["read"])
    removal(store, key)
    assert store.flush(20)  # the far tier itself is done with it
    far.go_on()
    assert fetch.wait(20) == {}
    assert store.flush(20)
    assert store.known([key]) == set()
    assert (read(near, key), read(far.inner, key)) == ({}, {})
    assert store.fetch([key]) == {}


def test_rows_that_are_put_after_a_removal_are_stored_and_found(late, removal):
    store, near, far, key = late
    fetch = store.prefetch([key])
    until(lambda: far.calls["read"])
    removal(store, key)
    assert store.flush(20)
    store.put(key, rows_of("new"))
    far.go_on()
    assert fetch.wait(20) == {}
    assert store.flush(20)
    for tier in (near, far.inner):
        assert same_bits(read(tier, key)["a"], rows_of("new"))
    assert same_bits(store.fetch([key])[key], rows_of("new"))


def test_a_look_under_way_is_not_remembered(late, removal):
    store, _, far, key = late
    store.learn([key])
    until(lambda: far.calls["looked"])
    removal(store, key)
    assert store.flush(20)
    far.go_on()
    assert store.fetch([key]) == {}  # the reading thread is past the look
    assert store.known([key]) == set()
    store.put(key, rows_of("new"))
    assert store.flush(20)
    assert same_bits(read(far.inner, key)["a"], rows_of("new"))


def test_rows_that_arrived_and_were_not_handed_out_are_missing(make_store, removal):
    store = make_store()
    key = store.key("a", "image")
    store.put(key, rows_of("a"))
    assert store.flush(20)
    fetch = store.prefetch([key])
    until(lambda: fetch.done)
    removal(store, key)
    assert (fetch.poll(), fetch.wait(0)) == ({}, {})


def test_other_keys_of_the_same_answer_are_given_and_promoted(late):
    store, near, far, key = late
    (other,) = write(far.inner, "b")
    fetch = store.prefetch([key, other])
    until(lambda: far.calls["read"])
    store.remove([key])
    far.go_on()
    assert set(fetch.wait(20)) == {other}
    assert store.flush(20)
    assert set(read(near, key, other)) == {"b"}


def test_a_damaged_entry_does_not_take_what_other_tiers_hold_with_it(make_store):
    near, far = FaultyTier(MemoryTier(1 << 20, name="near")), MemoryTier(1 << 20, name="far")
    (key,) = write(near.inner, "a")
    write(far, "a")
    store = make_store(near, far)
    near.next = ["flipped"]
    assert same_bits(store.fetch([key])[key], rows_of("a"))
    assert store.flush(20)
    assert same_bits(read(near.inner, key)["a"], rows_of("a"))  # the far tier's, in its place


class TierThatRemovesInTurns(FaultyTier):
    """Each removal waits until it is told to go on."""

    def __init__(self, inner):
        super().__init__(inner)
        self.turns = threading.Semaphore(0)

    def remove_many(self, keys):
        self.calls["removing"] += 1
        self.turns.acquire()
        return self.inner.remove_many(keys)

    def clear(self, namespace=None):
        self.calls["removing"] += 1
        self.turns.acquire()
        return self.inner.clear(namespace)


def test_a_removal_that_is_asked_for_while_one_is_carried_out_is_carried_out_too(make_store, removal):
    tier = TierThatRemovesInTurns(MemoryTier(1 << 20))
    store = make_store(tier)
    key = store.key("a", "image")
    store.remove([store.key("b", "image")])
    until(lambda: tier.calls["removing"] == 1)
    removal(store, key)
    store.put(key, rows_of("a"))
    tier.turns.release()  # the next turn of the writing thread takes the removal, and then the rows
    until(lambda: tier.calls["removing"] == 2)
    removal(store, key)
    tier.turns.release(9)
    assert store.flush(20)
    assert (store.fetch([key]), read(tier.inner, key)) == ({}, {})


def test_rows_that_wait_and_are_of_no_use_are_replaced_by_those_that_are(make_store):
    tier = FaultyTier(MemoryTier(1 << 20))
    store = make_store(tier)
    key = store.key("a", "image")
    tier.hang()
    store.put(key, rows_of("old", rows=7))
    fetch = store.prefetch({key: Expected(rows=4)})
    store.put(key, rows_of("new"))
    tier.go_on()
    fetch.cancel()
    assert store.flush(20)
    assert same_bits(store.fetch({key: Expected(rows=4)})[key], rows_of("new"))


def test_removals_among_fetches_and_puts_leave_nothing_old(make_store):
    """Rows say in which round they were put; what a fetch gives that begins after a removal is of a later round."""
    store = make_store(MemoryTier(1 << 20, name="near"), MemoryTier(1 << 20, name="far"))
    key = store.key("a", "image")
    stop = threading.Event()

    def fetch_on():
        while not stop.is_set():
            store.fetch([key])

    threads = [threading.Thread(target=fetch_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(60):
            store.put(key, rows_of("a") * 0 + number)
            if number % 2:
                assert store.flush(20)
            store.remove([key])
            assert store.fetch([key]) == {}
            assert store.known([key]) == set()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert store.flush(20)
    assert store.fetch([key]) == {}


def test_what_was_forgotten_of_removals_counts_as_removed(make_store):
    moments = iter(range(100))
    removals = Removals(lambda: next(moments), capacity=2)
    keys = [make_store().key(name, "image") for name in "abc"]
    assert not removals.after(keys[0], 0)
    for key in keys:
        removals.note([key])
    assert [removals.after(key, 0) for key in keys] == [False, True, True]
    assert [removals.after(key, -1) for key in keys] == [True] * 3
    removals.note([None])
    assert removals.after(keys[0], 2)
    assert not removals.after(keys[0], 3)
