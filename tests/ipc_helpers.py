"""A scheduler and workers in one process, with channels that can be made to misbehave."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, images, request, rows_of
from torch import Tensor

from mmcache.errors import ConfigError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Arena, ArenaReader, Receiver, Region, Sender, WorkerPart, WorkerStep
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.merge import MergePlan
from mmcache.planning import StepPlan
from mmcache.policies import make_policy
from mmcache.store import EmbeddingStore
from mmcache.transfer import encoder_inputs

KB = 1024
PIXELS = 4 * 2 * 4
"""Payload bytes of one image of `builders`."""


def three(name: str = "r") -> MultimodalRequest:
    """A request of three pictures, one of them with gaps."""
    return request(name, 40, images((2, 8), (12, 8, [True, True, False, True] * 2), (22, 8)))


def bare(name: str, ids: str) -> MultimodalRequest:
    """Items of which only metadata is here."""
    items = [MultimodalItem("image", None, PlaceholderRange(10 * i, 8), one) for i, one in enumerate(ids)]
    return request(name, 10 * len(ids) + 4, items)


def big(value: int) -> ItemFields:
    """Payload of 20,000 bytes."""
    configs = {"pixel_values": FieldConfig.batched("image")}
    return ItemFields({"pixel_values": torch.full((100, 50), float(value))}, configs)


class End:
    """One end of a channel in memory; with `rng` messages arrive out of order, and some of them twice."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.inbox: deque[bytes] = deque()
        self.peer: End | None = None
        self.rng = rng
        self.log: list[bytes] = []

    def send_bytes(self, data: bytes) -> None:
        if self.peer is None:
            raise BrokenPipeError
        self.log.append(data)
        self.peer.inbox.append(data)

    def poll(self, timeout: float | None = 0.0) -> bool:
        return bool(self.inbox) or self.peer is None

    def recv_bytes(self) -> bytes:
        if not self.inbox:
            raise EOFError
        if self.rng is None:
            return self.inbox.popleft()
        at = self.rng.randrange(min(3, len(self.inbox)))
        data = self.inbox[at]
        if self.rng.random() < 0.7:
            del self.inbox[at]
        return data

    def close(self) -> None:
        for end in (self, self.peer):
            if end is not None:
                end.peer = None


def channel(rng: random.Random | None = None) -> tuple[End, End]:
    one, other = End(rng), End(rng)
    one.peer, other.peer = other, one
    return one, other


class Worker:
    """A worker with a store; `run` does what an engine does with a step."""

    def __init__(self, name: str, end: Any, *, reads_payload: bool = True) -> None:
        self.store = EmbeddingStore() if reads_payload else None
        self.receiver = Receiver(end, name, store=self.store, reads_payload=reads_payload)
        self.encoded: list[str] = []

    def run(self, step: WorkerStep) -> dict[str, Tensor]:
        """Encode what is missing, merge; returns for each request its window with the rows in it."""
        with step:
            for batch in encoder_inputs(step.parts, "cpu"):
                pixels = batch.kwargs["pixel_values"]
                assert all(map(torch.is_tensor, pixels if isinstance(pixels, list) else [pixels]))
                for part, index in batch.items:
                    identifier = part.request.items[index].identifier
                    self.encoded.append(identifier)
                    self.store.put_planned(part.plan, {index: rows_of(identifier, planned(part, index).num_rows)})
            return {part.request_id: merged(part) for part in step.parts}

    def run_all(self) -> list[dict[str, Tensor]]:
        done = []
        while (step := self.receiver.next()) is not None:
            done.append(self.run(step))
            del step
        self.receiver.acknowledge()
        return done


def planned(part: WorkerPart, index: int) -> Any:
    return next(item for item in part.plan.items if item.index == index)


def merged(part: WorkerPart) -> Tensor:
    target = torch.zeros(part.window[1] - part.window[0], 4)
    return MergePlan([part]).merge_into(target)


