"""What goes wrong with one request, or while one copy is made, costs nobody else anything."""

from __future__ import annotations

import threading

import pytest
import torch
from builders import image_fields, request
from ipc_helpers import Scheduler, Worker, bare, big, channel, exchange, expected, nothing_is_held, three

from mmcache.errors import FieldError, MissingContentError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Arena
from mmcache.ipc.messages import Step, decode
from mmcache.ipc.wire import Kind, parse_body, parse_frame
from mmcache.items import MultimodalItem, PlaceholderRange

pytestmark = pytest.mark.usefixtures("order")


def of(identifier: str, offset: int, fields: ItemFields | None) -> MultimodalItem:
    return MultimodalItem("image", fields, PlaceholderRange(offset, 8), identifier)


def unsendable() -> ItemFields:
    return ItemFields({"pixel_values": torch.eye(3).to_sparse()}, {"pixel_values": FieldConfig.batched("image")})


def left_in(scheduler: Scheduler, worker: Worker, *contents: int) -> None:
    """The arena has these contents, which nobody holds any more, the first of them unused for longest."""
    for content in contents:
        source = request(f"left {content}", 10, [of(f"{content}", 0, big(content))])
        scheduler.settle(scheduler.send(source))
        step = worker.receiver.next()
        step.done()
        del step
        exchange(scheduler, [worker])
        scheduler.finish(source)
    scheduler.ledger.invalidate()


def test_no_room_is_made_of_what_the_step_itself_reads() -> None:
    arena = Arena(2 * 20_200)
    scheduler = Scheduler(arena)
    worker = scheduler.add("w")
    left_in(scheduler, worker, 1)
    items = [of("2", 0, big(2)), of("3", 10, big(3)), of("1", 20, None)]
    scheduler.send(request("r", 40, items))
    with worker.receiver.next() as step:
        for index, content in enumerate((2, 3, 1)):
            assert step.parts[0].fields(index)["pixel_values"].eq(content).all()
    del step
    exchange(scheduler, [worker])
    assert nothing_is_held(scheduler)
    arena.close()


def test_what_is_there_is_not_written_again_though_another_part_needs_room() -> None:
    arena = Arena(3 * 20_200)
    scheduler = Scheduler(arena)
    worker = scheduler.add("w")
    left_in(scheduler, worker, 1, 2, 3)
    sources = [request("new", 10, [of("4", 0, big(4))]), request("old", 10, [of("1", 0, big(1))])]
    scheduler.sender.send([(source, scheduler.plan(source)) for source in sources])
    assert arena.stats().written == 4 * 20_000
    arena.close()


