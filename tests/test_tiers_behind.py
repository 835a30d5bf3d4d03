"""What a store does behind its caller's back: writing, removing, leaving tiers alone that fail, telling listeners."""

import logging
import threading
import time

import pytest
import torch
from tier_faults import FaultyTier
from tier_helpers import NAMESPACE, balanced, key_of, put_all, rows_of, same_bits, until, write

from mmcache.tiers import DiskTier, MemoryTier, TieredStore

pytest_plugins = ["tier_fixtures"]


class TestRemoval:
    def test_removed_rows_are_not_found_any_more(self, make_store):
        near, far = MemoryTier(1 << 20, name="near"), MemoryTier(1 << 20, name="far")
        store = make_store(near, far)
        a, b = put_all(store, "a", "b")
        store.flush(10)
        store.remove([a])
        assert store.known([a, b]) == {b}
        assert set(store.fetch([a, b])) == {b}
        store.flush(10)
        assert not near.contains_many([a])
        assert not far.contains_many([a])

    def test_a_tier_that_is_down_does_not_bring_them_back(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make_store(tier)
        (key,) = put_all(store, "a")
        store.flush(10)
        tier.always = "refused"
        store.remove([key])
        assert not store.flush(0.05)
        tier.always = None
        assert store.fetch([key]) == {}  # whether or not the tier has taken the removal yet
        until(lambda: not tier.inner.contains_many([key]))
        balanced(store)

    def test_rows_that_wait_are_not_written_after_their_removal(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make_store(tier)
        tier.hang()
        first, second = put_all(store, "a", "b")
        until(lambda: tier.calls["put"] == 1)
        store.remove([first, second])
        tier.go_on()
        assert store.flush(10)
        assert not tier.inner.contains_many([first, second])
        assert store.known([first, second]) == set()
        put_all(store, "b")
        assert store.flush(10)
        assert store.fetch([second])

    def test_a_namespace_is_cleared_for_all_who_stored_in_it(self, make_store):
        tier = MemoryTier(1 << 20)
        store, other = make_store(tier), key_of("a", salt="other")
        (foreign,) = write(tier, "by another process")
        store.put(other, rows_of("a"))
        mine = put_all(store, "a")
        store.flush(10)
        store.clear(mine[0].namespace)
        assert store.fetch([*mine, foreign]) == {}
        assert set(store.fetch([other])) == {other}
        store.flush(10)
        assert not tier.contains_many([*mine, foreign])


class TestWriteBehind:
    def test_a_put_never_waits_and_a_full_queue_drops_and_counts(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 24))
        tier.hang()
        size = rows_of("a").nbytes
        store = make_store(tier, write_behind_bytes=3 * size + 1)
        keys = put_all(store, *(f"i{n}" for n in range(10)))
        stats = store.stats().tiers[0]
        assert stats.queued_bytes == 3 * size
        assert stats.dropped == 7
        tier.go_on()
        assert store.flush(10)
        assert set(store.fetch(keys)) == set(keys[:3])
        stats = store.stats().tiers[0]
        assert (stats.stored, stats.queued_bytes) == (3, 0)

    def test_rows_count_as_what_they_keep_alive(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 24))
        tier.hang()
        store = make_store(tier, write_behind_bytes=1000)
        store.put(store.key("slice", "image"), torch.zeros(1000, 16)[:1])
        assert store.stats().tiers[0].dropped == 1

    def test_a_tier_that_hangs_does_not_keep_rows_from_the_others(self, make_store):
        slow, fast = FaultyTier(MemoryTier(1 << 20, name="slow")), MemoryTier(1 << 20, name="fast")
        slow.hang()
        store = make_store(slow, fast)
        keys = put_all(store, "a", "b")
        until(lambda: len(fast.contains_many(keys)) == 2)

    def test_a_tier_without_room_is_no_failure(self, make_store):
        store = make_store(MemoryTier(100))
        keys = put_all(store, "a", "b", "c", "d", "e")
        assert store.flush(10)
        assert store.fetch(keys) == {}
        stats = balanced(store).tiers[0]
        assert (stats.stored, stats.dropped, stats.opened) == (0, 5, 0)

    def test_close_writes_what_waits_and_leaves_no_threads(self, tmp_path):
        before = threading.active_count()
        store = TieredStore([DiskTier(tmp_path / "s", 1 << 20)], namespace=NAMESPACE)
        keys = put_all(store, "a", "b")
        store.close()
        store.close()
        assert threading.active_count() == before
        assert store.fetch(keys) == {}
        answers = []
        store.prefetch(keys, answers.append)
        assert answers == [{}]  # whoever waits for it is told
        store.put(keys[0], rows_of("a"))
        store.remove(keys)
        assert store.stats().refused == 1
        with TieredStore([DiskTier(tmp_path / "s", 1 << 20)], namespace=NAMESPACE) as again:
            assert set(again.fetch(keys)) == set(keys)


