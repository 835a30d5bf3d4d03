"""Several tiers as one store: never a wait for the scheduler, never an error, never wrong rows."""

import logging
import threading
import time

import pytest
import torch
from tier_faults import FaultyTier
from tier_helpers import NAMESPACE, key_of, rows_of, same_bits, until, write

from mmcache.errors import ConfigError
from mmcache.tiers import DiskTier, Expected, MemoryTier, TieredStore, encode_entry

GATE = 60.0  # a deadline that no test means to reach


@pytest.fixture
def make(request):
    made = []

    def build(*tiers, **options):
        store = TieredStore(
            list(tiers) or [MemoryTier(1 << 24)], **{"namespace": NAMESPACE, "deadline": GATE} | options
        )
        made.append((store, tiers))
        return store

    yield build
    for store, tiers in made:
        for tier in tiers:
            if isinstance(tier, FaultyTier):
                tier.go_on()
        store.close()


def put(store, *identifiers):
    keys = [store.key(identifier, "image") for identifier in identifiers]
    for key in keys:
        store.put(key, rows_of(key.identifier))
    return keys


def balanced(store):
    """Every look-up is accounted for, in the whole and in every tier."""
    stats = store.stats()
    assert stats.lookups == stats.queue_hits + sum(tier.hits for tier in stats.tiers) + stats.misses
    for tier in stats.tiers:
        ends = tier.hits + tier.misses + tier.damaged + tier.errors + tier.timeouts + tier.cancelled
        assert tier.asked == ends, tier
        assert sum(tier.reasons.values()) == tier.damaged
    return stats


class TestRows:
    def test_what_was_put_is_found_bit_for_bit(self, make):
        store = make(MemoryTier(1 << 20, name="near"), MemoryTier(1 << 20, name="far"))
        keys = put(store, "a", "b")
        assert store.flush(10)
        found = store.fetch([*keys, store.key("missing", "image")])
        assert set(found) == set(keys)
        for key in keys:
            assert same_bits(found[key], rows_of(key.identifier))
        stats = balanced(store)
        assert (stats.lookups, stats.misses, stats.tiers[0].hits) == (3, 1, 2)

    def test_keys_carry_namespace_salt_and_adapter(self, make):
        store = make()
        store.put(store.key("x", "image", salt="s"), rows_of("x"))
        store.flush(10)
        others = ({}, {"salt": ""}, {"adapter": "s"}, {"salt": "s", "adapter": ""})
        assert not store.fetch([store.key("x", "image", **other) for other in others])
        assert store.fetch([store.key("x", "image", salt="s")])

    def test_keys_carry_the_modality(self, make):
        store = make()
        image, video = store.key("x", "image"), store.key("x", "video")
        store.put(image, rows_of("as image"))
        assert not store.known([video])
        store.flush(10)
        assert not store.fetch([video])
        store.put(video, rows_of("as video"))
        store.flush(10)
        found = store.fetch([image, video])
        assert same_bits(found[image], rows_of("as image"))
        assert same_bits(found[video], rows_of("as video"))

    def test_modalities_of_any_length_are_told_apart(self, make):
        store = make()
        keys = {store.key("x", modality) for modality in ("", "v" * 200, "v" * 201, "v" * 255, "v" * 300, "é" * 101)}
        assert len(keys) == 6
        assert not keys & {store.key("x", key.modality) for key in keys if key.modality.startswith("sha256")}

    def test_identifiers_of_any_length_are_told_apart(self, make):
        store = make()
        long = ["x" * 3999, "x" * 4000, "x" * 4001, "x" * 4096, "x" * 4097, "x" * 100_000, "é" * 3000, "é" * 3001]
        keys = [store.key(identifier, "image") for identifier in long]
        as_it_is_kept = store.key(keys[-1].identifier, "image")
        assert len({*keys, as_it_is_kept}) == len(long) + 1
        for identifier, key in zip(long, keys, strict=True):
            store.put(key, rows_of(identifier))
        store.flush(10)
        found = store.fetch([store.key(identifier, "image") for identifier in long])
        for identifier, key in zip(long, keys, strict=True):
            assert same_bits(found[key], rows_of(identifier))

    def test_rows_are_found_while_they_wait_to_be_written(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        tier.hang()
        store = make(tier)
        (key,) = put(store, "a")
        assert store.known([key]) == {key}
        assert same_bits(store.fetch([key])[key], rows_of("a"))
        assert balanced(store).queue_hits == 1

    def test_levels_reach_the_tier(self, make):
        tier = MemoryTier(1 << 20)
        store = make(tier)
        key = store.key("deep", "image")
        store.put(key, rows_of("deep", 4, 24), levels=3)
        store.flush(10)
        assert same_bits(store.fetch([key])[key], rows_of("deep", 4, 24))

    @pytest.mark.parametrize("wanted", [Expected(rows=5), Expected(width=8), Expected(dtype=torch.bfloat16)])
    def test_rows_that_do_not_fit_the_asker_are_missing_and_dropped(self, make, wanted):
        store = make()
        (key,) = put(store, "a")
        store.flush(10)
        assert store.fetch({key: wanted}) == {}
        store.flush(10)
        assert store.fetch([key]) == {}
        assert balanced(store).tiers[0].reasons == {"mismatch": 1}
        put(store, "a")
        store.flush(10)
        assert key in store.fetch({key: Expected(4, 16, torch.float32)})

    @pytest.mark.parametrize("part", ["namespace", "modality", "identifier"])
    def test_what_was_stored_under_another_key_is_missing_and_dropped(self, make, part):
        tier = MemoryTier(1 << 20)
        store = make(tier)
        key = store.key("a", "image")
        others = {"namespace": {"salt": "s"}, "modality": {"modality": "video"}, "identifier": {"identifier": "b"}}
        other = store.key(**{"identifier": "a", "modality": "image"} | others[part])
        tier.put_many({key: encode_entry(other, rows_of("a"))})
        assert store.fetch([key]) == {}
        store.flush(10)
        assert balanced(store).tiers[0].reasons == {part: 1}
        assert tier.usage().entries == 0

    @pytest.mark.parametrize("rows", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, 2, 3)])
    def test_what_cannot_be_stored_is_refused_and_counted(self, make, rows):
        store = make()
        store.put(store.key("a", "image"), rows)
        assert store.stats().refused == 1

    def test_bad_levels_are_dropped_and_counted(self, make):
        store = make()
        store.put(store.key("a", "image"), rows_of("a"), levels=7)
        store.flush(10)
        assert store.stats().tiers[0].dropped == 1
        assert not store.fetch([store.key("a", "image")])

    def test_an_empty_question_has_an_empty_answer(self, make):
        store = make()
        done = threading.Event()
        store.prefetch([], lambda found: done.set())
        assert done.wait(10)
        assert store.fetch([]) == {}
        assert store.known([]) == set()


