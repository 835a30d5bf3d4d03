"""Masks of any layout in memory, and what becomes of them during a merge, in every way that rows are written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

import pytest
import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge import merge_embeddings

pytestmark = pytest.mark.usefixtures("copies")

TOKENS = 120
FEW, MANY = 8, 60_000  # columns: of some bytes, and of more than the processor's cache holds
# Given and wanted dtype: copied, rounded and converted.
DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]


def ways(test: Callable[..., None]) -> Callable[..., None]:
    for names, values in ((("given", "wanted"), DTYPES), ("width", [FEW, MANY]), ("sources", [1, 3])):
        test = pytest.mark.parametrize(names, values)(test)
    return test


def rows_of(count: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(count)[:, None].add(torch.arange(width)).float().div(3).to(dtype)


def interleaved(mask: Tensor) -> Tensor:
    return torch.stack([mask, ~mask], 1)[:, 0]


def every_third(mask: Tensor) -> Tensor:
    return torch.stack([~mask, mask, torch.ones_like(mask)], 1).view(-1)[1::3]


def of_any_bytes(mask: Tensor) -> Tensor:
    """True is whatever byte is not zero."""
    return (mask.to(torch.uint8) * torch.arange(1, len(mask) + 1).remainder(255).add(1).to(torch.uint8)).view(
        torch.bool
    )


LAYOUTS = [interleaved, every_third, of_any_bytes]


@ways
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_of_any_layout(
    given: torch.dtype, wanted: torch.dtype, width: int, layout: Callable[[Tensor], Tensor], sources: int
) -> None:
    plain = torch.arange(TOKENS) % 17 > 4
    mask = layout(plain)
    rows = rows_of(int(plain.sum()), width, given)
    inputs = torch.ones(TOKENS, width, dtype=wanted)
    expected = inputs.clone()
    expected[plain] = rows.to(wanted)
    merge_embeddings(inputs, rows.tensor_split(sources), mask)
    assert torch.equal(inputs, expected)


@ways
def test_one_true_that_stands_for_all(given: torch.dtype, wanted: torch.dtype, width: int, sources: int) -> None:
    rows = rows_of(TOKENS, width, given)
    inputs = torch.zeros(TOKENS, width, dtype=wanted)
    merge_embeddings(inputs, rows.tensor_split(sources), torch.ones(1, dtype=torch.bool).expand(TOKENS))
    assert torch.equal(inputs, rows.to(wanted))


@ways
def test_the_mask_of_a_batch_whose_dimensions_were_swapped(
    given: torch.dtype, wanted: torch.dtype, width: int, sources: int
) -> None:
    mask = (torch.arange(TOKENS) % 7 > 1).view(TOKENS // 4, 4).t()
    rows = rows_of(int(mask.sum()), width, given)
    inputs = torch.zeros(4, TOKENS // 4, width, dtype=wanted)
    expected = inputs.clone()
    expected[mask] = rows.to(wanted)
    merge_embeddings(inputs, rows.tensor_split(sources), mask)
    assert torch.equal(inputs, expected)


@ways
def test_a_mask_that_lies_in_the_destination_is_read_first(
    given: torch.dtype, wanted: torch.dtype, width: int, sources: int
) -> None:
    inputs = torch.zeros(TOKENS, width, dtype=wanted)
    mask = inputs.view(-1).view(torch.bool)[:TOKENS]
    mask[3 : TOKENS - 5] = True
    expected = inputs.clone()
    rows = rows_of(TOKENS - 8, width, given)
    expected[3 : TOKENS - 5] = rows.to(wanted)
    merge_embeddings(inputs, rows.tensor_split(sources), mask)
    assert torch.equal(inputs.view(torch.int16), expected.view(torch.int16))


@ways
def test_a_mask_that_others_write_to_meanwhile(
    given: torch.dtype, wanted: torch.dtype, width: int, sources: int
) -> None:
    """Whichever marks were read: whole rows, at places that were marked at some time, and nothing beside them."""
    masks = [torch.arange(TOKENS).add(k) % 6 < 4 for k in (0, 1)]
    mask = masks[0].clone()
    rows = torch.arange(1, TOKENS * 2 // 3 + 1)[:, None].to(given).repeat(1, width)
    store = torch.zeros(TOKENS + 2, width, dtype=wanted)
    inputs = store[1:-1]
    ended = Event()

    def write() -> None:
        turn = 0
        while not ended.is_set():
            turn ^= 1
            mask.copy_(masks[turn])

    writer = Thread(target=write)
    writer.start()
    try:
        for _ in range(300 if width == FEW else 5):
            with suppress(EmbeddingError):  # a mask that was half written may have another number of marks
                merge_embeddings(inputs, rows.tensor_split(sources), mask)
    finally:
        ended.set()
        writer.join()
    assert not inputs[~(masks[0] | masks[1])].any()
    assert not store[[0, -1]].any()
    assert store.eq(store[:, :1]).all()


class Named(Tensor):
    """Whose operations return its kind, as those of any subclass."""


@ways
def test_rows_of_a_class_of_their_own(given: torch.dtype, wanted: torch.dtype, width: int, sources: int) -> None:
    mask = torch.arange(TOKENS) % 3 != 1
    rows = rows_of(int(mask.sum()), width, given)
    inputs = torch.zeros(TOKENS, width, dtype=wanted)
    expected = inputs.clone()
    expected[mask] = rows.to(wanted)
    merge_embeddings(inputs, [part.as_subclass(Named) for part in rows.tensor_split(sources)], mask)
    assert torch.equal(inputs, expected)
