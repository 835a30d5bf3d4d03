"""Several tiers as one store: never a wait for the scheduler, never an error, never wrong rows."""

import threading

import pytest
import torch
from tier_faults import FaultyTier
from tier_helpers import NAMESPACE, balanced, put_all, rows_of, same_bits, until, write

from mmcache.errors import ConfigError
from mmcache.tiers import Expected, MemoryTier, TieredStore, encode_entry

pytest_plugins = ["tier_fixtures"]


class TestRows:
    def test_what_was_put_is_found_bit_for_bit(self, make_store):
        store = make_store(MemoryTier(1 << 20, name="near"), MemoryTier(1 << 20, name="far"))
        keys = put_all(store, "a", "b")
        assert store.flush(10)
        found = store.fetch([*keys, store.key("missing", "image")])
        assert set(found) == set(keys)
        for key in keys:
            assert same_bits(found[key], rows_of(key.identifier))
        stats = balanced(store)
        assert (stats.lookups, stats.misses, stats.tiers[0].hits) == (3, 1, 2)

    def test_keys_carry_namespace_salt_and_adapter(self, make_store):
        store = make_store()
        store.put(store.key("x", "image", salt="s"), rows_of("x"))
        store.flush(10)
        others = ({}, {"salt": ""}, {"adapter": "s"}, {"salt": "s", "adapter": ""})
        assert not store.fetch([store.key("x", "image", **other) for other in others])
        assert store.fetch([store.key("x", "image", salt="s")])

    def test_keys_carry_the_modality(self, make_store):
        store = make_store()
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

    def test_modalities_of_any_length_are_told_apart(self, make_store):
        store = make_store()
        keys = {store.key("x", modality) for modality in ("", "v" * 200, "v" * 201, "v" * 255, "v" * 300, "é" * 101)}
        assert len(keys) == 6
        assert not keys & {store.key("x", key.modality) for key in keys if key.modality.startswith("sha256")}

    def test_identifiers_of_any_length_are_told_apart(self, make_store):
        store = make_store()
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

    def test_rows_are_found_while_they_wait_to_be_written(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        tier.hang()
        store = make_store(tier)
        (key,) = put_all(store, "a")
        assert store.known([key]) == {key}
        assert same_bits(store.fetch([key])[key], rows_of("a"))
        assert balanced(store).queue_hits == 1

    def test_levels_reach_the_tier(self, make_store):
        tier = MemoryTier(1 << 20)
        store = make_store(tier)
        key = store.key("deep", "image")
        store.put(key, rows_of("deep", 4, 24), levels=3)
        store.flush(10)
        assert same_bits(store.fetch([key])[key], rows_of("deep", 4, 24))

    @pytest.mark.parametrize("wanted", [Expected(rows=5), Expected(width=8), Expected(dtype=torch.bfloat16)])
    def test_rows_that_do_not_fit_the_asker_are_missing_and_dropped(self, make_store, wanted):
        store = make_store()
        (key,) = put_all(store, "a")
        store.flush(10)
        assert store.fetch({key: wanted}) == {}
        store.flush(10)
        assert store.fetch([key]) == {}
        assert balanced(store).tiers[0].reasons == {"mismatch": 1}
        put_all(store, "a")
        store.flush(10)
        assert key in store.fetch({key: Expected(4, 16, torch.float32)})

    @pytest.mark.parametrize("part", ["namespace", "modality", "identifier"])
    def test_what_was_stored_under_another_key_is_missing_and_dropped(self, make_store, part):
        tier = MemoryTier(1 << 20)
        store = make_store(tier)
        key = store.key("a", "image")
        others = {"namespace": {"salt": "s"}, "modality": {"modality": "video"}, "identifier": {"identifier": "b"}}
        other = store.key(**{"identifier": "a", "modality": "image"} | others[part])
        tier.put_many({key: encode_entry(other, rows_of("a"))})
        assert store.fetch([key]) == {}
        store.flush(10)
        assert balanced(store).tiers[0].reasons == {part: 1}
        assert tier.usage().entries == 0

    @pytest.mark.parametrize("rows", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(1, 2, 3)])
    def test_what_cannot_be_stored_is_refused_and_counted(self, make_store, rows):
        store = make_store()
        store.put(store.key("a", "image"), rows)
        assert store.stats().refused == 1

    def test_bad_levels_are_dropped_and_counted(self, make_store):
        store = make_store()
        store.put(store.key("a", "image"), rows_of("a"), levels=7)
        store.flush(10)
        assert store.stats().tiers[0].dropped == 1
        assert not store.fetch([store.key("a", "image")])

    def test_an_empty_question_has_an_empty_answer(self, make_store):
        store = make_store()
        done = threading.Event()
        store.prefetch([], lambda found: done.set())
        assert done.wait(10)
        assert store.fetch([]) == {}
        assert store.known([]) == set()