class TestOrder:
    def test_tiers_are_asked_in_order_once_and_only_for_what_is_missing(self, make):
        near, far = FaultyTier(MemoryTier(1 << 20, name="near")), FaultyTier(MemoryTier(1 << 20, name="far"))
        a, b = write(near, "a", "b")
        (c,) = write(far, "c")
        store = make(near, far)
        assert set(store.fetch([a, b, c, store.key("d", "image")])) == {a, b, c}
        assert (near.calls["get"], far.calls["get"]) == (1, 1)
        stats = balanced(store)
        assert [(t.asked, t.hits, t.misses) for t in stats.tiers] == [(4, 2, 2), (2, 1, 1)]

    def test_a_hit_is_promoted_to_the_tiers_before_it(self, make):
        near, mid, far = (MemoryTier(1 << 20, name=name) for name in ("near", "mid", "far"))
        (key,) = write(far, "a")
        store = make(near, mid, far)
        store.fetch([key])
        store.flush(10)
        assert near.contains_many([key])
        assert mid.contains_many([key])
        assert [tier.promoted for tier in store.stats().tiers] == [1, 1, 0]
        store.fetch([key])
        assert balanced(store).tiers[0].hits == 1

    def test_a_request_is_one_round_trip_a_tier(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, *(f"i{n}" for n in range(26)))
        store = make(tier)
        assert len(store.fetch(keys)) == 26
        assert tier.calls["get"] == 1

    def test_questions_that_pile_up_share_a_round_trip(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, *(f"i{n}" for n in range(9)))
        store = make(tier)
        tier.hang()
        fetches = [store.prefetch(keys[:1])]
        until(lambda: tier.calls["get"] == 1)
        fetches += [store.prefetch(keys[n : n + 2]) for n in range(1, 8)]
        tier.go_on()
        for n, fetch in enumerate(fetches):
            assert len(fetch.wait(10)) == (2 if n else 1)
        assert tier.calls["get"] == 2
        balanced(store)


