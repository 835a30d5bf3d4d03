"""One thread that calls functions when their time has come."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from threading import Condition, Thread

__all__ = ["Timers"]

_TICK = 0.005
_LONG = 3600.0
"""Seconds; locks cannot count to any time."""


class Timers:
    """Deadlines of many short operations on one daemon thread. Functions must be short, and must not raise.

    They are called up to `_TICK` seconds late, so that thousands of deadlines a second, which hardly ever come to
    anything, wake the thread some hundred times.
    """

    def __init__(self, name: str) -> None:
        self._condition = Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._closed = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call `function` in `seconds`, or right away once this is closed."""
        due = math.ceil((time.monotonic() + seconds) / _TICK) * _TICK
        with self._condition:
            closed = self._closed
            if not closed:
                heapq.heappush(self._heap, (due, next(self._numbers), function))
                if self._heap[0][0] == due:
                    self._condition.notify()
        if closed:
            function()

    def close(self) -> None:
        """Stop, and call what is not due yet: nobody is to wait for a deadline that does not come."""
        with self._condition:
            self._closed = True
            rest, self._heap = self._heap, []
            self._condition.notify()
        self._thread.join(1.0)
        for _, _, function in rest:
            function()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._condition.wait(min(self._heap[0][0] - time.monotonic(), _LONG) if self._heap else None)
                if self._closed:
                    return
                function = heapq.heappop(self._heap)[2]
            function()
