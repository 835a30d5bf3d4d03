"""Merges that are larger than the processor's cache, which they pass by: the same rows in the same places."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from merge_helpers import item, lookup_of, request_of
from torch import Tensor

from mmcache.merge import MergePlan, merge_embeddings

pytestmark = pytest.mark.usefixtures("copies")

TOKENS, WIDTH = 3000, 2048
RUNS = {"one run": [2200], "images": [256] * 8, "single rows": [1] * 1400, "mixed": [1, 700, 3, 40, 900, 17, 1, 500]}
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def spread(lengths: Sequence[int]) -> Tensor:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    start = 1
    for length in lengths:
        mask[start : start + length] = True
        start += length + 1
    return mask


def equal(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("lengths", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(("given", "wanted"), DTYPES)
@pytest.mark.parametrize("sources", [1, 13])
def test_a_large_merge_equals_the_masked_assignment(
    lengths: list[int], given: torch.dtype, wanted: torch.dtype, sources: int
) -> None:
    mask = spread(lengths)
    rows = torch.randn(int(mask.sum()), WIDTH).to(given)
    inputs = torch.randn(TOKENS, WIDTH).to(wanted)
    expected = inputs.clone()
    expected[mask] = rows.to(wanted)
    merge_embeddings(inputs, [part.clone() for part in torch.tensor_split(rows, sources)], mask)
    assert equal(inputs, expected)


@pytest.mark.parametrize(("given", "wanted"), DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_rows_that_do_not_lie_side_by_side(given: torch.dtype, wanted: torch.dtype, shift: int) -> None:
    mask = spread(RUNS["mixed"])
    count = int(mask.sum())
    rows = torch.randn(count, WIDTH + 40).to(given)[:, shift : shift + WIDTH]
    buffer = torch.randn(TOKENS, WIDTH + 24).to(wanted)
    inputs = buffer[:, shift : shift + WIDTH]
    expected = buffer.clone()
    expected[:, shift : shift + WIDTH][mask] = rows.to(wanted)
    merge_embeddings(inputs, [rows[:1000], rows[1000:]], mask)
    assert equal(buffer, expected)


@pytest.mark.parametrize(("given", "wanted"), DTYPES)
def test_a_large_plan(given: torch.dtype, wanted: torch.dtype) -> None:
    items = [item(5, 700), item(800, 900, "b", [True, False] * 450), item(1750, 1200, "c")]
    request = request_of(items, TOKENS)
    held = {i: torch.randn(it.placeholder.num_embeds, WIDTH).to(given) for i, it in enumerate(items)}
    plan = MergePlan([lookup_of(request, (0, TOKENS), held)])
    inputs = torch.randn(TOKENS, WIDTH).to(wanted)
    expected = inputs.clone()
    expected[5:705], expected[800:1700:2], expected[1750:2950] = (rows.to(wanted) for rows in held.values())
    plan.merge_into(inputs)
    assert equal(inputs, expected)
