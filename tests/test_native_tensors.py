"""Small tensors read at once, against PyTorch: the same bytes, or None for PyTorch to do it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import images, request
from hypothesis import given
from hypothesis import strategies as st
from native_build import build
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mmcache import native
from mmcache.ipc.delta import encode_delta
from mmcache.ipc.values import bytes_of

pytestmark = pytest.mark.skipif(native.gather is None, reason="built without a compiler, or for no C table of DLPack")

WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64]
SMALL = 4096


def gather(tensors: list[Any]) -> bytes | None:
    assert native.gather is not None
    return native.gather(tensors)


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype is torch.bool else 120, shape, generator=generator).to(dtype)


@given(
    dtype=st.sampled_from(WHOLE),
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    count=st.integers(1, 30),
    cut=st.booleans(),
)
def test_the_bytes_of_alike_tensors_lie_one_behind_the_other(
    dtype: torch.dtype, shape: tuple[int, ...], count: int, cut: bool
) -> None:
    tensors = [some(dtype, shape, seed) for seed in range(count)]
    if cut:  # views of one batch, as a processor gives them
        tensors = list(torch.stack(tensors).unbind())
    found = gather(tensors)
    if found is None:  # strides of an empty tensor may be any
        assert 0 in shape
    else:
        assert found == b"".join(bytes(bytes_of(tensor)) for tensor in tensors)


def test_up_to_a_page_each() -> None:
    for size in (SMALL // 8, SMALL // 8 + 1):
        tensors = [torch.arange(size) + number for number in range(3)]
        found = gather(tensors)
        assert found == (torch.cat(tensors).numpy().tobytes() if size * 8 == SMALL else None)


def others() -> dict[str, list[Any]]:
    """What is not for it: each list begins with what would be."""
    with FakeTensorMode():
        fake = torch.ones(3, dtype=torch.int64)
    plain = torch.tensor([1, 2, 3])
    lists: dict[str, Any] = {
        "another dtype": plain.int(),
        "another shape": plain[:2],
        "another number of dimensions": plain[None],
        "strides": torch.arange(6)[::2],
        "floats": plain.float(),
        "complex numbers": plain.to(torch.complex64),
        "lazily negated": torch._neg_view(plain.float()),
        "a parameter": torch.nn.Parameter(plain, requires_grad=False),
        "a list": [plain],
        "None": None,
        "an array": np.arange(3),
        "sparse": plain.to_sparse(),
        "on no device": plain.to("meta"),
        "nested": torch.nested.nested_tensor([plain.float()]),
        "quantised": torch.quantize_per_tensor(plain.float(), 1.0, 0, torch.qint8),
        "packed": torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "fake": fake,
        "nine dimensions": torch.ones((1,) * 9, dtype=torch.int64),
    }
    return {name: [plain, plain, other, plain] for name, other in lists.items()}


@pytest.mark.parametrize("kind", list(others()))
@pytest.mark.parametrize("first", [False, True])
def test_all_else_is_left_to_pytorch(kind: str, first: bool) -> None:
    tensors = others()[kind]
    assert gather(tensors[2:] if first else tensors) is None
    assert gather(tensors[:2]) == torch.cat(tensors[:2]).numpy().tobytes()


def test_no_tensors_have_no_dtype() -> None:
    assert gather([]) is None


def test_tensors_of_inference_and_of_numpy_are_read_as_they_are_now() -> None:
    with torch.inference_mode():
        inference = torch.tensor([1, 2])
    lent = np.array([3, 4])
    tensors = [inference, torch.from_numpy(lent)]
    assert gather(tensors) == np.array([1, 2, 3, 4]).tobytes()
    lent[:] = 5
    assert gather(tensors) == np.array([1, 2, 5, 5]).tobytes()


def test_tensors_within_a_transform_are_not_read() -> None:
    found: list[bytes | None] = []

    def look(tensor: Tensor) -> Tensor:
        found.append(gather([tensor]))
        return tensor

    torch.vmap(look)(torch.arange(6).view(3, 2))
    assert found == [None]


def test_nothing_is_kept() -> None:
    tensors = [torch.tensor([number]) for number in range(5)]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(10):
        gather(tensors)
        gather([*tensors, None])
    assert [sys.getrefcount(tensor) for tensor in tensors] == before


@pytest.mark.parametrize("arguments", [(), ([], []), (torch.ones(1),), ((torch.ones(1),),)])
def test_it_takes_one_list(arguments: tuple[Any, ...]) -> None:
    call: Any = native.gather
    with pytest.raises(TypeError):
        call(*arguments)


def test_a_message_is_the_same_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = request("r", 60, images((2, 8), (12, 8), (22, 8), (40, 3)))
    buffers: list[list[Any]] = [[], []]
    one = encode_delta(source, 1, (0, 0), (60, 4), buffers[0])
    monkeypatch.setattr(native, "gather", None)
    other = encode_delta(source, 1, (0, 0), (60, 4), buffers[1])
    assert one == other
    assert [bytes(part) for part in buffers[0]] == [bytes(part) for part in buffers[1]]
    assert one.columns[0].stacked is not None


def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    module = build("_tensors", tmp_path)
    table = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    assert module.gather(table, Tensor, [torch.tensor([7]), torch.tensor([8])]) == np.array([7, 8]).tobytes()
    with pytest.raises(ValueError, match="PyCapsule"):
        module.gather(object(), Tensor, [torch.tensor([7])])
