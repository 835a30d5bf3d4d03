"""What autograd follows through a merge, backward and forward, and what it forbids: told before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from merge_helpers import item, lookup_of, request_of
from torch import Tensor
from torch.autograd import forward_ad

from mmcache.errors import EmbeddingError
from mmcache.merge import MergePlan, merge_embeddings
from mmcache.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)

# PyTorch compiles its formulas for forward mode in a way that it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

WIDTHS = [3, 50000]  # few elements, and many: they go different ways
PICTURES = ["-###-", "#-#-#"]


def mask_of(picture: str) -> Tensor:
    return torch.tensor([c == "#" for c in picture])


def tangent_of(tensor: Tensor) -> Any:
    return forward_ad.unpack_dual(tensor).tangent


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_forward_mode_sees_the_rows(width: int, picture: str, dtype: torch.dtype, device: str) -> None:
    mask, source, tangent = mask_of(picture), torch.randn(3, width, dtype=dtype), torch.randn(3, width, dtype=dtype)
    with SimulatedDevice("cuda:0"), forward_ad.dual_level():
        dual = forward_ad.make_dual(source, tangent)
        for given in (dual, [dual[:1], dual[1:]], [dual[:1], source[1:].float(), dual[:0]]):
            inputs = torch.zeros(5, width, device=device)
            merge_embeddings(inputs, given, mask)
            found = tangent_of(inputs).cpu()
            right = tangent.float()
            if isinstance(given, list) and len(given) == 3:
                right = torch.cat([right[:1], torch.zeros(2, width)])
            assert torch.equal(found[mask], right)
            assert found[~mask].eq(0).all()
            assert torch.equal(forward_ad.unpack_dual(inputs).primal.cpu()[mask], source.float())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
def test_forward_mode_sees_that_rows_of_the_destination_are_no_more(width: int, picture: str) -> None:
    mask = mask_of(picture)
    with forward_ad.dual_level():
        inputs = forward_ad.make_dual(torch.zeros(5, width), torch.ones(5, width))
        merge_embeddings(inputs, torch.ones(3, width), mask)
        assert tangent_of(inputs)[mask].eq(0).all()
        assert tangent_of(inputs)[~mask].eq(1).all()


def test_forward_mode_sees_the_rows_of_a_plan_in_all_levels() -> None:
    with forward_ad.dual_level():
        tangent = torch.randn(2, 8)
        held = {0: forward_ad.make_dual(torch.randn(2, 8), tangent)}
        plan = MergePlan([lookup_of(request_of([item(1, 2)]), (0, 4), held)])
        inputs, level = torch.zeros(4, 4), forward_ad.make_dual(torch.zeros(4, 4), torch.ones(4, 4))
        plan.merge_into(inputs, level)
        assert torch.equal(tangent_of(inputs)[1:3], tangent[:, :4])
        assert torch.equal(tangent_of(level)[1:3], tangent[:, 4:])
        assert tangent_of(level)[[0, 3]].eq(0).all()


def first_of(parts: Any) -> Tensor:
    part = parts[0]
    assert isinstance(part, Tensor)
    return part


def without_grad(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor[:5]


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda buffer: first_of(buffer.split(5)),
    lambda buffer: first_of(buffer.chunk(2)),
    lambda buffer: first_of(buffer.view(2, 5, -1).unbind()),
    lambda buffer: first_of(buffer.split(5))[:, :],
    without_grad,
    lambda buffer: without_grad(buffer)[:, :],
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("followed", ["rows", "destination"])
def test_views_that_autograd_does_not_rewrite_are_refused_and_stay(
    width: int, picture: str, view: Callable[[Tensor], Tensor], followed: str
) -> None:
    mask = mask_of(picture)
    buffer = torch.zeros(10, width)
    if followed == "destination":
        buffer = buffer.requires_grad_() * 1
    inputs = view(buffer)
    source = torch.ones(3, width, requires_grad=followed == "rows" or not inputs.requires_grad)
    for given in (source, [source[:1], source[1:].double()]):
        for target, marks in ((inputs, mask), (inputs.unsqueeze(0), mask[None])):
            with pytest.raises(EmbeddingError, match="autograd forbids"):
                merge_embeddings(target, given, marks)
    request = request_of([item(0, 5, is_embed=mask.tolist())], 5)
    held = {0: torch.cat([source, source], 1)}
    first = torch.full((5, width), 7.0)
    with pytest.raises(EmbeddingError, match="autograd forbids"):
        MergePlan([lookup_of(request, (0, 5), held)]).merge_into(first, inputs)
    assert first.eq(7).all()
    assert buffer.eq(0).all()
    with torch.no_grad():
        merge_embeddings(inputs, source, mask)  # nobody follows
        assert torch.equal(inputs[mask], source)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
def test_rows_that_autograd_does_not_read_are_named_before_anything_is_written(width: int, picture: str) -> None:
    buffer = torch.zeros(6, width, requires_grad=True) * 1
    stale, (batched, _) = first_of(buffer.split(3)), buffer.view(2, 3, width).split(1)
    with torch.no_grad():
        buffer.fill_(1)
    inputs, fine = torch.zeros(5, width), torch.ones(1, width)
    for given, wrong in (([fine, fine, stale], 2), ([fine, batched], 1), ([[fine], stale], 1), (stale, 0)):
        with pytest.raises(EmbeddingError, match="autograd") as caught:
            merge_embeddings(inputs, given, mask_of(picture))
        assert caught.value.item == wrong
    request = request_of([item(0, 1), item(1, 3, "b")], 5)
    with pytest.raises(EmbeddingError, match="autograd") as caught:
        MergePlan([lookup_of(request, (0, 5), {0: fine, 1: stale})]).merge_into(inputs)
    assert caught.value.item == 1
    assert inputs.eq(0).all()
    with torch.no_grad():
        merge_embeddings(inputs, stale, mask_of(picture))
    assert inputs[mask_of(picture)].eq(1).all()


def test_such_a_view_is_written_to_when_there_is_nothing_to_follow() -> None:
    inputs, level = torch.zeros(4, 2, 4).unbind(1)
    request = request_of([item(1, 2)])
    MergePlan([lookup_of(request, (0, 4), {0: torch.ones(2, 8)})]).merge_into(inputs, level)
    assert inputs[1:3].eq(1).all()
    assert level[1:3].eq(1).all()
    narrow = torch.ones(2, 4, requires_grad=True)  # which do not go into the level
    target = torch.zeros(4, 4)
    MergePlan([lookup_of(request, (0, 4), {0: narrow})]).merge_into(target, level)
    assert target.requires_grad
    assert level.eq(0).all()


@pytest.mark.parametrize("wrap", [torch.func.grad, torch.func.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))])
def test_inside_a_transform_there_is_no_memory_to_merge(wrap: Callable[..., Any]) -> None:
    request = request_of([item(0, 3)], 6)
    untouched = torch.zeros(6, 2)

    def merged(given: Tensor) -> Tensor:
        source = given.expand(3, 2)
        for target in (untouched, torch.zeros(6, 2) * source.sum()):
            for rows in (source, [source[:1], source[1:]]):
                with pytest.raises(EmbeddingError, match="memory"):
                    merge_embeddings(target, rows, mask_of("-###--"))
            with pytest.raises(EmbeddingError, match="memory"):
                MergePlan([lookup_of(request, (0, 6), {0: source})]).merge_into(target)
        return source.sum()

    wrap(merged)(torch.ones(4, 1, 1) if wrap is torch.func.vmap else torch.ones(1, 1))
    assert untouched.eq(0).all()


def test_a_mask_inside_a_transform_is_refused() -> None:
    def merged(marks: Tensor) -> Tensor:
        with pytest.raises(EmbeddingError, match="memory"):
            merge_embeddings(torch.zeros(5, 2), torch.ones(3, 2), marks)
        return marks

    torch.func.vmap(merged)(torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("picture", ["-###-", "#-#-#", "#-##-#-###-#-#-##--#"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("followed", [False, True])
def test_the_smallest_floats_are_a_destination_of_any_strides(
    dtype: torch.dtype, picture: str, width: int, device: str, followed: bool
) -> None:
    mask = mask_of(picture)
    size, count = len(mask), int(mask.sum())
    source = (torch.arange(count * width).view(count, width) % 7 + 1).float().requires_grad_(followed)
    with SimulatedDevice("cuda:0"):
        for inputs in (
            torch.zeros(size, width, dtype=dtype, device=device),
            torch.zeros(width, size, dtype=dtype, device=device).t(),
            torch.zeros(size, 2 * width, dtype=dtype, device=device)[:, ::2],
        ):
            merge_embeddings(inputs, [source[:1], source[1:]], mask)
            assert inputs.requires_grad == followed
            found = inputs.detach().cpu().float()
            assert torch.equal(found[mask], source.detach())
            assert found[~mask].eq(0).all()
