"""`merge_embeddings` with awkward tensors: overlaps, autograd, inference mode, odd masks, many sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge import merge_embeddings
from mmcache.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
WIDTHS = [3, 50000]  # few elements, and many: they go different ways
PICTURES = ["-###-", "#-#-#"]


def mask_of(picture: str) -> Tensor:
    return torch.tensor([c == "#" for c in picture])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
def test_memory_that_is_shared_under_another_name_is_seen(width: int, picture: str) -> None:
    array = np.arange(5 * width, dtype=np.float32).reshape(5, width)
    inputs = torch.from_numpy(array)
    sources = [torch.from_numpy(array[2:4]), torch.from_numpy(array[1:2])]  # storages of their own, the same memory
    right = inputs.clone()
    right[mask_of(picture)] = torch.cat(sources).clone()
    merge_embeddings(inputs, sources, mask_of(picture))
    assert torch.equal(inputs, right)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_that_interleave_with_the_destination_in_one_buffer(width: int) -> None:
    buffer = torch.randn(6, 2, width)
    inputs, source = buffer[:, 0], buffer[:3, 1]
    right = inputs.clone()
    right[1:4] = source
    merge_embeddings(inputs, source, mask_of("-###--"))
    assert torch.equal(inputs, right)


@pytest.mark.parametrize(("shape", "strides"), [((5, 4), (1, 1)), ((9, 4), (2, 1)), ((3, 4), (0, 1)), ((3, 4), (1, 2))])
def test_a_destination_whose_rows_overlap_is_refused(shape: tuple[int, int], strides: tuple[int, int]) -> None:
    inputs = torch.zeros(40).as_strided(shape, strides)
    with pytest.raises(EmbeddingError, match="overlap"):
        merge_embeddings(inputs, torch.ones(1, 4), torch.arange(shape[0]).eq(0))
    assert inputs.eq(0).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
def test_destinations_of_any_strides_that_do_not_overlap(width: int, picture: str) -> None:
    for inputs in (torch.zeros(width, 5).t(), torch.zeros(10, width + 3)[::2, 2:-1], torch.zeros(5, 2 * width)[:, ::2]):
        source = torch.randn(3, width)
        merge_embeddings(inputs, source, mask_of(picture))
        assert torch.equal(inputs[mask_of(picture)], source)
        assert inputs[~mask_of(picture)].eq(0).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
def test_tensors_that_are_negated_lazily(width: int, picture: str) -> None:
    numbers = torch.randn(3, width, dtype=torch.complex64)
    negated = numbers.conj().imag
    assert negated.is_neg()
    inputs = torch.zeros(5, width)
    merge_embeddings(inputs, [negated[:1], negated[1:]], mask_of(picture))
    assert torch.equal(inputs[mask_of(picture)], -numbers.imag)
    target = torch.zeros(5, width, dtype=torch.complex64).conj().imag
    merge_embeddings(target, -negated, mask_of(picture))
    assert torch.equal(target[mask_of(picture)], numbers.imag)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("inner", FLOATS)
def test_every_float_goes_into_every_other(width: int, picture: str, inner: torch.dtype) -> None:
    source = torch.randn(3, width).to(inner)
    for outer in FLOATS:
        inputs = torch.zeros(5, width).to(outer)
        merge_embeddings(inputs, [source[:1], source[1:]], mask_of(picture))
        right = torch.zeros(5, width).to(outer).view(torch.int8)
        right[mask_of(picture)] = source.to(outer).view(torch.int8)
        assert torch.equal(inputs.view(torch.int8), right)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inference_tensor_is_written_to_anywhere(width: int, picture: str, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        inputs, source = torch.zeros(5, width), torch.randn(3, width)
    for given in (source, source.clone().requires_grad_(), [source[:1], source[1:].to(dtype)]):
        merge_embeddings(inputs, given, mask_of(picture))
        right = given if isinstance(given, Tensor) else torch.cat([part.float() for part in given])
        assert torch.equal(inputs[mask_of(picture)], right)
        plain = torch.zeros(5, width)  # and rows of inference mode go into any tensor
        assert torch.equal(merge_embeddings(plain, given, mask_of(picture)).detach(), inputs)
        with torch.inference_mode():
            assert torch.equal(merge_embeddings(torch.zeros(5, width), given, mask_of(picture)), inputs)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
def test_a_leaf_that_requires_grad_is_refused_and_a_parameter_is_written_without_grad(width: int, picture: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(5, width))
    for inputs in (weight, weight[:, :], weight.view(1, 5, width)):
        mask = mask_of(picture).view(inputs.shape[:-1])
        with pytest.raises(EmbeddingError, match="autograd"):
            merge_embeddings(inputs, torch.ones(3, width), mask)
        assert weight.eq(0).all()
    with torch.no_grad():
        merge_embeddings(weight, torch.ones(3, width), mask_of(picture))
    assert weight[mask_of(picture)].eq(1).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd_learns_that_a_tensor_it_saved_has_changed(width: int, picture: str, dtype: torch.dtype) -> None:
    inputs = torch.randn(5, width)
    weight = torch.randn(5, width, requires_grad=True)
    product = (weight * inputs).sum()  # saves `inputs`, of which autograd would use the new rows
    merge_embeddings(inputs, [torch.ones(2, width), torch.ones(1, width).to(dtype)], mask_of(picture))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize("width", [0, 4, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_small_sources_and_empty_ones(length: int, width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(length, width).to(dtype)
    parts = [part for row in rows.split(1) for part in (row, row[:0])]
    mask = torch.arange(2 * length).remainder(2).eq(1)
    inputs = torch.zeros(2 * length, width, dtype=torch.bfloat16)
    merge_embeddings(inputs, parts, mask)
    assert torch.equal(inputs[1::2], rows.to(torch.bfloat16))
    assert inputs[::2].eq(0).all()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("empty", ["first", "between", "last"])
@pytest.mark.parametrize("every", [1, 3])
def test_large_sources_and_empty_ones_of_the_same_memory(
    dtypes: tuple[torch.dtype, torch.dtype], empty: str, every: int
) -> None:
    rows = torch.randn(90, 30000).to(dtypes[0])
    parts = list(rows.split(30))
    parts.insert({"first": 0, "between": 1, "last": 3}[empty], rows[40:40])
    mask = torch.arange(90 * every) % every == 0
    inputs = torch.zeros(90 * every, 30000, dtype=dtypes[1])
    merge_embeddings(inputs, parts, mask)
    assert torch.equal(inputs[mask], rows.to(dtypes[1]))
    assert inputs[~mask].eq(0).all()


@pytest.mark.parametrize("count", [3, 30])
@pytest.mark.parametrize("width", [4, 4000])
@pytest.mark.parametrize("wrong", ["width", "integers", "count", "sparse", "none", "packed", "meta"])
def test_one_wrong_source_among_many_is_named_before_anything_is_written(count: int, width: int, wrong: str) -> None:
    parts: list[Any] = [torch.ones(1, width) for _ in range(count)]
    parts[2] = {
        "width": torch.ones(1, width + 1),
        "integers": torch.ones(1, width, dtype=torch.int64),
        "count": torch.ones(2, width),
        "sparse": torch.ones(1, width).to_sparse(),
        "none": None,
        "packed": torch.zeros(1, width, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "meta": torch.ones(1, width, device="meta"),
    }[wrong]
    inputs = torch.zeros(2 * count, width)
    with pytest.raises(EmbeddingError) as raised:
        merge_embeddings(inputs, parts, torch.arange(2 * count).remainder(2).eq(0))
    assert raised.value.item == (None if wrong == "none" else 2)
    assert ("have values" in str(raised.value)) == (wrong == "meta")
    assert inputs.eq(0).all()


@pytest.mark.parametrize(
    "mask",
    [
        [True, False, False],
        np.array([True, False, False]),
        torch.tensor([1, 0, 0], dtype=torch.uint8),
        torch.tensor([0]),
        torch.tensor([True, False]),
        torch.tensor([[True, False, False]]),
        torch.tensor(True),
        None,
    ],
)
def test_a_mask_is_a_boolean_tensor_of_one_entry_a_row(mask: Any) -> None:
    inputs = torch.zeros(3, 4)
    with pytest.raises(EmbeddingError, match="is_multimodal"):
        merge_embeddings(inputs, torch.ones(1, 4), mask)
    assert inputs.eq(0).all()


def test_masks_of_any_strides() -> None:
    picture = mask_of("#-##-#")
    for mask in (torch.stack([picture, ~picture], 1)[:, 0], picture.repeat_interleave(3)[::3], picture.flip(0).flip(0)):
        inputs = merge_embeddings(torch.zeros(6, 2), torch.ones(4, 2), mask)
        assert inputs[:, 0].tolist() == [1, 0, 1, 1, 0, 1]
    both = merge_embeddings(torch.zeros(2, 6, 2), torch.ones(8, 2), picture.expand(2, 6))
    assert both[:, :, 0].tolist() == [[1, 0, 1, 1, 0, 1]] * 2


@pytest.mark.parametrize(
    "inputs", [None, np.zeros((3, 4)), torch.zeros(3, 4).to_sparse(), torch.zeros(3, 4, dtype=torch.complex64)]
)
def test_destinations_that_cannot_be_merged_into(inputs: Any) -> None:
    with pytest.raises(EmbeddingError, match="inputs_embeds"):
        merge_embeddings(inputs, torch.ones(1, 4), mask_of("#--"))


@pytest.mark.parametrize("count", [3, 40])
def test_sources_of_several_devices_in_one_call(count: int) -> None:
    rows = torch.randn(count, 8)
    mask = torch.arange(2 * count).remainder(2).eq(0)
    for device in ("cpu", "cuda:0"):
        with SimulatedDevice("cuda:0") as sim:
            parts = [sim.to_device(part) if number % 2 else part for number, part in enumerate(rows.split(1))]
            inputs = torch.zeros(2 * count, 8, device=device)
            merge_embeddings(inputs, parts, mask)
            assert sim.mixes == []
            assert str(inputs.device) == device
            assert torch.equal(inputs.cpu()[::2], rows)


def test_the_list_of_sources_stays_as_it_is() -> None:
    inputs = torch.zeros(4, 4)
    parts = [inputs[0:1], torch.ones(1, 4)]
    kept = list(parts)
    merge_embeddings(inputs, parts, mask_of("-##-"))
    assert all(a is b for a, b in zip(parts, kept))
    assert len(parts) == 2
