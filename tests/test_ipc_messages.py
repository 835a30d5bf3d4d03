"""What travels comes out as it went in; what is malformed is an error and nothing else."""

from __future__ import annotations

import math
import pickle
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from builders import images, request
from hypothesis import given, settings
from hypothesis import strategies as st
from ipc_helpers import Scheduler, channel
from torch import Tensor

from mmcache.errors import MessageError, MMCacheError
from mmcache.fields import FieldConfig, FieldValue, ItemFields
from mmcache.ipc import Arena, Receiver, Sender
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.policies import make_policy

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.complex64,
    torch.float64,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, 0 to 3 dimensions, empty ones too; contiguous, transposed, strided or expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    data = torch.from_numpy(np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, max(count, 16), np.uint8))
    if dtype is torch.bool:
        data = data.bitwise_and(1)
    tensor = data[:count].view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    how = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "parameter"]))
    if how == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if how == "strided" and tensor.dim():
        return tensor[::2]
    if how == "expanded":
        return tensor.expand(3, *tensor.shape)
    if how == "parameter" and dtype.is_floating_point and dtype.itemsize > 1:
        return torch.nn.Parameter(tensor)
    return tensor


values = st.recursive(tensors(), lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@st.composite
def requests(draw: st.DrawFn) -> MultimodalRequest:
    configs = {
        "pixels": FieldConfig.batched("image"),
        "lengths": FieldConfig.batched("image", keep_on_cpu=True),
        "grid": FieldConfig.batched("image", keep_on_cpu=True),
        "flag": FieldConfig.shared("image", 9, keep_on_cpu=True),
    }
    alike = draw(st.booleans())
    flag = draw(tensors())
    items = []
    offset = draw(st.integers(0, 5))
    for number in range(draw(st.integers(0, 5))):
        length = draw(st.integers(1, 12))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
        names = (
            ["pixels", "grid", "flag"]
            if alike
            else draw(st.sets(st.sampled_from(sorted(configs)), min_size=1).map(sorted))
        )
        data: dict[str, Any] = {}
        for name in names:
            grid_like = torch.tensor([1, number, 3]) if alike else None
            data[name] = flag if name == "flag" else grid_like if name == "grid" and alike else draw(values)
        fields = draw(st.just(ItemFields(data, configs, listed=frozenset({"pixels"} & set(names)))) | st.none())
        items.append(MultimodalItem("image", fields, PlaceholderRange(offset, length, mask), f"item {number}"))
        offset += length + draw(st.integers(0, 3))
    tokens = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=offset, max_size=offset + 5))
    salt = draw(st.none() | st.text(st.characters(codec="utf-8"), max_size=5))
    return MultimodalRequest(draw(st.text(st.characters(codec="utf-8"), min_size=1)), tokens, items, cache_salt=salt)


def same(one: FieldValue, other: FieldValue) -> bool:
    """Bit for bit, so that NaN equals itself and -0.0 does not equal 0.0."""
    if isinstance(one, list) or isinstance(other, list):
        return (
            isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
        )
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().reshape(-1)) for t in (one, other)]
    return not raw[0].numel() or torch.equal(*(t.view(torch.uint8) for t in raw))


@pytest.fixture(scope="module")
def scheduler() -> Any:
    arena = Arena(1 << 20)
    yield Scheduler(arena)
    arena.close()


@given(source=requests(), inline=st.booleans())
@settings(max_examples=100)
def test_a_request_comes_out_as_it_went_in(scheduler: Scheduler, source: MultimodalRequest, inline: bool) -> None:
    if inline:
        scheduler = Scheduler(None)
    receiver = scheduler.receiver()
    bare = [item.fields is None or "pixels" not in item.fields for item in source.items]
    needed = [index for index, empty in enumerate(bare) if not empty and source.items[index].placeholder.num_embeds]
    computed = source.num_tokens if any(bare) else 0
    plan = scheduler.ledger.plan(source, num_computed_tokens=computed)
    scheduler.sender.send([(source, plan)])
    with receiver.next() as step:
        (part,) = step.parts
        assert part.plan == plan
        assert part.token_ids.tolist() == source.token_ids.tolist()
        assert part.request_id == source.request_id
        assert part._mirror.cache_salt == source.cache_salt
        flags = []
        for index, item in enumerate(source.items):
            assert part._mirror.placeholder(index) == item.placeholder
            assert part._mirror.identifiers[index] == item.identifier
            here = part.fields(index)
            assert (here is None) == (item.fields is None)
            if here is None or item.fields is None:
                continue
            whole = not computed and index in needed
            assert list(here) == [n for n in item.fields if whole or item.fields.config(n).keep_on_cpu]
            for name, value in here.items():
                assert same(value, item.fields[name])
                assert here.listed(name) == item.fields.listed(name)
                assert here.config(name).layout == item.fields.config(name).layout
                flags += [value] if name == "flag" else []
        assert len({id(flag) for flag in flags}) <= 1
    scheduler.ledger.release(plan)
    scheduler.ledger.finish(source.request_id)
    scheduler.sender.finish(source)


@given(cuts=st.lists(st.integers(0, 40), max_size=4))
def test_deltas_add_up_to_the_request(scheduler: Scheduler, cuts: list[int]) -> None:
    whole = request("whole", 41, images((2, 8), (12, 8, [True, False] * 4), (22, 8), (32, 8)))
    bounds = sorted({0, 41, *cuts})
    receiver = scheduler.receiver()
    source = request("grows", 0)
    for start, end in pairwise(bounds):
        new = [item for item in whole.items if start < item.placeholder.offset + item.placeholder.length <= end]
        source.extend(whole.token_ids[start:end], new)
        plan = scheduler.ledger.plan(source, num_computed_tokens=end)
        scheduler.sender.send([(source, plan)])
        with receiver.next() as step:
            (part,) = step.parts
            assert part.plan == plan
            assert part.token_ids.tolist() == whole.token_ids[:end].tolist()
            assert [item.placeholder for item in part.request.items] == [i.placeholder for i in source.items]
            if source.items:
                assert len(part.metadata("image_grid_thw")) == len(source.items)
        scheduler.ledger.release(plan)
    scheduler.sender.finish(source)


