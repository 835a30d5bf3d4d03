"""Faults of hosts, of channels and of what comes over them: typed errors for whom they concern, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ipc_helpers import Scheduler, Worker, channel, exchange, expected, nothing_is_held, three

from mmcache.errors import ArenaFullError, MessageError, MMCacheError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Arena, ArenaReader, Receiver, Sender
from mmcache.ipc.wire import Kind, body_parts, inline_frame, parse_body, parse_frame
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.policies import make_policy

ROOT = Path(__file__).parent.parent


# -- joining --------------------------------------------------------------------------------------------------


def test_a_receiver_that_resets_before_it_is_welcomed_joins(scheduler: Scheduler) -> None:
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    worker = Worker("w", theirs)
    worker.receiver.reset()
    source = three()
    scheduler.send(source)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))


def test_a_worker_joins_again_from_a_machine_whose_clock_started_later(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = scheduler.add("w")
    worker.receiver._channel.close()
    scheduler.poll()
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1000)
    worker = Worker("w", theirs)
    assert worker.receiver.epoch == 1000
    source = three()
    scheduler.send(source)
    ((result,),) = exchange(scheduler, [worker])
    assert torch.equal(result["r"], expected(source, (0, 40)))


def test_who_joins_says_what_it_holds(scheduler: Scheduler) -> None:
    worker = scheduler.add("w")
    assert [report.held for report in scheduler.reports] == [()]
    plan = scheduler.send(three())
    exchange(scheduler, [worker])
    worker.receiver.reset()
    exchange(scheduler, [worker])
    held = [report.held for report in scheduler.reports if report.joined]
    assert held == [(), tuple(item.handle for item in plan.items)]
    assert all(report.held is None for report in scheduler.reports if not report.joined)


def test_a_ledger_may_believe_who_joins(scheduler: Scheduler) -> None:
    workers = [scheduler.add("a"), scheduler.add("b")]
    source = three()
    scheduler.settle(scheduler.send(source))
    exchange(scheduler, workers)
    workers[1].store.clear()
    workers[1].receiver.reset()
    exchange(scheduler, workers)
    (joined,) = [report for report in scheduler.reports[2:] if report.joined]
    scheduler.ledger.reconcile(str(joined.epoch), joined.held, (), worker=joined.worker)
    plan = scheduler.send(source)
    assert plan.missing == (0, 1, 2)
    for (result,) in exchange(scheduler, workers):
        assert torch.equal(result["r"], expected(source, (0, 40)))
    assert scheduler.sender.stats().resends == 0
    assert [len(worker.store) for worker in workers] == [3, 3]


def test_messages_of_another_scheduler_on_the_host_are_dropped(scheduler: Scheduler) -> None:
    arena = Arena(1 << 18)
    other = Scheduler(arena)
    here, there = scheduler.add("w"), other.add("w")
    source = three()
    other.send(source)
    here.receiver._channel.inbox.append(there.receiver._channel.inbox[0])
    assert here.receiver.next() is None
    assert here.receiver.stale == 1
    for one, worker in ((scheduler, here), (other, there)):
        if one is scheduler:
            one.send(source)
        ((result,),) = exchange(one, [worker])
        assert torch.equal(result["r"], expected(source, (0, 40)))
        assert nothing_is_held(one)
    arena.close()


# -- hostile sizes in messages ----------------------------------------------------------------------------------

HOSTILE: list[Any] = [-1, 3, 41, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, [], [0] * 9, "", None]


def places(node: Any, way: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """The way to every value of a nested list."""
    for index, value in enumerate(node):
        yield (*way, index)
        if isinstance(value, list):
            yield from places(value, (*way, index))


def variants(frame: bytes) -> Iterator[bytes]:
    """The message with each value of its header replaced by each hostile one, one at a time."""
    parsed = parse_frame(frame)
    assert parsed.body is not None
    body = parse_body(parsed.body)
    header = bytes(body.header)
    for way in places(msgspec.msgpack.decode(header)):
        for hostile in HOSTILE:
            values = msgspec.msgpack.decode(header)
            node = values
            for index in way[:-1]:
                node = node[index]
            if node[way[-1]] == hostile:
                continue
            node[way[-1]] = hostile
            parts = body_parts(msgspec.msgpack.encode(values), body.buffers)
            yield inline_frame(parsed.kind, parsed.session, parsed.epoch, parsed.sequence, parts)


def said() -> tuple[list[bytes], list[bytes]]:
    """What a sender and a receiver say, with everything in messages: a step with all that steps have, and a report."""
    scheduler = Scheduler(None)
    ours, theirs = channel()
    scheduler.sender.add("w", ours)
    worker = Worker("w", theirs)
    exchange(scheduler, [worker])
    configs = {
        "pixel_values": FieldConfig.batched("image"),
        "grid": FieldConfig.batched("image", keep_on_cpu=True),
        "sizes": FieldConfig.batched("image", keep_on_cpu=True),
    }
    grids = [[torch.zeros(2), torch.zeros(0, 3, 5)], torch.zeros(3), torch.zeros(3)]
    items = []
    for number, grid in enumerate(grids):
        data = {"pixel_values": torch.ones(4, 2), "grid": grid, "sizes": torch.tensor([number])}
        mask = [True, False, True, True] if number == 1 else None
        items.append(
            MultimodalItem("image", ItemFields(data, configs), PlaceholderRange(5 * number, 4, mask), f"{number}")
        )
    scheduler.settle(scheduler.send(MultimodalRequest("r", range(20), items)))
    exchange(scheduler, [worker])
    worker.store.clear()
    scheduler.send(MultimodalRequest("s", range(20), items))
    exchange(scheduler, [worker])
    return ours.log, theirs.log


def use(step: Any) -> None:
    for part in step.parts:
        _ = part.token_ids, part.plan.bytes.total, part.plan.stored, part.needed
        uses = [lambda part=part: part.request, lambda part=part: part.metadata("grid")]
        uses += [lambda part=part, index=index: part.fields(index) for index in range(part.plan.num_items)]
        for one in uses:
            try:
                one()
            except MMCacheError:
                continue


def test_no_size_in_a_step_or_answer_does_more_than_raise_a_typed_error() -> None:
    to_worker, _ = said()
    kinds = set()
    for frame in to_worker[1:]:
        parsed = parse_frame(frame)
        kinds.add(parsed.kind)
        for data in variants(frame):
            _, theirs = channel()
            receiver = Receiver(theirs, "w")
            receiver._session, receiver.epoch, receiver._expected = parsed.session, parsed.epoch, parsed.sequence
            theirs.inbox.append(data)
            try:
                step = receiver.next()
            except MMCacheError:
                continue
            if step is not None:
                use(step)
    assert kinds == {Kind.STEP, Kind.RESEND}


def test_no_size_in_a_report_does_more_than_end_its_worker() -> None:
    _, to_scheduler = said()
    kinds = set()
    for frame in to_scheduler:
        parsed = parse_frame(frame)
        kinds.add(parsed.kind)
        for data in variants(frame):
            scheduler = Scheduler(None)
            ours, _ = channel()
            scheduler.sender.add("w", ours)
            scheduler.sender.session = scheduler.sender._links.session = parsed.session
            scheduler.send(three())
            if parsed.kind is Kind.REPORT:  # its worker has joined before
                ours.inbox.append(next(one for one in to_scheduler[1:] if parse_frame(one).kind is Kind.HELLO))
            ours.inbox.append(data)
            for report in scheduler.poll():
                assert report.error is None or (report.gone and isinstance(report.error, MessageError))
    assert kinds == {Kind.HELLO, Kind.REPORT}


@pytest.mark.parametrize("epoch", [0, 1 << 63, (1 << 64) - 1])
def test_an_impossible_epoch_concerns_its_worker_alone(scheduler: Scheduler, epoch: int) -> None:
    good = scheduler.add("good")
    ours, theirs = channel()
    scheduler.sender.add("bad", ours)
    Worker("bad", theirs)
    hello = bytearray(ours.inbox.pop())
    hello[8:24] = scheduler.sender.session.to_bytes(8, "little") + epoch.to_bytes(8, "little")
    ours.inbox.append(bytes(hello))
    scheduler.poll()
    assert scheduler.sender.workers == {"good": True, "bad": False}
    source = three()
    scheduler.send(source)
    ((result,),) = exchange(scheduler, [good])
    assert torch.equal(result["r"], expected(source, (0, 40)))


# -- fragmentation ----------------------------------------------------------------------------------------------

ROOM = 16 * 1024


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
@settings(max_examples=60)
def test_no_order_of_sizes_overlaps_regions_or_loses_room(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(ROOM)
    try:
        reader = ArenaReader(arena.path, time.monotonic_ns())
        held: list[tuple[Any, int]] = []
        for number, (give_back, size) in enumerate(steps):
            if give_back and held:
                arena.release(held.pop(size % len(held))[0])
            else:
                try:
                    region = arena.hold(number, {"x": torch.full((size,), number, dtype=torch.uint8)})
                except ArenaFullError:
                    continue
                held.append((region, number))
            for region, value in held:
                block = reader.block(region.offset, region.nbytes, region.serial, lambda: None)
                assert block.eq(value).all()
            assert arena.stats().used <= ROOM
        for region, _ in held:
            arena.release(region)
        arena.clear()
        assert arena.stats().used == 0
        assert arena.hold("whole", {"x": torch.zeros(ROOM - 64, dtype=torch.uint8)}).nbytes == ROOM - 64
    finally:
        arena.close()


# -- the interpreter's end ----------------------------------------------------------------------------------------

SCRIPT = """
import multiprocessing, sys

