"""Payload of megabytes, which is copied while its step is on the way: whoever is killed or interrupted meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from ipc_large_worker import CONFIGS, CONTENT_BYTES, CONTENTS, source, work
from torch import Tensor

from mmcache.fields import ItemFields
from mmcache.ipc import Arena, Sender, values
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.planning import StepPlan
from mmcache.policies import make_policy

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "mmcache.ipc", "mmcache.merge", "mmcache.store", "mmcache.transfer"])


class Engine:
    """A scheduler whose arena has room for some of the contents only, and its workers."""

    def __init__(self, names: list[str]) -> None:
        self.arena = Arena(5 * (CONTENT_BYTES + 4096))
        self.sender = Sender(self.arena)
        self.fields = [ItemFields({"pixels": source(content)}, CONFIGS) for content in range(CONTENTS)]
        self.processes: dict[str, Any] = {}
        self.answers: list[Any] = []
        self.read: dict[tuple[str, int], list[int]] = {}
        self.joined = 0
        for name in names:
            self.start(name)
        while not all(self.sender.workers.values()):
            self.poll()

    def start(self, name: str) -> None:
        ours, theirs = CONTEXT.Pipe()
        answer, their_answer = CONTEXT.Pipe()
        self.processes[name] = CONTEXT.Process(target=work, args=(name, theirs, their_answer), daemon=True)
        self.processes[name].start()
        theirs.close()
        their_answer.close()
        self.answers.append(answer)
        self.sender.add(name, ours)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()

    def request(self, name: str, contents: list[int]) -> tuple[MultimodalRequest, StepPlan]:
        items = [
            MultimodalItem("image", self.fields[content], PlaceholderRange(4 * place, 4), f"{content}")
            for place, content in enumerate(contents)
        ]
        request = MultimodalRequest(name, range(4 * len(items) + 1), items)
        ledger = EncoderLedger(1 << 20, make_policy("lru"), row_bytes={"image": 16})
        return request, ledger.plan(request, num_computed_tokens=0)

    def poll(self) -> None:
        for report in self.sender.poll():
            assert report.error is None
            self.joined += report.joined
            if report.gone:
                self.processes[report.worker].join()
                self.start(report.worker)
        for answer in wait(self.answers, 0):
            try:
                said = answer.recv()
            except EOFError:
                self.answers.remove(answer)
                continue
            assert not isinstance(said, str), said
            self.read[said[:2]] = said[2]

    def run_down(self) -> None:
        deadline = time.monotonic() + 60
        while any(not sent.finished for peer in self.sender._peers.values() for sent in [*peer.sent.values()]) or any(
            peer.waiting for peer in self.sender._peers.values()
        ):
            self.poll()
            assert time.monotonic() < deadline, f"a step does not end: {self.sender.stats()}"
            time.sleep(0.001)

    def end(self) -> None:
        """All workers end, and nothing of what they read or kept is held."""
        try:
            for name in list(self.processes):
                self.kill(name)
                self.sender.remove(name)
            assert self.sender.stats().quarantined == 0
            assert self.arena.stats().referenced == 0
            self.arena.clear()
            assert self.arena.stats().used == 0
        finally:
            self.arena.close()
        assert not Path(self.arena.path).exists()


@pytest.mark.parametrize("at", [1, 2])
def test_a_worker_that_is_killed_between_the_two_messages_reads_all_in_its_next_life(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(["a", "b"])
    copied = []

    def kill_meanwhile(address: int, tensor: Tensor) -> None:
        copied.append(tensor)
        if len(copied) == at:
            engine.kill("a")
        values.write_tensor(address, tensor)

    monkeypatch.setattr("mmcache.ipc.arena.write_tensor", kill_meanwhile)
    number = engine.sender.send([engine.request("r", [3, 5])])
    engine.run_down()
    while len(engine.read) < 2:
        engine.poll()
    assert engine.read == {("a", number): [3, 5], ("b", number): [3, 5]}
    assert engine.joined == 3
    assert engine.arena.stats().written == 2 * CONTENT_BYTES
    engine.end()


@pytest.mark.parametrize("seed", range(2))
def test_random_steps_with_kills_and_interrupts_in_the_middle_of_copies(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "later stage"] + ["far"] * seed
    engine = Engine(names)
    steps: dict[int, list[int]] = {}

    def meanwhile(address: int, tensor: Tensor) -> None:
        chance = rng.random()
        if chance < 0.05:
            engine.kill(rng.choice(names))
        if 0.05 < chance < 0.1:
            raise KeyboardInterrupt
        values.write_tensor(address, tensor)

    monkeypatch.setattr("mmcache.ipc.arena.write_tensor", meanwhile)
    for number in range(40):
        requests = [
            engine.request(f"r{number}.{part}", rng.sample(range(CONTENTS), rng.randrange(1, 4)))
            for part in range(rng.randrange(1, 3))
        ]
        before = engine.sender.stats().steps
        with contextlib.suppress(KeyboardInterrupt):
            engine.sender.send(requests)
        if engine.sender.stats().steps > before:
            steps[before + 1] = [int(plan.items[index].identifier) for _, plan in requests for index in plan.missing]
        if rng.random() < 0.5:
            while True:
                try:
                    engine.run_down()
                    break
                except KeyboardInterrupt:  # while a step was sent again
                    continue
        for request, _ in requests if rng.random() < 0.5 else ():
            engine.sender.finish(request)
            steps.pop(engine.sender.stats().steps, None)
    monkeypatch.setattr("mmcache.ipc.arena.write_tensor", values.write_tensor)
    engine.run_down()
    deadline = time.monotonic() + 10
    wanted = {(name, step): [] if name == "later stage" else read for name in names for step, read in steps.items()}
    while not wanted.keys() <= engine.read.keys() and time.monotonic() < deadline:
        engine.poll()
    assert {key: engine.read.get(key) for key in wanted} == wanted
    assert engine.joined > len(names)
    engine.end()
