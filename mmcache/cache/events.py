"""Telling others what a cache stores and removes, for routers that send a request to the engine that holds its rows."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmcache.errors import ConfigError

__all__ = ["CacheEvent", "EventBus", "Listener"]

_log = logging.getLogger("mmcache.cache")


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """An embedding came into a tier, or left it.

    Attributes:
        kind: "stored" or "removed".
        tier: "device" for a cache's own memory on whatever device, else the tier's name.
        namespace: fingerprint of the cache's namespace under the request's salt and adapter.
        identifier: the content.
    """

    kind: Literal["stored", "removed"]
    tier: str
    namespace: str
    identifier: str


Listener: TypeAlias = Callable[[CacheEvent], None]


class EventBus:
    """Listeners and the events that wait for them. Events of one tier and content arrive in the order they happened.

    Listeners are called without any lock of the cache; what one raises is logged and counted, and concerns nobody else.

    Attributes:
        errors: exceptions that listeners raised.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._listeners: dict[object, Listener] = {}
        self._events: deque[CacheEvent] = deque()
        self._delivering = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event from now on; returns a function that ends that.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(listener):
            raise ConfigError("a listener is called with events", expected="a callable", found=repr(listener))
        key = object()  # one may listen twice, and end it once
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe

    def add(self, event: CacheEvent) -> None:
        """Queue an event; `deliver` once no lock is held."""
        self._events.append(event)

    def deliver(self) -> None:
        """Call the listeners with what is queued, unless another thread is doing it right now."""
        while self._events and self._delivering.acquire(blocking=False):
            try:
                while self._events:
                    event = self._events.popleft()
                    for listener in list(self._listeners.values()):
                        self._tell(listener, event)
            finally:
                self._delivering.release()

    def _tell(self, listener: Listener, event: CacheEvent) -> None:
        try:
            listener(event)
        except Exception:
            self.errors += 1
            _log.exception("a listener of cache events raised")
