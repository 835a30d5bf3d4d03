"""Tensors that are negated lazily, on either side of a merge and of a transfer, in every dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
from merge_helpers import item, lookup_of, request_of
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge import MergePlan, merge_embeddings
from mmcache.staging import fill
from mmcache.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WIDTHS = [3, 50000]  # few elements, and many: they go different ways
PICTURES = ["-###-", "#-#-#"]


def mask_of(picture: str) -> Tensor:
    return torch.tensor([c == "#" for c in picture])


def numbers(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(count * width).view(count, width) % 200 + 1).to(dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("outer", FLOATS)
def test_signs_survive_a_merge_from_and_into_every_dtype(width: int, picture: str, outer: torch.dtype) -> None:
    mask = mask_of(picture)
    for inner, negated_inputs in itertools.product(FLOATS, (False, True)):
        source = numbers(3, width, inner)
        lazily = torch._neg_view(source)
        mixed = [lazily[:1], (-source[1:]).to(outer)]
        for given in (lazily, [lazily[:1], lazily[1:]], mixed, [mixed]):
            inputs = torch.zeros(5, width, dtype=outer)
            if negated_inputs:
                inputs = torch._neg_view(inputs)
            for shaped, marks in ((inputs, mask), (inputs[None], mask[None])):
                merge_embeddings(shaped, given, marks)
                assert torch.equal(inputs.resolve_neg()[mask], (-source).to(outer))
                assert inputs.resolve_neg()[~mask].eq(0).all()
                inputs.zero_()
        assert lazily.is_neg()  # and the source stays as it was
        assert torch.equal(source, numbers(3, width, inner))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_embed", [None, [True, False] * 5 + [True]])
@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, FLOATS)))
def test_signs_survive_a_plan_with_levels(
    width: int, is_embed: list[bool] | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    inner, outer = dtypes
    request = request_of([item(1, 11, is_embed=is_embed)], 13)
    source = numbers(request.items[0].placeholder.num_embeds, 2 * width, inner)
    plan = MergePlan([lookup_of(request, (0, 13), {0: torch._neg_view(source)})])
    mask = plan.is_multimodal
    inputs, level = torch.zeros(13, width, dtype=outer), torch._neg_view(torch.ones(13, width, dtype=outer))
    plan.merge_into(inputs, level)
    for target, columns in ((inputs, source[:, :width]), (level.resolve_neg(), source[:, width:])):
        assert torch.equal(target[mask], (-columns).to(outer))
        assert target[~mask].eq(0).all()


@pytest.mark.parametrize("picture", ["-###-" * 3, "#-##-" * 9])  # strided copies, and an indexed one
@pytest.mark.parametrize("rows_on", ["cpu", "cuda:0"])
def test_signs_survive_on_a_device(picture: str, rows_on: str) -> None:
    mask = mask_of(picture)
    count = int(mask.sum())
    for inner, outer, negated_inputs in itertools.product(FLOATS, FLOATS, (False, True)):
        with SimulatedDevice("cuda:0") as device:
            source = numbers(count, 4, inner)
            inputs = torch.zeros(len(mask), 4, dtype=outer, device="cuda:0")
            target = torch._neg_view(inputs) if negated_inputs else inputs
            lazily = torch._neg_view(source if rows_on == "cpu" else device.to_device(source))
            device.clear()
            merge_embeddings(target, [lazily[:1], lazily[1:]], mask)
            assert not device.host_reads
            found = inputs.cpu()[mask]
        assert torch.equal(-found if negated_inputs else found, (-source).to(outer))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_smallest_floats_keep_their_sign_and_take_none_that_is_lazy(
    width: int, picture: str, dtype: torch.dtype
) -> None:
    source = numbers(3, width, torch.float32).to(dtype)
    right = -source.float()
    lazily = torch._neg_view(source)
    for outer in (torch.float16, torch.float32, dtype):
        for given in (lazily, [lazily[:1], lazily[1:]]):
            inputs = torch.zeros(5, width).to(outer)
            merge_embeddings(inputs, given, mask_of(picture))
            assert torch.equal(inputs.float()[mask_of(picture)], right)
    memory = torch.zeros(5, width).to(dtype)
    with pytest.raises(EmbeddingError, match="negated"):
        merge_embeddings(torch._neg_view(memory), source, mask_of(picture))
    assert memory.float().eq(0).all()


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, FLOATS)))
def test_a_staged_copy_keeps_the_sign(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    inner, outer = dtypes
    source, staged = numbers(40, 9, inner), torch.empty(40, 9, dtype=outer)
    fill(staged, torch._neg_view(source))
    assert torch.equal(staged, (-source).to(outer))


def test_a_staged_copy_keeps_what_is_conjugated() -> None:
    source = torch.randn(40, 9, dtype=torch.complex64)
    for dtype in (torch.complex64, torch.complex128):
        staged = torch.empty(40, 9, dtype=dtype)
        fill(staged, source.conj())
        assert torch.equal(staged, source.conj().resolve_conj().to(dtype))
