"""What the scheduler pays to learn how much of a request's KV exists, beside a chain of block hashes.

    python bench/prefix.py [--rounds 101] [--images 26] [--json FILE]

One request of a growing history: 26 images of 560 tokens behind 27 tokens of text each, int32 tokens. The chain is the
method of engines that know blocks by hash, without anything that it does not need: SHA-256 over the digest before, the
16 tokens of the block and the items that overlap it. Each row goes through a queue of conversations with tokens of
their own, one after the other, as a scheduler does, in one index. Rows run interleaved in one process on one thread;
medians of its CPU time for one conversation are printed (another process on the machine would count in a wall clock),
and ratios to the chain. A next turn that takes at most 1/5 of 1/30 of the chain is within the goals of both.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from mmcache import MultimodalItem, MultimodalRequest, PlaceholderRange, PrefixIndex, PrefixMatch, block_keys

BLOCK, ROWS, STRIDE = 16, 560, 587
QUEUE = 16
"""Conversations."""


def images(count: int, first: int = 0) -> list[MultimodalItem]:
    return [
        MultimodalItem("image", None, PlaceholderRange(n * STRIDE + 27, ROWS), hashlib.sha256(b"%d" % n).hexdigest())
        for n in range(first, first + count)
    ]


def chain(tokens: np.ndarray, items: list[tuple[int, int, bytes]]) -> list[bytes]:
    """A lean SHA-256 chain; `items` are (offset, end, identifier)."""
    sha256 = hashlib.sha256
    data = tokens.tobytes()
    parent, keys, open_item = bytes(32), [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = parent + data[4 * start : 4 * (start + BLOCK)]
        while open_item < len(items) and items[open_item][1] <= start:
            open_item += 1
        index = open_item
        while index < len(items) and items[index][0] < start + BLOCK:
            block += items[index][2] + (items[index][0] - start).to_bytes(8, "little", signed=True)
            index += 1
        parent = sha256(block).digest()
        keys.append(parent)
    return keys


def match_and_insert(index: PrefixIndex, request: MultimodalRequest) -> PrefixMatch:
    match = index.match(request)
    index.insert(request, request.num_tokens)
    match.release()
    return match


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of matching and inserting prefixes")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--images", type=int, default=26)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    count = arguments.images
    length = count * STRIDE + 18
    new_tokens = STRIDE + 33
    generator = np.random.default_rng(0)
    tokens = [generator.integers(0, 150_000, length + new_tokens, dtype=np.int32) for _ in range(QUEUE)]
    spans = [(i.placeholder.offset, i.placeholder.offset + ROWS, i.identifier.encode()) for i in images(count)]
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        results = []
        start = time.thread_time()
        for call in calls:
            results.append(call())
        times[name].append((time.thread_time() - start) / len(calls))
        return results

    def turns(name: str, index: PrefixIndex, requests: Sequence[MultimodalRequest], known: int) -> None:
        for match in timed(name, [partial(match_and_insert, index, request) for request in requests]):
            if match.num_tokens // BLOCK != known // BLOCK:
                raise SystemExit(f"{name}: {match} where {known} tokens are known")

    def requests(end: int, num_images: int) -> list[MultimodalRequest]:
        return [MultimodalRequest(f"{n}", own[:end], images(num_images)) for n, own in enumerate(tokens)]

    gc.disable()  # as timeit does: a collection would be charged to whichever row it falls into
    ints = tokens[0][:length].tolist()
    num_blocks = length // BLOCK
    known = length - STRIDE
    for _ in range(arguments.rounds):
        timed("SHA-256 chain", [partial(chain, own[:length], spans) for own in tokens])
        turns("match + insert, nothing known", PrefixIndex(BLOCK), requests(length, count), 0)
        index = PrefixIndex(BLOCK)
        numbered = [
            partial(index.insert, request, length, np.arange(n * num_blocks, (n + 1) * num_blocks))
            for n, request in enumerate(requests(length, count))
        ]
        timed("insert with ids that an engine gives", numbered)
        index = PrefixIndex(BLOCK)
        for request in requests(known, count - 1):
            index.insert(request, known)
        queue = requests(length, count)
        turns("match + insert, all but one image known", index, queue, known)
        for request, own in zip(queue, tokens):
            request.extend(own[length:], images(1, count))
        turns("the next turn: one more image", index, queue, length)
        again = requests(length + new_tokens, count + 1)
        turns("match + insert, all known, a new request object", index, again, length + new_tokens - 1)
        turns("match + insert, all known, the same object", index, again, length + new_tokens - 1)
        timed("block_keys", [partial(block_keys, queue[0], BLOCK)])
        timed("converting Python ints to an int32 array", [partial(np.asarray, ints, np.int32)])
    result = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    print(f"{count} images, {length} tokens, blocks of {BLOCK}; medians of {arguments.rounds} rounds")
    base = result["SHA-256 chain"]
    for name, microseconds in result.items():
        print(f"  {name:50} {microseconds:9.1f} us   1/{base / microseconds:.1f}")
    turn, first = result["the next turn: one more image"], result["match + insert, nothing known"]
    print(f"  the next turn is 1/{first / turn:.1f} of the first, 1/{base / turn:.0f} of the chain")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"images": count, "tokens": length, "microseconds": result}, file, indent=2)


if __name__ == "__main__":
    main()
