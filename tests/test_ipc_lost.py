"""Rows and content that are not there: nothing is lost, nothing is sent twice, one request fails alone."""

from __future__ import annotations

import pytest
import torch
from builders import images, request, rows_of
from ipc_helpers import PIXELS, Scheduler, bare, exchange, expected, merged, nothing_is_held, three

from mmcache.errors import MissingContentError, RequestError
from mmcache.fields import ItemFields
from mmcache.items import MultimodalItem, MultimodalRequest

pytestmark = pytest.mark.usefixtures("order")


# -- rows that are not there -----------------------------------------------------------------------------------------


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
    assert nothing_is_held(scheduler)


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


# -- content that is not there ---------------------------------------------------------------------------------------


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
    workers = [scheduler.add("a"), scheduler.add("b")]
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, workers)
    scheduler.finish(source)
    scheduler.ledger.invalidate()
    poor = bare("poor", "xyz")
    rejected = scheduler.plan(poor)
    assert len(rejected.drop) == 3
    with pytest.raises(MissingContentError):
        scheduler.sender.send([(poor, rejected)])
    scheduler.finish(poor)
    assert [len(worker.store) for worker in workers] == [3, 3]
    scheduler.send(request("text", 5))
    exchange(scheduler, workers)
    assert [len(worker.store) for worker in workers] == [0, 0]


# -- requests come and go --------------------------------------------------------------------------------------------


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


def test_all_workers_forget_a_request_that_ends_before_they_acknowledged_it(scheduler: Scheduler) -> None:
    workers = [scheduler.add(name) for name in "abc"]
    source = three()
    scheduler.send(source)
    scheduler.finish(source)
    exchange(scheduler, workers)
    assert all(worker.receiver._mirrors for worker in workers)
    scheduler.sender.flush()
    exchange(scheduler, workers)
    assert not any(worker.receiver._mirrors for worker in workers)
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
