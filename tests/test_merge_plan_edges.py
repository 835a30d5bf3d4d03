"""`MergePlan` with awkward rows and destinations: overlaps, levels in one buffer, dtypes, duplicates."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from merge_helpers import item, lookup_of, request_of, rows
from torch import Tensor

from mmcache.errors import EmbeddingError, RequestError, UnresolvedItemError
from mmcache.merge import MergePlan
from mmcache.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)


@pytest.mark.parametrize("width", [4, 3000])
def test_rows_that_lie_in_a_destination_are_read_before_any_is_written(width: int) -> None:
    request = request_of([item(2, 4, is_embed=[True, False, True, True])])
    for place in (0, 1, 2, 5):
        inputs, level = torch.randn(8, width), torch.zeros(8, width)
        plan = MergePlan([lookup_of(request, (0, 8), {0: inputs[place : place + 3]})])
        expected = inputs.clone()
        expected[[2, 4, 5]] = inputs[place : place + 3].clone()
        plan.merge_into(inputs)
        assert torch.equal(inputs, expected)
        wide = torch.randn(8, 2 * width)  # the levels lie in the rows that are merged
        held = wide[0:3]
        right = held.clone()
        MergePlan([lookup_of(request, (0, 8), {0: held})]).merge_into(wide[:, :width], level)
        assert torch.equal(wide[[2, 4, 5], :width], right[:, :width])
        assert torch.equal(level[[2, 4, 5]], right[:, width:])


def test_an_item_may_lie_where_another_is_written() -> None:
    request = request_of([item(0, 2, "a"), item(5, 2, "b")])
    inputs = torch.randn(8, 4)
    right = inputs[[5, 6, 2, 3, 4, 0, 1, 7]]
    MergePlan([lookup_of(request, (0, 8), {0: inputs[5:7], 1: inputs[0:2]})]).merge_into(inputs)
    assert torch.equal(inputs, right)


def test_levels_may_lie_side_by_side_in_one_buffer() -> None:
    request = request_of([item(1, 2)])
    buffer = torch.full((4, 3, 4), 7.0)
    MergePlan([lookup_of(request, (0, 4), {0: rows(2, 12)})]).merge_into(*buffer.unbind(1))
    assert torch.equal(buffer[1:3].reshape(2, 12), rows(2, 12))
    assert buffer[[0, 3], 0].eq(7).all()
    assert buffer[[0, 3], 1:].eq(0).all()


def test_a_destination_given_twice_is_refused() -> None:
    plan = MergePlan([lookup_of(request_of([item(1, 2)]), (0, 4), {0: rows(2, 8)})])
    inputs = torch.ones(4, 4)
    for again in (inputs, inputs.view(1, 4, 4), inputs[:, :]):
        with pytest.raises(EmbeddingError, match="level 0"):
            plan.merge_into(inputs, again)
    assert inputs.eq(1).all()
    empty = torch.zeros(0, 4)
    assert MergePlan([]).merge_into(empty, torch.zeros(0, 4)) is empty


@pytest.mark.parametrize(
    "cut",
    [
        lambda memory: (memory[:, :6, :4], memory[:, 2:8, :4]),  # rows later in the same buffer
        lambda memory: (memory[:, :6, 2:6], memory[:, :6, 5:9]),  # columns that meet in one
        lambda memory: (memory[:, :6, :4], memory[:, 5:11, :4]),  # one row, which is padding of the first
        lambda memory: (memory[0].t()[:6, 1:5], memory[0, 3:9, 3:7]),  # a transposed one
        lambda memory: (memory[:, :6, :4], memory.view(torch.float16)[:, 5:, 8:12]),  # of another dtype, not shared
        lambda memory: (memory[:, :6, :4], memory.view(torch.float16)[:, 5:, 7:11]),  # of another dtype
        lambda memory: (memory[:, :6, 0:8:2], memory[:, :6, 2:10:2]),  # every other column of both
        lambda memory: (memory[:, :6, 0:8:2], memory[:, :6, 1:9:2]),  # every other column, not shared
    ],
)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_destination_that_overlaps_another_is_refused_before_anything_is_written(
    cut: Callable[[Tensor], tuple[Tensor, Tensor]], number: int, device: str
) -> None:
    count = 2 + number
    plan = MergePlan([lookup_of(request_of([item(1, 2)]), (0, 6), {0: rows(2, 4 * count)})])
    first, second = cut(torch.arange(12 * 12).view(1, 12, 12).float())
    probe = torch.zeros(12 * 12 * 4, dtype=torch.uint8)
    for mark, tensor in enumerate((first, second), 1):
        start, size = tensor.storage_offset() * tensor.element_size(), tensor.element_size()
        for place in np.ndindex(*tensor.shape):
            at = start + sum(i * stride for i, stride in zip(place, tensor.stride())) * size
            probe[at : at + size] |= mark
    shared = bool(probe.eq(3).any())
    with SimulatedDevice("cuda:0") as simulated:
        memory = torch.arange(12 * 12).view(1, 12, 12).float()
        first, second = cut(memory if device == "cpu" else simulated.to_device(memory))
        destinations = [first, *[torch.zeros(6, 4, device=device)] * number, second]
        before = [destination.cpu() for destination in destinations]
        if shared:
            with pytest.raises(EmbeddingError, match=f"level {number}"):
                plan.merge_into(*destinations)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(destinations, before))
        else:
            plan.merge_into(*destinations)
            found = torch.cat([d.cpu().view(-1, 4)[1:3].float() for d in destinations], 1)
            assert torch.equal(found, rows(2, 4 * count))


def test_destinations_of_several_dtypes_and_strides_in_one_call() -> None:
    request = request_of([item(1, 3, is_embed=[True, False, True])])
    wide = torch.randn(2, 12)
    inputs, first, second = (
        torch.zeros(5, 4, dtype=torch.bfloat16),
        torch.zeros(4, 7).t()[:5],
        torch.ones(9, 8)[::2, :4],
    )
    MergePlan([lookup_of(request, (0, 5), {0: wide})]).merge_into(inputs, first, second.double().float()[:5])
    MergePlan([lookup_of(request, (0, 5), {0: wide})]).merge_into(inputs, first, second)
    for number, target in enumerate((inputs, first, second)):
        assert torch.equal(target[[1, 3]], wide[:, 4 * number : 4 * number + 4].to(target.dtype))
        assert target[[0, 2, 4]].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inference_tensor_is_written_to_anywhere(dtype: torch.dtype) -> None:
    request = request_of([item(1, 40)], 60)
    with torch.inference_mode():
        inputs, level = torch.zeros(50, 900), torch.ones(50, 900)
    held = torch.randn(40, 1800).to(dtype)
    MergePlan([lookup_of(request, (0, 50), {0: held})]).merge_into(inputs, level)
    assert torch.equal(inputs[1:41], held[:, :900].float())
    assert torch.equal(level[1:41], held[:, 900:].float())
    assert level[41:].eq(0).all()


def test_the_same_content_twice_in_a_request_and_in_a_batch() -> None:
    request = request_of([item(1, 3, "a"), item(6, 3, "a")])
    held = {0: rows(3), 1: rows(3)}
    other = request_of([item(0, 3, "a")], name="s")
    inputs = torch.zeros(14, 4)
    MergePlan([lookup_of(request, (2, 10), held), lookup_of(other, (0, 6), {0: held[0]})]).merge_into(inputs)
    assert inputs[:, 0].tolist() == [5, 9, 0, 0, 1, 5, 9, 0, 1, 5, 9, 0, 0, 0]


def test_a_plan_may_be_made_before_the_rows_are_here() -> None:
    held: dict[int, Tensor] = {}
    plan = MergePlan([lookup_of(request_of([item(1, 2)]), (0, 4), held)])
    with pytest.raises(UnresolvedItemError):
        plan.merge_into(torch.zeros(4, 4))
    held[0] = rows(2)
    assert plan.merge_into(torch.zeros(4, 4))[1:3].equal(rows(2))


def test_a_merge_is_of_lookups() -> None:
    for wrong in (None, 3, [None], [3], [SimpleNamespace(window=(0, 1))]):
        with pytest.raises(RequestError, match="lookups"):
            MergePlan(wrong)
