"""`MergePlan`: the rows of a batch of windows, at their places, for any number of destinations."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_helpers import Operations, item, lookup_of, request_of, rows
from torch import Tensor

from mmcache.errors import EmbeddingError, UnresolvedItemError
from mmcache.items import MultimodalRequest
from mmcache.merge import MergePlan

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)


def test_a_window_takes_the_rows_that_lie_in_it() -> None:
    request = request_of([item(3, 10)])
    held = {0: rows(10)}
    for start, end, expected in [(7, 20, held[0][4:]), (0, 5, held[0][:2]), (5, 9, held[0][2:6]), (0, 20, held[0])]:
        inputs = torch.zeros(end - start, 4)
        assert MergePlan([lookup_of(request, (start, end), held)]).merge_into(inputs) is inputs
        place = max(0, 3 - start)
        assert torch.equal(inputs[place : place + len(expected)], expected)
        assert inputs.count_nonzero() == expected.numel()
    for start, end in [(0, 3), (13, 20)]:
        inputs = torch.zeros(end - start, 4)
        MergePlan([lookup_of(request, (start, end), held)]).merge_into(inputs)
        assert inputs.count_nonzero() == 0


@settings(max_examples=100, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), max_size=4),
    chunk=st.integers(1, 20),
    gap=st.integers(0, 3),
)
def test_chunks_add_up_to_the_whole_bit_for_bit(masks: list[list[bool]], chunk: int, gap: int) -> None:
    items, held, offset = [], {}, gap
    for index, mask in enumerate(masks):
        items.append(item(offset, len(mask), f"i{index}", mask))
        held[index] = torch.randn(sum(mask), 4)
        offset += len(mask) + gap
    length = offset + 2
    request = request_of(items, length)
    text = torch.randn(length, 4)
    whole = MergePlan([lookup_of(request, (0, length), held)]).merge_into(text.clone())
    expected = text.clone()
    for index, mask in enumerate(masks):
        start = items[index].placeholder.offset
        expected[start : start + len(mask)][torch.tensor(mask)] = held[index]
    assert torch.equal(whole, expected)
    chunks = []
    for start in range(0, length, chunk):
        end = min(length, start + chunk)
        plan = MergePlan([lookup_of(request, (start, end), held)])
        chunks.append(plan.merge_into(text[start:end].clone()))
        flat = torch.zeros(length, dtype=torch.bool)
        for it in items:
            for begin, count in it.placeholder.runs:
                flat[it.placeholder.offset + begin : it.placeholder.offset + begin + count] = True
        assert torch.equal(plan.is_multimodal, flat[start:end])
    assert torch.equal(torch.cat(chunks), whole)


def test_a_mask_with_holes_takes_the_right_rows() -> None:
    mask = [True, True, False, True] * 3
    request = request_of([item(0, 12, is_embed=mask)])
    inputs = torch.zeros(4, 4)
    MergePlan([lookup_of(request, (5, 9), {0: rows(9)})]).merge_into(inputs)
    assert inputs[:, 0].tolist() == [17, 0, 21, 25]  # rows 4, 5 and 6


def test_a_batch_lies_one_window_behind_the_other_and_padding_stays() -> None:
    first = lookup_of(request_of([item(2, 4)]), (0, 8), {0: rows(4)})
    text = lookup_of(request_of([]), (5, 6), {})
    last = lookup_of(request_of([item(1, 6)], name="s"), (3, 10), {0: rows(6, start=101)})
    inputs = torch.full((20, 4), -1.0)
    plan = MergePlan([first, text, last])
    assert plan.num_rows == 16
    plan.merge_into(inputs)
    assert torch.equal(inputs[2:6], rows(4))
    assert torch.equal(inputs[9:13], rows(6, start=101)[2:])
    assert inputs.eq(-1).all(1).sum() == 12


def test_interleaved_items_share_a_span_and_not_a_row() -> None:
    video = item(0, 8, "v", [False, True, True, False, False, True, True, False])
    audio = item(1, 6, "a", [False, False, True, True, False, False])
    request = request_of([video, audio])
    inputs = torch.zeros(8, 4)
    held = {0: rows(4), 1: rows(2, start=101)}
    MergePlan([lookup_of(request, (0, 8), held)]).merge_into(inputs)
    assert inputs[:, 0].tolist() == [0, 1, 5, 101, 105, 9, 13, 0]


def test_a_placeholder_token_that_stands_for_no_item_is_left_alone() -> None:
    typed = MultimodalRequest("r", [7] * 10, [item(4, 2)])  # the user typed the placeholder wherever there is no image
    inputs = torch.full((10, 4), -1.0)
    plan = MergePlan([lookup_of(typed, (0, 10), {0: rows(2)})])
    plan.merge_into(inputs)
    assert inputs[:, 0].tolist() == [-1] * 4 + [1, 5] + [-1] * 4
    assert plan.safe_token_ids(torch.full((10,), 7), 0).tolist() == [7] * 4 + [0, 0] + [7] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_embed", [None, [True, False] * 1000, ([True] * 9 + [False]) * 200])
def test_nothing_is_allocated_that_grows_with_the_bytes(dtype: torch.dtype, is_embed: list[bool] | None) -> None:
    request = request_of([item(0, 2000, is_embed=is_embed)], 2000)
    held = torch.randn(request.items[0].placeholder.num_embeds, 2048).to(dtype)
    targets = [torch.zeros(2000, 1024, dtype=torch.bfloat16) for _ in range(2)]
    plan = MergePlan([lookup_of(request, (0, 2000), {0: held})])
    with Operations():  # PyTorch imports much when an operation is watched for the first time
        plan.merge_into(*targets)
    tracemalloc.start()
    try:
        with Operations() as operations:
            plan.merge_into(*targets)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert operations.largest <= 256 << 10  # written: 2 to 4 MB a level
    assert peak <= 1 << 20
    for number, target in enumerate(targets):
        columns = slice(1024 * number, 1024 * (number + 1))
        assert torch.equal(target[plan.is_multimodal], held[:, columns].to(torch.bfloat16))


def test_a_plan_serves_several_destinations_and_steps() -> None:
    request = request_of([item(1, 2)])
    plan = MergePlan([lookup_of(request, (0, 4), {0: rows(2)})])
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        inputs = torch.zeros(4, 4, dtype=dtype)
        plan.merge_into(inputs)
        assert inputs[:, 0].tolist() == [0, 1, 5, 0]


def test_rows_wider_than_hidden_fill_the_levels_and_zero_the_rest() -> None:
    request = request_of([item(2, 5, is_embed=[True, True, False, True, True])])
    wide = torch.randn(4, 12)
    inputs, levels = torch.full((10, 4), 7.0), [torch.full((size, 4), 7.0) for size in (10, 8)]
    MergePlan([lookup_of(request, (3, 11), {0: wide})]).merge_into(inputs, *levels)
    places = [0, 2, 3]
    for number, target in enumerate([inputs, *levels]):
        assert torch.equal(target[places], wide[1:, 4 * number : 4 * number + 4])
        others = [i for i in range(8) if i not in places]
        assert target[others].eq(0 if number else 7).all()
        assert target[8:].eq(7).all()  # padding


def test_levels_without_items_become_zero() -> None:
    plan = MergePlan([lookup_of(request_of([]), (0, 3), {})])
    inputs, level = torch.ones(3, 4), torch.ones(5, 4)
    assert plan.merge_into(inputs, level) is inputs
    assert inputs.eq(1).all()
    assert level[:3].eq(0).all()
    assert level[3:].eq(1).all()


def test_items_without_levels_leave_zeros_in_them() -> None:
    request = request_of([item(0, 2, "video"), item(3, 2, "audio")])
    inputs, level = torch.zeros(6, 4), torch.full((6, 4), 7.0)
    MergePlan([lookup_of(request, (0, 6), {0: torch.ones(2, 8), 1: torch.ones(2, 4)})]).merge_into(inputs, level)
    assert inputs[:, 0].tolist() == [1, 1, 0, 1, 1, 0]
    assert level[:, 0].tolist() == [1, 1, 0, 0, 0, 0]


def test_an_unresolved_item_raises_before_any_write() -> None:
    good = lookup_of(request_of([item(0, 2)]), (0, 4), {0: rows(2)})
    bad = lookup_of(request_of([item(0, 2)], name="bad"), (0, 4), {})
    inputs, level = torch.zeros(8, 4), torch.ones(8, 4)
    with pytest.raises(UnresolvedItemError) as raised:
        MergePlan([good, bad]).merge_into(inputs, level)
    assert (raised.value.request_id, raised.value.item) == ("bad", 0)
    assert inputs.eq(0).all()
    assert level.eq(1).all()


def test_unresolved_items_fall_back_to_the_text_embedding_by_option() -> None:
    request = request_of([item(0, 2, "a"), item(3, 2, "b")])
    inputs = torch.full((6, 4), -1.0)
    MergePlan([lookup_of(request, (0, 6), {0: rows(2)})], skip_unresolved=True).merge_into(inputs)
    assert inputs[:, 0].tolist() == [1, 5, -1, -1, -1, -1]


@pytest.mark.parametrize("wrong", [rows(9), rows(11), rows(10, 5), rows(10, 8), rows(10).long(), torch.ones(40)])
def test_one_bad_item_is_named_and_no_row_of_the_batch_is_touched(wrong: Tensor) -> None:
    lookups = [
        lookup_of(request_of([item(0, 2, "x"), item(2, 10)], name=name), (0, 12), {0: rows(2), 1: held})
        for name, held in (("p", rows(10)), ("q", wrong), ("s", rows(10)))
    ]
    inputs = torch.zeros(36, 4)
    with pytest.raises(EmbeddingError) as raised:
        MergePlan(lookups).merge_into(inputs)
    assert (raised.value.request_id, raised.value.item) == ("q", 1)
    assert inputs.eq(0).all()
    MergePlan([lookups[0], lookups[2]]).merge_into(inputs)  # the others go on
    assert inputs.count_nonzero() == 2 * 12 * 4


@pytest.mark.parametrize(
    ("inputs", "levels"),
    [
        (torch.zeros(5, 4), []),  # too short
        (torch.zeros(2, 6, 4), []),
        (torch.zeros(6, 4, dtype=torch.int32), []),
        (torch.zeros(6, 4), [torch.zeros(5, 4)]),
        (torch.zeros(6, 4), [torch.zeros(6, 5)]),
    ],
)
def test_destinations_that_do_not_fit(inputs: Tensor, levels: list[Tensor]) -> None:
    plan = MergePlan([lookup_of(request_of([item(0, 2)]), (0, 6), {0: rows(2, 8) if levels else rows(2)})])
    with pytest.raises(EmbeddingError):
        plan.merge_into(inputs, *levels)
    assert inputs.eq(0).all()


def test_a_window_without_items_returns_its_argument() -> None:
    inputs = torch.ones(1, 4)
    assert MergePlan([lookup_of(request_of([item(0, 2)]), (39, 40), {})]).merge_into(inputs) is inputs
    assert MergePlan([]).merge_into(inputs) is inputs
    batched = torch.zeros(1, 4, 4)
    MergePlan([lookup_of(request_of([item(0, 2)]), (0, 4), {0: rows(2)})]).merge_into(batched)
    assert batched[0, :2].equal(rows(2))
