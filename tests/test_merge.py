"""`merge_embeddings`: rows over the True positions of a mask, in place."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_helpers import Operations
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.merge import merge_embeddings
from mmcache.testing import SimulatedDevice

pytestmark = pytest.mark.usefixtures("copies")

torch.set_num_threads(1)


def mask_of(text: str) -> Tensor:
    """A mask from a picture: `#` receives a row."""
    return torch.tensor([c == "#" for c in text.replace(" ", "")])


def rows(count: int, width: int = 4, dtype: torch.dtype = torch.float32, start: int = 1) -> Tensor:
    return torch.arange(start, start + count * width, dtype=torch.float32).reshape(count, width).to(dtype)


def reference(inputs: Tensor, parts: Sequence[Tensor], mask: Tensor) -> Tensor:
    result = inputs.clone()
    result[mask] = torch.cat([p.detach().to(inputs.device, inputs.dtype) for p in parts])
    return result


def test_rows_fill_the_true_positions_in_order_in_place() -> None:
    inputs = torch.zeros(6, 4)
    result = merge_embeddings(inputs, rows(3), mask_of("-##--#"))
    assert result is inputs
    assert inputs[:, 0].tolist() == [0, 1, 5, 0, 0, 9]


def test_nothing_to_merge_changes_nothing() -> None:
    inputs = torch.ones(3, 4)
    assert merge_embeddings(inputs, [], mask_of("---")) is inputs
    assert merge_embeddings(inputs, torch.empty(0, 4), mask_of("---")) is inputs
    assert merge_embeddings(torch.ones(0, 4), [], torch.zeros(0, dtype=torch.bool)).shape == (0, 4)
    assert inputs.eq(1).all()


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    runs=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=12),
    width=st.sampled_from([1, 8, 700]),
    dtypes=st.sampled_from(
        [
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float64),
            (torch.float32, torch.float32),
        ]
    ),
)
def test_equals_the_masked_assignment_for_any_runs_and_sources(
    data: st.DataObject, runs: list[tuple[int, int]], width: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    mask = torch.tensor([flag for gap, length in runs for flag in [False] * gap + [True] * length] + [False] * 2)
    count = int(mask.sum())
    all_rows = torch.randn(count, width).to(dtypes[1])
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    parts = [all_rows[a:b] for a, b in zip([0, *cuts], [*cuts, count])]
    inputs = torch.randn(len(mask), width).to(dtypes[0])
    expected = reference(inputs, parts, mask)
    assert torch.equal(merge_embeddings(inputs, parts, mask), expected)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn],
)
def test_rows_of_equal_dtype_keep_every_bit(dtype: torch.dtype) -> None:
    bits = torch.randint(-128, 128, (64, 600 * dtype.itemsize), dtype=torch.int8)  # NaN payloads among them
    source = bits.view(dtype)
    inputs = torch.zeros(70, 600, dtype=dtype)
    merge_embeddings(inputs, source, mask_of("---" + "#" * 64 + "---"))
    assert torch.equal(inputs[3:67].view(torch.int8), bits)
    for width in (5, 600):  # and on ways of their own: few elements, and rows by index
        inputs = torch.zeros(128, width, dtype=dtype)
        merge_embeddings(inputs, source[:, :width], mask_of("#-" * 64))
        assert torch.equal(inputs[::2].view(torch.int8), source[:, :width].contiguous().view(torch.int8))


@pytest.mark.parametrize("width", [5, 2000])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_sources_of_several_dtypes_in_one_call(width: int, device: str) -> None:
    dtypes = [torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.float16, torch.float64]
    parts = [torch.randn(8, width).to(dtype) for dtype in dtypes]
    mask = mask_of("#--##-#" * 10)
    with SimulatedDevice("cuda:0"):
        for dtype in dtypes:
            inputs = torch.zeros(70, width, dtype=dtype, device=device)
            merge_embeddings(inputs, parts, mask)
            right = torch.cat([part.to(dtype).view(torch.int8) for part in parts])
            assert torch.equal(inputs.cpu().view(torch.int8)[mask], right)


@pytest.mark.parametrize("picture", ["#" * 40 + "-", "#-" * 40, "##-" * 20 + "-", "-" + "#" * 25 + "--" + "#" * 15])
@pytest.mark.parametrize("width", [8, 2000])
def test_sources_of_any_strides(picture: str, width: int) -> None:
    mask = mask_of(picture)
    base = torch.randn(width, 80)
    inputs = torch.randn(len(mask), width)
    for source in (base.t()[::2], base.t()[40:], torch.randn(1, width).expand(40, -1)):
        expected = reference(inputs, [source], mask)
        assert torch.equal(merge_embeddings(inputs.clone(), source, mask), expected)


def test_destination_may_be_a_slice_of_a_larger_buffer() -> None:
    buffer = torch.zeros(10, 8)
    merge_embeddings(buffer[2:8, 2:6], rows(2), mask_of("-#--#-"))
    assert buffer[3, 2:6].tolist() == [1, 2, 3, 4]
    assert buffer[6, 2:6].tolist() == [5, 6, 7, 8]
    assert buffer.count_nonzero() == 8


def test_destination_may_have_batch_dimensions() -> None:
    inputs = torch.zeros(2, 3, 4)
    merge_embeddings(inputs, [rows(2)], torch.stack([mask_of("--#"), mask_of("#--")]))
    assert inputs[:, :, 0].tolist() == [[0, 0, 1], [5, 0, 0]]


def test_sources_may_be_nested_and_have_leading_dimensions() -> None:
    inputs = torch.zeros(7, 4)
    merge_embeddings(inputs, [(rows(1), [rows(1, start=10)]), rows(4, start=20).view(2, 2, 4)], mask_of("######-"))
    assert inputs[:, 0].tolist() == [1, 10, 20, 24, 28, 32, 0]


def test_rows_are_converted_and_the_source_stays_as_it_is() -> None:
    source = torch.full((3, 4), 1.00390625 + 2**-12)
    kept = source.clone()
    inputs = torch.zeros(3, 4, dtype=torch.bfloat16)
    merge_embeddings(inputs, source, mask_of("###"))
    assert torch.equal(inputs, source.to(torch.bfloat16))
    assert torch.equal(source, kept)


@pytest.mark.parametrize("width", [4, 4000])
def test_a_source_may_be_part_of_the_destination(width: int) -> None:
    inputs = torch.arange(20.0).unsqueeze(1).repeat(1, width)
    mask = mask_of("--" + "#" * 10 + "-" * 8)
    expected = reference(inputs, [inputs[1:11].clone()], mask)
    merge_embeddings(inputs, inputs[1:11], mask)
    assert torch.equal(inputs, expected)


@pytest.mark.parametrize("width", [4, 40000])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_sources_may_be_rows_that_others_overwrite(width: int, device: str) -> None:
    with SimulatedDevice("cuda:0"):
        inputs = torch.arange(6.0, device=device).unsqueeze(1).repeat(1, width)
        merge_embeddings(inputs, [inputs[5:6], inputs[0:3]], mask_of("#--###"))
        assert inputs[:, -1].tolist() == [5, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("width", [4, 4000])
@pytest.mark.parametrize("picture", ["-#########-", "#-#-#-#-#-#-#-#-#-"])
def test_gradients_flow_where_they_are_asked_for(width: int, picture: str) -> None:
    source = torch.randn(9, width, requires_grad=True)
    weight = torch.randn(len(picture), width, requires_grad=True)
    merged = merge_embeddings(weight * 2, source, mask_of(picture))
    merged.sum().backward()
    assert source.grad is not None
    assert source.grad.eq(1).all()
    assert weight.grad is not None
    assert torch.equal(weight.grad[:, 0], torch.where(mask_of(picture), 0.0, 2.0))
    with torch.no_grad():
        plain = merge_embeddings(torch.zeros(len(picture), width), source, mask_of(picture))
    assert not plain.requires_grad
    with torch.inference_mode():
        assert torch.equal(merge_embeddings(torch.zeros(len(picture), width), source, mask_of(picture)), plain)


@pytest.mark.parametrize(
    ("counts", "picture", "source", "found", "expected"),
    [
        ([4, 3], "####-####", 1, 3, 4),  # each source has a run of its own: the run that differs is named
        ([5, 4], "####-####", 0, 5, 4),
        ([4, 4, 4], "####-####", 2, 4, 0),  # otherwise the one that no longer fits
        ([9], "####-####", 0, 9, 8),
        ([2, 2, 2], "####-####", 2, 6, 8),  # or the last
    ],
)
def test_counts_are_checked_before_anything_is_written(
    counts: list[int], picture: str, source: int, found: int, expected: int
) -> None:
    inputs = torch.zeros(9, 4)
    with pytest.raises(EmbeddingError) as raised:
        merge_embeddings(inputs, [rows(n) for n in counts], mask_of(picture))
    assert (raised.value.item, raised.value.found, raised.value.expected) == (source, found, expected)
    assert str(sum(counts)) in str(raised.value)
    assert inputs.eq(0).all()


@pytest.mark.parametrize(
    ("inputs", "embeddings", "mask"),
    [
        (torch.zeros(3, 4), rows(1, 5), mask_of("#--")),  # width
        (torch.zeros(3, 4), torch.ones(4), mask_of("#--")),  # no rows
        (torch.zeros(3, 4), torch.ones(1, 4, dtype=torch.int64), mask_of("#--")),
        (torch.zeros(3, 4), torch.ones(1, 4, dtype=torch.complex64), mask_of("#--")),
        (torch.zeros(3, 4), "rows", mask_of("#--")),
        (torch.zeros(3, 4), rows(1), mask_of("#---")),  # length of the mask
        (torch.zeros(3, 4), rows(1), mask_of("#--").int()),
        (torch.zeros(3, 4), rows(1), [True, False, False]),
        (torch.zeros(4), rows(1), mask_of("#---")),
        (torch.zeros(3, 4, dtype=torch.int32), rows(1), mask_of("#--")),
        (torch.zeros(1, 4).expand(3, 4), rows(1), mask_of("#--")),  # rows that overlap
        (torch.zeros(2, 3, 8)[:, :2, :4], rows(1), torch.stack([mask_of("#-"), mask_of("--")])),
    ],
)
def test_what_does_not_fit_raises_and_changes_nothing(inputs: Tensor, embeddings: Any, mask: Any) -> None:
    with pytest.raises(EmbeddingError):
        merge_embeddings(inputs, embeddings, mask)
    assert inputs.eq(0).all()


def test_a_wrong_source_among_right_ones_is_named_before_anything_is_written() -> None:
    inputs = torch.zeros(4, 4)
    with pytest.raises(EmbeddingError) as raised:
        merge_embeddings(inputs, [rows(1), rows(2, 3), rows(1)], mask_of("####"))
    assert raised.value.item == 1
    assert inputs.eq(0).all()


@pytest.mark.parametrize(
    "picture", ["-" + "#" * 40 + "-", "#-" * 40, ("####" * 2 + "--") * 5, "-#" * 12 + "-" + "#" * 28]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("where", ["device", "host", "pinned"])
def test_on_a_device_the_host_waits_for_nothing(picture: str, dtype: torch.dtype, where: str) -> None:
    mask = mask_of(picture)
    source = torch.randn(40, 16).to(dtype)
    base = torch.randn(len(mask), 16).to(torch.bfloat16)
    expected = reference(base, [source], mask)
    with SimulatedDevice("cuda:0") as sim:
        inputs = sim.to_device(base)
        given = {"device": sim.to_device, "pinned": sim.pin, "host": lambda t: t}[where](source)
        merge_embeddings(inputs, [given[:10], given[10:]], mask)
        assert sim.host_reads == []
        assert sim.mixes == []
        assert [move for move in sim.moves if move.blocks] == []
        sent = sum(move.nbytes for move in sim.moves)
        assert sent <= 40 * 8 + (0 if where == "device" else 40 * 32)  # indices, and the rows in the target's dtype
        assert torch.equal(inputs.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[1] * 30, [3, 1, 7, 2, 5, 4, 1, 6], [8] * 12, [90]])
def test_on_a_device_launches_do_not_grow_with_rows(lengths: list[int], dtype: torch.dtype) -> None:
    counts = []
    for factor in (1, 10):
        # ten times the runs where runs are short, ten times the length elsewhere
        runs = lengths * factor if max(lengths) < 90 else [length * factor for length in lengths]
        mask = torch.tensor([flag for length in runs for flag in [True] * length + [False]])
        with SimulatedDevice("cuda:0") as sim:
            inputs = sim.to_device(torch.zeros(len(mask), 16, dtype=torch.bfloat16))
            source = sim.to_device(torch.randn(sum(runs), 16).to(dtype))
            with Operations() as operations:
                merge_embeddings(inputs, source, mask)
        counts.append(operations.count)
    assert counts[0] == counts[1]
    assert counts[0] < 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[1] * 2048, [16] * 128, [3, 1, 7, 2, 5, 4, 1, 6, 35] * 32, [512] * 4, [2048]])
def test_on_the_cpu_nothing_is_allocated_that_grows_with_the_bytes_written(
    lengths: list[int], dtype: torch.dtype
) -> None:
    mask = torch.tensor([flag for length in lengths for flag in [True] * length + [False]])
    inputs = torch.zeros(len(mask), 1024, dtype=torch.bfloat16)
    source = torch.randn(2048, 1024).to(dtype)
    with Operations():  # PyTorch imports much when an operation is watched for the first time
        merge_embeddings(inputs, source, mask)
    tracemalloc.start()
    try:
        with Operations() as operations:
            merge_embeddings(inputs, [source[:700], source[700:]], mask)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert operations.largest <= 256 << 10  # written: 4 MiB
    assert peak <= 1 << 20
    assert torch.equal(inputs[mask], source.to(torch.bfloat16))


def test_device_rows_into_a_host_destination_are_fetched() -> None:
    source = torch.randn(5, 4)
    with SimulatedDevice("cuda:0") as sim:
        inputs = torch.zeros(9, 4)
        merge_embeddings(inputs, sim.to_device(source), mask_of("-#####---"))
        assert sim.mixes == []
        assert inputs.device.type == "cpu"
    assert torch.equal(inputs[1:6], source)


def test_a_mask_on_the_device_is_refused() -> None:
    with SimulatedDevice("cuda:0") as sim:
        mask = sim.to_device(mask_of("#-"))
        with pytest.raises(EmbeddingError, match="CPU"):
            merge_embeddings(torch.zeros(2, 4), rows(1), mask)
        assert sim.host_reads == []