def work(channel):
    from mmcache.ipc import Receiver
    from mmcache.store import EmbeddingStore
    global kept
    receiver = Receiver(channel, "w", store=EmbeddingStore())
    step = receiver.next(None)
    kept = step.parts[0].fields(0)  # still there when the process ends
    step.done()

def main(how):
    import torch
    from mmcache.fields import FieldConfig, ItemFields
    from mmcache.ipc import Arena, Sender
    from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
    from mmcache.ledger import EncoderLedger
    from mmcache.policies import make_policy
    arena = Arena(1 << 20)
    sender = Sender(arena)
    context = multiprocessing.get_context(how)
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,))
    process.start()
    theirs.close()
    sender.add("w", ours)
    fields = ItemFields({"x": torch.ones(100)}, {"x": FieldConfig.batched("image")})
    request = MultimodalRequest("r", range(10), [MultimodalItem("image", fields, PlaceholderRange(0, 4), "a")])
    ledger = EncoderLedger(1 << 20, make_policy("lru"), row_bytes={"image": 16})
    sender.send([(request, ledger.plan(request, num_computed_tokens=0))])
    done = gone = False
    while not gone:
        for report in sender.poll():
            done, gone = done or bool(report.finished), gone or report.gone
    assert done
    process.join()
    assert process.exitcode == 0, process.exitcode
    sys.exit(arena.path)  # closes nothing, and says where the arena was

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_processes_that_close_nothing_end_quietly_and_leave_nothing(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "default", str(script), how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    path = done.stderr.strip()
    assert path.startswith("/dev/shm/mmcache-arena-"), done.stderr
    assert "\n" not in path, done.stderr
    assert done.stdout == ""
    assert not Path(path).exists()


def test_a_sender_without_workers_takes_steps_and_forgets_them() -> None:
    sender = Sender(None)
    ledger = EncoderLedger(1 << 20, make_policy("lru"))
    source = three()
    assert sender.send([(source, ledger.plan(source, num_computed_tokens=0))]) == 1
    assert sender.poll() == []
    assert sender.stats().under_way == 0
