"""What tiers cost, beside what a read of the same bytes costs without them.

    python bench/tiers.py [--rounds 60] [--entries 100000] [--skip redis mooncake startup]

All ways of one comparison take turns in one process, on one thread, with warm caches; medians count, as ratios. Servers
are started on free loopback ports where they are installed. "decoded" is header and checksum checked and the rows in
memory of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from tier_servers import MooncakeCluster, RedisServer

from mmcache import (
    CacheConfig,
    FieldConfig,
    ItemFields,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
)
from mmcache.namespaces import Namespace, namespace_fingerprint
from mmcache.tiers import (
    DiskTier,
    Key,
    MemoryTier,
    MooncakeTier,
    RedisTier,
    Tier,
    TieredStore,
    decode_entry,
    encode_entry,
)

torch.set_num_threads(1)
NAMESPACE = Namespace("bench", digest_scheme="sha256")
SPACE = namespace_fingerprint(NAMESPACE)
ROWS = torch.randn(512, 4096).to(torch.bfloat16)  # 4 MiB
ITEMS = 26


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, sorted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 3):
        for name, way in ways.items():
            start = time.perf_counter()
            result = way()
            elapsed = time.perf_counter() - start
            del result
            if turn >= 3:
                times[name].append(elapsed)
    return {name: sorted(values) for name, values in times.items()}


def show(title: str, times: dict[str, list[float]], limit: str) -> None:
    """Medians, their ratios, and the ratios of the best times, which say more where others use the machine, too."""
    print(f"\n{title}")
    for name, seconds in times.items():
        median, against = statistics.median(seconds), statistics.median(times[limit])
        best = min(seconds) / min(times[limit])
        print(f"  {name:52} {median * 1e3:9.3f} ms   {median / against:6.2f}   (best {best:5.2f})")


def get(tier: Tier, keys: list[Key]) -> list[torch.Tensor]:
    return [decode_entry(key, entry) for key, entry in tier.get_many(keys).items()]


def keys_of(count: int, prefix: str = "item") -> list[Key]:
    return [Key(SPACE, f"{prefix}-{number}") for number in range(count)]


@contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mmcache-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def disk(rounds: int) -> None:
    with directory() as path:
        tier = DiskTier(path, 1 << 30)
        (key,) = keys_of(1)
        tier.put_many({key: encode_entry(key, ROWS)})
        file = path / "objects" / key.name[:2] / key.name
        store = TieredStore([tier], namespace=NAMESPACE)

        def plain() -> bytes:
            with open(file, "rb") as opened:
                return opened.read()

        with ThreadPoolExecutor(1) as pool:
            times = take_turns(
                {
                    "plain read of the file": plain,
                    "DiskTier, decoded": lambda: get(tier, [key]),
                    "plain read on another thread, waited for": lambda: pool.submit(plain).result(),
                    "TieredStore.fetch (on another thread, waited for)": lambda: store.fetch([key]),
                },
                rounds * 3,
            )
        show("disk, one hit of 4 MiB in the page cache", times, "plain read of the file")
        store.close()


def redis(rounds: int) -> None:
    if why := RedisServer.why_not():
        print(f"\nredis: {why}")
        return
    from redis import Redis

    server = RedisServer("--maxmemory", "2gb")
    try:
        client = Redis.from_url(server.url)
        tier = RedisTier(server.url)
        compare_remote("redis", tier, rounds, client.set, lambda names: get_all(client, names))
    finally:
        server.kill()


def get_all(client: Any, names: list[str]) -> list[bytes]:
    if len(names) == 1:
        return [client.get(names[0])]
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.get(name)
    values: list[bytes] = pipeline.execute()
    return values


def mooncake(rounds: int) -> None:
    if why := MooncakeCluster.why_not():
        print(f"\nmooncake: {why}")
        return
    from mooncake.store import MooncakeDistributedStore

    cluster = MooncakeCluster(1 << 30)
    try:
        client = MooncakeDistributedStore()
        client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", cluster.address)
        tier = MooncakeTier(cluster.address, buffer_bytes=256 << 20)
        compare_remote(
            "mooncake",
            tier,
            rounds,
            client.put,
            lambda names: [client.get(names[0])] if len(names) == 1 else client.get_batch(names),
        )
        tier.close()
        client.close()
    finally:
        cluster.kill()


def compare_remote(
    name: str,
    tier: Tier,
    rounds: int,
    raw_put: Callable[[str, bytes], object],
    raw_get: Callable[[list[str]], list[bytes]],
) -> None:
    keys = keys_of(ITEMS)
    for number, key in enumerate(keys):
        entry = encode_entry(key, ROWS)
        raw_put(f"raw-{number}", entry.header + entry.payload.numpy().tobytes())
        tier.put_many({key: entry})
    for count in (1, ITEMS):
        names = [f"raw-{number}" for number in range(count)]
        assert [len(value) for value in raw_get(names)] == [encode_entry(keys[0], ROWS).nbytes] * count
        asked = keys[:count]
        times = take_turns(
            {
                "the client's own get": lambda names=names: raw_get(names),
                "tier, decoded": lambda asked=asked: get(tier, asked),
            },
            rounds if count == 1 else max(8, rounds // 4),
        )
        show(f"{name}, {count} x 4 MiB in one call", times, "the client's own get")


def startup(entries: int) -> None:
    with directory() as path:
        rows = torch.randn(1, 16)
        size = encode_entry(keys_of(1)[0], rows).nbytes
        tier = DiskTier(path, 1 << 40)
        keys = keys_of(entries)
        for start in range(0, entries, 500):
            tier.put_many({key: encode_entry(key, rows) for key in keys[start : start + 500]})
        nbytes = tier.usage().nbytes or 0
        tier.close()
        print(f"\nstart-up of a directory with {entries} entries: median (and longest) of 5, wall and processor time")
        starts(path, nbytes, "after a clean end", lambda: None)
        starts(path, nbytes, "after a kill -9 amid puts and evictions", lambda: killed(path, nbytes, rows))
        starts(path, nbytes, "after a power cut (files and index are compared)", lambda: power_cut(path, nbytes))
        tier = DiskTier(path, nbytes)
        evicting = puts(tier, keys_of(300, "new"), rows)
        tier.close()
        with directory() as small:
            other = DiskTier(small, 100 * size)
            plain = puts(other, keys_of(400, "new"), rows)[100:]
            other.close()
        print(
            f"  a put that evicts one: of {entries} entries {statistics.median(evicting) * 1e3:.3f} ms,"
            f" of 100 {statistics.median(plain) * 1e3:.3f} ms"
        )


def starts(path: Path, nbytes: int, title: str, before: Callable[[], None]) -> None:
    wall, cpu = [], []
    for _ in range(5):
        before()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        tier = DiskTier(path, nbytes)
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
        tier.close()
    times = ", ".join(
        f"{statistics.median(t) * 1e3:.1f} ({max(t) * 1e3:.1f}) ms {name}"
        for name, t in (("wall", wall), ("processor", cpu))
    )
    print(f"  {title:50} {times}")


def killed(path: Path, nbytes: int, rows: torch.Tensor) -> None:
    """A process that puts, evicts and removes until it is killed."""
    begun, began = os.pipe()
    pid = os.fork()
    if pid == 0:
        tier = DiskTier(path, nbytes)
        while True:
            keys = keys_of(32, f"{os.getpid()}-{time.monotonic_ns()}")
            tier.put_many({key: encode_entry(key, rows) for key in keys})
            tier.remove_many(keys[:4])
            os.write(began, b".")
    for _ in range(20):
        os.read(begun, 1)
    time.sleep(0.003)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(begun)
    os.close(began)


def power_cut(path: Path, nbytes: int) -> None:
    """What a process has left that lived in another run of the machine."""
    pid = os.fork()
    if pid == 0:
        DiskTier(path, nbytes)
        os._exit(0)
    os.waitpid(pid, 0)
    for owner in (path / "owners").iterdir():
        owner.write_text("another run of the machine")


def puts(tier: DiskTier, keys: list[Key], rows: torch.Tensor) -> list[float]:
    times = []
    for key in keys:
        entry = encode_entry(key, rows)
        begin = time.perf_counter()
        tier.put_many({key: entry})
        times.append(time.perf_counter() - begin)
    return times


def request_path(rounds: int) -> None:
    """A request with one new image of 4 MiB, from look-up to merge: with tiers behind the cache and without."""
    weights, batch = torch.randn(1024, 1024), torch.randn(256, 1024)
    tokens = list(range(600))
    into = torch.zeros(600, ROWS.shape[1], dtype=ROWS.dtype)
    pixels = ItemFields(
        {"pixel_values": torch.zeros(64, 64)}, {"pixel_values": FieldConfig.flat("image", [slice(0, 64)])}
    )

    def turn(cache: MultimodalCache, number: int, layers: int) -> tuple[float, float]:
        item = MultimodalItem("image", pixels, PlaceholderRange(20, 512), f"image-{number}-{layers}")
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        request = MultimodalRequest(f"turn-{number}", tokens, [item])
        with cache.lookup(request, num_computed_tokens=0) as lookup:
            hidden = batch
            for _ in range(layers):  # stands for an encoder
                hidden = torch.relu(hidden @ weights) * 1e-2
            cache.insert(lookup, {0: ROWS.clone()})
            lookup.merge_into(into)
        cache.finish(request)
        return time.perf_counter() - begin, time.thread_time() - begin_cpu

    with directory() as path:
        config = CacheConfig(
            capacity_bytes=32 * ROWS.nbytes, namespace=NAMESPACE, row_bytes={"image": ROWS.nbytes // ROWS.shape[0]}
        )
        caches = {
            "without tiers": MultimodalCache(config),
            "memory and disk behind it": MultimodalCache(
                config, [MemoryTier(8 * ROWS.nbytes), DiskTier(path, 64 * ROWS.nbytes)]
            ),
        }
        for layers in (0, 6):
            times: dict[str, list[float]] = {name: [] for name in caches}
            cpu: dict[str, list[float]] = {name: [] for name in caches}
            for number in range(rounds * 4 + 3):
                for name, cache in caches.items():
                    elapsed, busy = turn(cache, number, layers)
                    if number >= 3:
                        times[name].append(elapsed)
                        cpu[name].append(busy)
                if not layers:
                    time.sleep(0.005)  # writers have to get a turn, as between an engine's steps
            encoder = f"an encoder of {layers} layers 256 x 1024 x 1024" if layers else "no encoder at all"
            show(f"a request with one new image of 4 MiB, {encoder}", times, "without tiers")
            show("  ... the processor time of its own thread, whoever else wants the processor", cpu, "without tiers")
        stats = caches["memory and disk behind it"].tier_stats()
        assert stats is not None
        print(f"  of {stats.puts} puts {stats.tiers[0].dropped} / {stats.tiers[1].dropped} dropped (memory / disk)")
        for cache in caches.values():
            cache.close()
    store = TieredStore([MemoryTier(1 << 26, name="near"), MemoryTier(1 << 26, name="far")], namespace=NAMESPACE)
    keys = [store.key(f"known-{number}", "image") for number in range(ITEMS)]
    for key in keys:
        store.put(key, ROWS[:1].clone())
    store.flush(60)
    ways = {"known": lambda: store.known(keys), "prefetch": lambda: store.prefetch(keys)}
    for name, seconds in take_turns(ways, 300).items():
        print(f"  {name}({ITEMS} keys) of two tiers returns after {statistics.median(seconds) * 1e6:.1f} us")
    store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--skip", nargs="*", default=[], choices=["disk", "redis", "mooncake", "startup", "request"])
    arguments = parser.parse_args()
    print("median, its ratio to the limit, and that of the best times")
    for name, run in (
        ("disk", lambda: disk(arguments.rounds)),
        ("redis", lambda: redis(arguments.rounds)),
        ("mooncake", lambda: mooncake(arguments.rounds)),
        ("request", lambda: request_path(arguments.rounds)),
        ("startup", lambda: startup(arguments.entries)),
    ):
        if name not in arguments.skip:
            run()


if __name__ == "__main__":
    main()
