"""A step: what a worker gets of it, and when its memory comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import image_fields, images, request
from ipc_helpers import PIXELS, Scheduler, big, channel, exchange, expected, merged, nothing_is_held, planned, three

from mmcache.errors import ConfigError, FieldError, MessageError, ReleasedError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Sender
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.planning import ItemStatus

pytestmark = pytest.mark.usefixtures("order")


# -- a step ----------------------------------------------------------------------------------------------------------


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


# -- what items may be -----------------------------------------------------------------------------------------------


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
