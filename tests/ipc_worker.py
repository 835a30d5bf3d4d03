"""A worker process that checks every tensor it reads, and every window it merges, against the source."""

from __future__ import annotations

import random
import traceback
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Receiver, WorkerPart
from mmcache.merge import MergePlan
from mmcache.store import EmbeddingStore
from mmcache.transfer import encoder_inputs

ROWS, WIDTH = 6, 4
SHAPE = (40, 25)
CONFIGS = {
    "pixels": FieldConfig.batched("image"),
    "grid": FieldConfig.batched("image", keep_on_cpu=True),
}


def pixels(content: int) -> Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) * (content + 1) + content


def fields(content: int) -> ItemFields:
    return ItemFields({"pixels": pixels(content), "grid": torch.tensor([1, content, 2])}, CONFIGS)


def encode(payload: Tensor) -> Tensor:
    """What a tower makes of it: rows that depend on what was read."""
    return payload[:ROWS, :WIDTH] + payload.sum() / 1e6


class Unruly:
    """A connection on whose way messages overtake each other, and some come twice."""

    def __init__(self, connection: Connection, rng: random.Random) -> None:
        self.connection = connection
        self.rng = rng
        self.waiting: list[bytes] = []

    def send_bytes(self, data: bytes) -> None:
        self.connection.send_bytes(data)

    def poll(self, timeout: float | None = 0.0) -> bool:
        while self.connection.poll(0) and len(self.waiting) < 4:
            self.waiting.append(self.connection.recv_bytes())
        return bool(self.waiting) or self.connection.poll(timeout)

    def recv_bytes(self) -> bytes:
        if not self.waiting:
            self.waiting.append(self.connection.recv_bytes())
        at = self.rng.randrange(len(self.waiting))
        data = self.waiting[at]
        if self.rng.random() < 0.9:
            del self.waiting[at]
        return data


def work(name: str, connection: Connection, side: Connection, seed: int, unruly: bool) -> None:
    """Run steps until the scheduler closes; now and then forget everything, or only the way here."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    store = EmbeddingStore()
    receiver = Receiver(Unruly(connection, rng) if unruly else connection, name, store=store)
    try:
        while True:
            step = receiver.next(None)
            if step is None:
                continue
            with step:
                run(step.parts, store)
            del step
            if rng.random() < 0.01:
                receiver.reset()
                if rng.random() < 0.5:
                    store.clear()
    except (EOFError, OSError):
        return
    except BaseException:
        side.send(traceback.format_exc())
        raise


def run(parts: list[WorkerPart], store: EmbeddingStore) -> None:
    for batch in encoder_inputs(parts, "cpu"):
        for (part, index), payload in zip(batch.items, batch.kwargs["pixels"]):
            content = int(part.request.items[index].identifier)
            assert torch.equal(payload, pixels(content)), f"content {content} was read wrongly"
            store.put_planned(part.plan, {index: encode(payload)})
    for part in parts:
        start, end = part.window
        target = torch.zeros(end - start, WIDTH)
        MergePlan([part]).merge_into(target)
        assert torch.equal(target, expected(part, start, end)), f"{part.request_id}: rows at the wrong places"
        grids = [grid[1].item() for grid in part.metadata("grid")] if part.plan.num_items else []
        assert grids == [int(name) for name in part._mirror.identifiers], "metadata of another item"


def expected(part: WorkerPart, start: int, end: int) -> Tensor:
    whole = torch.zeros(part.request.num_tokens, WIDTH)
    for item in part.request.items:
        offset = item.placeholder.offset
        whole[offset : offset + ROWS] = encode(pixels(int(item.identifier)))
    return whole[start:end]
