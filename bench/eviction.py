"""Hit ratios of the eviction policies and of Belady's on traces of requests.

    python bench/eviction.py --traces DIR [--shares 0.01 0.05] [--queues 0 64] [--equal]

Every `*.jsonl` or `*.jsonl.gz` in DIR whose lines have `hash_ids` is replayed: an id is an object, a line a request
that needs its objects in order. Sizes are equal, or lognormal from 0.2 to 30 MB (seeded). Capacity is a share of the
distinct bytes. With a queue the policy knows the requests that run next, as a scheduler does. Seconds saved are of an
encoder that takes 5 ms and 4 ms a megabyte, times a seeded lognormal factor, and are given to the policy as costs.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from mmcache.policies import EvictionPolicy, QueueAwarePolicy, make_policy

Trace = Sequence[Sequence[int]]


def read_trace(path: Path) -> list[list[int]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        return [record["hash_ids"] for line in lines if "hash_ids" in (record := json.loads(line))]


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


def report(name: str, trace: Trace, shares: Sequence[float], queues: Sequence[int], equal_only: bool) -> None:
    keys, uses = np.unique(np.concatenate([np.asarray(request, np.int64) for request in trace]), return_counts=True)
    ids = keys.tolist()
    rng = np.random.default_rng(1)
    lognormal = np.clip(rng.lognormal(np.log(2.45), 1.25, len(ids)), 0.2, 30) * 1e6
    factor = rng.lognormal(0, 0.3, len(ids))
    for title, array in (("equal sizes", np.ones(len(ids))), ("lognormal sizes", lognormal)):
        if equal_only and title != "equal sizes":
            continue
        sizes = dict(zip(ids, array.astype(np.int64).tolist()))
        mega = array / 1e6 if title != "equal sizes" else np.full(len(ids), 2.45)
        costs = dict(zip(ids, ((0.005 + 0.004 * mega) * factor).tolist()))
        wanted = dict(zip(ids, uses.tolist()))

        def ratio(hits: dict[int, int], of: Callable[[int], float], wanted: dict[int, int] = wanted) -> float:
            return sum(n * of(key) for key, n in hits.items()) / sum(n * of(key) for key, n in wanted.items())

        print(f"\n{name}: {sum(uses)} uses of {len(ids)} objects, {title}")
        print(f"  {'share':>6}  {'policy':24} {'objects':>8} {'bytes':>8} {'seconds saved':>14}")
        for share in shares:
            capacity = int(share * sum(sizes.values()))
            rows: list[tuple[str, str, int]] = [("lru", "lru", 0), ("gdsf", "gdsf", 0)]
            rows += [(f"queue-aware, {queue} known", "queue-aware", queue) for queue in queues]
            for label, policy, queue in rows:
                plain = replay(trace, make_policy(policy), capacity, sizes, None, queue)
                costed = plain if policy == "lru" else replay(trace, make_policy(policy), capacity, sizes, costs, queue)
                line = (ratio(plain, lambda _: 1.0), ratio(plain, sizes.__getitem__), ratio(costed, costs.__getitem__))
                print(f"  {share:6.3f}  {label:24} {line[0]:8.4f} {line[1]:8.4f} {line[2]:14.4f}", flush=True)
            best = belady(trace, capacity, sizes)
            line = (ratio(best, lambda _: 1.0), ratio(best, sizes.__getitem__), ratio(best, costs.__getitem__))
            print(f"  {share:6.3f}  {'Belady':24} {line[0]:8.4f} {line[1]:8.4f} {line[2]:14.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="hit ratios of eviction policies")
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.05, 0.1, 0.25])
    parser.add_argument("--queues", type=int, nargs="+", default=[0, 16, 64, 256, 1024])
    parser.add_argument("--equal", action="store_true", help="equal sizes only")
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.traces.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    if not paths:
        raise SystemExit(f"no *.jsonl or *.jsonl.gz in {arguments.traces}")
    for path in paths:
        trace = [request for request in read_trace(path) if request]
        if trace:
            report(path.name, trace, arguments.shares, arguments.queues, arguments.equal)


if __name__ == "__main__":
    main()
