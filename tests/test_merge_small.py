"""`merge_embeddings` where little is written: few rows, many tiny sources, and all that must still be noticed there."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmcache import native
from mmcache.errors import EmbeddingError
from mmcache.merge import merge_embeddings

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)


def mask_of(picture: str) -> Tensor:
    return torch.tensor([c == "#" for c in picture])


class Count(TorchDispatchMode):
    """Names the operations that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("picture", ["-###--", "#-#--#", "--#---", "######"])
@pytest.mark.parametrize(
    ("pieces", "dtype", "expected"),
    [
        (1, torch.bfloat16, []),
        (3, torch.bfloat16, ["cat"]),
        (1, torch.float32, ["_to_copy"]),
        (3, torch.float32, ["cat", "_to_copy"]),
        (3, torch.float16, ["cat", "_to_copy"]),
    ],
)
def test_a_few_rows_take_no_operation_but_those_that_join_and_convert(
    picture: str, pieces: int, dtype: torch.dtype, expected: list[str]
) -> None:
    if dtype is torch.float32 and native.scatter_rounded is not None:
        expected = [name for name in expected if name != "_to_copy"]
    mask = mask_of(picture)
    rows = torch.randn(int(mask.sum()), 8).to(dtype)
    parts = [part.clone() for part in torch.tensor_split(rows, pieces)]
    inputs = torch.zeros(6, 8, dtype=torch.bfloat16)
    with Count() as count:
        merge_embeddings(inputs, parts, mask)
    assert count.names == expected
    assert torch.equal(inputs[mask], rows.to(torch.bfloat16))
    assert inputs[~mask].eq(0).all()