class TestOrder:
    def test_tiers_are_asked_in_order_once_and_only_for_what_is_missing(self, make_store):
        near, far = FaultyTier(MemoryTier(1 << 20, name="near")), FaultyTier(MemoryTier(1 << 20, name="far"))
        a, b = write(near, "a", "b")
        (c,) = write(far, "c")
        store = make_store(near, far)
        assert set(store.fetch([a, b, c, store.key("d", "image")])) == {a, b, c}
        assert (near.calls["get"], far.calls["get"]) == (1, 1)
        stats = balanced(store)
        assert [(t.asked, t.hits, t.misses) for t in stats.tiers] == [(4, 2, 2), (2, 1, 1)]

    def test_a_hit_is_promoted_to_the_tiers_before_it(self, make_store):
        near, mid, far = (MemoryTier(1 << 20, name=name) for name in ("near", "mid", "far"))
        (key,) = write(far, "a")
        store = make_store(near, mid, far)
        store.fetch([key])
        store.flush(10)
        assert near.contains_many([key])
        assert mid.contains_many([key])
        assert [tier.promoted for tier in store.stats().tiers] == [1, 1, 0]
        store.fetch([key])
        assert balanced(store).tiers[0].hits == 1

    def test_a_request_is_one_round_trip_a_tier(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, *(f"i{n}" for n in range(26)))
        store = make_store(tier)
        assert len(store.fetch(keys)) == 26
        assert tier.calls["get"] == 1

    def test_questions_that_pile_up_share_a_round_trip(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, *(f"i{n}" for n in range(9)))
        store = make_store(tier)
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
    def test_it_returns_at_once_and_is_polled(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        (key,) = write(tier, "a")
        store = make_store(tier)
        tier.hang()
        fetch = store.prefetch([key])
        assert fetch.poll() == {}
        assert not fetch.done
        tier.go_on()
        until(lambda: fetch.done)
        assert same_bits(fetch.poll()[key], rows_of("a"))
        assert fetch.poll() == {}
        assert set(fetch.wait(0)) == {key}

    def test_its_callback_gets_what_was_found_once_and_on_another_thread(self, make_store):
        store = make_store()
        (key,) = put_all(store, "a")
        calls = []
        for _ in range(2):  # waiting to be written, and in the tier
            asked = [key, store.key("b", "image")]
            store.prefetch(asked, lambda found: calls.append((set(found), threading.get_ident())))
            store.flush(10)
        until(lambda: len(calls) == 2)
        assert [found for found, _ in calls] == [{key}, {key}]
        assert threading.get_ident() not in {thread for _, thread in calls}

    def test_cancelled_it_ends_without_a_callback(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        (key,) = write(tier, "a")
        store = make_store(tier, MemoryTier(1 << 20, name="far"))
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

    def test_a_failing_callback_is_counted_and_harms_nobody(self, make_store):
        store = make_store()
        (key,) = put_all(store, "a")
        store.prefetch([key], lambda found: 1 / 0)
        until(lambda: store.stats().listener_errors == 1)
        assert store.fetch([key])


class TestKnowledge:
    def test_a_new_process_learns_what_is_stored_in_one_batch(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, "a", "b", "c")
        store = make_store(tier)
        asked = [*keys, store.key("d", "image")]
        assert store.known(asked) == set()
        store.learn(asked)
        until(lambda: store.known(asked) == set(keys))
        store.learn(asked)
        assert tier.calls["contains"] == 1
        assert tier.calls["get"] == 0

    def test_known_does_no_io_and_does_not_wait(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        keys = write(tier, "a")
        store = make_store(tier)
        store.learn(keys)
        until(lambda: store.known(keys))
        tier.hang()
        before = dict(tier.calls)
        assert store.known(iter(keys)) == set(keys)
        assert dict(tier.calls) == before

    def test_what_turns_out_to_be_gone_is_known_no_longer(self, make_store):
        inner = MemoryTier(1 << 20)
        store = make_store(inner)
        (key,) = put_all(store, "a")
        store.flush(10)
        assert store.known([key])
        inner.remove_many([key])
        assert store.fetch([key]) == {}
        assert store.known([key]) == set()
        put_all(store, "a")  # and is written again
        store.flush(10)
        assert inner.contains_many([key])

    def test_what_is_known_to_be_there_is_not_written_again(self, make_store):
        tier = FaultyTier(MemoryTier(1 << 20))
        store = make_store(tier)
        for _ in range(3):
            put_all(store, "a")
            store.flush(10)
        assert tier.calls["put"] == 1


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
