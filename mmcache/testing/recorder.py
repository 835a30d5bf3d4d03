"""The state of a simulation: who lies where, and what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from mmcache.testing.labels import CPU, Labels
from mmcache.testing.origins import Origins
from mmcache.testing.records import HostRead, Mix, Move, Where

__all__ = ["Recorder", "tensors_in"]


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All tensors among the arguments of a call, nested ones included, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class Recorder:
    """Labels and records, shared by the two halves of a simulation.

    `ambient` is where the arguments of the function that is running lie: composite operators make their intermediate
    tensors there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.labels = Labels()
        self.origins = Origins()
        self.ambient = CPU
        self.host_reads: list[HostRead] = []
        self.mixes: list[Mix] = []
        self.moves: list[Move] = []

    def resolve(self, device: Any) -> torch.device:
        """The device that an argument of a call names, with an index."""
        named: torch.device = (
            torch.device(self.device.type, device) if isinstance(device, int) else torch.device(device)
        )
        return self.device if named.type == self.device.type and named.index is None else named

    def read(self, op: str, tensor: torch.Tensor) -> None:
        """The host reads `tensor`; of note if that is on the device."""
        device = self.labels.device(tensor)
        origins = self.origins.of(tensor)
        self.origins.touched |= origins
        if device != CPU:
            self.host_reads.append(HostRead(op, device, tuple(tensor.shape), tensor.dtype, Where.caller(), origins))

    def mixed(self, op: str, tensors: Iterable[torch.Tensor]) -> None:
        """An operation was given `tensors`, which lie on several devices."""
        given = tuple(tensors)
        devices = tuple(map(self.labels.device, given))
        origins = tuple(map(self.origins.of, given))
        self.mixes.append(Mix(op, devices, tuple(tuple(t.shape) for t in given), Where.caller(), origins))

    def moved(
        self,
        op: str,
        origin: torch.Tensor,
        result: torch.Tensor,
        source: torch.device,
        target: torch.device,
        wait: bool,
    ) -> None:
        """The values of `origin` went from `source` to `target`, where `result` holds them; `wait`: a blocking call."""
        if origin.numel() == 0:
            return
        # PyTorch converts and compacts on the host, in pageable memory, whatever crosses between a host and a device.
        host = result if target == CPU else origin
        direct = origin.dtype == result.dtype and host.is_contiguous()
        crossing = origin if target == CPU else result
        nbytes = origin.numel() * crossing.element_size()
        origins = self.origins.of(origin)
        move = Move(op, source, target, nbytes, not wait, direct and self.labels.pinned(host), Where.caller(), origins)
        self.moves.append(move)
        if target == CPU and move.blocks:
            self.host_reads.append(HostRead(op, source, tuple(origin.shape), origin.dtype, move.where, origins))