@settings(max_examples=120, deadline=None)
@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=80),
    width=st.sampled_from([1, 7, 64]),
    cuts=st.lists(st.integers(0, 80), max_size=70),
    dtypes=st.sampled_from(
        [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.half, torch.float)]
    ),
    nested=st.booleans(),
)
def test_any_number_of_tiny_sources_equals_the_masked_assignment(
    flags: list[bool], width: int, cuts: list[int], dtypes: tuple[torch.dtype, torch.dtype], nested: bool
) -> None:
    mask = torch.tensor(flags)
    rows = torch.randn(sum(flags), width).to(dtypes[0])
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts: Any = [rows[a:b] for a, b in pairwise(bounds)]
    inputs = torch.randn(len(flags), width).to(dtypes[1])
    right = inputs.clone()
    right[mask] = rows.to(dtypes[1])
    version = inputs._version
    merge_embeddings(inputs, [parts[:1], tuple(parts[1:])] if nested else parts, mask)
    assert torch.equal(inputs, right)
    assert inputs._version > version or not len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_row_is_never_repeated_and_none_left_out(dtype: torch.dtype, as_list: bool, count: int) -> None:
    inputs = torch.zeros(6, 4)
    rows = torch.ones(count, 4, dtype=dtype)
    with pytest.raises(EmbeddingError) as raised:
        merge_embeddings(inputs, [rows] if as_list else rows, mask_of("##-##-"))
    assert (raised.value.found, raised.value.expected) == (count, 4)
    assert inputs.eq(0).all()


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("wrong", ["integers", "flags", "complex", "integers all over", "one dimension", "nested"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_joining_would_swallow_is_named(count: int, wrong: str) -> None:
    parts: list[Any] = [torch.ones(1, 4) for _ in range(count)]
    if wrong == "integers all over":
        parts = [part.long() for part in parts]
    else:
        parts[1] = {
            "integers": torch.ones(1, 4).long(),
            "flags": torch.ones(1, 4).bool(),
            "complex": torch.ones(1, 4).cfloat(),
            "one dimension": torch.ones(4),
            "nested": torch.nested.nested_tensor([torch.ones(1, 4)]),
        }[wrong]
    inputs = torch.zeros(2 * count, 4)
    with pytest.raises(EmbeddingError) as raised:
        merge_embeddings(inputs, parts, torch.arange(2 * count) < count)
    assert raised.value.item == (0 if wrong == "integers all over" else 1)
    assert inputs.eq(0).all()


def test_rows_of_a_mix_of_dtypes_keep_the_bits_of_those_that_fit() -> None:
    bits = torch.full((1, 4), 0x7FA5, dtype=torch.int16)  # a NaN with a payload
    inputs = torch.zeros(4, 4, dtype=torch.bfloat16)
    merge_embeddings(inputs, [torch.ones(1, 4), bits.view(torch.bfloat16)], mask_of("-#-#"))
    assert torch.equal(inputs[3:].view(torch.int16), bits)
    assert inputs[1].eq(1).all()


def test_an_empty_tensor_of_one_dimension_is_no_rows() -> None:
    for parts in ([torch.empty(0), torch.ones(1, 4)], [torch.ones(1, 4), torch.empty(0), torch.ones(0, 4)]):
        assert merge_embeddings(torch.zeros(2, 4), parts, mask_of("-#"))[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("view", [torch._neg_view, torch.neg])
def test_rows_that_are_negated_lazily_and_contiguous(count: int, view: Any) -> None:
    mask = torch.arange(2 * count) % 2 == 0
    rows = torch.randn(count, 4)
    inputs = torch.zeros(2 * count, 4)
    merge_embeddings(inputs, view(rows), mask)
    assert torch.equal(inputs[mask], -rows)
    held = torch.zeros(2 * count, 4)
    merge_embeddings(torch._neg_view(held), rows, mask)
    assert torch.equal(held[mask], -rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_masks_without_memory_of_their_own(dtype: torch.dtype) -> None:
    inputs = torch.ones(4, 3, dtype=dtype)
    merge_embeddings(inputs, torch._efficientzerotensor((2, 3)), mask_of("##--"))
    assert inputs[:, 0].tolist() == [0, 0, 1, 1]
    nowhere = torch._efficientzerotensor((4,), dtype=torch.bool)
    merge_embeddings(inputs, torch.ones(0, 3), nowhere)
    with pytest.raises(EmbeddingError):
        merge_embeddings(inputs, torch.ones(1, 3), nowhere)
    assert inputs[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("rows", [3, 400])
@pytest.mark.parametrize("picture", ["one run", "every other"])
def test_the_same_memory_as_another_dtype_is_read_before_it_is_written(rows: int, picture: str) -> None:
    width = 1000
    buffer = torch.randn(2 * rows, width)
    inputs = buffer.view(torch.bfloat16).view(4 * rows, width)
    source = buffer[:rows]
    places = torch.arange(4 * rows)
    mask = (places > 0) & (places <= rows) if picture == "one run" else places % 4 == 1
    right = source.to(torch.bfloat16)
    merge_embeddings(inputs, source, mask)
    assert torch.equal(inputs[mask].view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_require_grad_are_seen_by_autograd_in_a_plain_destination(pieces: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    merged = merge_embeddings(torch.zeros(5, 4), list(torch.tensor_split(rows, pieces)), mask_of("#-##-"))
    merged.sum().backward()
    assert rows.grad is not None
    assert rows.grad.eq(1).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_sparse_masks_and_nested_destinations_are_refused() -> None:
    with pytest.raises(EmbeddingError, match="is_multimodal"):
        merge_embeddings(torch.zeros(3, 4), torch.ones(1, 4), mask_of("#--").to_sparse())
    with pytest.raises(EmbeddingError, match="inputs_embeds"):
        merge_embeddings(torch.nested.nested_tensor([torch.ones(1, 4)] * 2), torch.ones(1, 4), mask_of("#-"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_sources_beyond_what_is_joined_at_once(dtype: torch.dtype) -> None:
    rows = torch.randn(1200, 2048).to(dtype)  # more than 4 MiB in sources of a row
    inputs = torch.zeros(2401, 2048, dtype=torch.bfloat16)
    merge_embeddings(inputs, [row.clone() for row in rows.split(1)], torch.arange(2401) % 2 == 1)
    gc.collect()
    assert torch.equal(inputs[1::2], rows.to(torch.bfloat16))
    assert inputs[::2].eq(0).all()
