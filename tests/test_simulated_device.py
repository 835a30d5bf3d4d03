"""The simulated device: labelled tensors compute for real, and what would wait or break on a device is written down."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from mmcache.testing import SimulatedDevice

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")


@pytest.fixture
def sim() -> Iterator[SimulatedDevice]:
    with SimulatedDevice("cuda:0") as simulated:
        yield simulated


def seen(sim: SimulatedDevice) -> tuple[list[str], list[str], list[str]]:
    return [r.op for r in sim.host_reads], [m.op for m in sim.mixes], [m.op for m in sim.moves]


def test_tensors_say_that_they_are_on_the_device(sim: SimulatedDevice) -> None:
    x = sim.to_device(torch.arange(6.0))
    assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (CUDA, True, False, 0)
    host = torch.arange(6.0)
    assert (host.device, host.is_cuda, host.is_cpu, host.get_device()) == (CPU, False, True, -1)
    assert seen(sim) == ([], [], [])


def test_device_without_an_index_is_the_device(sim: SimulatedDevice) -> None:
    assert torch.zeros(2, device="cuda").device == CUDA
    assert torch.zeros(2, device=0).device == CUDA
    x = sim.to_device(torch.zeros(2))
    assert x.to("cuda") is x


def test_results_are_computed_and_carry_the_label(sim: SimulatedDevice) -> None:
    x = sim.to_device(torch.arange(6.0).reshape(2, 3))
    y = torch.nn.functional.linear(x + 1, x)[0].clone()
    assert y.device == CUDA
    with SimulatedDevice("cuda:0"):  # a label belongs to the block that gave it
        assert y.tolist() == [8.0, 26.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="cuda:0"),
        lambda: torch.arange(3, device="cuda:0"),
        lambda: torch.full((2,), 1.5, device="cuda:0"),
        lambda: torch.empty(3, device="cuda:0"),
        lambda: torch.zeros_like(torch.ones(2), device="cuda:0"),
        lambda: torch.ones(2).new_zeros(2, device="cuda:0"),
        lambda: torch.rand(2, device="cuda:0"),
    ],
)
def test_factories_make_device_tensors_without_a_move(sim: SimulatedDevice, make: Callable[[], torch.Tensor]) -> None:
    assert make().device == CUDA
    assert seen(sim) == ([], [], [])


def test_factories_follow_the_tensor_they_are_asked_of(sim: SimulatedDevice) -> None:
    x = sim.to_device(torch.ones(2))
    assert torch.zeros_like(x).device == CUDA
    assert x.new_zeros(3).device == CUDA
    assert torch.zeros_like(x, device="cpu").device == CPU
    assert torch.nn.functional.one_hot(x.long(), 3).device == CUDA


def test_a_device_context_is_understood(sim: SimulatedDevice) -> None:
    with torch.device("cuda:0"):
        assert torch.ones(2).device == CUDA
    assert torch.ones(2).device == CPU


@pytest.mark.parametrize(
    ("op", "read"),
    [
        ("item", lambda x: x[0].item()),
        ("item", lambda x: bool(x[1] > 0)),
        ("item", lambda x: int(x[1])),
        ("item", lambda x: float(x[1])),
        ("item", lambda x: f"{x[1]:.1f}"),
        ("item", lambda x: list(range(9))[x[1].long()]),
        ("item", lambda x: torch.arange(9)[: x[1].long()]),
        ("item", lambda x: x[x[1].long()]),
        ("item", lambda x: torch.arange(int(x[1]))),
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.numpy()),
        ("numpy", lambda x: np.asarray(x)),
        ("repr", lambda x: repr(x)),
        ("nonzero", lambda x: x.nonzero()),
        ("nonzero", lambda x: torch.where(x > 1)),
        ("index", lambda x: x[x > 1]),
        ("index_put_", lambda x: x.__setitem__(x > 1, 0.0)),
        ("masked_select", lambda x: x.masked_select(x > 1)),
        ("repeat_interleave", lambda x: torch.repeat_interleave(x, x.long())),
        ("unique", lambda x: torch.unique(x)),
        ("unique_consecutive", lambda x: torch.unique_consecutive(x)),
        ("equal", lambda x: torch.equal(x, x)),
        ("allclose", lambda x: torch.allclose(x, x)),
        ("tensor", lambda x: torch.tensor([x[1]])),
        ("cpu", lambda x: x.cpu()),
        ("to", lambda x: x.to("cpu")),
        ("copy_", lambda x: torch.empty(6).copy_(x)),
    ],
)
def test_reads_by_the_host_are_recorded(sim: SimulatedDevice, op: str, read: Callable[[torch.Tensor], object]) -> None:
    read(torch.arange(6.0))
    assert sim.host_reads == []
    x = sim.to_device(torch.arange(6.0))
    read(x)
    assert {r.op for r in sim.host_reads} == {op}
    assert all(r.device == CUDA for r in sim.host_reads)
    assert sim.mixes == []


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: torch.repeat_interleave(x, x.long(), output_size=15),
        lambda x: x.repeat_interleave(2, dim=0),
        lambda x: torch.where(x > 1, x, x + 1),
        lambda x: x.masked_fill(x > 1, 0.0),
        lambda x: x.index_copy_(0, x.long(), x + 1),
        lambda x: (x.shape, x.numel(), len(x), x.stride(), x.dtype),
        lambda x: x.split(3),
        lambda x: list(x),
        lambda x: x.to(torch.bfloat16).view(torch.int16),
        lambda x: copy.deepcopy(x),
    ],
)
def test_device_work_is_not_a_read(sim: SimulatedDevice, harmless: Callable[[torch.Tensor], object]) -> None:
    harmless(sim.to_device(torch.arange(6.0)))
    assert seen(sim) == ([], [], [])


def test_a_record_names_the_line_that_did_it(sim: SimulatedDevice) -> None:
    x = sim.to_device(torch.arange(6.0))
    x.sum().item()
    where = sim.host_reads[0].where
    assert where.file == __file__
    assert where.function == "test_a_record_names_the_line_that_did_it"
    with open(where.file) as source:
        assert "x.sum().item()" in source.readlines()[where.line - 1]
    assert str(where).startswith(f"{__file__}:{where.line}")


def test_mixing_devices_is_recorded_and_computed(sim: SimulatedDevice) -> None:
    x, host = sim.to_device(torch.ones(2, 2)), torch.ones(2, 2)
    assert torch.equal((x + host).cpu(), torch.full((2, 2), 2.0))
    mix = sim.mixes[0]
    assert (mix.op, mix.devices, mix.shapes) == ("add", (CUDA, CPU), ((2, 2), (2, 2)))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, host: torch.cat([x, host]),
        lambda x, host: host @ x,
        lambda x, host: host.masked_scatter(x > 1, x),
        lambda x, host: torch.where(host > 0, x, x),
        lambda x, host: host + x[0, 0],
        lambda x, host: host[x[0].long()],
        lambda x, host: x.index_select(0, host[0].long()),
        lambda x, host: torch.repeat_interleave(x, torch.tensor([1, 2]), dim=0),
        lambda x, host: x.index_put_((torch.tensor([0]),), host[:1]),
    ],
)
def test_mixes_of_many_kinds(sim: SimulatedDevice, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    mix(sim.to_device(torch.ones(2, 2)), torch.ones(2, 2))
    assert len(sim.mixes) == 1


def test_a_number_in_a_cpu_tensor_may_join_device_tensors(sim: SimulatedDevice) -> None:
    assert (sim.to_device(torch.ones(3)) * torch.tensor(2.0)).device == CUDA
    assert seen(sim) == ([], [], [])


def test_cpu_indices_into_a_device_tensor_are_a_move(sim: SimulatedDevice) -> None:
    sim.to_device(torch.ones(3))[torch.tensor([0, 2])]
    assert seen(sim) == ([], [], ["index"])
    assert sim.moves[0].nbytes == 16


def test_moves_say_bytes_direction_and_whether_the_host_waits(sim: SimulatedDevice) -> None:
    host = torch.ones(4, 2)
    pinned = host.pin_memory()
    assert pinned.is_pinned()
    assert not host.is_pinned()
    assert host.to("cuda:0").device == CUDA
    assert host.to("cuda:0", torch.bfloat16, non_blocking=True).dtype == torch.bfloat16
    assert pinned.to("cuda:0", non_blocking=True).device == CUDA
    assert pinned.cuda(non_blocking=True).device == CUDA
    assert pinned.t().to("cuda:0", non_blocking=True).device == CUDA
    assert [(m.nbytes, m.non_blocking, m.pinned, m.blocks) for m in sim.moves] == [
        (32, False, False, True),
        (16, True, False, True),
        (32, True, True, False),
        (32, True, True, False),
        (32, True, False, True),  # not contiguous: compacted on the host first
    ]
    assert all((m.source, m.target) == (CPU, CUDA) for m in sim.moves)
    assert sim.host_reads == []


def test_copy_into_a_device_tensor_is_a_move(sim: SimulatedDevice) -> None:
    x = torch.empty(4, device="cuda:0")
    x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    x[:2] = torch.zeros(2)
    x[2:] = 5
    assert [(m.op, m.nbytes, m.blocks) for m in sim.moves] == [("copy_", 16, False), ("copy_", 8, True)]
    assert x.tolist() == [0, 0, 5, 5]


def test_an_asynchronous_copy_to_the_host_is_a_move_but_no_read(sim: SimulatedDevice) -> None:
    back = sim.to_device(torch.ones(2)).to("cpu", non_blocking=True)
    assert (back.device, back.is_pinned()) == (CPU, True)
    assert seen(sim) == ([], [], ["to"])


def test_a_move_makes_a_copy_and_staying_does_not(sim: SimulatedDevice) -> None:
    host = torch.ones(2)
    x = host.to("cuda:0")
    x.zero_()
    assert host.tolist() == [1, 1]
    assert x.to("cuda:0") is x
    assert x.to(host).device == CPU
    assert host.to(x).device == CUDA
    assert host.type_as(x).device == CUDA


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, torch.asarray])
def test_device_tensors_of_host_data_are_blocking_moves(
    sim: SimulatedDevice, make: Callable[..., torch.Tensor]
) -> None:
    assert make([1, 2], device="cuda:0").device == CUDA
    array = np.ones(3)
    x = make(array, device="cuda:0")
    array[:] = 0
    assert [(m.nbytes, m.blocks) for m in sim.moves] == [(16, True), (24, True)]
    assert x.sum().item() == 3


def test_views_share_their_label_and_new_storage_does_not_inherit_a_stale_one(sim: SimulatedDevice) -> None:
    x = sim.to_device(torch.ones(4, 4))
    view = x[1:].t()
    del x
    gc.collect()
    assert view.device == CUDA
    del view
    gc.collect()
    for _ in range(100):
        assert torch.ones(4, 4).device == CPU


def test_pinned_factories(sim: SimulatedDevice) -> None:
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert torch.empty(4, pin_memory=True)[1:].is_pinned()
    assert torch.empty(4, pin_memory=True).device == CPU


def test_whole_modules_move_and_run(sim: SimulatedDevice) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU())
    host = torch.ones(1, 4)
    expected = module(host).detach()
    module.to(sim.device)
    assert {p.device for p in module.parameters()} == {CUDA}
    assert len(sim.moves) == 4
    sim.clear()
    result = module(host.to(sim.device, non_blocking=True)).detach()
    assert result.device == CUDA
    assert seen(sim) == ([], [], ["to"])
    assert torch.equal(result.cpu(), expected)
    sim.clear()
    module(host)
    assert sim.mixes


def test_attention_runs(sim: SimulatedDevice) -> None:
    q = sim.to_device(torch.randn(1, 2, 8, 4))
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).device == CUDA
    assert seen(sim) == ([], [], [])


def test_another_device_of_the_type(sim: SimulatedDevice) -> None:
    x = sim.to_device(torch.ones(2))
    y = x.to("cuda:1")
    assert y.device == torch.device("cuda:1")
    x + y
    assert len(sim.mixes) == 1
    assert (sim.moves[0].source, sim.moves[0].target) == (CUDA, torch.device("cuda:1"))


def test_nothing_is_simulated_outside_the_block() -> None:
    sim = SimulatedDevice("cuda:0")
    with sim:
        x = sim.to_device(torch.ones(2))
    x.sum().item()
    assert x.device == CPU
    assert sim.device_of(x) == CUDA
    assert sim.host_reads == []
    with sim:
        x.sum().item()
    assert len(sim.host_reads) == 1
    sim.clear()
    assert sim.host_reads == []
