"""One thread that does what the scheduler's thread must not wait for: hashing and copying."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

__all__ = ["Helper"]

_log = logging.getLogger("mmcache.vllm")


class Helper:
    """Runs functions in their order, on a thread of its own that does not keep the process alive."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="mmcache-ec-helper", daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[[], None]) -> None:
        """Run it soon."""
        self._queue.put(function)

    def close(self, timeout: float) -> None:
        """Stop behind what is queued."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            try:
                function()
            except Exception:
                _log.exception("a background job of the encoder-cache connector failed")
