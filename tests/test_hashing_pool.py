"""Hashing in threads, and giving it up."""

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

from mmcache import ConfigError, UnhashableContentError
from mmcache.hashing import ContentHasher, HashPool, ImageSource


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake3", "sha256"])
def test_the_pool_agrees_with_the_hasher(algorithm):
    hasher = ContentHasher(algorithm)
    rng = np.random.default_rng(0)
    parts = [rng.random((70, 1000 * size)) for size in range(1, 12)]
    with HashPool(hasher, 3) as pool:
        futures = [pool.submit("image", part, settings={"size": 5}) for part in parts]
        for part, future in zip(parts, futures):
            assert future.result(60) == hasher.digest("image", part, settings={"size": 5})
        source = ImageSource(b"x")
        assert pool.submit(source).result(60) == source.digest(hasher)


def test_errors_reach_the_one_who_asked():
    with HashPool(ContentHasher()) as pool:
        bad, good = pool.submit([object()]), pool.submit([1])
        with pytest.raises(UnhashableContentError):
            bad.result(60)
        assert good.result(60) == ContentHasher().digest([1])


class Gate:
    def __init__(self):
        self.entered, self.leave = threading.Event(), threading.Event()


def gated(monkeypatch):
    gate = Gate()
    original = ContentHasher.digest_until

    def slow(self, stop, parts, named_parts):
        gate.entered.set()
        assert gate.leave.wait(60)
        return original(self, stop, parts, named_parts)

    monkeypatch.setattr(ContentHasher, "digest_until", slow)
    return gate


def test_what_has_begun_can_be_given_up(monkeypatch):
    gate = gated(monkeypatch)
    with HashPool(ContentHasher(), 1) as pool:
        running, waiting, kept = (pool.submit(np.zeros((1000, 1000))) for _ in range(3))
        assert gate.entered.wait(60)
        assert running.cancel()
        assert waiting.cancel()
        gate.leave.set()
        for future in (running, waiting):
            with pytest.raises(CancelledError):
                future.result(60)
        assert kept.result(60) == ContentHasher().digest(np.zeros((1000, 1000)))
        assert not kept.cancel()


def test_a_large_buffer_is_given_up_between_its_pieces():
    asked = []

    def stop():
        asked.append(True)
        return len(asked) > 3

    with pytest.raises(CancelledError):
        ContentHasher().digest_until(stop, (np.zeros(8 << 20),), {})  # 64 MB: sixteen pieces
    assert len(asked) == 4
    assert ContentHasher().digest_until(lambda: False, (np.zeros(8 << 20),), {}) == ContentHasher().digest(
        np.zeros(8 << 20)
    )


def test_a_pool_needs_a_worker_and_can_be_closed_twice():
    with pytest.raises(ConfigError):
        HashPool(ContentHasher(), 0)
    pool = HashPool(ContentHasher())
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError):
        pool.submit(1)
