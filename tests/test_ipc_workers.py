"""Workers come, go and come again; channels misbehave; shared memory is missing or full: nothing is inferred."""

from __future__ import annotations

import multiprocessing
import random
import threading

import numpy as np
import pytest
import torch
from builders import images, request
from ipc_helpers import (
    PIXELS,
    Scheduler,
    Worker,
    big,
    channel,
    exchange,
    expected,
    nothing_is_held,
    share_no_memory,
    three,
)

from mmcache.errors import ConfigError, MessageError
from mmcache.ipc import Arena, Receiver, Sender
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.policies import make_policy
from mmcache.store import EmbeddingStore

pytestmark = pytest.mark.usefixtures("order")


# -- workers come and go ---------------------------------------------------------------------------------------------


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


# -- channels that misbehave -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("numbers", [10, 3000, 3_000_000])
def test_messages_of_any_size_come_through_a_pipe_whole(numbers: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    sender = Sender(None)
    sender.add("w", ours)
    receiver = Receiver(theirs, "w")
    while not sender.workers["w"]:
        sender.poll()
        receiver.next()
    source = request("r", numbers)
    plan = EncoderLedger(1 << 20, make_policy("lru")).plan(source, num_computed_tokens=0)
    thread = threading.Thread(target=sender.send, args=([(source, plan)],))  # a pipe holds less than the largest
    thread.start()
    step = receiver.next(None)
    thread.join()
    assert step is not None
    assert np.array_equal(step.parts[0].token_ids, source.token_ids)
    step.done()
    while sender.stats().under_way:
        sender.poll()
    ours.close()
    with pytest.raises(EOFError):
        receiver.next(None)
    theirs.close()
    with pytest.raises(OSError, match="closed"):
        receiver.next(None)


@pytest.mark.parametrize("end", [0, 1])
def test_a_pipe_that_ends_or_is_closed_ends_its_worker_alone(scheduler: Scheduler, end: int) -> None:
    good = scheduler.add("good")
    ends = multiprocessing.Pipe()
    scheduler.sender.add("bad", ends[0])
    receiver = Receiver(ends[1], "bad")
    while not scheduler.sender.workers["bad"]:
        scheduler.poll()
        receiver.next()
    ends[end].close()
    source = three()
    scheduler.send(source)
    ((result,),) = exchange(scheduler, [good])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert [report.worker for report in scheduler.reports if report.gone] == ["bad"]


# -- without shared memory, or without room in it --------------------------------------------------------------------


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
    share_no_memory(monkeypatch)
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