class TestFailures:
    def test_a_slow_tier_counts_as_missing_after_its_deadline(self, make_store):
        slow, far = FaultyTier(MemoryTier(1 << 20, name="slow")), MemoryTier(1 << 20, name="far")
        (key,) = write(far, "a")
        store = make_store(slow, far, deadline=0.1)
        slow.hang()
        assert same_bits(store.fetch([key])[key], rows_of("a"))
        assert balanced(store).tiers[0].timeouts == 1

    def test_the_asker_can_be_in_more_of_a_hurry(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        (key,) = write(tier, "a")
        store = make_store(tier)
        tier.hang()
        assert store.fetch([key], timeout=0.01) == {}
        tier.go_on()
        assert store.fetch([key])
        assert balanced(store).tiers[0].cancelled == 1

    @pytest.mark.parametrize("fault", ["refused", "raises"])
    def test_a_tier_that_fails_is_passed_over_left_alone_and_tried_again(self, make_store, fault, caplog):
        bad, far = FaultyTier(MemoryTier(1 << 20, name="bad")), MemoryTier(1 << 20, name="far")
        keys = write(far, *(f"i{n}" for n in range(20)))
        (here,) = write(bad, "b")
        store = make_store(bad, far)
        bad.always = fault
        with caplog.at_level(logging.WARNING):
            for key in keys:
                assert set(store.fetch([key])) == {key}
        assert not store.stats().tiers[0].closed
        assert bad.calls["get"] == 3
        assert store.stats().tiers[0].skipped == 17
        reads = [r for r in caplog.records if "counts as missing" in r.message]
        assert len(reads) == 1
        assert store.known([here]) == set()
        bad.always = None
        until(lambda: store.stats().tiers[0].closed)
        assert set(store.fetch([here])) == {here}
        balanced(store)

    @pytest.mark.parametrize("answer", [None, 3, {"a": "b"}, "key: None", "key: text"])
    def test_a_tier_that_answers_anything_is_passed_over(self, make_store, answer):
        far = MemoryTier(1 << 20, name="far")
        (key,) = write(far, "a")
        odd = MemoryTier(1 << 20, name="odd")
        odd.get_many = lambda keys: {"key: None": {key: None}, "key: text": {key: "x"}}.get(str(answer), answer)
        store = make_store(odd, far)
        for _ in range(5):
            assert same_bits(store.fetch([key])[key], rows_of("a"))
            store.remove([key])
            store.flush(10)
            write(far, "a")
        balanced(store)

    def test_writes_to_a_tier_that_fails_are_dropped_and_taken_up_again(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make_store(tier)
        tier.always = "refused"
        for n in range(10):
            put_all(store, f"i{n}")
            store.flush(5)
        assert tier.calls["put"] == 3
        assert store.stats().tiers[0].dropped == 10
        tier.always = None

        def taken():
            put_all(store, "later")
            store.flush(5)
            return bool(tier.inner.contains_many([store.key("later", "image")]))

        until(taken)

    @pytest.mark.parametrize(
        ("fault", "reasons"),
        [
            ("flipped", {"checksum"}),
            ("header", {"checksum", "foreign", "version", "truncated"}),
            ("truncated", {"truncated"}),
            ("empty", {"truncated"}),
            ("version", {"version"}),
            ("foreign", {"foreign"}),
        ],
    )
    def test_damage_is_a_miss_is_dropped_and_is_encoded_anew(self, make_store, fault, reasons):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make_store(tier)
        (key,) = put_all(store, "a")
        store.flush(10)
        tier.next = [fault]
        assert store.fetch([key]) == {}
        stats = balanced(store).tiers[0]
        assert stats.damaged == 1
        assert set(stats.reasons) <= reasons
        assert store.flush(10)
        assert not tier.inner.contains_many([key])
        put_all(store, "a")
        store.flush(10)
        assert same_bits(store.fetch([key])[key], rows_of("a"))

    def test_another_keys_entry_is_never_served(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        a, b = write(tier, "a", "b")
        store = make_store(tier)
        store.fetch([a])
        tier.next = ["swapped"]
        assert store.fetch([b]) == {}
        assert balanced(store).tiers[0].reasons == {"identifier": 1}

    def test_rows_that_were_written_to_are_found_out(self, make_store):
        store = make_store(MemoryTier(1 << 20))
        (key,) = put_all(store, "a")
        store.flush(10)
        store.fetch([key])[key].add_(1)
        assert store.fetch([key]) == {}
        assert balanced(store).tiers[0].reasons == {"checksum": 1}

    def test_a_tier_that_hangs_for_ever_does_not_keep_the_store_from_closing(self, make_store, caplog):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make_store(tier, deadline=0.05)
        tier.hang()
        store.fetch([store.key("a", "image")])
        start = time.monotonic()
        with caplog.at_level(logging.WARNING):
            store.close(timeout=0.3)
        assert time.monotonic() - start < 30  # not for ever
        assert any("hangs" in record.message for record in caplog.records)


class TestEvents:
    def test_they_tell_what_enters_and_leaves_each_tier(self, make_store):
        events = []
        size = 64 + 256 + 192
        near, far = MemoryTier(2 * size, name="near"), MemoryTier(1 << 20, name="far")
        store = make_store(near, far, on_event=lambda *event: events.append(event))
        keys = []
        for name in "abc":
            keys += put_all(store, name)
            store.flush(10)
        space = keys[0].namespace
        until(lambda: len(events) >= 7)
        assert [e for e in events if e[1] == "far"] == [("stored", "far", space, n) for n in "abc"]
        near_events = [e for e in events if e[1] == "near"]
        assert ("removed", "near", space, "a") in near_events
        assert near_events.index(("removed", "near", space, "a")) > near_events.index(("stored", "near", space, "a"))
        events.clear()
        store.remove([keys[2]])
        until(lambda: len(events) == 2)
        assert set(events) == {("removed", "near", space, "c"), ("removed", "far", space, "c")}

    def test_a_listener_that_fails_or_calls_back_harms_nobody(self, make_store):
        seen = []

        def listener(kind, tier, namespace, identifier):
            seen.append(store.known([key]))
            store.stats()
            raise RuntimeError("a bug in a listener")

        store = make_store(on_event=listener)
        key = store.key("a", "image")
        store.put(key, rows_of("a"))
        until(lambda: store.stats().listener_errors == 1)
        assert seen == [{key}]
        assert store.fetch([key])
