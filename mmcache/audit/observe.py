"""One run of a consumer on the simulated device, and what it did with each field."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mmcache.audit.calls import call, modules_of
from mmcache.fields import FieldValue
from mmcache.testing import Mix, SimulatedDevice, Where

__all__ = ["Consumer", "Observation", "Seen", "Use", "counted", "observe", "only_in"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Use:
    """A line of the consumer that did something with a field, and how often.

    Attributes:
        phase: "encoder", "positions" or "lengths".
        op: the operation (`cat`, `tolist`, `to`, ...).
        where: file, line and function.
        blocks: whether the host waits there.
    """

    phase: str
    op: str
    where: Where
    blocks: bool
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.op} at {self.where}{times}"


@dataclass(frozen=True, slots=True)
class Consumer:
    """What reads the fields of a batch, in the phases of a request.

    Attributes:
        encoder: makes rows of the fields, on the device.
        positions: makes positions of the tokens, on the CPU; None where they do not depend on fields.
        lengths: counts patches and placeholders, on the CPU; None where nothing does.
    """

    encoder: Callable[..., Any]
    positions: Callable[..., Any] | None = None
    lengths: Callable[..., Any] | None = None

    def phases(self) -> list[tuple[str, Callable[..., Any]]]:
        """The phases that there are, in the order of a request."""
        phases = (("lengths", self.lengths), ("positions", self.positions), ("encoder", self.encoder))
        return [(name, function) for name, function in phases if function is not None]


@dataclass(frozen=True, slots=True)
class Seen:
    """Something that happened in a run.

    Attributes:
        names: fields that the tensors were computed from. What went through the host (`tolist` and back) is not known.
        waits: of a move to the device, whether it was asked to block.
    """

    use: Use
    names: frozenset[str]
    waits: bool = False


@dataclass(slots=True)
class Observation:
    """What happened in one run.

    Attributes:
        mixes: operations over tensors of several devices, which a real device would have refused; `names` are those of
            the tensors on the CPU, or, where these are the consumer's own, of those on the device.
        reads: reads of device tensors by the host.
        moves: moves to the device.
        touched: phase to the fields whose values it took.
        error: what the consumer raised, if it did, and in which phase.
    """

    mixes: list[Seen] = field(default_factory=list)
    reads: list[Seen] = field(default_factory=list)
    moves: list[Seen] = field(default_factory=list)
    touched: dict[str, frozenset[str]] = field(default_factory=dict)
    error: tuple[str, Exception] | None = None


def observe(
    consumer: Consumer,
    fields: Mapping[str, FieldValue],
    text: Mapping[str, Any],
    marks: Mapping[str, bool],
    device: str,
) -> Observation:
    """Run all phases of `consumer` with the fields placed by `marks`.

    Args:
        fields: all on the CPU; each run gets copies.
        text: other inputs by name (token ids): on the device for the encoder, on the CPU for the other phases.
        marks: field name to whether it stays on the CPU.
        device: the device to simulate.
    """
    seen = Observation()
    with SimulatedDevice(device) as sim, torch.no_grad():
        for module in {m for _, function in consumer.phases() for m in modules_of(function)}:
            for tensor in (*module.parameters(), *module.buffers()):
                sim.adopt(tensor)
        for phase, function in consumer.phases():
            placed = {name: _placed(sim, value, name, marks[name]) for name, value in fields.items()}
            around = {n: _map(v, sim.to_device) for n, v in text.items()} if phase == "encoder" else text
            sim.clear()
            try:
                call(function, placed, around)
            except Exception as error:  # whatever a consumer raises is a finding about where its fields lie
                seen.error = (phase, error)
            seen.mixes += [Seen(Use(phase, m.op, m.where, True), _to_blame(m, marks)) for m in sim.mixes]
            seen.reads += [Seen(Use(phase, r.op, r.where, True), r.origins) for r in sim.host_reads]
            seen.moves += [
                Seen(Use(phase, m.op, m.where, m.blocks), m.origins, not m.non_blocking)
                for m in sim.moves
                if m.target != _CPU
            ]
            seen.touched[phase] = sim.touched
            if seen.error:
                break
    return seen


def _placed(sim: SimulatedDevice, value: FieldValue, name: str, on_cpu: bool) -> FieldValue:
    def place(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone() if on_cpu else sim.to_device(tensor)
        sim.name(copy, name)
        return copy

    placed: FieldValue = _map(value, place)
    return placed


def _map(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    return [_map(entry, function) for entry in value] if isinstance(value, (list, tuple)) else value


def _to_blame(mix: Mix, marks: Mapping[str, bool]) -> frozenset[str]:
    """The fields that should lie elsewhere for an operation over tensors of several devices to work.

    Those on the CPU that are kept there; where there are none (the consumer's own CPU tensors), those on the device.
    """
    sides = list(zip(mix.devices, mix.shapes, mix.origins))
    kept = [n for device, shape, names in sides if device == _CPU and shape for n in names if marks.get(n)]
    return frozenset(kept) or frozenset(n for device, _, names in sides if device != _CPU for n in names)


def counted(uses: Iterable[Use]) -> tuple[Use, ...]:
    """Equal uses once, with how often they occurred."""
    return tuple(Use(u.phase, u.op, u.where, u.blocks, count) for u, count in Counter(uses).items())


def only_in(here: Iterable[Seen], there: Iterable[Seen]) -> tuple[Use, ...]:
    """What happened here more often than there."""
    return counted((Counter(seen.use for seen in here) - Counter(seen.use for seen in there)).elements())
