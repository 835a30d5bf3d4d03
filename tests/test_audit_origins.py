"""The simulated device follows named values, so that a record says whose it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mmcache.testing import SimulatedDevice


@pytest.fixture
def sim() -> Iterator[SimulatedDevice]:
    with SimulatedDevice("cuda:0") as simulated:
        yield simulated


def named(sim: SimulatedDevice, name: str, *, device: bool = False) -> torch.Tensor:
    value = torch.arange(6)
    value = sim.to_device(value) if device else value
    sim.name(value, name)
    return value


def test_what_is_computed_from_a_named_value_says_so(sim: SimulatedDevice) -> None:
    a, b = named(sim, "a", device=True), named(sim, "b", device=True)
    ((a[1:] + 1).cumsum(0) * 2)[:3].tolist()
    (a + b).sum().item()
    torch.ones(2, device="cuda").tolist()
    assert [read.origins for read in sim.host_reads] == [{"a"}, {"a", "b"}, set()]


def test_writing_into_a_tensor_hands_the_name_on(sim: SimulatedDevice) -> None:
    target, filled = torch.zeros(6, device="cuda"), torch.zeros(6, device="cuda")
    target[2:4] = named(sim, "a", device=True)[:2]
    filled.add_(named(sim, "b", device=True))
    target.tolist(), filled.tolist()
    assert [read.origins for read in sim.host_reads] == [{"a"}, {"b"}]


def test_a_mix_tells_the_names_of_each_side_and_a_move_its_own(sim: SimulatedDevice) -> None:
    host, device = named(sim, "a"), named(sim, "b", device=True)
    host + device
    host.to("cuda", non_blocking=True)
    assert [mix.origins for mix in sim.mixes] == [({"a"}, {"b"})]
    assert [move.origins for move in sim.moves] == [{"a"}]


def test_values_that_went_through_the_host_are_new(sim: SimulatedDevice) -> None:
    a = named(sim, "a", device=True)
    torch.tensor(a.tolist(), device="cuda").tolist()
    assert [read.origins for read in sim.host_reads] == [{"a"}, set()]


def test_touched_names_are_those_whose_values_were_taken(sim: SimulatedDevice) -> None:
    a, b, c = (named(sim, name) for name in "abc")
    assert a.shape == (6,)
    assert len(b) == 6
    assert sim.touched == set()
    b.tolist()
    c + 1
    assert sim.touched == {"b", "c"}
    assert a.device == torch.device("cpu")
    sim.clear()
    assert sim.touched == set()


def test_an_adopted_tensor_is_labelled_in_place_and_only_in_the_block() -> None:
    weight = torch.ones(3)
    with SimulatedDevice("cuda:0") as sim:
        pointer = weight.data_ptr()
        sim.adopt(weight)
        assert weight.is_cuda
        assert weight.data_ptr() == pointer
    assert not weight.is_cuda
