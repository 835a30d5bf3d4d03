"""One thread on which a store calls what others gave it, so that slow or failing listeners hold up nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from mmcache.tiers.counters import Counters

__all__ = ["Callbacks"]

_log = logging.getLogger("mmcache.tiers")


class Callbacks:
    """Calls functions in the order in which they were handed in; exceptions are counted and logged."""

    def __init__(self, name: str, counters: Counters) -> None:
        self._counters = counters
        self._closed = False
        self._queue: SimpleQueue[tuple[Callable[..., object], tuple[object, ...]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have `function(*arguments)` called some time soon; once this is closed, right away and here."""
        if self._closed:
            self._guarded(function, arguments)
        else:
            self._queue.put((function, arguments))

    def forked(self) -> None:
        """The thread is not in this process: calls are made right away."""
        self._closed = True

    def close(self, timeout: float) -> None:
        """Stop after what was handed in so far."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._guarded(*work)
            del work  # rows that were handed out are not kept until the next call

    def _guarded(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        try:
            function(*arguments)
        except Exception:
            self._counters.add(listener_errors=1)
            _log.exception("a listener failed")
