"""What a content digest costs, as ratios to the raw hash call and to reading the buffer once.

    python bench/hashing.py [--rounds 41]

All variants run interleaved in one process, on one thread but for the pool; medians are printed. "Cold" rows sweep a
large buffer through the caches before every call.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import xxhash

from mmcache.hashing import ContentHasher, HashPool, ImageSource


def measured(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    repeat: int,
    before: Callable[[], object],
    pick: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before()
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            times[name].append((time.perf_counter() - start) / repeat)
    return {name: pick(values) for name, values in times.items()}


def show(title: str, result: dict[str, float], base: str) -> None:
    print(f"\n{title}")
    for name, seconds in result.items():
        print(f"  {name:44} {seconds * 1e6:12.2f} us  {seconds / result[base]:8.3f} x {base}")


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of content digests")
    parser.add_argument("--rounds", type=int, default=41)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    hashers = {name: ContentHasher(name) for name in ("xxh3_128", "sha256")}
    raw: dict[str, Callable[[object], object]] = {"xxh3_128": xxhash.xxh3_128_hexdigest}
    try:
        from blake3 import blake3
    except ImportError:
        print("blake3 is not installed: its rows are left out")
    else:
        hashers["blake3"] = ContentHasher("blake3")
        raw["blake3"] = lambda view: blake3(view).hexdigest()
    sweep = np.zeros(64 << 20, np.uint8)

    def evict() -> None:
        sweep[::64] += 1

    def nothing() -> None:
        return

    fast = hashers["xxh3_128"]
    generator = torch.Generator().manual_seed(0)
    large = torch.rand(5040, 768, generator=generator)
    bf16 = torch.rand(1024, 2048, generator=generator).to(torch.bfloat16)
    for title, tensor, before, repeat in (
        ("float32 (5040, 768), 15.5 MB, cold", large, evict, 1),
        ("bfloat16 (1024, 2048), 4 MiB, warm", bf16, nothing, 3),
    ):
        bits = tensor.view(torch.uint8).numpy().reshape(-1)
        words, view = bits.view(np.int64), memoryview(bits)
        calls: dict[str, Callable[[], object]] = {"read": words.max}
        for name in raw:
            calls[f"raw {name}"] = lambda name=name, view=view: raw[name](view)
            calls[f"digest {name}"] = lambda name=name, tensor=tensor: hashers[name].digest(tensor)
        result = measured(calls, rounds, repeat, before)
        show(title, result, "read")
        for name in raw:
            print(f"  digest / raw, {name}: {result[f'digest {name}'] / result[f'raw {name}']:.3f}")

    small = torch.arange(6, dtype=torch.float32)
    small_bytes, grid = small.numpy().tobytes(), torch.tensor([[1, 48, 64]])
    small_array, small_bf16 = small.numpy(), torch.arange(12, dtype=torch.bfloat16)
    result = measured(
        {
            "raw xxh3_128": lambda: xxhash.xxh3_128_hexdigest(small_bytes),
            "t.numpy()": small.numpy,
            "digest of a 24-byte tensor": lambda: fast.digest(small),
            "digest of a 24-byte array": lambda: fast.digest(small_array),
            "digest of 24 bytes": lambda: fast.digest(small_bytes),
            "digest of a tensor and options": lambda: fast.digest("image", small, size=504, resample="bicubic"),
            "digest of a bf16 tensor": lambda: fast.digest(small_bf16),
            "digest of a grid (1, 3) int64": lambda: fast.digest(grid),
        },
        10 * rounds,
        30,
        nothing,
    )
    show("small parts", result, "raw xxh3_128")

    # What a second thread gains: a hash that is as fast as memory gains what reading gains, no more. The best of all
    # rounds, as whatever else runs on the second core shows in the others.
    many = [torch.rand(1260, 768, generator=generator) for _ in range(16)]
    arrays = [tensor.view(torch.int64).numpy() for tensor in many]
    with ThreadPoolExecutor(2) as readers:
        pools = {name: HashPool(hasher, 2) for name, hasher in hashers.items()}
        calls = {
            "read, one thread": lambda: [array.max() for array in arrays],
            "read, two threads": lambda: list(readers.map(np.max, arrays)),
        }
        for name, pool in pools.items():
            calls[f"{name}, one thread"] = lambda hasher=hashers[name]: [hasher.digest(tensor) for tensor in many]
            calls[f"{name}, pool of two"] = lambda pool=pool: [f.result() for f in [pool.submit(t) for t in many]]
        result = measured(calls, 3 * rounds, 1, nothing, min)
        for pool in pools.values():
            pool.close()
    show("16 x 3.9 MB, best of all rounds", result, "read, one thread")

    try:
        from PIL import Image
    except ImportError:
        print("Pillow is not installed: its rows are left out")
        return
    shades = (np.indices((1080, 1920)).sum(axis=0) % 256).astype(np.uint8)
    image = Image.fromarray(np.stack([shades, shades.T.reshape(shades.shape), 255 - shades], axis=-1))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    jpeg, pixels, carried = buffer.getvalue(), np.asarray(image), ImageSource(buffer.getvalue())
    result = measured(
        {
            "file, digested once": lambda: ImageSource(jpeg).digest(fast),
            "file, digest carried, with settings": lambda: fast.digest("image", carried, settings={"size": 504}),
            "pixels as an array": lambda: fast.digest(pixels),
            "pixels of a Pillow image": lambda: fast.digest(image),
            "decoding, for comparison": ImageSource(jpeg).decode,
        },
        rounds,
        1,
        nothing,
    )
    show(f"one 1920 x 1080 image, JPEG of {len(jpeg) >> 10} kB", result, "file, digested once")


if __name__ == "__main__":
    main()