class TestPrefetch:
    def test_it_returns_at_once_and_is_polled(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        (key,) = write(tier, "a")
        store = make(tier)
        tier.hang()
        fetch = store.prefetch([key])
        assert fetch.poll() == {}
        assert not fetch.done
        tier.go_on()
        until(lambda: fetch.done)
        assert same_bits(fetch.poll()[key], rows_of("a"))
        assert fetch.poll() == {}
        assert set(fetch.wait(0)) == {key}

    def test_its_callback_gets_what_was_found_once_and_on_another_thread(self, make):
        store = make()
        (key,) = put(store, "a")
        calls = []
        for _ in range(2):  # waiting to be written, and in the tier
            asked = [key, store.key("b", "image")]
            store.prefetch(asked, lambda found: calls.append((set(found), threading.get_ident())))
            store.flush(10)
        until(lambda: len(calls) == 2)
        assert [found for found, _ in calls] == [{key}, {key}]
        assert threading.get_ident() not in {thread for _, thread in calls}

    def test_cancelled_it_ends_without_a_callback(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        (key,) = write(tier, "a")
        store = make(tier, MemoryTier(1 << 20, name="far"))
        tier.hang()
        calls = []
        fetch = store.prefetch([key], calls.append)
        fetch.cancel()
        fetch.cancel()
        assert fetch.done
        tier.go_on()
        store.close()
        assert calls == []
        stats = balanced(store)
        assert (stats.tiers[0].cancelled, stats.misses) == (1, 1)

    def test_a_failing_callback_is_counted_and_harms_nobody(self, make):
        store = make()
        (key,) = put(store, "a")
        store.prefetch([key], lambda found: 1 / 0)
        until(lambda: store.stats().listener_errors == 1)
        assert store.fetch([key])


class TestKnowledge:
    def test_a_new_process_learns_what_is_stored_in_one_batch(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, "a", "b", "c")
        store = make(tier)
        asked = [*keys, store.key("d", "image")]
        assert store.known(asked) == set()
        store.learn(asked)
        until(lambda: store.known(asked) == set(keys))
        store.learn(asked)
        assert tier.calls["contains"] == 1
        assert tier.calls["get"] == 0

    def test_known_does_no_io_and_does_not_wait(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, "a")
        store = make(tier)
        store.learn(keys)
        until(lambda: store.known(keys))
        tier.hang()
        before = dict(tier.calls)
        assert store.known(iter(keys)) == set(keys)
        assert dict(tier.calls) == before

    def test_what_turns_out_to_be_gone_is_known_no_longer(self, make):
        inner = MemoryTier(1 << 20)
        store = make(inner)
        (key,) = put(store, "a")
        store.flush(10)
        assert store.known([key])
        inner.remove_many([key])
        assert store.fetch([key]) == {}
        assert store.known([key]) == set()
        put(store, "a")  # and is written again
        store.flush(10)
        assert inner.contains_many([key])

    def test_what_is_known_to_be_there_is_not_written_again(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make(tier)
        for _ in range(3):
            put(store, "a")
            store.flush(10)
        assert tier.calls["put"] == 1


class TestRemoval:
    def test_removed_rows_are_not_found_any_more(self, make):
        near, far = MemoryTier(1 << 20, name="near"), MemoryTier(1 << 20, name="far")
        store = make(near, far)
        a, b = put(store, "a", "b")
        store.flush(10)
        store.remove([a])
        assert store.known([a, b]) == {b}
        assert set(store.fetch([a, b])) == {b}
        store.flush(10)
        assert not near.contains_many([a])
        assert not far.contains_many([a])

    def test_a_tier_that_is_down_does_not_bring_them_back(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make(tier)
        (key,) = put(store, "a")
        store.flush(10)
        tier.always = "refused"
        store.remove([key])
        assert not store.flush(0.05)
        tier.always = None
        assert store.fetch([key]) == {}  # whether or not the tier has taken the removal yet
        until(lambda: not tier.inner.contains_many([key]))
        balanced(store)

    def test_rows_that_wait_are_not_written_after_their_removal(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make(tier)
        tier.hang()
        first, second = put(store, "a", "b")
        until(lambda: tier.calls["put"] == 1)
        store.remove([first, second])
        tier.go_on()
        assert store.flush(10)
        assert not tier.inner.contains_many([first, second])
        assert store.known([first, second]) == set()
        put(store, "b")
        assert store.flush(10)
        assert store.fetch([second])

    def test_a_namespace_is_cleared_for_all_who_stored_in_it(self, make):
        tier = MemoryTier(1 << 20)
        store, other = make(tier), key_of("a", salt="other")
        (foreign,) = write(tier, "by another process")
        store.put(other, rows_of("a"))
        mine = put(store, "a")
        store.flush(10)
        store.clear(mine[0].namespace)
        assert store.fetch([*mine, foreign]) == {}
        assert set(store.fetch([other])) == {other}
        store.flush(10)
        assert not tier.contains_many([*mine, foreign])


class TestWriteBehind:
    def test_a_put_never_waits_and_a_full_queue_drops_and_counts(self, make):
        tier = FaultyTier(MemoryTier(1 << 24))
        tier.hang()
        size = rows_of("a").nbytes
        store = make(tier, write_behind_bytes=3 * size + 1)
        keys = put(store, *(f"i{n}" for n in range(10)))
        stats = store.stats().tiers[0]
        assert stats.queued_bytes == 3 * size
        assert stats.dropped == 7
        tier.go_on()
        assert store.flush(10)
        assert set(store.fetch(keys)) == set(keys[:3])
        stats = store.stats().tiers[0]
        assert (stats.stored, stats.queued_bytes) == (3, 0)

    def test_rows_count_as_what_they_keep_alive(self, make):
        tier = FaultyTier(MemoryTier(1 << 24))
        tier.hang()
        store = make(tier, write_behind_bytes=1000)
        store.put(store.key("slice", "image"), torch.zeros(1000, 16)[:1])
        assert store.stats().tiers[0].dropped == 1

    def test_a_tier_that_hangs_does_not_keep_rows_from_the_others(self, make):
        slow, fast = FaultyTier(MemoryTier(1 << 20, name="slow")), MemoryTier(1 << 20, name="fast")
        slow.hang()
        store = make(slow, fast)
        keys = put(store, "a", "b")
        until(lambda: len(fast.contains_many(keys)) == 2)

    def test_a_tier_without_room_is_no_failure(self, make):
        store = make(MemoryTier(100))
        keys = put(store, "a", "b", "c", "d", "e")
        assert store.flush(10)
        assert store.fetch(keys) == {}
        stats = balanced(store).tiers[0]
        assert (stats.stored, stats.dropped, stats.opened) == (0, 5, 0)

    def test_close_writes_what_waits_and_leaves_no_threads(self, tmp_path):
        before = threading.active_count()
        store = TieredStore([DiskTier(tmp_path / "s", 1 << 20)], namespace=NAMESPACE)
        keys = put(store, "a", "b")
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
    def test_a_slow_tier_counts_as_missing_after_its_deadline(self, make):
        slow, far = FaultyTier(MemoryTier(1 << 20, name="slow")), MemoryTier(1 << 20, name="far")
        (key,) = write(far, "a")
        store = make(slow, far, deadline=0.1)
        slow.hang()
        assert same_bits(store.fetch([key])[key], rows_of("a"))
        assert balanced(store).tiers[0].timeouts == 1

    def test_the_asker_can_be_in_more_of_a_hurry(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        (key,) = write(tier, "a")
        store = make(tier)
        tier.hang()
        assert store.fetch([key], timeout=0.01) == {}
        tier.go_on()
        assert store.fetch([key])
        assert balanced(store).tiers[0].cancelled == 1

    @pytest.mark.parametrize("fault", ["refused", "raises"])
    def test_a_tier_that_fails_is_passed_over_left_alone_and_tried_again(self, make, fault, caplog):
        bad, far = FaultyTier(MemoryTier(1 << 20, name="bad")), MemoryTier(1 << 20, name="far")
        keys = write(far, *(f"i{n}" for n in range(20)))
        (here,) = write(bad, "b")
        store = make(bad, far)
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
    def test_a_tier_that_answers_anything_is_passed_over(self, make, answer):
        far = MemoryTier(1 << 20, name="far")
        (key,) = write(far, "a")
        odd = MemoryTier(1 << 20, name="odd")
        odd.get_many = lambda keys: {"key: None": {key: None}, "key: text": {key: "x"}}.get(str(answer), answer)
        store = make(odd, far)
        for _ in range(5):
            assert same_bits(store.fetch([key])[key], rows_of("a"))
            store.remove([key])
            store.flush(10)
            write(far, "a")
        balanced(store)

    def test_writes_to_a_tier_that_fails_are_dropped_and_taken_up_again(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make(tier)
        tier.always = "refused"
        for n in range(10):
            put(store, f"i{n}")
            store.flush(5)
        assert tier.calls["put"] == 3
        assert store.stats().tiers[0].dropped == 10
        tier.always = None

        def taken():
            put(store, "later")
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
    def test_damage_is_a_miss_is_dropped_and_is_encoded_anew(self, make, fault, reasons):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make(tier)
        (key,) = put(store, "a")
        store.flush(10)
        tier.next = [fault]
        assert store.fetch([key]) == {}
        stats = balanced(store).tiers[0]
        assert stats.damaged == 1
        assert set(stats.reasons) <= reasons
        assert store.flush(10)
        assert not tier.inner.contains_many([key])
        put(store, "a")
        store.flush(10)
        assert same_bits(store.fetch([key])[key], rows_of("a"))

    def test_another_keys_entry_is_never_served(self, make):
        tier = FaultyTier(MemoryTier(1 << 20))
        a, b = write(tier, "a", "b")
        store = make(tier)
        store.fetch([a])
        tier.next = ["swapped"]
        assert store.fetch([b]) == {}
        assert balanced(store).tiers[0].reasons == {"identifier": 1}

    def test_rows_that_were_written_to_are_found_out(self, make):
        store = make(MemoryTier(1 << 20))
        (key,) = put(store, "a")
        store.flush(10)
        store.fetch([key])[key].add_(1)
        assert store.fetch([key]) == {}
        assert balanced(store).tiers[0].reasons == {"checksum": 1}

    def test_a_tier_that_hangs_for_ever_does_not_keep_the_store_from_closing(self, make, caplog):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make(tier, deadline=0.05)
        tier.hang()
        store.fetch([store.key("a", "image")])
        start = time.monotonic()
        with caplog.at_level(logging.WARNING):
            store.close(timeout=0.3)
        assert time.monotonic() - start < 30  # not for ever
        assert any("hangs" in record.message for record in caplog.records)


class TestEvents:
    def test_they_tell_what_enters_and_leaves_each_tier(self, make):
        events = []
        size = 64 + 256 + 192
        near, far = MemoryTier(2 * size, name="near"), MemoryTier(1 << 20, name="far")
        store = make(near, far, on_event=lambda *event: events.append(event))
        keys = []
        for name in "abc":
            keys += put(store, name)
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

    def test_a_listener_that_fails_or_calls_back_harms_nobody(self, make):
        seen = []

        def listener(kind, tier, namespace, identifier):
            seen.append(store.known([key]))
            store.stats()
            raise RuntimeError("a bug in a listener")

        store = make(on_event=listener)
        key = store.key("a", "image")
        store.put(key, rows_of("a"))
        until(lambda: store.stats().listener_errors == 1)
        assert seen == [{key}]
        assert store.fetch([key])


@pytest.mark.parametrize(
    "arguments",
    [
        {"tiers": []},
        {"tiers": [MemoryTier(10), MemoryTier(10)]},
        {"tiers": [MemoryTier(10)], "deadline": 0},
        {"tiers": [MemoryTier(10)], "write_behind_bytes": -1},
        {"tiers": [MemoryTier(10)], "namespace": None},
    ],
)
def test_settings_that_cannot_work_are_errors_and_leave_no_threads(arguments):
    before = threading.active_count()
    with pytest.raises(ConfigError):
        TieredStore(**{"namespace": NAMESPACE} | arguments)
    assert threading.active_count() == before
    with pytest.raises(ConfigError):
        MemoryTier(0)
