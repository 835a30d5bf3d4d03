"""Tiers on a device: a real GPU where there is one, and always a simulated one, whatever thread asks them."""

import threading
from typing import Any

import torch

from mmcache.testing import SimulatedDevice
from mmcache.tiers import MemoryTier

ON_A_DEVICE = ("simulated device", "gpu")


class Simulated:
    """A tier on a simulated device, which is there only for threads that have entered it, one at a time here.

    Outside of its calls a payload passes for host memory, so that tests look at it as at any other.
    """

    def __init__(self, sim: SimulatedDevice, capacity_bytes: int, **options: Any) -> None:
        self.sim = sim
        self._lock = threading.RLock()
        with self._lock, sim:
            self._tier = MemoryTier(capacity_bytes, device=sim.device, **options)
        self.name = self._tier.name
        self.shared = self._tier.shared

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._tier, name)

        def call(*arguments: Any) -> Any:
            with self._lock, self.sim:
                return function(*arguments)

        return call


def device_tier(kind: str, capacity_bytes: int, **options: Any) -> Any:
    """A tier that keeps its entries on the `kind` of device."""
    if kind == "gpu":
        return MemoryTier(capacity_bytes, device="cuda", **options)
    return Simulated(SimulatedDevice("cuda:0"), capacity_bytes, **options)


def lies_on(tier: Any, tensor: torch.Tensor) -> str:
    """The type of the device where a tensor lies, as the tier sees it."""
    return tier.sim.device_of(tensor).type if isinstance(tier, Simulated) else tensor.device.type
