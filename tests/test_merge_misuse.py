"""What is no sequence of rows, no rows and no ids: a typed error, and nothing written."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from merge_helpers import item, lookup_of, request_of, rows

from mmcache.errors import EmbeddingError
from mmcache.merge import MergePlan, merge_embeddings
from mmcache.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)

MASK = torch.tensor([False, True, True, False])
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]


def nested_in(depth: int) -> list[Any]:
    embeddings: list[Any] = [rows(2)]
    for _ in range(depth):
        embeddings = [embeddings]
    return embeddings


def within_itself(count: int) -> list[Any]:
    embeddings: list[Any] = []
    embeddings += [embeddings] * count
    return embeddings


@pytest.mark.parametrize(
    "embeddings", [nested_in(100_000), within_itself(1), within_itself(3), [rows(2), nested_in(9999)]]
)
def test_sequences_that_nest_without_an_end_are_refused(embeddings: Any) -> None:
    inputs = torch.zeros(4, 4)
    with pytest.raises(EmbeddingError, match="deep"):
        merge_embeddings(inputs, embeddings, MASK)
    assert inputs.eq(0).all()


@pytest.mark.parametrize(
    "embeddings",
    [{rows(2): 0}, {rows(2)}, {"image": rows(2)}, {"image": rows(2)}.values(), iter([rows(2)]), frozenset([rows(2)])],
)
def test_one_tensor_in_what_is_no_sequence_is_refused(embeddings: Any) -> None:
    inputs = torch.zeros(4, 4)
    with pytest.raises(EmbeddingError, match="sequence"):
        merge_embeddings(inputs, embeddings, MASK)
    assert inputs.eq(0).all()


def test_any_sequence_is_taken() -> None:
    for embeddings in (deque([rows(2)]), deque([rows(1), rows(1, start=5)]), (deque([rows(2)]),), nested_in(20)):
        assert torch.equal(merge_embeddings(torch.zeros(4, 4), embeddings, MASK)[1:3], rows(2))


@pytest.mark.parametrize("shape", [(4, 0), (1, 4, 0), (2, 2, 0), (2, 1, 2, 0)])
def test_a_destination_without_columns_takes_rows_without_columns(shape: tuple[int, ...]) -> None:
    inputs, mask = torch.zeros(shape), MASK.view(shape[:-1])
    assert merge_embeddings(inputs, torch.zeros(2, 0), mask) is inputs
    with pytest.raises(EmbeddingError, match="3 rows for 2 slots"):
        merge_embeddings(inputs, torch.zeros(3, 0), mask)


@pytest.mark.parametrize(
    "held", [None, [1.0], "rows", torch.nested.nested_tensor([torch.ones(4), torch.ones(4)]), rows(2).to_sparse()]
)
def test_a_plan_names_the_item_whose_rows_are_no_dense_tensor(held: Any) -> None:
    request = request_of([item(0, 1, "a"), item(1, 2, "b")])
    inputs = torch.zeros(4, 4)
    with pytest.raises(EmbeddingError, match="dense") as caught:
        MergePlan([lookup_of(request, (0, 4), {0: rows(1), 1: held})]).merge_into(inputs)
    assert (caught.value.request_id, caught.value.item) == ("r", 1)
    assert inputs.eq(0).all()


@pytest.mark.parametrize("dtype", UNSIGNED + SIGNED)
@pytest.mark.parametrize("is_embed", [None, [True, False] * 9])  # on a device strided fills, and an indexed one
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_token_ids_of_every_integer_dtype(dtype: torch.dtype, is_embed: list[bool] | None, device: str) -> None:
    plan = MergePlan([lookup_of(request_of([item(1, 18, is_embed=is_embed)], 20), (0, 20), {})])
    bounds = torch.iinfo(dtype)
    mask = plan.is_multimodal.tolist()
    with SimulatedDevice("cuda:0"):
        for token_id in (0, 7, bounds.min, bounds.max):
            ids = torch.arange(20).to(dtype).to(device)
            safe = plan.safe_token_ids(ids, token_id)
            assert safe.dtype is dtype
            assert safe.tolist() == [token_id if hit else i for i, hit in enumerate(mask)]
            assert ids.tolist() == list(range(20))
        for token_id in (bounds.min - 1, bounds.max + 1, 0.5, "a", None, True):
            with pytest.raises(EmbeddingError, match="token_id"):
                plan.safe_token_ids(torch.arange(20).to(dtype).to(device), token_id)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "ids",
    [
        torch.arange(4).to_sparse(),
        torch.ones(4, 4, dtype=torch.int64).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(4, dtype=torch.int64)]),
        torch.ones(4, dtype=torch.bool),
        torch.ones(4, dtype=torch.complex64),
    ],
)
def test_token_ids_that_are_no_dense_integers_are_refused(ids: Any) -> None:
    plan = MergePlan([lookup_of(request_of([item(1, 2)]), (0, 4), {})])
    with pytest.raises(EmbeddingError, match="token ids are"):
        plan.safe_token_ids(ids)
