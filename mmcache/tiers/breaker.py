"""A circuit breaker: what fails again and again is left alone for a while, and then probed."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """Closed (work is allowed), or open until a probe succeeds.

    Args:
        failures: consecutive failures that open it.
        retry_seconds: pause before the first probe; doubled after each failed probe up to `longest_seconds`.
        longest_seconds: the longest pause.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        failures: int = 3,
        retry_seconds: float = 0.5,
        longest_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._first = retry_seconds
        self._longest = longest_seconds
        self._clock = clock
        self._lock = Lock()
        self._failures = 0
        self._pause = retry_seconds
        self._open_until: float | None = None
        self.opened = 0
        """How often it has opened."""

    @property
    def closed(self) -> bool:
        """Whether work is allowed."""
        return self._open_until is None

    def probe_due(self) -> float | None:
        """Seconds until a probe is due (0 or less: now), or None while it is closed."""
        until = self._open_until
        return None if until is None else until - self._clock()

    @property
    def allows(self) -> bool:
        """Whether work may go ahead: it is closed, or a probe is due and the work is the probe."""
        due = self.probe_due()
        return due is None or due <= 0

    def success(self) -> bool:
        """Something worked; True if that closed the breaker."""
        with self._lock:
            was_open = self._open_until is not None
            self._failures = 0
            self._pause = self._first
            self._open_until = None
        return was_open

    def failure(self) -> bool:
        """Something failed; True if that opened the breaker. A failure when a probe is due is that of the probe."""
        with self._lock:
            if self._open_until is not None:
                if self._clock() >= self._open_until:  # before that it is work which began while it was closed
                    self._pause = min(self._pause * 2, self._longest)
                    self._open_until = self._clock() + self._pause
                return False
            self._failures += 1
            if self._failures < self._limit:
                return False
            self._open_until = self._clock() + self._pause
            self.opened += 1
        return True
