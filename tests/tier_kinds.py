"""The kinds of tiers, as parameters of tests, and one of each kind of this process's own."""

import pytest
import torch
from tier_devices import ON_A_DEVICE, device_tier

from mmcache.tiers import DiskTier, MemoryTier


def _with_a_gpu(kind):
    return pytest.param(
        kind, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
    )


GPU = _with_a_gpu("gpu")
OF_THIS_PROCESS = ["memory", _with_a_gpu("pinned"), "simulated device", GPU]
WITH_A_BUDGET = [*OF_THIS_PROCESS, "disk"]
SERVERS = [pytest.param(kind, marks=pytest.mark.server) for kind in ("redis", "mooncake")]


def make_tier(kind, budget, directory):
    if kind in ON_A_DEVICE:
        return device_tier(kind, budget)
    return DiskTier(directory / "store", budget) if kind == "disk" else MemoryTier(budget, pinned=kind == "pinned")
