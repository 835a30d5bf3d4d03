"""What a scheduler pays for a lookup, in multiples of 26 dictionary look-ups measured in the same process.

    python bench/lookup.py [--json FILE]

The request is a growing history: 26 images of 560 tokens, 15,280 tokens; unless said, 25 images are covered and 1 is
new. `peer` is the least that an engine without a plan does for the same request: a plain-dict LRU asked for all 26
items. Medians of interleaved rounds, in CPU time of the one thread: what others do on the machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import torch

from mmcache import (
    CacheConfig,
    FieldConfig,
    ItemFields,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
    split_fields,
)

STRIDE, LENGTH, TAIL = 585, 560, 70
WIDTH = 64


def fields(num: int) -> list[ItemFields]:
    grid = torch.tensor([[1, 2, 2]] * num)
    configs = {
        "pixel_values": FieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": FieldConfig.batched("image", keep_on_cpu=True),
    }
    return split_fields({"pixel_values": torch.zeros(num * 4, 2), "image_grid_thw": grid}, configs)["image"]


def identifiers(num: int, kind: str) -> list[str]:
    return [f"{kind}{i:031x}" for i in range(num)]


def items(of: list[ItemFields], names: list[str]) -> list[MultimodalItem]:
    return [
        MultimodalItem("image", of[i % len(of)], PlaceholderRange(i * STRIDE + 10, LENGTH), name)
        for i, name in enumerate(names)
    ]


def history(name: str, num: int, of: list[ItemFields], kind: str = "0") -> MultimodalRequest:
    tokens = np.arange(num * STRIDE + TAIL, dtype=np.int32)
    return MultimodalRequest(name, tokens, items(of, identifiers(num, kind)))


def cases() -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """Name to (what to time, what to do before, calls per timing)."""
    of = fields(26)
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 34, row_bytes={"image": WIDTH * 4}, prefix_blocks=0))
    known = {f"{i:032x}": i for i in range(26)}
    names = list(known)

    def floor() -> None:
        for name in names:
            known[name]

    lru: OrderedDict[str, int] = OrderedDict(known)

    def peer() -> None:
        for name in names:
            if name in lru:
                lru.move_to_end(name)
            else:
                lru[name] = 0

    def covered(num: int) -> Callable[[], None]:
        req = history(f"covered {num}", num, of, "c")
        start = (num - 1) * STRIDE

        def run() -> None:
            cache.lookup(req, num_computed_tokens=start).release()

        return run

    stored_request = history("stored", 26, of)
    with cache.lookup(stored_request, num_computed_tokens=0) as lookup:
        cache.insert(lookup, [torch.zeros(LENGTH, WIDTH)] * 26)
    cache.finish(stored_request)

    def stored(finish: bool) -> Callable[[], None]:
        req = history(f"stored {finish}", 26, of)

        def run() -> None:
            cache.lookup(req, num_computed_tokens=0).release()
            if finish:
                cache.finish(req)

        return run

    digests = identifiers(26, "0")  # hashing is another bench's business
    ready = items(of, digests)
    tokens = np.arange(26 * STRIDE + TAIL, dtype=np.int32)

    def make() -> None:
        MultimodalRequest("made", tokens, ready)

    parts = [(of[i], item.placeholder.offset, item.identifier) for i, item in enumerate(ready)]

    def make_all() -> None:
        made = [
            MultimodalItem("image", item_fields, PlaceholderRange(offset, LENGTH), name)
            for item_fields, offset, name in parts
        ]
        MultimodalRequest("made", tokens, made)

    new_tokens = np.arange(620, dtype=np.int32)

    def turn(num: int) -> tuple[Callable[[], None], Callable[[], None]]:
        # A conversation grows by what is timed: every round begins with a new one, made outside the time. So are its
        # first turns, or else they would be charged for what making 2,600 items drives out of the CPU's caches.
        state: list[MultimodalRequest] = []

        def prepare() -> None:
            if state:
                cache.finish(state.pop())
            state.append(history(f"turn {num}", num, of, "t"))
            state[0].extend(new_tokens)  # makes room; the next doubling is far away
            for _ in range(3):
                run()

        def run() -> None:
            req = state[0]
            at = req.num_tokens
            item = MultimodalItem("image", of[0], PlaceholderRange(at + 20, LENGTH), f"u{at:031x}")
            req.extend(new_tokens, [item])
            cache.lookup(req, num_computed_tokens=at).release()

        return run, prepare

    def nothing() -> None:
        pass

    return {
        "26 dict look-ups (floor)": (floor, nothing, 2000),
        "peer: plain-dict LRU, 26 items": (peer, nothing, 1000),
        "lookup + release, 25 of 26 covered, 1 missing": (covered(26), nothing, 500),
        "lookup + release, 2,599 of 2,600 covered, 1 missing": (covered(2600), nothing, 500),
        "lookup + release, 26 stored and needed, held": (stored(False), nothing, 200),
        "lookup + release + finish, 26 stored and needed": (stored(True), nothing, 200),
        "make the request from 26 items": (make, nothing, 100),
        "make the request, its 26 items and ranges": (make_all, nothing, 100),
        "one more turn: extend + lookup + release, at 26": (*turn(26), 10),
        "one more turn: extend + lookup + release, at 2,600": (*turn(2600), 10),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    timed = cases()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for run, prepare, calls in timed.values():
        prepare()
        for _ in range(calls):
            run()
    gc.collect()
    gc.disable()
    for _ in range(arguments.rounds):
        for name, (run, prepare, calls) in timed.items():
            prepare()
            begin = time.thread_time()
            for _ in range(calls):
                run()
            seconds[name].append((time.thread_time() - begin) / calls)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    for name, value in medians.items():
        print(f"{name:52} {value * 1e6:9.2f} us  {value / base:7.1f} x")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({name: {"us": v * 1e6, "ratio": v / base} for name, v in medians.items()}, file, indent=1)


if __name__ == "__main__":
    main()
