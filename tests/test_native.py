"""The compiled copies against NumPy and PyTorch, and what becomes of the package without them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_build import build

from mmcache import native

compiled = pytest.mark.skipif(native.scatter is None, reason="built without a compiler")
rounds = pytest.mark.skipif(native.scatter_rounded is None, reason="built without a compiler, or for no AVX2")

GUARD = 64
LARGE = 4 << 20


def memory(nbytes: int, shift: int = 0) -> np.ndarray:
    """Random bytes between guards, at an address that is `shift` beyond a line of the cache."""
    store = np.random.default_rng(nbytes).integers(0, 256, nbytes + 4 * GUARD, dtype=np.uint8)
    start = GUARD + (-store.ctypes.data - GUARD) % GUARD + shift
    return store[start : start + nbytes]


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 1000, 65_537, LARGE - 1, LARGE, LARGE + 1, LARGE + 4097])
@pytest.mark.parametrize(("to_shift", "shift"), [(0, 0), (1, 0), (0, 3), (63, 16), (17, 41)])
def test_a_copy_writes_its_bytes_and_no_others(nbytes: int, to_shift: int, shift: int) -> None:
    source, target = memory(nbytes, shift), memory(nbytes + 2 * GUARD, to_shift)
    expected = target.copy()
    expected[GUARD : GUARD + nbytes] = source
    native.copy(target.ctypes.data + GUARD, source.ctypes.data, nbytes)
    assert np.array_equal(target, expected)


def scattered(
    scatter: native.Scatter, target: np.ndarray, marks: np.ndarray, source: np.ndarray, nbytes: int, past: bool
) -> bool:
    steps = target.strides[0], source.strides[0]
    return scatter(
        target.ctypes.data,
        steps[0],
        marks.ctypes.data,
        len(marks),
        source.ctypes.data,
        steps[1],
        len(source),
        nbytes,
        past,
    )


@compiled
@given(
    marks=st.lists(st.booleans(), max_size=60),
    width=st.integers(1, 40),
    pads=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    past=st.booleans(),
    shift=st.integers(0, 15),
)
def test_rows_go_to_the_marked_ones_in_order(
    marks: list[bool], width: int, pads: tuple[int, int], past: bool, shift: int
) -> None:
    rows = sum(marks)
    flags = np.array(marks, np.bool_)
    whole = memory(len(marks) * (width + pads[0]), shift).reshape(len(marks), width + pads[0])
    source = memory(rows * (width + pads[1])).reshape(rows, width + pads[1])[:, :width]
    expected = whole.copy()
    expected[flags, :width] = source
    assert native.scatter is not None
    assert scattered(native.scatter, whole[:, :width], flags, source, width, past)
    assert np.array_equal(whole, expected)


@compiled
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("lengths", [[700], [1] * 300, [1, 2, 3, 100, 7], [8, 16, 64]])
def test_long_rows_too(lengths: list[int], past: bool) -> None:
    flags = np.zeros(1000, np.bool_)
    start = 5
    for length in lengths:
        flags[start : start + length] = True
        start += length + 1
    target, source = memory(1000 * 4000, 8).reshape(1000, 4000), memory(sum(lengths) * 4000, 3).reshape(-1, 4000)
    expected = target.copy()
    expected[flags] = source
    assert native.scatter is not None
    assert scattered(native.scatter, target, flags, source, 4000, past)
    assert np.array_equal(target, expected)


@compiled
@pytest.mark.parametrize("rows", [0, 2, 4])
def test_nothing_is_written_where_the_marks_are_of_another_number(rows: int) -> None:
    flags = np.array([0, 1, 1, 0, 1], np.bool_)
    target, source = memory(5 * 32).reshape(5, 32), memory(rows * 32).reshape(rows, 32)
    before = target.copy()
    assert native.scatter is not None
    assert not scattered(native.scatter, target, flags, source, 32, False)
    assert np.array_equal(target, before)


@compiled
def test_any_byte_but_zero_is_a_mark() -> None:
    flags = np.array([0, 255, 2] + [1] * 20 + [128, 0], np.uint8)
    target, source = memory(25 * 16).reshape(25, 16), memory(23 * 16).reshape(23, 16)
    expected = target.copy()
    expected[flags != 0] = source
    assert native.scatter is not None
    assert scattered(native.scatter, target, flags, source, 16, False)
    assert np.array_equal(target, expected)


@rounds
@pytest.mark.parametrize("width", [1, 3, 7, 8, 9, 64, 1000])
def test_float32_is_rounded_as_pytorch_does(width: int) -> None:
    bits = np.random.default_rng(width).integers(0, 1 << 32, (50, width), dtype=np.uint32)
    bits[:20] &= 0xFFFF8000  # halfway between two, or exact
    bits[20:24] = 0x7F7FFFFF, *([0x7F800000] * (width - 1))  # rounds up to infinity; infinity
    bits[24:27] = 0xFF800001  # a signalling NaN whose upper half is infinity's
    source = torch.from_numpy(bits.view(np.float32))
    target = torch.zeros(80, width, dtype=torch.bfloat16)
    flags = torch.zeros(80, dtype=torch.bool)
    flags[7:57] = True
    assert native.scatter_rounded is not None
    assert native.scatter_rounded(
        target.data_ptr(), 2 * width, flags.data_ptr(), 80, source.data_ptr(), 4 * width, 50, 2 * width, False
    )
    expected, found = source.to(torch.bfloat16), target[7:57]
    numbers = ~source.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])
    assert not target[~flags].any()


@compiled
@pytest.mark.parametrize(
    ("arguments", "error"), [((1, 2), TypeError), ((1, 2, "3"), TypeError), ((1, 2, 1 << 70), OverflowError)]
)
def test_what_is_no_address_is_refused(arguments: tuple[int, ...], error: type[Exception]) -> None:
    call: Callable[..., None] = native.copy
    with pytest.raises(error):
        call(*arguments)


def test_no_bytes_are_copied_from_nowhere_to_nowhere() -> None:
    native.copy(0, 0, 0)


@pytest.mark.parametrize("target", [[], ["-U__SSE2__"]], ids=["this processor", "any processor"])
def test_the_source_compiles_without_a_warning_also_for_other_processors(target: list[str], tmp_path: Path) -> None:
    module = build("_rows", tmp_path, *target)
    assert not (target and module.ROUNDS)
    copied, start = np.zeros(LARGE, np.uint8), memory(LARGE)
    module.copy(copied.ctypes.data, start.ctypes.data, LARGE)
    assert np.array_equal(copied, start)
    flags = np.arange(1000) % 3 != 1
    for past in (False, True):
        inputs, rows = np.zeros((1000, 5000), np.uint8), memory(667 * 5000).reshape(667, 5000)
        assert scattered(module.scatter, inputs, flags, rows, 5000, past)
        assert np.array_equal(inputs[flags], rows)
        assert not inputs[~flags].any()


WITHOUT = """
import sys
{how}
import torch
import mmcache
from mmcache import native
assert native.scatter is None and native.scatter_rounded is None and native.gather is None
inputs, mask = torch.zeros(3000, 1024), torch.zeros(3000, dtype=torch.bool)
mask[100:2900] = True
rows = torch.arange(2800 * 1024, dtype=torch.float32).reshape(2800, 1024)
mmcache.merge_embeddings(inputs, [rows[:7], rows[7:]], mask)
assert torch.equal(inputs[100:2900], rows) and not inputs[:100].any() and not inputs[2900:].any()
target = torch.zeros(2800, 1024)
native.copy(target.data_ptr(), rows.data_ptr(), rows.nbytes)
assert torch.equal(target, rows)
"""


@pytest.mark.parametrize(
    "how",
    [
        "for name in ('_rows', '_tensors'): sys.modules['mmcache.native.' + name] = None",
        "import types\nfor name in ('_rows', '_tensors'):\n"
        "    sys.modules['mmcache.native.' + name] = types.SimpleNamespace(VERSION=0)",
    ],
    ids=["missing", "of another source"],
)
def test_everything_works_without_it(how: str) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT.format(how=how)], check=True, timeout=120)