LARGE = (1 << 63) - 1


@pytest.mark.parametrize(
    "grids",
    [
        [[1, -LARGE - 1, LARGE], [0, 5, 6]],
        [[1, 2], [3, 4, 5], [6]],
        [[1, 2, 3], 4],
        [4, [1, 2, 3]],
        [4, 5],
        [[], []],
        [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        [[[1, 2]], [3, 4]],
        [list(range(17)), list(range(17, 34))],
    ],
)
def test_metadata_of_any_shape_comes_out_as_it_went_in(scheduler: Scheduler, grids: list[Any]) -> None:
    configs = {"grid": FieldConfig.batched("image", keep_on_cpu=True)}
    for kinds in ([torch.int64] * 3, [torch.int64, torch.int32, torch.int64], [torch.float64] * 3):
        values = [torch.tensor(grid, dtype=torch.int64).to(kind) for grid, kind in zip(grids, kinds)]
        items = [
            MultimodalItem("image", ItemFields({"grid": value}, configs), PlaceholderRange(4 * number, 4), f"{number}")
            for number, value in enumerate(values)
        ]
        source = MultimodalRequest("r", range(20), items)
        receiver = scheduler.receiver()
        plan = scheduler.ledger.plan(source, num_computed_tokens=20)
        scheduler.sender.send([(source, plan)])
        with receiver.next() as step:
            here = step.parts[0].metadata("grid")
        assert len(here) == len(values)
        assert all(map(same, here, values))
        here[0].fill_(7)
        assert same(here[1], values[1])
        scheduler.ledger.release(plan)
        scheduler.finish(source)


def frames() -> tuple[list[bytes], list[bytes]]:
    """Real messages: what a sender says, and what a receiver says."""
    ours, theirs = channel()
    sender = Sender(None)
    sender.add("w", ours)
    receiver = Receiver(theirs, "w")
    sender.poll()
    receiver.next()
    sender.poll()
    source = request("r", 40, images((2, 8), (12, 8, [True, True, False, True] * 2), (22, 8)))
    plan = EncoderLedger(1 << 20, make_policy("lru")).plan(source, num_computed_tokens=0)
    sender.send([(source, plan)])
    receiver.next().done()
    return ours.log, theirs.log


def test_damaged_messages_are_typed_errors_on_both_sides() -> None:
    rng = random.Random(0)
    to_worker, to_scheduler = frames()
    session = int.from_bytes(to_worker[1][8:16], "little")
    for _ in range(1500):
        ours, theirs = channel()
        data = bytearray(rng.choice(to_worker[1:]))
        damage(data, rng)
        receiver = Receiver(theirs, "w")
        receiver._session, receiver.epoch = session, int.from_bytes(data[16:24], "little")
        theirs.inbox.append(bytes(data))
        try:
            step = receiver.next()
        except MMCacheError:
            continue
        if step is not None:
            for part in step.parts:
                try:
                    _ = [part.fields(index) for index in range(part.plan.num_items)], part.request
                except MMCacheError:
                    continue
    for _ in range(500):
        sender = Sender(None)
        ours, theirs = channel()
        sender.add("w", ours)
        data = bytearray(rng.choice(to_scheduler))
        damage(data, rng)
        ours.inbox.append(bytes(data))
        for report in sender.poll():
            assert report.gone
            assert isinstance(report.error, MessageError)


def damage(data: bytearray, rng: random.Random) -> None:
    """Flip, cut, repeat or replace a few bytes behind the session and epoch."""
    for _ in range(rng.randrange(1, 4)):
        how = rng.random()
        at = rng.randrange(len(data)) if rng.random() < 0.1 else rng.randrange(min(24, len(data) - 1), len(data))
        if how < 0.7:
            data[at] = rng.randrange(256)
        elif how < 0.8:
            del data[max(at, 24) :]
        elif how < 0.9:
            data[at:at] = data[at : at + rng.randrange(9)]
        else:
            del data[at : at + rng.randrange(1, 9)]
        if len(data) < 26:
            return


def test_every_cut_of_a_message_is_refused() -> None:
    to_worker, _ = frames()
    data = to_worker[1]
    for length in range(len(data)):
        _, theirs = channel()
        receiver = Receiver(theirs, "w")
        receiver._session, receiver.epoch = (int.from_bytes(data[i : i + 8], "little") for i in (8, 16))
        theirs.inbox.append(data[:length])
        with pytest.raises(MessageError):
            receiver.next()


def test_another_version_is_refused_by_name() -> None:
    _, theirs = channel()
    receiver = Receiver(theirs, "w")
    theirs.inbox.append(b"mmc\x01" + bytes(60))
    with pytest.raises(MessageError, match="version"):
        receiver.next()


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was executed",)


def test_pickles_are_never_executed() -> None:
    ours, _ = channel()
    sender = Sender(None)
    sender.add("w", ours)
    ours.inbox.append(pickle.dumps(Bomb()))
    (report,) = sender.poll()
    assert isinstance(report.error, MessageError)


def test_text_that_is_no_unicode_fails_its_request_alone(scheduler: Scheduler) -> None:
    source = request("\ud800", 5)
    plan = scheduler.ledger.plan(source, num_computed_tokens=0)
    with pytest.raises(MMCacheError):
        scheduler.sender.send([(source, plan)])
