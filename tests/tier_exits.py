"""Processes that end while a thread of the library is in torch's code: `python tier_exits.py DIR NAME...`

Each is a child of one process that has imported everything, does its work, and falls off its end like any program. The
answer is a line of JSON: name, and how it ended (0, or the negative number of a signal).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from builders import images, request
from tier_helpers import NAMESPACE, rows_of

from mmcache import CacheConfig, MultimodalCache
from mmcache.engines.vllm.threads import Helper
from mmcache.hashing import ContentHasher, HashPool
from mmcache.tiers import DiskTier, MemoryTier, TieredStore

HOLD = []  # what a program forgets to close lives as long as the program


def in_torch(seconds: float = 0.4) -> None:
    """Be in torch's code, without the interpreter's lock for most of it, for some time after the program has ended."""
    end = time.monotonic() + seconds
    large = torch.ones(1 << 22)
    while time.monotonic() < end:
        large.add_(1.0)


class Busy(MemoryTier):
    """A tier that is in torch's code whenever it is asked."""

    def get_many(self, keys):
        in_torch()
        return super().get_many(keys)

    def put_many(self, entries):
        in_torch()
        return super().put_many(entries)


class Hanging(MemoryTier):
    """A tier that does not answer before the process has ended."""

    def get_many(self, keys):
        time.sleep(3600)
        return {}


def store_of(*tiers, **options):
    store = TieredStore(list(tiers), namespace=NAMESPACE, **options)
    HOLD.append(store)
    return store


def reading(directory):
    store = store_of(Busy(1 << 20))
    store.prefetch([store.key("a", "image")])
    time.sleep(0.05)


def writing(directory):
    store = store_of(Busy(1 << 20), DiskTier(directory / "written", 64 << 20))
    for name in "abc":
        store.put(store.key(name, "image"), rows_of(name, 512, 1024))
    time.sleep(0.05)


def calling_back(directory):
    store = store_of(MemoryTier(1 << 20))
    store.prefetch([store.key("a", "image")], lambda found: in_torch())
    time.sleep(0.05)


def waiting(directory):
    # The one thread that cannot be waited for does not keep the process
    store = store_of(Hanging(1 << 20))
    store.close = lambda: TieredStore.close(store, 0.2)
    store.prefetch([store.key("a", "image")])
    time.sleep(0.05)
    store.close()


def caching(directory):
    config = CacheConfig(capacity_bytes=1 << 20, namespace=NAMESPACE)
    cache = MultimodalCache(config, [Busy(1 << 20), DiskTier(directory / "cache", 1 << 20)])
    HOLD.append(cache)
    with cache.lookup(request("r", 20, images((2, 4), ids=["picture"])), num_computed_tokens=0) as lookup:
        cache.insert(lookup, {0: rows_of("picture")})


def hashing(directory):
    pool = HashPool(ContentHasher("sha256"), 2)
    HOLD.append(pool)
    for number in range(4):
        pool.submit(torch.full((1 << 23,), float(number)).to(torch.bfloat16))


def helping_vllm(directory):
    helper = Helper()
    HOLD.append(helper)
    for _ in range(50):
        helper(in_torch)
    time.sleep(0.05)


def child_of_multiprocessing(directory):
    process = multiprocessing.get_context("fork").Process(target=child, args=(directory,))
    process.start()
    process.join()
    assert process.exitcode == 0


def child(directory):
    store = store_of(DiskTier(directory / "child", 64 << 20))
    store.put(store.key("a", "image"), rows_of("a", 512, 1024))


SCENARIOS = (
    reading,
    writing,
    calling_back,
    waiting,
    caching,
    hashing,
    helping_vllm,
    child_of_multiprocessing,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in SCENARIOS:
        if scenario.__name__ not in sys.argv[2:]:
            continue
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            scenario(Path(sys.argv[1]))
            break
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([scenario.__name__, ended, time.monotonic() - started]), flush=True)
