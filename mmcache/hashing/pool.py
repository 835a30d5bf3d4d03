"""Hashing beside the caller: a bounded pool of threads, whose work can be given up halfway."""

from __future__ import annotations

import os
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Self

from mmcache.errors import ConfigError, ReleasedError
from mmcache.hashing.hasher import ContentHasher
from mmcache.integers import as_int

__all__ = ["HashPool"]


class _Hashing(Future[str]):
    """A future whose `cancel` also stops work that has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up = False

    def cancel(self) -> bool:
        self.given_up = True
        return super().cancel() or not self.done()


class HashPool:
    """Digests many or large parts in threads. Hash functions release the GIL while they read a large buffer.

    What it gives is that the caller goes on meanwhile, and can give up. SHA-256 and BLAKE3 are bound by their core and
    gain from every thread; `xxh3_128` is as fast as memory and gains what a second reader of memory would. Parts below
    some hundred kilobytes are sooner digested than handed over.

    Give it what nobody writes to meanwhile. Close it, or use it in a `with` block.
    """

    def __init__(self, hasher: ContentHasher, max_workers: int = 2) -> None:
        """Start a pool of at most `max_workers` threads.

        Raises:
            ConfigError: no hasher, or not an integer of at least one.
        """
        if not isinstance(hasher, ContentHasher):
            raise ConfigError("a pool digests with a ContentHasher", field="hasher", found=type(hasher).__name__)
        workers = as_int(max_workers)
        if workers is None or workers < 1:
            raise ConfigError("a pool needs a worker", field="max_workers", expected=">= 1", found=max_workers)
        self._hasher = hasher
        self._workers = workers
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._executor = ThreadPoolExecutor(self._workers, thread_name_prefix="mmcache-hash")
        self._process = os.getpid()

    def submit(self, /, *parts: object, **named_parts: object) -> Future[str]:
        """Digest in the pool, as `ContentHasher.digest` does.

        Returns:
            A future of the digest. Its `cancel()` also ends a digest that is being computed, within a few megabytes;
            its result is then a `CancelledError`.

        Raises:
            ReleasedError: the pool is closed.
        """
        if self._closed:
            raise ReleasedError("the pool is closed")
        if self._process != os.getpid():  # threads do not come along into a forked process
            self._start()
        future = _Hashing()
        self._executor.submit(self._work, future, parts, named_parts)
        return future

    def _work(self, future: _Hashing, parts: tuple[object, ...], named_parts: dict[str, object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            digest = self._hasher.digest_until(lambda: future.given_up, parts, named_parts)
            if future.given_up:
                raise CancelledError
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(digest)

    def close(self) -> None:
        """Wait for what was submitted, and end the threads. Idempotent."""
        self._closed = True
        if self._process == os.getpid():
            self._executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
