"""What items have in common, and what is written to in between, reaches a worker as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import images, request
from ipc_helpers import Scheduler, channel
from torch import Tensor

from mmcache.errors import ConfigError, FieldError, MMCacheError, ReleasedError, RequestError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Arena, Receiver, Sender
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.store import EmbeddingStore

pytestmark = pytest.mark.usefixtures("order")

BATCHED = FieldConfig.batched("image")
TABLE = FieldConfig.shared("image", 1)
KEPT = FieldConfig.batched("image", keep_on_cpu=True)


def item(offset: int, identifier: str, data: dict[str, Any], configs: dict[str, FieldConfig]) -> MultimodalItem:
    return MultimodalItem("image", ItemFields(data, configs), PlaceholderRange(offset, 2), identifier)


def arena_of(size: int | None) -> Arena | None:
    return None if size is None else Arena(size)


@pytest.mark.parametrize("size", [None, 64, 1 << 16], ids=["no arena", "full arena", "arena"])
def test_items_that_share_one_tensor_keep_their_other_fields(size: int | None) -> None:
    arena = arena_of(size)
    scheduler = Scheduler(arena)
    worker = scheduler.add("w")
    common = torch.tensor([1, 2])
    configs = {"common": BATCHED, "own": BATCHED}
    # One request of each of two tenants, in one batch.
    sources = [
        MultimodalRequest(
            f"r{salt}",
            range(9),
            [
                item(3 * i, f"id{i}", {"common": common, "own": torch.full((3 + i,), 10.0 * salt + i)}, configs)
                for i in range(3)
            ],
            cache_salt=str(salt),
        )
        for salt in range(2)
    ]
    plans = [scheduler.ledger.plan(source, num_computed_tokens=0) for source in sources]
    scheduler.sender.send(list(zip(sources, plans)))
    with worker.receiver.next() as step:
        for salt, part in enumerate(step.parts):
            for i in range(3):
                assert part.fields(i)["own"].tolist() == [10.0 * salt + i] * (3 + i)
                assert part.fields(i)["common"].tolist() == [1, 2]
    if arena is not None:
        arena.close()


def inference(value: float) -> Tensor:
    with torch.inference_mode():
        return torch.full((4,), value)


def fill(tensor: Tensor, value: float) -> None:
    with torch.inference_mode():
        tensor.fill_(value)


LENT = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("table", "write"),
    [
        (inference(0), fill),
        (torch.from_numpy(LENT), lambda table, value: LENT.fill(value)),
        (torch.zeros(4), lambda table, value: table.data.fill_(value)),
        (torch.zeros(4), lambda table, value: table.fill_(value)),
    ],
    ids=["inference tensor", "memory that numpy lent", "behind autograd's back", "plain"],
)
@pytest.mark.parametrize("size", [None, 1 << 16], ids=["no arena", "arena"])
def test_a_buffer_that_is_used_again_is_sent_again(size: int | None, table: Tensor, write: Any) -> None:
    arena = arena_of(size)
    scheduler = Scheduler(arena)
    worker = scheduler.add("w")
    for value in (1.0, 2.0, 3.0):
        write(table, value)
        data = {"pixels": torch.full((1,), value), "table": table}
        source = MultimodalRequest(
            f"r{value}", range(3), [item(0, f"id{value}", data, {"pixels": BATCHED, "table": TABLE})]
        )
        scheduler.send(source)
        with worker.receiver.next() as step:
            assert step.parts[0].fields(0)["pixels"].tolist() == [value]
            assert step.parts[0].fields(0)["table"].tolist() == [value] * 4
    if arena is not None:
        arena.close()


def test_equal_tables_of_several_requests_are_written_once() -> None:
    arena = Arena(1 << 16)
    scheduler = Scheduler(arena)
    scheduler.add("w")
    for number in range(3):
        data = {"pixels": torch.full((1,), float(number)), "table": torch.ones(100)}
        scheduler.send(
            MultimodalRequest(
                f"r{number}", range(3), [item(0, f"id{number}", data, {"pixels": BATCHED, "table": TABLE})]
            )
        )
    assert arena.stats().written == 3 * 4 + 400
    arena.close()


def test_a_step_keeps_to_the_request_as_it_was() -> None:
    scheduler = Scheduler(None)
    worker = scheduler.add("w")
    source = request("r", 10, images((0, 4)))
    scheduler.send(source)
    first = worker.receiver.next()
    source.extend([1] * 10, images((12, 4), ids="z"))
    scheduler.send(source, computed=10)
    second = worker.receiver.next()
    assert [len(step.parts[0].token_ids) for step in (first, second)] == [10, 20]
    assert [len(step.parts[0].metadata("image_grid_thw")) for step in (first, second)] == [1, 2]


def test_marks_that_differ_are_refused_as_they_are_of_a_lookup() -> None:
    scheduler = Scheduler(None)
    worker = scheduler.add("w")
    marks = [KEPT, BATCHED, KEPT]
    items = [
        item(3 * i, f"id{i}", {"g": torch.tensor([i]), "x": torch.ones(1)}, {"g": mark, "x": BATCHED})
        for i, mark in enumerate(marks)
    ]
    source = MultimodalRequest("r", range(9), items)
    scheduler.send(source)
    (part,) = worker.receiver.next().parts
    for metadata in (part.metadata, source.metadata):
        with pytest.raises(FieldError, match="keep_on_cpu") as error:
            metadata("g")
        assert error.value.item == 1
        with pytest.raises(FieldError, match="name"):
            metadata(5)  # type: ignore[arg-type]


def test_one_element_of_any_stride_travels() -> None:
    scheduler = Scheduler(None)
    worker = scheduler.add("w")
    odd = torch.arange(8, dtype=torch.bfloat16)[3::2][:1]
    assert odd.stride() == (2,)
    source = MultimodalRequest("r", range(3), [item(0, "a", {"g": odd, "x": [odd]}, {"g": KEPT, "x": BATCHED})])
    scheduler.send(source)
    (part,) = worker.receiver.next().parts
    assert part.metadata("g")[0].tolist() == [3.0]
    assert part.fields(0)["x"][0].tolist() == [3.0]


@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), torch.nested.nested_tensor([torch.ones(2)])])
def test_tensors_without_bytes_are_refused(value: Tensor) -> None:
    arena = Arena(1 << 12)
    with pytest.raises(FieldError, match="cannot travel"):
        arena.hold("key", {"x": value})
    assert arena.stats().used == 0
    arena.close()


def test_what_a_caller_gets_wrong_is_named_and_changes_nothing() -> None:
    scheduler = Scheduler(None)
    scheduler.add("w")
    sender = scheduler.sender
    source = request("r", 10, images((0, 4)))
    plan = scheduler.ledger.plan(source, num_computed_tokens=0)
    before = sender.workers
    wrong: list[tuple[type[MMCacheError], Any]] = [
        (ConfigError, lambda: Sender(5)),  # type: ignore[arg-type]
        (ConfigError, lambda: sender.add("w", 5)),  # type: ignore[arg-type]
        (RequestError, lambda: sender.send(None)),  # type: ignore[arg-type]
        (RequestError, lambda: sender.send([plan])),  # type: ignore[list-item]
        (RequestError, lambda: sender.send((source, plan))),  # type: ignore[arg-type]
        (ConfigError, lambda: sender.send([(source, plan)], workers="w")),
        (ConfigError, lambda: sender.send([(source, plan)], workers=5)),  # type: ignore[arg-type]
        (ConfigError, lambda: Receiver(None, "w")),  # type: ignore[arg-type]
        (ConfigError, lambda: Arena(1 << 12, directory=None)),  # type: ignore[arg-type]
        (RequestError, lambda: sender.finish(5)),  # type: ignore[arg-type]
        (RequestError, lambda: sender.supply(source, None)),  # type: ignore[arg-type]
        (RequestError, lambda: sender.supply(5, {})),  # type: ignore[arg-type]
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()
    assert sender.workers == before
    assert sender.stats().steps == 0


def test_regions_belong_to_their_arena() -> None:
    one, other = Arena(1 << 12), Arena(1 << 12)
    region = one.hold("key", {"x": torch.ones(3)})
    for call in (other.release, other.retain):
        with pytest.raises(ReleasedError, match="its arena"):
            call(region)
    assert other.stats().referenced == 0
    assert one.stats().referenced > 0
    for parts in ([b"abc", "text"], [b"abc", memoryview(b"12345678").cast("q")]):
        with pytest.raises(ConfigError, match="pieces of bytes"):
            one.hold_bytes(parts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        one.release(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        one.hold([], {"x": torch.ones(1)})
    for value in (5, (torch.ones(1),)):
        with pytest.raises(FieldError, match="tensors"):
            one.hold("key", {"x": value})  # type: ignore[dict-item]
    one.release(region)
    one.discard("key")
    with pytest.raises(ReleasedError):
        one.retain(region)  # nobody holds it any more
    assert one.stats().referenced == 0
    one.close()
    other.close()


def test_what_is_wrong_in_a_step_or_a_store_is_named() -> None:
    scheduler = Scheduler(None)
    sender, source = scheduler.sender, request("r", 20, images((2, 8)))
    plan = scheduler.plan(source)
    wrong: list[tuple[Any, str]] = [
        (None, "found NoneType"),
        ([(source, plan), plan], "found in it StepPlan"),
        ((source, plan), "found in it MultimodalRequest"),
        ([(source, plan), (source, 5)], "found in it MultimodalRequest, int"),
        ([(request("other", 5), plan)], "found a plan for 'r'"),
        ([(request("r", 5), plan)], "found a plan for 1 items"),
    ]
    for parts, found in wrong:
        with pytest.raises(RequestError, match=found):
            sender.send(parts)
    for store in (EmbeddingStore, 5, {}):
        with pytest.raises(ConfigError, match="EmbeddingStore"):
            Receiver(channel()[0], "w", store=store)  # type: ignore[arg-type]
