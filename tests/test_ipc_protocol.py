"""Steps to workers: nothing is inferred, nothing is lost, nothing is sent twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from builders import image_fields, images, request, rows_of
from ipc_helpers import Scheduler, Worker, channel, exchange, expected, merged, nothing_is_held, planned, three

from mmcache.errors import ConfigError, FieldError, MessageError, MissingContentError, ReleasedError, RequestError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Arena, Receiver, Sender
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.planning import ItemStatus
from mmcache.store import EmbeddingStore

PIXELS = 4 * 2 * 4
"""Payload bytes of one image of `builders`."""


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    arena = Arena(1 << 18)
    yield Scheduler(arena)
    arena.close()


def bare(name: str, ids: str) -> MultimodalRequest:
    """Items of which only metadata is here."""
    items = [MultimodalItem("image", None, PlaceholderRange(10 * i, 8), one) for i, one in enumerate(ids)]
    return request(name, 10 * len(ids) + 4, items)


# -- a step -------------------------------------------------------------------------------------------------


def test_a_step_arrives_as_it_was_planned(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    plan = scheduler.send(source)
    with worker.receiver.next() as step:
        (part,) = step.parts
        assert part.plan == plan
        assert part.token_ids.tolist() == source.token_ids.tolist()
        assert torch.equal(torch.stack(part.metadata("image_grid_thw")), torch.stack(source.metadata("image_grid_thw")))
        for index, item in enumerate(source.items):
            here = part.request.items[index]
            assert here.placeholder == item.placeholder
            assert torch.equal(here.fields["pixel_values"], item.fields["pixel_values"])
            assert here.fields.config("image_grid_thw").keep_on_cpu
            assert part.plan.action(index, "pixel_values") is plan.action(index, "pixel_values")


def test_encode_merge_and_acknowledge(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    plan = scheduler.send(source)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert [report.finished for report in scheduler.reports if report.finished] == [(1,)]
    assert nothing_is_held(scheduler)
    assert scheduler.arena.stats().written == plan.bytes.transfer == 3 * PIXELS


def test_a_covered_request_moves_no_payload_and_has_all_metadata(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    plan = scheduler.send(source, computed=35)
    with worker.receiver.next() as step:
        (part,) = step.parts
        assert part.missing == part.needed == ()
        assert len(part.metadata("image_grid_thw")) == 3
        assert part.metadata("video_grid_thw") == []
        with pytest.raises(FieldError, match="keep_on_cpu"):
            part.metadata("pixel_values")
        assert merged(part).eq(0).all()
    assert plan.bytes.transfer == scheduler.arena.stats().written == 0


def test_all_workers_read_one_copy(scheduler: Scheduler) -> None:
    workers = [scheduler.add(name) for name in "abcd"]
    source = three()
    scheduler.send(source)
    for (result,) in exchange(scheduler, workers):
        assert torch.equal(result["r"], expected(source, (0, 40)))
    assert scheduler.arena.stats().written == 3 * PIXELS
    assert nothing_is_held(scheduler)


def test_chunks_bring_the_items_of_their_windows(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    done = []
    for start in range(0, 40, 6):
        plan = scheduler.send(source, computed=start, scheduled=6)
        ((result,),) = exchange(scheduler, [worker])
        scheduler.settle(plan)
        done.append(result["r"])
    assert torch.equal(torch.cat(done), expected(source, (0, 40)))
    assert worker.encoded == ["a", "b", "c"]
    assert scheduler.arena.stats().written == 3 * PIXELS


def test_look_ahead_brings_the_items_of_the_next_window(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    plan = scheduler.ledger.plan(source, num_computed_tokens=0, num_scheduled_tokens=6, lookahead=8)
    scheduler.sender.send([(source, plan)])
    with worker.receiver.next() as step:
        assert step.parts[0].missing == (0, 1)
        assert set(step.parts[0].fields(1)) == {"pixel_values", "image_grid_thw"}
        assert set(step.parts[0].fields(2)) == {"image_grid_thw"}


def test_a_batch_is_one_step(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    sources = [three("one"), three("two")]
    plans = [scheduler.plan(source) for source in sources]
    scheduler.sender.send(list(zip(sources, plans)))
    ((result,),) = exchange(scheduler, [worker])
    assert {name: rows.shape for name, rows in result.items()} == {"one": (40, 4), "two": (40, 4)}
    assert worker.encoded == ["a", "b", "c"]
    assert scheduler.arena.stats().written == 3 * PIXELS


def test_a_turn_sends_what_is_new(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = request("chat", 4000, images((2, 8)))
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    written = scheduler.sender.stats().message_bytes
    source.extend(list(range(20)), [MultimodalItem("image", image_fields(1)[0], PlaceholderRange(4002, 8), "z")])
    scheduler.send(source, computed=4000)
    ((result,),) = exchange(scheduler, [worker])
    assert scheduler.sender.stats().message_bytes - written < 1500
    assert torch.equal(result["chat"], expected(source, (4000, 4020)))


def test_what_is_not_acknowledged_is_said_again_and_taken_once(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = request("chat", 20, images((2, 8)))
    scheduler.send(source)
    source.extend(range(20), [MultimodalItem("image", image_fields(1)[0], PlaceholderRange(22, 8), "z")])
    scheduler.send(source, computed=20)
    (first, second) = exchange(scheduler, [worker])[0]
    assert torch.equal(torch.cat([first["chat"], second["chat"]])[20:], expected(source, (20, 40)))
    source.extend(range(4))
    scheduler.send(source, computed=40)
    with worker.receiver.next() as step:
        assert step.parts[0].token_ids.tolist() == source.token_ids.tolist()
        assert len(step.parts[0].metadata("image_grid_thw")) == 2


def test_the_step_is_over_once_done(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    scheduler.send(three())
    step = worker.receiver.next()
    (part,) = step.parts
    step.done()
    step.done()
    for use in (lambda: part.request, lambda: part.fields(0)):
        with pytest.raises(ReleasedError):
            use()


def test_a_tensor_kept_beyond_its_step_keeps_its_memory(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    step = worker.receiver.next()
    kept = step.parts[0].fields(0)["pixel_values"][1:]
    step.done()
    del step
    exchange(scheduler, [worker])
    scheduler.finish(source)
    for number in range(40):  # enough to use the whole arena several times over
        other = request(
            f"other {number}", 12, [MultimodalItem("image", big(number), PlaceholderRange(0, 8), f"{number}")]
        )
        scheduler.send(other)
        exchange(scheduler, [worker], rounds=2)
        scheduler.finish(other)
    assert scheduler.arena.stats().evictions > 0
    assert torch.equal(kept, source.items[0].fields["pixel_values"][1:])
    assert not nothing_is_held(scheduler)
    del kept
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)


def big(value: int) -> ItemFields:
    configs = {"pixel_values": FieldConfig.batched("image")}
    return ItemFields({"pixel_values": torch.full((100, 50), float(value))}, configs)


# -- rows that are not there -----------------------------------------------------------------------------------


def test_lost_rows_are_sent_again_once_and_the_step_goes_on(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    worker.store.drop([planned_handle(scheduler, source, 1)])
    plan = scheduler.send(source)
    assert plan.stored == (0, 1, 2)
    assert worker.receiver.next() is None
    (report,) = scheduler.poll()
    assert [(lost.request_id, lost.items, lost.error) for lost in report.lost] == [("r", (1,), None)]
    with worker.receiver.next() as step:
        assert step.parts[0].missing == (1,)
        assert step.parts[0].plan.stored == (0, 2)
        worker.store.put_planned(step.parts[0].plan, {1: rows_of("b", 6)})
        assert torch.equal(merged(step.parts[0]), expected(source, (0, 40)))
    assert scheduler.sender.stats().resends == 1
    assert scheduler.arena.stats().written == 3 * PIXELS
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)


def planned_handle(scheduler: Scheduler, source: MultimodalRequest, index: int) -> int:
    plan = scheduler.plan(source)
    scheduler.ledger.release(plan)
    return plan.items[index].handle


def test_only_the_worker_that_lacks_rows_makes_them_again(scheduler: Scheduler) -> None:
    workers = [scheduler.add("a"), scheduler.add("b")]
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, workers)
    workers[1].store.clear()
    scheduler.send(source)
    for (result,) in exchange(scheduler, workers):
        assert torch.equal(result["r"], expected(source, (0, 40)))
    assert [worker.encoded for worker in workers] == [["a", "b", "c"], ["a", "b", "c"] * 2]


def test_a_repeated_complaint_is_answered_once(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    worker.store.clear()
    scheduler.send(source)
    assert worker.receiver.next() is None
    inbox = scheduler.sender._peers["w"].channel.inbox
    inbox.extend([inbox[-1]] * 3)
    exchange(scheduler, [worker])
    assert scheduler.sender.stats().resends == 1
    assert nothing_is_held(scheduler)


def test_rows_that_nobody_can_make_fail_their_request_alone(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    rich, poor = three("rich"), bare("poor", "xy")
    scheduler.settle(scheduler.send(rich))
    exchange(scheduler, [worker])
    plan = scheduler.plan(poor)
    worker.store.put_planned(plan, {0: rows_of("x", 8), 1: rows_of("y", 8)})
    scheduler.settle(plan)
    worker.store.clear()
    sources = [poor, rich]
    plans = [scheduler.plan(source) for source in sources]
    scheduler.sender.send(list(zip(sources, plans)))
    assert worker.receiver.next() is None
    (report,) = scheduler.poll()
    errors = {lost.request_id: lost.error for lost in report.lost}
    assert errors["rich"] is None
    assert errors["poor"].items == (0, 1)
    assert errors["poor"].request_id == "poor"
    step = worker.receiver.next()
    assert step.failed == {"poor": (0, 1)}
    result = worker.run(step)
    assert torch.equal(result["rich"], expected(rich, (0, 40)))
    del step
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)


# -- content that is not there -------------------------------------------------------------------------------


def test_content_that_is_nowhere_is_one_error_before_anything_is_sent(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    good, poor = three("good"), bare("poor", "xyz")
    plans = [scheduler.plan(good), scheduler.plan(poor)]
    with pytest.raises(MissingContentError) as error:
        scheduler.sender.send([(good, plans[0]), (poor, plans[1])])
    assert (error.value.request_id, error.value.items) == ("poor", (0, 1, 2))
    assert worker.receiver.next() is None
    assert nothing_is_held(scheduler)
    scheduler.ledger.release(plans[1])
    scheduler.sender.send([(good, plans[0])])
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["good"], expected(good, (0, 40)))


def stripped(name: str, source: MultimodalRequest, salt: str | None = None) -> MultimodalRequest:
    """The same request with metadata only."""
    kept = [
        ItemFields(
            {"image_grid_thw": item.fields["image_grid_thw"]}, {"image_grid_thw": item.fields.config("image_grid_thw")}
        )
        for item in source.items
    ]
    items = [
        MultimodalItem("image", fields, item.placeholder, item.identifier) for fields, item in zip(kept, source.items)
    ]
    return MultimodalRequest(name, source.token_ids, items, cache_salt=salt)


@pytest.mark.parametrize("metadata", [True, False])
def test_stripped_content_is_found_where_its_tenant_left_it(scheduler: Scheduler, metadata: bool) -> None:
    worker = scheduler.add("w")
    full = request("full", 24, images((0, 8), (10, 8)))
    scheduler.settle(scheduler.send(full))
    exchange(scheduler, [worker])
    scheduler.finish(full)
    scheduler.ledger.invalidate()
    poor = stripped("poor", full) if metadata else bare("poor", "ab")
    plan = scheduler.send(poor)
    assert plan.missing == (0, 1)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["poor"], expected(poor, (0, 24)))
    with pytest.raises(MissingContentError):
        scheduler.send(stripped("other", full, salt="another tenant"))


@pytest.mark.parametrize("metadata", [True, False])
def test_content_can_be_supplied_later_as_long_as_the_request_lives(scheduler: Scheduler, metadata: bool) -> None:
    worker = scheduler.add("w")
    full = request("full", 24, images((0, 8), (10, 8)))
    poor = stripped("poor", full) if metadata else bare("poor", "ab")
    plan = scheduler.plan(poor)
    for _ in range(2):
        with pytest.raises(MissingContentError) as error:
            scheduler.sender.send([(poor, plan)])
    scheduler.sender.supply(poor, {index: full.items[index].fields for index in error.value.items})
    scheduler.sender.send([(poor, plan)])
    scheduler.settle(plan)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["poor"], expected(poor, (0, 24)))
    scheduler.arena.clear()
    worker.store.clear()
    scheduler.send(poor)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["poor"], expected(poor, (0, 24)))
    for wrong in ({9: full.items[0].fields}, {0: None}, {0: ItemFields({}, {})}):
        with pytest.raises(RequestError):
            scheduler.sender.supply(poor, wrong)


def test_handles_to_drop_survive_a_rejected_request(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    scheduler.finish(source)
    scheduler.ledger.invalidate()
    poor = bare("poor", "xyz")
    rejected = scheduler.plan(poor)
    assert len(rejected.drop) == 3
    with pytest.raises(MissingContentError):
        scheduler.sender.send([(poor, rejected)])
    scheduler.finish(poor)
    assert len(worker.store) == 3
    scheduler.send(request("text", 5))
    exchange(scheduler, [worker])
    assert len(worker.store) == 0


# -- requests come and go -------------------------------------------------------------------------------------


def test_a_name_used_again_is_another_request(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    scheduler.settle(scheduler.send(three("same")))
    exchange(scheduler, [worker])
    scheduler.ledger.finish("same")
    other = request("same", 30, images((0, 4), (20, 6), ids=["p", "q"]))
    scheduler.settle(scheduler.send(other))
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["same"], expected(other, (0, 30)))


def test_a_finished_request_is_forgotten_by_its_workers_and_can_come_again(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    scheduler.finish(source)
    scheduler.finish(source)
    scheduler.sender.flush()
    exchange(scheduler, [worker])
    assert not worker.receiver._mirrors
    scheduler.settle(scheduler.send(source))
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)


def test_an_abort_under_way_gives_everything_back(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.send(source)
    step = worker.receiver.next()
    scheduler.finish(source)
    step.done()
    del step
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)


def test_a_preempted_request_runs_again(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    plan = scheduler.send(source, scheduled=30)
    exchange(scheduler, [worker])
    scheduler.settle(plan)
    scheduler.send(source)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert worker.encoded == ["a", "b", "c"]


def test_a_plan_is_sent_with_its_own_request(scheduler: Scheduler) -> None:
    scheduler.add("w")
    plan = scheduler.plan(three("one"))
    for other in (three("two"), request("one", 40)):
        with pytest.raises(RequestError):
            scheduler.sender.send([(other, plan)])


# -- workers come and go --------------------------------------------------------------------------------------


def test_steps_wait_for_a_worker_that_has_not_joined(scheduler: Scheduler) -> None:
    ours, theirs = channel()
    scheduler.sender.add("late", ours)
    source = three()
    scheduler.send(source)
    assert scheduler.sender.workers == {"late": False}
    worker = Worker("late", theirs)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)


def test_a_worker_that_joins_late_gets_what_it_needs(scheduler: Scheduler) -> None:
    first = scheduler.add("first")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [first])
    second = scheduler.add("second")
    scheduler.send(source)
    for (result,) in exchange(scheduler, [first, second]):
        assert torch.equal(result["r"], expected(source, (0, 40)))
    assert scheduler.arena.stats().written == 3 * PIXELS


@pytest.mark.parametrize("rows_survive", [True, False])
def test_after_a_reset_a_step_under_way_comes_again(scheduler: Scheduler, rows_survive: bool) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    scheduler.send(source)
    if not rows_survive:
        worker.store.clear()
    worker.receiver.reset()
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert len(worker.encoded) == (3 if rows_survive else 6)
    assert sum(report.joined for report in scheduler.reports) == 2
    assert nothing_is_held(scheduler)


def test_memory_of_an_epoch_that_is_over_is_not_used_while_anybody_may_read_it(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.send(source)
    kept = worker.receiver.next().parts[0].fields(0)["pixel_values"]
    worker.receiver.reset()
    exchange(scheduler, [worker])
    assert scheduler.sender.stats().quarantined == 1
    assert torch.equal(kept, source.items[0].fields["pixel_values"])
    del kept
    exchange(scheduler, [worker])
    assert scheduler.sender.stats().quarantined == 0
    assert nothing_is_held(scheduler)


def test_a_restarted_worker_takes_over_on_another_channel(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    scheduler.send(source)
    worker.receiver._channel.close()
    del worker
    (report,) = scheduler.poll()
    assert report.gone
    assert scheduler.poll() == []
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    worker = Worker("w", theirs)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)


def test_a_broken_channel_does_not_keep_the_step_from_the_others(scheduler: Scheduler) -> None:
    dead, alive = scheduler.add("dead"), scheduler.add("alive")
    dead.receiver._channel.close()
    source = three()
    scheduler.send(source)
    ((result,),) = exchange(scheduler, [alive])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert [report.worker for report in scheduler.reports if report.gone] == ["dead"]
    scheduler.sender.remove("dead")
    del dead
    scheduler.poll()
    assert nothing_is_held(scheduler)


def test_what_an_aborted_request_left_under_way_does_not_reach_the_next_epoch(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    gone, stays = three("gone"), request("stays", 10, images((0, 8), ids="z"))
    numbers = [scheduler.sender.send([(source, scheduler.plan(source))]) for source in (gone, stays)]
    scheduler.finish(gone)
    worker.receiver.reset()
    (results,) = exchange(scheduler, [worker])
    assert [list(result) for result in results] == [["stays"]]
    assert sorted(step for report in scheduler.reports for step in report.finished) == numbers


def test_a_worker_serves_the_next_scheduler(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    arena = Arena(1 << 16)
    successor = Scheduler(arena)
    ours, theirs = channel()
    successor.sender.add("w", ours)
    worker.receiver.reset(theirs)
    exchange(successor, [worker])
    successor.send(source)
    ((result,),) = exchange(successor, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert worker.encoded == ["a", "b", "c"] * 2
    arena.close()


def test_later_stages_get_tokens_plans_and_metadata_alone(scheduler: Scheduler) -> None:
    first, second = scheduler.add("first"), scheduler.add("second", reads_payload=False)
    source = three()
    scheduler.send(source)
    step = second.receiver.next()
    assert step.parts[0].missing == (0, 1, 2)
    assert len(step.parts[0].metadata("image_grid_thw")) == 3
    assert "pixel_values" not in step.parts[0].fields(0)
    step.done()
    exchange(scheduler, [first])
    assert nothing_is_held(scheduler)
    with pytest.raises(ConfigError):
        Receiver(channel()[0], "x", store=EmbeddingStore(), reads_payload=False)


def test_replicas_get_their_own_requests(scheduler: Scheduler) -> None:
    replicas = [scheduler.add(name) for name in "ab"]
    source = three()
    scheduler.send(source, workers=["b"])
    results = exchange(scheduler, replicas)
    assert [len(result) for result in results] == [0, 1]
    with pytest.raises(ConfigError):
        scheduler.send(three("other"), workers=["nobody"])


def test_a_worker_of_another_name_is_refused(scheduler: Scheduler) -> None:
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    Receiver(theirs, "someone else")
    (report,) = scheduler.poll()
    assert report.gone
    assert isinstance(report.error, MessageError)


# -- channels that misbehave ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_messages_out_of_order_and_twice_change_nothing(scheduler: Scheduler, seed: int) -> None:
    rng = random.Random(seed)
    workers = [scheduler.add(name, rng=rng) for name in "ab"]
    sent = []
    for number in range(30):
        ids = rng.sample("abcdef", 3)
        source = request(f"r{number}", 40, images((2, 8), (12, 8), (22, 8), ids=ids))
        plan = scheduler.send(source)
        sent.append(source)
        scheduler.settle(plan)
        if rng.random() < 0.3:
            worker = rng.choice(workers)
            worker.receiver.reset()
            if rng.random() < 0.5:
                worker.store.clear()
        if rng.random() < 0.5:
            exchange_once(scheduler, workers, sent)
    for _ in range(60):
        exchange_once(scheduler, workers, sent)
    assert nothing_is_held(scheduler)


def exchange_once(scheduler: Scheduler, workers: list[Worker], sent: list[MultimodalRequest]) -> None:
    sources = {source.request_id: source for source in sent}
    for results in exchange(scheduler, workers, rounds=1):
        for result in results:
            for name, rows in result.items():
                assert torch.equal(rows, expected(sources[name], (0, 40)))


def test_steps_come_in_the_order_in_which_they_were_sent(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    sources = [request(name, 5) for name in "abc"]
    numbers = [scheduler.sender.send([(source, scheduler.plan(source))]) for source in sources]
    worker.receiver._channel.inbox.reverse()
    seen = []
    while (step := worker.receiver.next()) is not None:
        seen.append(step.number)
        step.done()
    assert seen == numbers


# -- without shared memory, or without room in it ---------------------------------------------------------------


def test_without_an_arena_the_bytes_ride_in_messages() -> None:
    scheduler = Scheduler(None)
    worker = scheduler.add("w")
    source = three()
    scheduler.send(source)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert scheduler.sender.stats().under_way == 0


def test_a_worker_that_cannot_attach_gets_the_bytes_in_messages(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = scheduler.add("near")

    def fail(*_: object) -> None:
        raise ConfigError("no arena can be attached here")

    monkeypatch.setattr("mmcache.ipc.receiver.ArenaReader", fail)
    far = scheduler.add("far")
    source = three()
    scheduler.send(source)
    for (result,) in exchange(scheduler, [near, far]):
        assert torch.equal(result["r"], expected(source, (0, 40)))
    assert scheduler.arena.stats().written == 3 * PIXELS
    assert nothing_is_held(scheduler)


def test_what_finds_no_room_rides_in_the_message() -> None:
    arena = Arena(8192)
    scheduler = Scheduler(arena)
    worker = scheduler.add("w")
    items = [MultimodalItem("image", big(i), PlaceholderRange(10 * i, 8), f"{i}") for i in range(3)]
    scheduler.send(request("large", 40, items))
    step = worker.receiver.next()
    for index in range(3):
        assert step.parts[0].fields(index)["pixel_values"].eq(index).all()
    step.done()
    del step
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)
    assert arena.stats().written == 0
    arena.close()


# -- what items may be ----------------------------------------------------------------------------------------


def test_client_given_embeddings_reach_the_merge_and_are_not_stored(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    given = torch.randn(8, 4)
    items = [MultimodalItem("image", None, PlaceholderRange(2, 8), "given", embeds=given)]
    source = request("r", 20, items)
    for start in (0, 6):
        scheduler.send(source, computed=start, scheduled=6)
        ((result,),) = exchange(scheduler, [worker])
        whole = torch.zeros(20, 4)
        whole[2:10] = given
        assert torch.equal(result["r"], whole[start : start + 6])
    assert len(worker.store) == 0
    assert scheduler.arena.stats().written == given.nbytes


def test_a_shared_field_is_written_once_and_stays_one_value(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    large = torch.randn(5000)
    configs = {
        "pixel_values": FieldConfig.batched("image"),
        "table": FieldConfig.shared("image", 2),
        "flag": FieldConfig.shared("image", 2, keep_on_cpu=True),
    }
    flag = torch.tensor([7])
    fields = [ItemFields({"pixel_values": torch.ones(4) * i, "table": large, "flag": flag}, configs) for i in range(2)]
    source = request(
        "r", 20, [MultimodalItem("image", fields[i], PlaceholderRange(10 * i, 8), f"{i}") for i in range(2)]
    )
    plan = scheduler.send(source)
    step = worker.receiver.next()
    one, other = (step.parts[0].fields(index) for index in range(2))
    assert one["table"] is other["table"]
    assert one["flag"] is other["flag"]
    assert torch.equal(one["table"], large)
    assert scheduler.arena.stats().written == plan.bytes.transfer == large.nbytes + 2 * 16


def test_a_fresh_payload_beats_what_the_arena_has_under_its_digest(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")

    def one(name: str, value: float, patches: int) -> MultimodalRequest:
        fields = ItemFields(
            {"pixel_values": torch.full((patches, 2), value)}, {"pixel_values": FieldConfig.batched("image")}
        )
        return request(name, 12, [MultimodalItem("image", fields, PlaceholderRange(0, 4), "uuid")])

    for name, value, patches in (("one", 1.0, 4), ("two", 2.0, 4), ("three", 2.0, 9)):
        source = one(name, value, patches)
        scheduler.ledger.invalidate()
        plan = scheduler.send(source)
        with worker.receiver.next() as step:
            assert torch.equal(step.parts[0].fields(0)["pixel_values"], source.items[0].fields["pixel_values"])
        scheduler.ledger.release(plan)
        scheduler.finish(source)


def test_a_plan_whose_rows_do_not_fit_the_layout_is_refused(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    plan = scheduler.plan(source)
    wrong = replace(plan, items=(replace(plan.items[0], num_rows=9), *plan.items[1:]))
    scheduler.sender.send([(source, wrong)])
    with pytest.raises(MessageError) as error:
        worker.receiver.next()
    assert (error.value.request_id, error.value.item) == ("r", 0)
    scheduler.finish(source)
    worker.receiver.reset()
    other = three("other")
    scheduler.send(other)
    (results,) = exchange(scheduler, [worker])
    assert [list(result) for result in results] == [["other"]]


def test_rows_of_items_in_flight_elsewhere_are_not_asked_for(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    one, two = three("one"), three("two")
    scheduler.send(one)
    plan = scheduler.send(two)
    assert [item.status for item in plan.items] == [ItemStatus.IN_FLIGHT] * 3
    worker.run(worker.receiver.next())
    with worker.receiver.next() as step:
        assert step.parts[0].missing == ()
        assert torch.equal(merged(step.parts[0]), expected(two, (0, 40)))
        assert step.parts[0].key(0) == ("".join(plan.ledger_id), planned(step.parts[0], 0).handle)


def test_rows_that_were_in_flight_when_an_epoch_ended_come_again(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    one, two = three("one"), three("two")
    scheduler.send(one)
    exchange(scheduler, [worker])
    plan = scheduler.send(two)
    assert [item.status for item in plan.items] == [ItemStatus.IN_FLIGHT] * 3
    worker.store.clear()
    worker.receiver.reset()
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["two"], expected(two, (0, 40)))


def test_a_sender_takes_workers_with_a_name_and_forgets_unknown_ones_quietly(scheduler: Scheduler) -> None:
    with pytest.raises(ConfigError):
        Sender(None).add("", channel()[0])
    scheduler.sender.remove("nobody")
    scheduler.sender.finish("nothing")
