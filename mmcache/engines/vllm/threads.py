"""One thread that does what the scheduler's thread must not wait for: hashing and copying."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from mmcache.tiers.lifetime import call_at_exit

__all__ = ["Helper"]

_log = logging.getLogger("mmcache.vllm")
_EXIT_SECONDS = 10.0


class Helper:
    """Runs functions in their order, on a thread of its own. A process that ends waits for the one that is running."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stopping = False
        self._do_not_close_at_exit = call_at_exit(lambda: self.close(_EXIT_SECONDS))
        self._thread = Thread(target=self._run, name="mmcache-ec-helper", daemon=True)
        self._thread.start()

    def __call__(self, function: Callable[[], None]) -> None:
        """Run it soon."""
        self._queue.put(function)

    def close(self, timeout: float) -> None:
        """Stop without what is queued."""
        self._do_not_close_at_exit()
        self._stopping = True
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None and not self._stopping:
            try:
                function()
            except Exception:
                _log.exception("a background job of the encoder-cache connector failed")
