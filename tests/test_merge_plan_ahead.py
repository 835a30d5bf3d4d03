"""`MergePlan` for a draft model that reads ahead, and token ids that are harmless to look up; also on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from merge_helpers import item, lookup_of, request_of, rows

from mmcache.errors import EmbeddingError, UnresolvedItemError, WindowError
from mmcache.merge import MergePlan
from mmcache.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)


def test_a_draft_model_reads_ahead() -> None:
    request = request_of([item(2, 3, "a"), item(8, 4, "b")], 14)
    held = {0: rows(3), 1: rows(4, start=101)}
    inputs = torch.full((8, 4), -1.0)
    MergePlan([lookup_of(request, (0, 8), held, lookahead=1)], shift=1).merge_into(inputs)
    assert inputs[:, 0].tolist() == [-1, 1, 5, 9, -1, -1, -1, 101]
    del held[1]  # the item behind the window is not encoded yet
    ahead = lookup_of(request, (0, 8), held)
    with pytest.raises(UnresolvedItemError) as raised:
        MergePlan([ahead], shift=1).merge_into(torch.zeros(8, 4))
    assert raised.value.item == 1
    inputs.fill_(-1.0)
    MergePlan([ahead], shift=1, skip_unresolved=True).merge_into(inputs)
    assert inputs[:, 0].tolist() == [-1, 1, 5, 9, -1, -1, -1, -1]
    end = torch.full((2, 4), -1.0)
    MergePlan([lookup_of(request, (12, 14), held)], shift=3).merge_into(end)
    assert end.eq(-1).all()


@pytest.mark.parametrize("shift", [-1, 1.0, True, None, np.int64(-1)])
def test_a_shift_is_a_count(shift: Any) -> None:
    with pytest.raises(WindowError):
        MergePlan([], shift=shift)


def test_a_shift_may_be_of_numpy_and_reaches_into_a_chunk() -> None:
    request = request_of([item(2, 6, is_embed=[True, False, True, True, True, False])], 12)
    held = {0: rows(4)}
    whole = torch.full((12, 4), -1.0)
    MergePlan([lookup_of(request, (0, 12), held)]).merge_into(whole)
    for ahead in (0, 1, 3):
        for start, end in ((0, 4), (3, 7), (5, 12)):
            inputs = torch.full((end - start, 4), -1.0)
            plan = MergePlan([lookup_of(request, (start, end), held, lookahead=ahead)], shift=np.int64(ahead))
            plan.merge_into(inputs)
            right = torch.full((end - start, 4), -1.0)
            seen = whole[start + ahead : end + ahead]
            right[: len(seen)] = seen
            assert torch.equal(inputs, right)
            assert plan.is_multimodal[: len(seen)].tolist() == seen.ge(0).all(1).tolist()


@pytest.mark.parametrize("is_embed", [None, [True, False] * 6])
def test_ids_outside_the_vocabulary_become_harmless(is_embed: list[bool] | None) -> None:
    request = request_of([item(4, 12, is_embed=is_embed)])
    plan = MergePlan([lookup_of(request, (0, 20), {})])
    ids = torch.where(torch.nn.functional.pad(plan.is_multimodal, (0, 2)), 151655, torch.arange(22))
    safe = plan.safe_token_ids(ids, 3)
    assert safe[plan.is_multimodal.nonzero()[:, 0]].eq(3).all()
    assert torch.equal(safe[:4], ids[:4])
    assert torch.equal(safe[16:], ids[16:])
    assert ids.max() == 151655
    with SimulatedDevice("cuda:0") as sim:
        on_device = plan.safe_token_ids(sim.to_device(ids), 3)
        assert not [move for move in sim.moves if move.blocks]
        assert sim.host_reads == sim.mixes == []
        assert torch.equal(on_device.cpu(), safe)
    with pytest.raises(EmbeddingError):
        plan.safe_token_ids(ids[:19])


IRREGULAR = [flag for n in (1, 2, 3, 1, 4, 2) for flag in [True] * n + [False]] + [True]


@pytest.mark.parametrize("is_embed", [None, ([True] * 3 + [False]) * 5, IRREGULAR])
@pytest.mark.parametrize("rows_on", ["host", "device"])
def test_a_plan_on_a_device_sends_indices_once_and_waits_for_nothing(is_embed: list[bool] | None, rows_on: str) -> None:
    request = request_of([item(2, 20, is_embed=is_embed)])
    wide = torch.randn(request.items[0].placeholder.num_embeds, 12)
    expected = [torch.zeros(30, 4) for _ in range(3)]
    MergePlan([lookup_of(request, (0, 30), {0: wide})]).merge_into(*expected)
    with SimulatedDevice("cuda:0") as sim:
        held = sim.to_device(wide) if rows_on == "device" else wide
        plan = MergePlan([lookup_of(request, (0, 30), {0: held})])
        for step in range(2):
            targets = [sim.to_device(torch.zeros(30, 4)) for _ in range(3)]
            plan.merge_into(*targets)
            assert sim.host_reads == sim.mixes == []
            assert not [move for move in sim.moves if move.blocks]
            indices = [move for move in sim.moves if move.nbytes == 8 * len(wide)]
            assert len(indices) == (1 if is_embed is IRREGULAR and not step else 0)
            sim.clear()
            for target, right in zip(targets, expected):
                assert torch.equal(target.cpu(), right)
            sim.clear()


@pytest.mark.parametrize("shape", [(20,), (1, 20)])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_token_ids_are_made_harmless_in_the_shape_they_have(shape: tuple[int, ...], device: str) -> None:
    every_other = [True, False] * 5
    plan = MergePlan([lookup_of(request_of([item(4, 10, is_embed=every_other)]), (0, 18), {})])
    with SimulatedDevice("cuda:0"):
        ids = torch.arange(100, 120, dtype=torch.int32).view(shape)
        safe = plan.safe_token_ids(ids.to(device), 7).cpu()
    right = [7 if 4 <= i < 14 and every_other[i - 4] else 100 + i for i in range(20)]
    assert (safe.dtype, safe.shape, safe.flatten().tolist()) == (torch.int32, shape, right)


@pytest.mark.parametrize("ids", [torch.zeros(20), torch.zeros(2, 20, dtype=torch.int64), [0] * 20, torch.tensor(3)])
def test_token_ids_of_another_kind_are_refused(ids: Any) -> None:
    with pytest.raises(EmbeddingError):
        MergePlan([lookup_of(request_of([item(4, 2)]), (0, 18), {})]).safe_token_ids(ids)