def test_what_was_kept_for_a_step_that_is_refused_is_kept_no_more(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    left_in(scheduler, worker, 1)
    sources = [bare("poor", "x"), request("old", 10, [of("1", 0, big(1))])]
    with pytest.raises(MissingContentError):
        scheduler.sender.send([(source, scheduler.plan(source)) for source in sources])
    assert nothing_is_held(scheduler)


def test_content_that_cannot_travel_is_not_supplied(scheduler: Scheduler) -> None:
    source = bare("poor", "xy")
    with pytest.raises(FieldError, match="cannot travel") as error:
        scheduler.sender.supply(source, {0: big(1), 1: unsendable()})
    assert (error.value.request_id, error.value.item, error.value.field) == ("poor", 1, "pixel_values")
    with pytest.raises(MissingContentError) as missing:
        scheduler.send(source)
    assert missing.value.items == (0, 1)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_lost_rows_whose_payload_cannot_travel_fail_their_request_alone(
    scheduler: Scheduler, shared_memory: bool
) -> None:
    scheduler = scheduler if shared_memory else Scheduler(None)
    worker = scheduler.add("w")
    good = three("good")
    scheduler.settle(scheduler.send(good))
    exchange(scheduler, [worker])
    # What it says is stored already, so nobody has looked at its payload yet.
    odd = request("odd", 20, [of("c", 0, unsendable())])
    worker.store.clear()
    plans = [(odd, scheduler.plan(odd)), (good, scheduler.plan(good))]
    assert plans[0][1].stored == (0,)
    scheduler.sender.send(plans)
    assert worker.receiver.next() is None
    (report,) = scheduler.poll()
    errors = {lost.request_id: lost.error for lost in report.lost}
    assert errors["good"] is None
    assert isinstance(errors["odd"], FieldError)
    assert errors["odd"].request_id == "odd"
    step = worker.receiver.next()
    assert step.failed == {"odd": (0,)}
    assert torch.equal(worker.run(step)["good"], expected(good, (0, 40)))
    del step
    exchange(scheduler, [worker])
    if shared_memory:
        assert nothing_is_held(scheduler)


def test_who_joins_gets_a_step_as_it_was_sent_however_its_request_has_grown(scheduler: Scheduler) -> None:
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    source, other = three(), request("other", 5)
    scheduler.send(source)
    scheduler.send(other)
    metadata = ItemFields({"g": torch.eye(3).to_sparse()}, {"g": FieldConfig.batched("image", keep_on_cpu=True)})
    source.extend(range(10), [of("z", 40, metadata)])
    worker = Worker("w", theirs)
    (results,) = exchange(scheduler, [worker])
    assert [list(result) for result in results] == [["r"], ["other"]]
    assert torch.equal(results[0]["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)
    with pytest.raises(FieldError):
        scheduler.send(source, computed=49)


def test_a_copy_that_fails_while_a_worker_joins_is_made_again_and_no_step_overtakes(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    sources = [request(name, 20, [of(name, 2, image_fields(1)[0])]) for name in "abc"]
    for source in sources[:2]:
        scheduler.send(source)
    scheduler.arena.clear()
    worker = Worker("w", theirs)

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr("mmcache.ipc.arena.write_tensor", fail)
        scheduler.poll()
        worker.receiver.next()
        with pytest.raises(RuntimeError, match="device lost"):
            scheduler.poll()
    scheduler.send(sources[2])
    (results,) = exchange(scheduler, [worker])
    assert [list(result) for result in results] == [["a"], ["b"], ["c"]]
    assert nothing_is_held(scheduler)


def test_a_field_that_cannot_travel_leaves_nothing_of_those_before_it(scheduler: Scheduler) -> None:
    scheduler.add("w")
    configs = {"pixels": FieldConfig.batched("image"), "table": FieldConfig.shared("image", 1)}
    fields = ItemFields({"pixels": torch.ones(9), "table": torch.eye(3).to_sparse()}, configs)
    for one in (scheduler, Scheduler(None)):
        with pytest.raises(FieldError, match="cannot travel") as error:
            one.send(request("r", 40, [of("a", 0, big(1)), of("b", 10, fields)]))
        if one is scheduler:
            assert (error.value.request_id, error.value.item, error.value.field) == ("r", 1, "table")
    assert nothing_is_held(scheduler)


def test_without_an_arena_a_payload_that_cannot_travel_is_named_as_well() -> None:
    scheduler = Scheduler(None)
    worker = scheduler.add("w")
    with pytest.raises(FieldError, match="cannot travel") as error:
        scheduler.send(request("r", 40, [of("a", 0, big(1)), of("b", 10, unsendable())]))
    assert (error.value.request_id, error.value.item, error.value.field) == ("r", 1, "pixel_values")
    assert not worker.receiver._channel.inbox


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.WRITTEN])
def test_an_exception_while_one_worker_is_spoken_to_costs_the_others_nothing(
    scheduler: Scheduler, order: str, kind: Kind
) -> None:
    if order == "payload first" and kind is Kind.WRITTEN:
        pytest.skip("nothing is said of what is written")
    workers = [scheduler.add(name) for name in "abc"]
    peer = scheduler.sender._peers["b"]
    say = peer.say

    def interrupted(frame: bytes) -> None:
        if parse_frame(frame).kind is kind:
            raise KeyboardInterrupt
        say(frame)

    peer.say = interrupted
    source = three()
    plan = scheduler.plan(source)
    with pytest.raises(KeyboardInterrupt):
        scheduler.sender.send([(source, plan)])
    results = exchange(scheduler, [workers[0], workers[2]])
    for (result,) in results:
        assert torch.equal(result["r"], expected(source, (0, 40)))
    assert [report.worker for report in scheduler.reports if report.gone] == ["b"]
    ours, theirs = channel()
    scheduler.sender.add("b", ours)
    workers[1].receiver.reset(theirs)
    ((result,),) = exchange(scheduler, [workers[1]])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)


@pytest.mark.parametrize("end", ["finish", "remove", "supply"])
def test_what_happens_to_a_request_while_its_step_waits_for_payload_changes_nothing_of_the_step(
    scheduler: Scheduler, order: str, end: str
) -> None:
    if order == "payload first":
        pytest.skip("it does not wait")
    worker, other = scheduler.add("w"), scheduler.add("other")
    source = three()
    scheduler.send(source)
    inbox = worker.receiver._channel.inbox
    written = inbox.pop()
    assert worker.receiver.next() is None
    if end == "finish":
        scheduler.finish(source)
        scheduler.sender.flush()
    elif end == "remove":
        scheduler.sender.remove("w")
    else:
        scheduler.sender.supply(source, {0: big(7)})
    assert not nothing_is_held(scheduler)
    inbox.appendleft(written)
    for (result,) in exchange(scheduler, [worker, other]):
        assert torch.equal(result["r"], expected(source, (0, 40)))
    if end == "remove":
        worker.receiver.reset()
        scheduler.poll()
        scheduler.sender._links.reap()
    assert nothing_is_held(scheduler)


def test_senders_of_one_arena_may_bring_the_same_content_at_once() -> None:
    arena = Arena(1 << 20)
    wrong: list[str] = []

    def run(number: int) -> None:
        scheduler = Scheduler(arena)
        worker = scheduler.add("w")
        for step in range(30):
            items = [of(f"{content}", 10 * content, big(content)) for content in range(3)]
            source = request(f"{number} {step}", 40, items)
            plan = scheduler.send(source)
            with worker.receiver.next() as received:
                for content in received.parts[0].missing:
                    if not received.parts[0].fields(content)["pixel_values"].eq(content).all():
                        wrong.append(f"{number} {step} {content}")
            del received
            exchange(scheduler, [worker])
            scheduler.finish(source)
            scheduler.ledger.release(plan)
            if step % 5 == 0:
                arena.clear()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.stats().referenced == 0
    arena.clear()
    assert arena.stats().used == 0
    arena.close()


# -- what is known of a worker is what it said in its present epoch --------------------------------------------------


def test_what_was_sent_and_not_acknowledged_is_not_taken_as_known() -> None:
    scheduler = Scheduler(None)
    worker = scheduler.add("w")
    inbox = worker.receiver._channel.inbox
    source = request("r", 10)
    scheduler.send(source)
    source.extend(range(10))
    scheduler.send(source, computed=10)
    later = inbox.pop()
    assert len(worker.run_all()) == 1
    scheduler.poll()
    source.extend(range(10))
    scheduler.send(source, computed=20)
    (delta,) = decode(Step, parse_body(parse_frame(inbox[-1]).body).header).deltas
    assert delta.tokens_from == 10
    inbox.appendleft(later)
    assert len(worker.run_all()) == 2


def test_what_a_worker_said_in_an_epoch_that_is_over_says_nothing_about_the_next(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    source = three()
    scheduler.send(source)
    worker.run(worker.receiver.next())
    heard = scheduler.sender._peers["w"].channel.inbox
    old = list(heard)
    heard.clear()
    worker.store.clear()
    worker.receiver.reset()
    scheduler.poll()
    heard.extend(old)
    assert [report.finished for report in scheduler.poll()] == []
    assert scheduler.sender.stats().stale == len(old) > 0
    assert not nothing_is_held(scheduler)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))
    assert nothing_is_held(scheduler)
