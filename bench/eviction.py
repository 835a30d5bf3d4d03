"""Hit ratios of the eviction policies and of Belady's on traces of requests.

    python bench/eviction.py --traces DIR [--shares 0.01 0.05] [--queues 0 64] [--seed 1] [--json FILE]

Every `*.jsonl` or `*.jsonl.gz` in DIR whose lines have `hash_ids` is replayed: an id is an object, a line a request
that needs its objects in order. Sizes are equal, or lognormal from 0.2 to 30 MB (seeded). Capacity is a share of the
distinct bytes. With a queue the policy knows the requests that run next, as a scheduler does. Objects and bytes are
those of hits at cost 1; seconds saved are of an encoder that takes 5 ms and 4 ms a megabyte, times a seeded lognormal
factor, and are given to the policy as costs. Belady's rule is the best there is where sizes and costs are equal.
One process a core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from mmcache.policies import EvictionPolicy, QueueAwarePolicy, make_policy

Trace = Sequence[Sequence[int]]


def read_trace(path: Path) -> list[list[int]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        return [ids for line in lines if (ids := json.loads(line).get("hash_ids"))]


def replay(
    trace: Trace,
    policy: EvictionPolicy,
    capacity: int,
    sizes: dict[int, int],
    costs: dict[int, float] | None = None,
    queue: int = 0,
) -> dict[int, int]:
    """Hits of each object."""
    hits: dict[int, int] = {}
    resident: set[int] = set()
    used = 0
    aware = isinstance(policy, QueueAwarePolicy) and queue > 0
    if aware:
        for position in range(min(queue, len(trace))):
            policy.announce(position, trace[position])
    for position, request in enumerate(trace):
        if aware and position + queue < len(trace):
            policy.announce(position + queue, trace[position + queue])
        for key in request:
            if aware:
                policy.withdraw(position, (key,))
            if key in resident:
                hits[key] = hits.get(key, 0) + 1
                policy.touch(key)
                continue
            size = sizes[key]
            if size > capacity:
                continue
            while used + size > capacity:
                victim = policy.victim()
                if not isinstance(victim, int):
                    raise SystemExit("the policy has no victim although objects are resident")
                resident.remove(victim)
                used -= sizes[victim]
            resident.add(key)
            used += size
            policy.add(key, size, 1.0 if costs is None else costs[key], key)
    return hits


def belady(trace: Trace, capacity: int, sizes: dict[int, int]) -> dict[int, int]:
    """Hits of each object where the one that is needed last goes first (the best there is, with equal sizes)."""
    flat = [key for request in trace for key in request]
    following: dict[int, int] = {}
    needed = [0] * len(flat)
    for time in range(len(flat) - 1, -1, -1):
        needed[time] = following.get(flat[time], len(flat))
        following[flat[time]] = time
    hits: dict[int, int] = {}
    due: dict[int, int] = {}
    order: list[tuple[int, int]] = []
    used = 0
    for key, then in zip(flat, needed):
        if key in due:
            hits[key] = hits.get(key, 0) + 1
        elif sizes[key] > capacity:
            continue
        else:
            while used + sizes[key] > capacity:
                time, victim = heappop(order)
                if due.get(victim) == -time:
                    del due[victim]
                    used -= sizes[victim]
            used += sizes[key]
        due[key] = then
        heappush(order, (-then, key))
        if len(order) > 4 * len(due) + 64:
            order = [(-time, key) for key, time in due.items()]
            heapify(order)
    return hits


class Workload:
    """A trace with a size and a cost for each object.

    Attributes:
        trace, sizes, costs: as `replay` takes them.
        uses: how often each object is asked for.
    """

    def __init__(self, trace: Trace, lognormal: bool, seed: int) -> None:
        self.trace = trace
        keys, uses = np.unique(np.concatenate([np.asarray(request, np.int64) for request in trace]), return_counts=True)
        ids = keys.tolist()
        rng = np.random.default_rng(seed)
        drawn = np.clip(rng.lognormal(np.log(2.45), 1.25, len(ids)), 0.2, 30)
        megabytes = drawn if lognormal else np.full(len(ids), 2.45)
        self.sizes: dict[int, int] = dict(zip(ids, (megabytes * 1e6).astype(np.int64).tolist()))
        factor = rng.lognormal(0, 0.3, len(ids))
        self.costs: dict[int, float] = dict(zip(ids, ((0.005 + 0.004 * megabytes) * factor).tolist()))
        self.uses: dict[int, int] = dict(zip(ids, uses.tolist()))

    def measure(self, share: float, policy: str, queue: int) -> tuple[float, float, float]:
        """Object hit ratio, byte hit ratio, share of the encoder seconds saved."""
        capacity = int(share * sum(self.sizes.values()))
        if policy == "belady":
            hits = costed = belady(self.trace, capacity, self.sizes)
        else:
            hits = costed = replay(self.trace, make_policy(policy), capacity, self.sizes, None, queue)
            if policy != "lru":
                costed = replay(self.trace, make_policy(policy), capacity, self.sizes, self.costs, queue)
        return (
            self._ratio(hits, dict.fromkeys(self.uses, 1)),
            self._ratio(hits, self.sizes),
            self._ratio(costed, self.costs),
        )

    def _ratio(self, hits: Mapping[int, int], worth: Mapping[int, float]) -> float:
        return sum(n * worth[key] for key, n in hits.items()) / sum(n * worth[key] for key, n in self.uses.items())


Case = tuple[str, bool, float, str, int]  # trace, whether sizes are lognormal, share, policy, queue
_workloads: dict[tuple[str, bool], Workload] = {}  # of a process


def measure(case: Case, seed: int) -> tuple[float, float, float]:
    path, lognormal, *what = case
    if (path, lognormal) not in _workloads:
        _workloads[path, lognormal] = Workload(read_trace(Path(path)), lognormal, seed)
    return _workloads[path, lognormal].measure(*what)


def cases(paths: Sequence[Path], shares: Sequence[float], queues: Sequence[int]) -> Iterator[Case]:
    for path in paths:
        for lognormal in (False, True):
            for share in shares:
                for policy in ("lru", "gdsf"):
                    yield str(path), lognormal, share, policy, 0
                for queue in queues:
                    yield str(path), lognormal, share, "queue-aware", queue
                yield str(path), lognormal, share, "belady", 0


def main() -> None:
    parser = argparse.ArgumentParser(description="hit ratios of eviction policies")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.05, 0.1, 0.25])
    parser.add_argument("--queues", type=int, nargs="+", default=[0, 16, 64, 256, 1024])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.traces.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    paths = [path for path in paths if read_trace(path)]
    if not paths:
        raise SystemExit(f"no *.jsonl or *.jsonl.gz with hash_ids in {arguments.traces}")
    rows = []
    table = ""
    todo = list(cases(paths, arguments.shares, arguments.queues))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(measure, todo, [arguments.seed] * len(todo))
        for (path, lognormal, share, policy, queue), found in zip(todo, results):
            title = f"{Path(path).name}, {'lognormal' if lognormal else 'equal'} sizes"
            if title != table:
                table = title
                print(f"\n{title}\n  {'share':>6}  {'policy':24} {'objects':>8} {'bytes':>8} {'seconds saved':>14}")
            label = f"{policy}, {queue} known" if policy == "queue-aware" else policy
            print(f"  {share:6.3f}  {label:24} {found[0]:8.4f} {found[1]:8.4f} {found[2]:14.4f}", flush=True)
            case = {"trace": path, "lognormal": lognormal, "share": share, "policy": policy, "queue": queue}
            rows.append(case | dict(zip(("objects", "bytes", "seconds"), found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