def expected(request: MultimodalRequest, window: tuple[int, int]) -> Tensor:
    """What a window looks like with the rows of all its items, from the source."""
    whole = torch.zeros(request.num_tokens, 4)
    for item in request.items:
        mask = torch.ones(item.placeholder.length, dtype=torch.bool)
        if item.placeholder.is_embed is not None:
            mask = item.placeholder.is_embed
        where = torch.arange(item.placeholder.length)[mask] + item.placeholder.offset
        whole[where] = rows_of(item.identifier, item.placeholder.num_embeds)
    return whole[window[0] : window[1]]


class Scheduler:
    """A ledger and a sender."""

    def __init__(self, arena: Arena | None, capacity: int = 1 << 20) -> None:
        self.arena = arena
        self.sender = Sender(arena)
        self.ledger = EncoderLedger(capacity, make_policy("lru"), row_bytes={"image": ROW_BYTES})
        self.reports: list[Any] = []

    def add(self, name: str, *, rng: random.Random | None = None, **options: Any) -> Worker:
        ours, theirs = channel(rng)
        self.sender.add(name, ours)
        worker = Worker(name, theirs, **options)
        while not self.sender.workers[name]:
            self.poll()
            worker.receiver.next()
        return worker

    def receiver(self) -> Receiver:
        """The receiver of a worker without a store that takes the place of the one before."""
        self.sender.remove("w")
        ours, theirs = channel()
        self.sender.add("w", ours)
        receiver = Receiver(theirs, "w")
        self.poll()
        receiver.next()
        self.poll()
        return receiver

    def poll(self) -> list[Any]:
        reports = self.sender.poll()
        self.reports += reports
        return reports

    def plan(self, request: MultimodalRequest, computed: int = 0, scheduled: int | None = None) -> StepPlan:
        return self.ledger.plan(request, num_computed_tokens=computed, num_scheduled_tokens=scheduled)

    def send(
        self, request: MultimodalRequest, computed: int = 0, scheduled: int | None = None, **options: Any
    ) -> StepPlan:
        plan = self.plan(request, computed, scheduled)
        self.sender.send([(request, plan)], **options)
        return plan

    def settle(self, plan: StepPlan) -> None:
        """The worker has made the rows."""
        rows = {item.index: item.num_rows for item in plan.items}
        self.ledger.settle(plan, {index: rows[index] * ROW_BYTES for index in plan.missing})
        self.ledger.release(plan)

    def finish(self, request: MultimodalRequest) -> None:
        self.sender.finish(request)
        self.ledger.finish(request.request_id)


def exchange(scheduler: Scheduler, workers: Sequence[Worker], rounds: int = 20) -> list[list[dict[str, Tensor]]]:
    """Let messages flow until nothing moves any more; what each worker merged."""
    results: list[list[dict[str, Tensor]]] = [[] for _ in workers]
    for _ in range(rounds):
        before = scheduler.sender.stats()
        for worker, result in zip(workers, results):
            result += worker.run_all()
        if not scheduler.poll() and scheduler.sender.stats() == before and not any(map(has_mail, workers)):
            break
    return results


def has_mail(worker: Worker) -> bool:
    return bool(worker.receiver._channel.inbox)


def share_no_memory(patch: pytest.MonkeyPatch) -> None:
    """Workers that join from here on are on another machine."""

    def fail(path: str, epoch: int) -> None:
        raise ConfigError("no arena can be attached here", found=path)

    patch.setattr("mmcache.ipc.receiver.ArenaReader", fail)


def nothing_is_held(scheduler: Scheduler) -> bool:
    """Whether all references of workers have come back."""
    return scheduler.sender.stats().under_way == 0 and scheduler.arena.stats().referenced == 0


def block(size: int = KB, value: int = 1) -> dict[str, Tensor]:
    """Content of so many bytes."""
    return {"pixels": torch.full((size,), value, dtype=torch.uint8)}


def content(reader: ArenaReader, region: Region) -> Tensor:
    """A copy of what a reader finds in a region."""
    return reader.block(region.offset, region.nbytes, region.serial, lambda: None).clone()


epochs = iter(range(1 << 40, 1 << 41))


def attach(arena: Arena) -> ArenaReader:
    """A reader with an epoch of its own."""
    return ArenaReader(arena.path, next(epochs))
