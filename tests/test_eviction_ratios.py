"""The simulator of `bench/eviction.py` against libcachesim, and what knowing the queue is worth."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcache.policies import make_policy

BENCH = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "eviction.py"))
TRACE = [[int(key)] for key in np.random.default_rng(3).zipf(1.2, 6000) % 900]
SIZES = dict.fromkeys(range(900), 1)


def hits(trace: Any, name: str, capacity: int, queue: int = 0) -> int:
    return sum(BENCH["replay"](trace, make_policy(name), capacity, SIZES, None, queue).values())


@pytest.mark.parametrize("capacity", [10, 60, 300])
def test_lru_and_belady_agree_with_libcachesim(capacity: int) -> None:
    simulator = pytest.importorskip("libcachesim")
    times: dict[int, int] = {}
    following = [0] * len(TRACE)
    for time in range(len(TRACE) - 1, -1, -1):
        following[time] = times.get(TRACE[time][0], -1)
        times[TRACE[time][0]] = time
    for ours, theirs in (
        (hits(TRACE, "lru", capacity), simulator.LRU(capacity)),
        (sum(BENCH["belady"](TRACE, capacity, SIZES).values()), simulator.Belady(capacity)),
    ):
        found = 0
        for time, (key,) in enumerate(TRACE):
            request = simulator.Request()
            request.obj_id, request.obj_size, request.clock_time = key, 1, time
            request.next_access_vtime = following[time] if following[time] >= 0 else 2**62
            found += theirs.get(request)
        assert ours == found


def test_knowing_the_queue_is_worth_hits_and_never_beats_belady() -> None:
    best = sum(BENCH["belady"](TRACE, 60, SIZES).values())
    known = [hits(TRACE, "queue-aware", 60, queue) for queue in (0, 50, 1000)]
    assert known[0] < known[1] < known[2] <= best
    assert known[0] >= hits(TRACE, "lru", 60) - 0.005 * len(TRACE)
