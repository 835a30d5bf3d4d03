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


def theirs(simulator: Any, cache: Any, sizes: dict[int, int]) -> int:
    """Hits that a cache of libcachesim has on the trace."""
    times: dict[int, int] = {}
    following = [0] * len(TRACE)
    for time in range(len(TRACE) - 1, -1, -1):
        following[time] = times.get(TRACE[time][0], -1)
        times[TRACE[time][0]] = time
    found = 0
    for time, (key,) in enumerate(TRACE):
        request = simulator.Request()
        request.obj_id, request.obj_size, request.clock_time = key, sizes[key], time
        request.next_access_vtime = following[time] if following[time] >= 0 else 2**62
        found += cache.get(request)
    return found


@pytest.mark.parametrize("capacity", [10, 60, 300])
def test_lru_and_belady_agree_with_libcachesim(capacity: int) -> None:
    simulator = pytest.importorskip("libcachesim")
    lru = theirs(simulator, simulator.LRU(capacity), SIZES)
    best = theirs(simulator, simulator.Belady(capacity), SIZES)
    assert hits(TRACE, "lru", capacity) == lru
    assert sum(BENCH["belady"](TRACE, capacity, SIZES).values()) == best
    # The trace tells policies apart: agreement says something.
    assert len({lru, best, theirs(simulator, simulator.FIFO(capacity), SIZES), hits(TRACE, "gdsf", capacity)}) == 4


@pytest.mark.parametrize("capacity", [300, 3000])
def test_lru_agrees_with_libcachesim_on_unequal_sizes(capacity: int) -> None:
    simulator = pytest.importorskip("libcachesim")
    sizes = dict(enumerate(np.random.default_rng(4).integers(1, 60, 900).tolist()))
    ours = sum(BENCH["replay"](TRACE, make_policy("lru"), capacity, sizes).values())
    assert ours == theirs(simulator, simulator.LRU(capacity), sizes)


def test_knowing_the_queue_is_worth_hits_and_never_beats_belady() -> None:
    best = sum(BENCH["belady"](TRACE, 60, SIZES).values())
    known = [hits(TRACE, "queue-aware", 60, queue) for queue in (0, 50, 1000)]
    assert known[0] < known[1] < known[2] <= best
    assert known[0] >= hits(TRACE, "lru", 60) - 0.005 * len(TRACE)


def chats(seed: int, conversations: int, live: int) -> list[list[int]]:
    """Every turn re-sends the images before it and adds one to three; one turn in five is the last."""
    rng = np.random.default_rng(seed)
    turns: list[list[int]] = []
    active: list[list[int]] = []
    image = 0
    while len(turns) < 5 * conversations:
        if len(active) < live or rng.random() < 0.2:
            active.append([])
        index = int(rng.integers(len(active)))
        for _ in range(int(rng.integers(1, 4))):
            active[index].append(image)
            image += 1
        turns.append(list(active[index]))
        if rng.random() < 0.2:
            active.pop(index)
    return turns


@pytest.mark.parametrize("seed", [1, 2])
def test_without_a_queue_it_is_near_the_better_of_lru_and_gdsf(seed: int) -> None:
    """Popularity rewards counting uses, conversations punish it: the policy learns which it sees."""
    rng = np.random.default_rng(seed)
    popular = [[int(key)] for key in rng.zipf(1.2, 20_000) % 5000]
    for trace, better, worse, capacity in (
        (popular, "gdsf", "lru", 100),
        (chats(seed, 600, 60), "lru", "gdsf", 600),
    ):
        keys = {key for request in trace for key in request}
        asked = sum(len(request) for request in trace)
        ratio = {
            name: sum(BENCH["replay"](trace, make_policy(name), capacity, dict.fromkeys(keys, 1)).values()) / asked
            for name in ("lru", "gdsf", "queue-aware")
        }
        assert ratio[better] > ratio[worse] + 0.03
        assert ratio["queue-aware"] > ratio[better] - 0.015
