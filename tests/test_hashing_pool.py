"""Hashing in threads, and giving it up."""

import os
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

from mmcache import ConfigError, ReleasedError, UnhashableContentError
from mmcache.hashing import AudioSource, ContentHasher, HashPool, ImageSource, VideoSource


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


class Paused(ContentHasher):
    """Stops in the middle of a content until it is told to go on."""

    __slots__ = ("asked", "go_on", "halfway")

    def __init__(self):
        super().__init__()
        self.asked, self.halfway, self.go_on = 0, threading.Event(), threading.Event()

    def digest_until(self, stop, parts, named_parts):
        def pause():
            self.asked += 1
            if self.asked == 4:
                self.halfway.set()
                assert self.go_on.wait(60)
            return stop()

        return super().digest_until(pause, parts, named_parts)


@pytest.mark.parametrize("given_up", [True, False])
@pytest.mark.parametrize("kind", ["array", "file", "frame", "samples"])
def test_a_digest_is_given_up_in_the_middle_of_its_content(kind, given_up):
    hasher, content = Paused(), np.zeros(4 << 20)  # 32 MB: eight pieces
    if kind != "array":
        content = {
            "file": lambda: VideoSource(bytes(32 << 20)),
            "frame": lambda: VideoSource([ImageSource(bytes(32 << 20))]),
            "samples": lambda: AudioSource(content, 16000),
        }[kind]()
    with HashPool(hasher, 1) as pool:
        future = pool.submit(content)
        assert hasher.halfway.wait(60)
        assert not given_up or future.cancel()
        hasher.go_on.set()
        if given_up:
            with pytest.raises(CancelledError):
                future.result(60)
            assert hasher.asked == 4, "what was left was not read"
            if kind != "array":  # and what was not finished is not remembered
                assert content.digest(ContentHasher()) == ContentHasher().digest(content)
        else:
            assert future.result(60) == ContentHasher().digest(content)
            assert hasher.asked > 8


class Holding(ContentHasher):
    """Computes without ever letting go of the GIL, as a hash written in Python would."""

    def digest_until(self, stop, parts, named_parts):
        return str(sum(range(300_000)))


def seen_running(hasher):
    """Whether this thread gets to run while a digest is being computed in the pool.

    No thread is made to let go of the GIL meanwhile, so that it can only be because the digest let go of it itself.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        with HashPool(hasher, 1) as pool:
            content = bytearray(16 << 20)
            for _ in range(200 if type(hasher) is ContentHasher else 5):
                future = pool.submit(content)
                while not future.done():
                    if future.running():
                        return True
                    time.sleep(0)
        return False
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("algorithm", ["xxh3_128", "blake3", "sha256"])
def test_other_threads_run_while_a_digest_is_computed(algorithm):
    assert seen_running(ContentHasher(algorithm))


def test_a_hash_that_keeps_the_gil_would_be_noticed():
    assert not seen_running(Holding())


def test_a_pool_needs_a_worker_and_can_be_closed_twice():
    for workers in (0, True, 1.5, None):
        with pytest.raises(ConfigError, match="worker"):
            HashPool(ContentHasher(), workers)
    with pytest.raises(ConfigError, match="ContentHasher"):
        HashPool("xxh3_128")
    pool = HashPool(ContentHasher())
    pool.close()
    pool.close()
    with pytest.raises(ReleasedError, match="closed"):
        pool.submit(1)


def test_a_forked_child_digests_with_threads_of_its_own():
    hasher = ContentHasher()
    with HashPool(hasher, 1) as pool:
        digest = pool.submit(b"before").result()
        child = os.fork()
        if not child:  # only a number may leave it: pytest's own cleaning up belongs to the parent
            same = pool.submit(b"before").result(timeout=30) == digest
            pool.close()
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.submit(b"before").result() == digest
