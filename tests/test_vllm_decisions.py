"""What the connector promises vLLM, and what it never promises. No vLLM is needed: it is played by `vllm_fakes`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fakes import WIDTH, Engine, Position, Store, digest, filled, item, request

from mmcache.errors import UnresolvedItemError

# -- encode once


def test_the_first_time_an_item_is_encoded_and_saved() -> None:
    engine = Engine(store=Store())
    assert engine.serve(request(item("a"))) == []
    assert engine.encoded == [digest("a")]
    assert [tuple(rows.shape) for rows in engine.store.rows.values()] == [(4, WIDTH)]


def test_another_engine_loads_what_was_saved() -> None:
    engine = Engine(store=filled())
    assert engine.serve(request(item("a"))) == [digest("a")]
    assert engine.encoded == []
    assert torch.equal(engine.caches[0][digest("a")], engine.encoder(digest("a")))


def test_after_eviction_it_comes_back_from_memory_without_asking_the_store() -> None:
    engine = Engine(store=Store())
    engine.serve(request(item("a")))
    asked = len(engine.store.asked)
    engine.forget()
    assert engine.serve(request(item("a"))) == [digest("a")]
    assert len(engine.store.asked) == asked


def test_memory_alone_serves_without_a_store() -> None:
    engine = Engine()
    engine.serve(request(item("a")))
    engine.forget()
    assert engine.serve(request(item("a"))) == [digest("a")]


def test_what_vllm_may_drop_before_it_gets_there_is_offered_although_vllm_holds_it() -> None:
    engine = Engine(store=Store())
    same = item("a")  # processed once: vLLM's own cache hands the same object out again
    engine.serve(request(same))
    assert engine.ready(request(same))
    assert engine.side.has_item(digest("a"))


def test_all_items_of_a_request_are_asked_for_in_one_batch() -> None:
    engine = Engine(store=Store())
    engine.serve(request(item("a", 0), item("b", 4), item("c", 8)))
    assert [len(batch) for batch in engine.store.asked] == [3]


def test_two_requests_for_one_item_ask_once() -> None:
    engine = Engine(store=Store(at_once=False))
    one, two = request(item("a")), request(item("a"))
    assert not engine.side.prepare(one, 0)
    assert not engine.side.prepare(two, 0)
    assert len(engine.store.asked) <= 1
    engine.side.prepare(one, 0)
    assert len(engine.store.asked) == 1


def test_covered_items_are_neither_fetched_nor_offered() -> None:
    engine = Engine(store=filled())
    r = request(item("a", 0), item("b", 10))
    assert engine.ready(r, 4)
    assert not engine.side.has_item(digest("a"))
    assert all(len(batch) == 1 for batch in engine.store.asked)


def test_a_decoding_request_costs_nothing() -> None:
    engine = Engine(store=Store())
    assert engine.side.prepare(request(item("a", 0)), 4)
    assert engine.store.asked == []


def test_an_item_that_encloses_a_later_one_counts_to_its_own_end() -> None:
    engine = Engine(store=filled())
    video = item("a", 0)
    video.mm_position = Position(0, 20, 4)
    assert engine.ready(request(video, item("b", 5)), 12)
    assert engine.side.has_item(digest("a"))


def test_items_far_behind_the_window_are_not_fetched_yet() -> None:
    engine = Engine(store=Store(), window=16)
    assert engine.ready(request(item("a", 0), item("b", 1000)))
    assert sum(len(batch) for batch in engine.store.asked) == 1


def test_a_request_waits_only_for_items_of_its_window() -> None:
    engine = Engine(store=Store(at_once=False), window=16)
    r = request(item("a", 20))
    assert engine.side.prepare(r, 0)
    assert engine.side.prepare(r, 0)
    assert len(engine.store.asked) == 1
    assert not engine.side.prepare(r, 8)


# -- never a broken promise


def test_a_promise_outlives_the_store() -> None:
    engine = Engine(store=filled())
    r = request(item("a"))
    assert engine.ready(r)
    engine.store.rows.clear()
    assert engine.schedule(r) == [digest("a")]
    engine.step()
    assert torch.equal(engine.caches[0][digest("a")], engine.encoder(digest("a")))


def test_asking_changes_nothing() -> None:
    engine = Engine(store=filled())
    assert engine.ready(request(item("a")))
    before = dict(engine.side.counts)
    assert [engine.side.has_item(digest("a")) for _ in range(3)] == [True] * 3
    assert not engine.side.has_item(digest("b"))
    assert dict(engine.side.counts) == before


def test_what_was_promised_stays_until_every_worker_has_it() -> None:
    size = 64 + 4 * WIDTH * 4
    engine = Engine(memory=1 << 16, workers=2, store=filled())
    r = request(item("a"))
    assert engine.ready(r)
    engine.schedule(r)
    engine.step(workers=[0])
    # Fill the memory: the slot of "a" must not be given away while the second worker has not read it
    for i in range((1 << 16) // size + 10):
        assert engine.ready(request(item(f"other {i}")))
        engine.schedule(request(item(f"other {i}")))
        plan = engine.plan
        engine.side.plan_step(())
        engine.plan = plan
    engine.run_worker(1)
    assert torch.equal(engine.caches[1][digest("a")], engine.encoder(digest("a")))


def test_no_promise_before_all_workers_share_the_memory() -> None:
    engine = Engine(workers=2, attach=1, store=filled())
    assert engine.ready(request(item("a")))
    assert not engine.side.has_item(digest("a"))
    engine.attach(1)
    assert engine.ready(request(item("a")))
    assert engine.side.has_item(digest("a"))


def test_offers_end_with_the_step() -> None:
    engine = Engine(store=filled())
    assert engine.ready(request(item("a")))
    engine.side.plan_step(())
    assert not engine.side.has_item(digest("a"))


def test_a_worker_refuses_a_slot_that_holds_something_else() -> None:
    engine = Engine(store=filled())
    r = request(item("a"))
    assert engine.ready(r)
    engine.schedule(r)
    plan = engine.side.plan_step(())
    engine.region.clear_header(plan.loads[0].offset)
    worker, cache = engine.workers[0], engine.caches[0]
    worker.begin(plan)
    with pytest.raises(UnresolvedItemError):
        worker.load(cache)
    assert cache == {}


def test_an_encode_that_did_not_happen_leaves_nothing() -> None:
    engine = Engine(store=Store())
    r = request(item("a"))
    assert engine.ready(r)
    engine.schedule(r)
    engine._encode = []
    engine.step()
    engine.forget()
    assert len(engine.side.residents) == 0
    assert engine.store.rows == {}
    assert engine.serve(request(item("a"))) == []


def test_rows_of_an_unexpected_shape_are_not_saved() -> None:
    engine = Engine(store=Store())
    engine.encoder = lambda identifier: torch.zeros(3, WIDTH)
    engine.serve(request(item("a")))
    engine.forget()
    assert engine.store.rows == {}
    assert len(engine.side.residents) == 0


def test_a_fault_of_our_own_costs_an_encode_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(store=Store())

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    engine.store.prefetch = broken  # type: ignore[method-assign]
    assert engine.serve(request(item("a"))) == []
    assert engine.encoded == [digest("a")]
    assert "a bug" in caplog.text


# -- slow and failing stores


def test_a_slow_store_delays_a_request_and_no_longer_than_patience() -> None:
    engine = Engine(store=Store(at_once=False))
    r = request(item("a"))
    assert not engine.ready(r)
    engine.now = 0.9
    assert not engine.ready(r)
    engine.now = 1.1
    assert engine.ready(r)
    assert not engine.side.has_item(digest("a"))
    assert engine.schedule(r) == []


def test_an_answer_that_comes_late_serves_the_next_request() -> None:
    store = filled()
    store.at_once = False
    engine = Engine(store=store)
    r = request(item("a"))
    engine.ready(r)
    engine.now = 2.0
    assert engine.ready(r)
    engine.store.answer()
    engine.side.catch_up()
    assert engine.ready(request(item("a")))
    assert engine.side.has_item(digest("a"))


def test_a_missing_item_is_asked_for_once_a_request() -> None:
    engine = Engine(store=Store())
    r = request(item("a"))
    for _ in range(10):
        engine.side.prepare(r, 0)
    assert len(engine.store.asked) == 1


def test_a_preempted_request_may_ask_again() -> None:
    engine = Engine(store=Store())
    r = request(item("a"))
    engine.ready(r)
    r.num_preemptions += 1
    engine.ready(r)
    assert len(engine.store.asked) == 2


def test_hashing_is_waited_for_like_a_store() -> None:
    engine = Engine(store=filled())
    engine.later.at_once = False
    r = request(item("a"))
    assert not engine.side.prepare(r, 0)
    engine.now = 1.1
    assert engine.side.prepare(r, 0)
    assert engine.schedule(r) == []


def test_rows_of_another_dtype_from_a_store_are_refused() -> None:
    store = filled()
    store.rows = {key: rows.to(torch.bfloat16) for key, rows in store.rows.items()}
    engine = Engine(store=store)
    assert engine.serve(request(item("a"))) == []
    assert engine.side.counts["refused.mismatch"] == 1


def test_rows_of_another_count_are_dropped_and_encoded_anew() -> None:
    engine = Engine(trust=True, store=Store())
    engine.serve(request(item("a", rows=4)))
    engine.forget()
    engine.store.rows.clear()
    assert engine.serve(request(item("a", rows=3))) == []
    assert engine.side.counts["refused.mismatch"] == 1


# -- memory


def test_an_item_larger_than_the_memory_is_encoded_and_not_saved() -> None:
    engine = Engine(memory=1 << 16, store=Store())
    big = item("big", rows=4096)
    assert engine.serve(request(big)) == []
    assert engine.side.counts["refused.memory"] == 1
    assert len(engine.side.residents) == 0


def test_memory_is_given_back_when_the_store_has_written() -> None:
    engine = Engine(store=Store(keep=True))
    engine.serve(request(item("a")))
    engine.forget()
    (resident,) = [engine.side.residents.get(key) for key in engine.store.rows]
    assert resident is not None
    assert resident.pins == 1
    engine.store.put_rows.clear()
    engine.side.catch_up()
    assert resident.pins == 0


def test_what_waiting_requests_fetched_is_not_evicted_by_those_behind_them() -> None:
    size = 64 + 4 * WIDTH * 4
    names = [f"n{i}" for i in range(400)]
    store = Store()
    filler = Engine(memory=1 << 20, store=store)
    for name in names:
        filler.serve(request(item(name)))
    filler.forget()
    engine = Engine(memory=1 << 16, store=store)
    requests = [request(item(name)) for name in names]
    room = (1 << 16) // size
    assert room < len(names)
    for r in requests:
        engine.ready(r)
    for r in requests[:room]:
        assert engine.ready(r)
        assert engine.side.has_item(r.mm_features[0].identifier)


# -- roles


def test_a_consumer_does_not_save() -> None:
    engine = Engine(store=Store(), produces=False)
    engine.serve(request(item("a")))
    engine.forget()
    assert engine.store.rows == {}


def test_a_producer_does_not_encode_again_what_the_store_has() -> None:
    engine = Engine(store=filled(), consumes=False)
    r = request(item("a"))
    assert engine.ready(r)
    assert engine.schedule(r) == [digest("a")]
    engine.step()
    assert engine.caches[0] == {}


def test_one_worker_saves_and_all_load() -> None:
    engine = Engine(store=Store(), workers=2)
    engine.serve(request(item("a")))
    engine.forget()
    assert engine.serve(request(item("a"))) == [digest("a")]
    assert all(digest("a") in cache for cache in engine.caches)


# -- everything at once


@settings(max_examples=25)
@given(st.data())
def test_whatever_happens_promises_are_kept_with_the_right_rows(data: st.DataObject) -> None:
    store = Store()
    memory = data.draw(st.sampled_from([1 << 16]), label="memory")
    engine = Engine(memory=memory, workers=2, store=store, window=12)
    names = st.sampled_from("abcdefgh")
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        store.at_once = data.draw(st.booleans(), label="store answers at once")
        engine.later.at_once = data.draw(st.booleans(), label="helper is quick")
        chosen = data.draw(st.lists(names, min_size=1, max_size=3, unique=True), label="items")
        r = request(*(item(name, 4 * i) for i, name in enumerate(chosen)))
        engine.now += data.draw(st.sampled_from([0.0, 0.6, 2.0]), label="time passes")
        if engine.ready(r, passes=2):
            promised = engine.schedule(r)
            engine.step()
            for identifier in promised:
                assert all(torch.equal(c[identifier], engine.encoder(identifier)) for c in engine.caches)
        engine.side.finished(r.request_id)
        if data.draw(st.booleans(), label="the store loses everything"):
            store.rows.clear()
        if data.draw(st.booleans(), label="vLLM evicts"):
            engine.forget()
    store.at_once = engine.later.at_once = True
    store.answer()
    engine.later.run()
    engine.forget()
    engine.side.catch_up()
    for key in list(store.rows):
        resident = engine.side.residents.get(key)
        assert resident is None or resident.pins == 0
