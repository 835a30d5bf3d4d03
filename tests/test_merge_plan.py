"""`MergePlan`: the rows of a batch of windows, at their places, for any number of destinations."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmcache.errors import EmbeddingError, RequestError, UnresolvedItemError, WindowError
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.merge import MergePlan
from mmcache.testing import SimulatedDevice

torch.set_num_threads(1)


def rows(count: int, width: int = 4, dtype: torch.dtype = torch.float32, start: int = 1) -> Tensor:
    return torch.arange(start, start + count * width, dtype=torch.float32).reshape(count, width).to(dtype)


def item(offset: int, length: int, name: str = "a", is_embed: Sequence[bool] | None = None) -> MultimodalItem:
    return MultimodalItem("image", None, PlaceholderRange(offset, length, is_embed), name)


def lookup_of(
    request: MultimodalRequest, window: tuple[int, int], held: dict[int, Tensor], lookahead: int = 0
) -> SimpleNamespace:
    """What a merge asks of a lookup, with rows from a dict."""
    horizon = window[1] + lookahead

    def rows_for(index: int) -> Tensor:
        if index not in held:
            raise UnresolvedItemError("the rows are not here", request_id=request.request_id, item=index)
        return held[index]

    needed = tuple(
        i
        for i, it in enumerate(request.items)
        if (row := it.placeholder.next_row(window[0])) is not None and row < horizon
    )
    return SimpleNamespace(request=request, window=window, needed=needed, rows=rows_for)


def request_of(items: Sequence[MultimodalItem], length: int = 40, name: str = "r") -> MultimodalRequest:
    return MultimodalRequest(name, list(range(length)), items)


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


# What else there is to get wrong


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


def test_a_merge_is_of_lookups() -> None:
    for wrong in (None, 3, [None], [3], [SimpleNamespace(window=(0, 1))]):
        with pytest.raises(RequestError, match="lookups"):
            MergePlan(wrong)
