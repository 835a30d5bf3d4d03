"""Real processes: random requests, kills, restarts, resets, messages out of order and twice."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from ipc_worker import ROWS, SHAPE, WIDTH, Unruly, fields, work

from mmcache.ipc import Arena, Receiver, Sender
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.planning import StepPlan
from mmcache.policies import make_policy
from mmcache.store import EmbeddingStore

WORKERS = 4
CONTENT_BYTES = SHAPE[0] * SHAPE[1] * 4

# Processes of their own, started from one that has imported everything: a restart takes milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "mmcache.ipc", "mmcache.merge", "mmcache.store", "mmcache.transfer"])


class Engine:
    """A scheduler with worker processes; steps are under way at the same time."""

    def __init__(self, seed: int, contents: int, patch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.patch = patch
        # Room for all payload, so that each content is written once; for few rows, so that some are dropped.
        self.arena = Arena(2 * contents * CONTENT_BYTES)
        self.sender = Sender(self.arena)
        self.ledger = EncoderLedger(
            contents // 2 * ROWS * WIDTH * 4, make_policy("lru"), row_bytes={"image": WIDTH * 4}
        )
        self.fields = [fields(content) for content in range(contents)]
        self.processes: dict[str, Any] = {}
        self.sides: list[Any] = []
        self.under_way: dict[int, tuple[list[tuple[MultimodalRequest, StepPlan]], set[str]]] = {}
        self.computed: dict[str, int] = {}
        self.moved: set[int] = set()
        self.steps = self.lost = self.joined = 0
        for number in range(WORKERS):
            self.start(f"worker {number}")

    def start(self, name: str) -> None:
        ours, theirs = CONTEXT.Pipe()
        side, their_side = CONTEXT.Pipe()
        seed = self.rng.randrange(1 << 30)
        process = CONTEXT.Process(target=work, args=(name, theirs, their_side, seed, True), daemon=True)
        process.start()
        theirs.close()
        their_side.close()
        self.processes[name] = process
        self.sides.append(side)
        self.sender.add(name, ours)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()
        self.start(name)

    def request(self, number: int) -> MultimodalRequest:
        rng = self.rng
        chosen = rng.sample(range(len(self.fields)), rng.randrange(4))
        if chosen and rng.random() < 0.2:
            chosen.append(chosen[0])
        offset, items = rng.randrange(5), []
        for content in chosen:
            items.append(MultimodalItem("image", self.fields[content], PlaceholderRange(offset, ROWS), f"{content}"))
            offset += ROWS + rng.randrange(4)
        return MultimodalRequest(f"request {number}", range(offset + 3), items)

    def step(self, batch: list[MultimodalRequest]) -> None:
        parts = []
        for request in batch:
            computed = self.computed.setdefault(request.request_id, 0)
            scheduled = self.rng.choice([4, 9, 100])
            plan = self.ledger.plan(request, num_computed_tokens=computed, num_scheduled_tokens=scheduled)
            self.moved |= {int(request.items[index].identifier) for index in plan.missing}
            parts.append((request, plan))
        # Some steps go out before their payload, as if it were large, and some after it.
        self.patch.setattr("mmcache.ipc.gather._LARGE", self.rng.choice([0, 1 << 20]))
        self.under_way[self.sender.send(parts)] = (parts, set(self.processes))
        self.steps += 1

    def poll(self) -> list[MultimodalRequest]:
        """Take in reports; the requests whose steps are over at every worker."""
        over = []
        for report in self.sender.poll():
            assert report.error is None
            self.joined += report.joined
            for lost in report.lost:
                assert lost.error is None
                self.lost += len(lost.items)
                items = {item.index: int(item.identifier) for item in lost.plan.items}
                self.moved |= {items[index] for index in lost.items}
            for number in report.finished:
                if number not in self.under_way:
                    continue
                parts, waiting = self.under_way[number]
                waiting.discard(report.worker)
                if not waiting:
                    del self.under_way[number]
                    over += [self.settle(request, plan) for request, plan in parts]
        for side in wait(self.sides, 0):
            try:
                pytest.fail(side.recv())
            except EOFError:
                self.sides.remove(side)  # its worker was killed
        return over

    def settle(self, request: MultimodalRequest, plan: StepPlan) -> MultimodalRequest:
        self.ledger.settle(plan, dict.fromkeys(plan.missing, ROWS * WIDTH * 4))
        self.ledger.commit(request, plan.window[1])
        self.ledger.release(plan)
        self.computed[request.request_id] = plan.window[1]
        return request

    def finish(self, request: MultimodalRequest) -> None:
        self.sender.finish(request)
        self.ledger.finish(request.request_id)
        del self.computed[request.request_id]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.arena.close()


def serve(count: int, seed: int, contents: int, kill_every: int, patch: pytest.MonkeyPatch) -> Engine:
    engine = Engine(seed, contents, patch)
    rng = engine.rng
    ready: list[MultimodalRequest] = []
    made = done = 0
    last = time.monotonic()
    while done < count:
        while made < count and len(ready) < 6:
            ready.append(engine.request(made))
            made += 1
            if made % kill_every == 0:
                engine.kill(rng.choice(list(engine.processes)))
        while ready and len(engine.under_way) < 6:
            batch = [ready.pop(rng.randrange(len(ready))) for _ in range(min(len(ready), rng.randrange(1, 4)))]
            engine.step(batch)
        over = engine.poll()
        for request in over:
            aborted = rng.random() < 0.05
            if aborted or engine.computed[request.request_id] == request.num_tokens:
                engine.finish(request)
                done += 1
            else:
                ready.append(request)
        now = time.monotonic()
        last = now if over else last
        assert now - last < 60, f"no step has ended for a minute: {engine.sender.stats()}"
        if not over:
            time.sleep(0.0005)
    return engine


@pytest.mark.parametrize(
    "count", [pytest.param(1000, id="1000"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
)
def test_random_requests_with_kills_resets_and_unruly_channels(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(count, seed=count, contents=24, kill_every=250, patch=monkeypatch)
    try:
        # Every tensor and every window was checked by the workers. Each content was written once, for all of them.
        assert engine.arena.stats().written == len(engine.moved) * CONTENT_BYTES
        assert engine.joined > WORKERS
        assert engine.lost > 0
        engine.sender.flush()
        deadline = time.monotonic() + 30
        while engine.sender.stats().under_way and time.monotonic() < deadline:
            engine.poll()
            time.sleep(0.01)
        assert engine.sender.stats().under_way == 0
        assert engine.sender.stats().quarantined == 0
        assert engine.arena.stats().referenced == 0
    finally:
        path = engine.arena.path
        engine.close()
    assert not Path(path).exists()


def schedule_until_killed(connection: Any) -> None:
    arena = Arena(1 << 16)
    sender = Sender(arena)
    sender.add("worker", connection)
    ledger = EncoderLedger(1 << 20, make_policy("lru"), row_bytes={"image": WIDTH * 4})
    request = MultimodalRequest("r", range(20), [MultimodalItem("image", fields(3), PlaceholderRange(2, ROWS), "3")])
    sender.send([(request, ledger.plan(request, num_computed_tokens=0))])
    connection.send_bytes(arena.path.encode())
    while True:
        sender.poll()
        time.sleep(0.001)


def test_a_worker_outlives_its_scheduler_and_nothing_is_left() -> None:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=schedule_until_killed, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    path = ours.recv_bytes().decode()
    store = EmbeddingStore()
    receiver = Receiver(Unruly(ours, random.Random(0)), "worker", store=store)
    step = receiver.next(30)
    kept = step.parts[0].fields(0)["pixels"]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises((EOFError, OSError)):
        receiver.next(30)
    assert kept.equal(fields(3)["pixels"])
    engine_arena = Arena(1 << 16)
    try:
        assert not Path(path).exists()
        assert kept.equal(fields(3)["pixels"])
        sender = Sender(engine_arena)
        here, there = CONTEXT.Pipe()
        sender.add("worker", here)
        receiver.reset(there)
        request = MultimodalRequest(
            "next", range(20), [MultimodalItem("image", fields(5), PlaceholderRange(2, ROWS), "5")]
        )
        ledger = EncoderLedger(1 << 20, make_policy("lru"), row_bytes={"image": WIDTH * 4})
        sender.send([(request, ledger.plan(request, num_computed_tokens=0))])
        step = None
        for _ in range(5):
            sender.poll()
            step = step or receiver.next()
        assert step.parts[0].fields(0)["pixels"].equal(fields(5)["pixels"])
    finally:
        engine_arena.close()
