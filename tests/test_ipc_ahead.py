"""A step that goes out ahead of its payload: the worker takes it in while the bytes are copied, and waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import image_fields, images, request
from ipc_helpers import (
    PIXELS,
    Scheduler,
    Worker,
    bare,
    channel,
    exchange,
    expected,
    nothing_is_held,
    share_no_memory,
    three,
)

from mmcache.errors import MessageError, MissingContentError
from mmcache.ipc import Arena, values
from mmcache.ipc.wire import Kind, inline_frame, parse_frame


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcache.ipc.gather._LARGE", 0)  # as payload of megabytes


def kinds(inbox: Any) -> list[Kind]:
    return [parse_frame(data).kind for data in inbox]


def read(step: Any) -> list[torch.Tensor]:
    return [part.fields(index)["pixel_values"].clone() for part in step.parts for index in part.missing]


def payload(source: Any) -> list[torch.Tensor]:
    return [item.fields["pixel_values"] for item in source.items]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_a_step_is_taken_in_at_once_and_handed_out_when_its_payload_is_written(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    inbox = worker.receiver._channel.inbox
    source = three()
    scheduler.send(source)
    assert kinds(inbox) == [Kind.STEP, Kind.WRITTEN]
    written = inbox.pop()
    assert worker.receiver.next() is None
    assert worker.receiver._waiting is not None  # decoded; only the bytes are waited for
    inbox.append(written)
    step = worker.receiver.next()
    assert equal(read(step), payload(source))
    result = worker.run(step)
    assert torch.equal(result["r"], expected(source, (0, 40)))
    del step
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)


def test_the_message_overtakes_its_step_and_comes_twice(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    inbox = worker.receiver._channel.inbox
    source = three()
    scheduler.send(source)
    step, written = inbox
    inbox.clear()
    inbox.extend([written, written, step, written])
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert worker.receiver.stale == 1
    assert nothing_is_held(scheduler)


def test_steps_behind_one_that_waits_wait_too(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    inbox = worker.receiver._channel.inbox
    sources = [request(name, 20, images((2, 8), ids=[name])) for name in "xyz"]
    for source in sources:
        scheduler.send(source)
    first = next(data for data in inbox if parse_frame(data).kind is Kind.WRITTEN)
    inbox.remove(first)
    assert worker.receiver.next() is None
    inbox.append(first)
    (results,) = exchange(scheduler, [worker])
    assert [list(result) for result in results] == [["x"], ["y"], ["z"]]
    for source, result in zip(sources, results):
        assert torch.equal(result[source.request_id], expected(source, (0, 20)))
    assert nothing_is_held(scheduler)


def test_a_copy_that_is_interrupted_is_seen_and_made_again(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = scheduler.add("w")
    source = three()
    plan = scheduler.plan(source)
    copied = []

    def interrupted(address: int, tensor: torch.Tensor) -> None:
        if copied:
            raise KeyboardInterrupt
        copied.append(tensor)
        values.write_tensor(address, tensor)

    with monkeypatch.context() as patch:
        patch.setattr("mmcache.ipc.arena.write_tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.sender.send([(source, plan)])
    with pytest.raises(MessageError, match="not in the arena"):
        worker.receiver.next()
    assert worker.receiver.next() is None  # it is never handed out
    worker.receiver.reset()
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)
    assert scheduler.arena.stats().written == 3 * PIXELS


def test_a_scheduler_that_ends_between_the_two_messages_ends_the_wait(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    end = worker.receiver._channel
    scheduler.send(three())
    end.inbox.pop()
    assert worker.receiver.next() is None
    end.close()
    with pytest.raises(EOFError):
        worker.receiver.next(None)


def test_a_step_that_is_refused_writes_nothing_and_leaves_nothing(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    good, bad = three(), bare("bad", "u")
    plans = [(one, scheduler.plan(one)) for one in (good, bad)]
    with pytest.raises(MissingContentError):
        scheduler.sender.send(plans)
    assert not worker.receiver._channel.inbox
    stats = scheduler.arena.stats()
    assert (stats.written, stats.used, stats.referenced, stats.regions) == (0, 0, 0, 0)
    scheduler.sender.send(plans[:1])
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(good, (0, 40)))


def test_one_content_twice_in_a_step_is_written_once(scheduler: Scheduler) -> None:
    """Two ledgers, which do not know of each other, and a third request that only names what the others bring."""
    worker = scheduler.add("w")
    others = [Scheduler(None).ledger for _ in range(2)]
    sources = [request(name, 20, images((2, 8), ids=["same"])) for name in "xy"] + [bare("z", ["same"])]
    plans = [ledger.plan(source, num_computed_tokens=0) for ledger, source in zip([scheduler.ledger, *others], sources)]
    scheduler.sender.send(list(zip(sources, plans)))
    step = worker.receiver.next()
    assert equal(read(step), payload(sources[0]) * 3)
    assert scheduler.arena.stats().written == PIXELS
    step.done()
    del step
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)


def test_what_is_there_goes_out_with_its_step(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = request("r", 20, images((2, 8)))
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, [worker])
    worker.store.clear()
    scheduler.ledger.clear()
    again = request("again", 20, images((2, 8)))
    scheduler.send(again)
    assert kinds(worker.receiver._channel.inbox) == [Kind.STEP]
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["again"], expected(again, (0, 20)))
    assert scheduler.arena.stats().written == PIXELS


def test_little_payload_is_written_first(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcache.ipc.gather._LARGE", PIXELS + 1)
    worker = scheduler.add("w")
    scheduler.send(three())
    assert kinds(worker.receiver._channel.inbox) == [Kind.STEP]
    assert equal(read(worker.receiver.next()), payload(three()))


def test_tensors_that_have_to_be_read_by_torch_are_written_first(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    for item in source.items:
        item.fields._data["pixel_values"] = item.fields["pixel_values"].t().contiguous().t()
    scheduler.send(source)
    assert kinds(worker.receiver._channel.inbox) == [Kind.STEP]
    assert equal(read(worker.receiver.next()), payload(three()))


def test_a_stage_that_reads_no_payload_does_not_wait_for_it(scheduler: Scheduler) -> None:
    first, later = scheduler.add("first"), scheduler.add("later", reads_payload=False)
    source = three()
    scheduler.send(source)
    assert kinds(first.receiver._channel.inbox) == [Kind.STEP, Kind.WRITTEN]
    assert kinds(later.receiver._channel.inbox) == [Kind.STEP]
    with later.receiver.next() as step:
        assert step.parts[0].missing == (0, 1, 2)
    results, _ = exchange(scheduler, [first, later])
    assert torch.equal(results[0]["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)


def test_a_worker_without_the_arena_gets_bytes_that_are_written(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = scheduler.add("near")
    with monkeypatch.context() as patch:
        share_no_memory(patch)
        far = scheduler.add("far")
    source = three()
    scheduler.send(source)
    for (result,) in exchange(scheduler, [near, far]):
        assert torch.equal(result["r"], expected(source, (0, 40)))
    assert scheduler.arena.stats().written == 3 * PIXELS
    assert nothing_is_held(scheduler)


def test_a_step_may_wait_for_lost_rows_and_for_new_payload(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    old = request("old", 20, images((2, 8), ids=["old"]))
    scheduler.settle(scheduler.send(old))
    exchange(scheduler, [worker])
    worker.store.clear()
    both = request("both", 40, images((2, 8), (12, 8), ids=["old", "new"]))
    scheduler.send(both)
    inbox = worker.receiver._channel.inbox
    written = inbox.pop()
    assert worker.receiver.next() is None
    scheduler.poll()
    assert worker.receiver.next() is None  # the lost rows' payload is here, the new one is not yet
    inbox.append(written)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["both"], expected(both, (0, 40)))
    assert nothing_is_held(scheduler)


def test_who_joins_while_nobody_is_there_gets_a_step_whose_payload_is_written(scheduler: Scheduler) -> None:
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    source = three()
    scheduler.send(source)
    worker = Worker("w", theirs)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)


def test_a_receiver_that_starts_anew_does_not_wait_for_what_was(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    inbox = worker.receiver._channel.inbox
    source = three()
    scheduler.send(source)
    written = inbox.pop()
    assert worker.receiver.next() is None
    worker.receiver.reset()
    inbox.append(written)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)


@pytest.mark.parametrize("mark", [2, 255])
def test_only_two_kinds_of_steps_are_known(scheduler: Scheduler, mark: int) -> None:
    worker = scheduler.add("w")
    inbox = worker.receiver._channel.inbox
    scheduler.send(three())
    data = bytearray(inbox.popleft())
    data[6] = mark
    inbox.appendleft(bytes(data))
    with pytest.raises(MessageError, match="unknown kind"):
        worker.receiver.next()


def test_an_arena_writes_what_it_reserved_once_and_finds_it_only_then() -> None:
    arena = Arena(1 << 16)
    try:
        fields = {"pixel_values": image_fields(1)[0]["pixel_values"]}
        region = arena.reserve("key", fields)
        assert arena.find("key") is None
        assert arena.stats().written == 0
        arena.write(region)
        arena.write(region)
        assert arena.stats().written == PIXELS
        found = arena.find("key")
        assert found is region
        arena.release(region)
        arena.release(region)
        assert arena.stats().referenced == 0
    finally:
        arena.close()


def test_a_step_without_an_arena_may_wait_as_well() -> None:
    scheduler = Scheduler(None)
    worker = scheduler.add("w")
    inbox = worker.receiver._channel.inbox
    source = three()
    scheduler.send(source)
    step = bytearray(inbox.pop())
    step[6] = 1
    frame = parse_frame(bytes(step))
    inbox.append(bytes(step))
    assert worker.receiver.next() is None
    inbox.append(inline_frame(Kind.WRITTEN, frame.session, frame.epoch, frame.sequence))
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
