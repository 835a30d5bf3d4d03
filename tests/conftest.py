import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from mmcache import native

# Small parallel operations on shared cores stall at barriers, and would make results depend on the machine.
torch.set_num_threads(1)

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
# For a first look at a failure: the example as it was found, at once.
hypothesis.settings.register_profile(
    "unshrunk", deadline=None, phases=(hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate)
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names that hold an address differ between processes, and the tests could not be shared out among them."""
    named_by_address = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if named_by_address:
        raise pytest.UsageError(f"tests are named by values, not by addresses: {named_by_address}")


@pytest.fixture(scope="module", params=["payload first", "step first"])
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    """What a sender does first: a module that uses this runs its tests as with little payload and as with much."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "step first":
            patch.setattr("mmcache.ipc.gather._LARGE", 0)
        yield request.param


@pytest.fixture
def scheduler() -> Iterator[Any]:
    """A ledger and a sender with an arena of their own, for what is tested of `mmcache.ipc`."""
    from ipc_helpers import Arena, Scheduler

    arena = Arena(1 << 18)
    yield Scheduler(arena)
    arena.close()


@pytest.fixture(scope="module", params=["compiled", "NumPy"])
def copies(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who moves rows: a module that uses this runs its tests with the compiled part and without."""
    if request.param == "compiled" and native.scatter is None:
        pytest.skip("built without a compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "NumPy":
            patch.setattr(native, "scatter", None)
            patch.setattr(native, "scatter_rounded", None)
        yield request.param
