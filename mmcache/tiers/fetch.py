"""One look-up of several keys on its way through the tiers, and the one question it has open at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Event as Flag
from threading import Lock
from typing import TypeAlias

from torch import Tensor

from mmcache.staging import Event
from mmcache.tiers.arguments import patience
from mmcache.tiers.devices import handed_out
from mmcache.tiers.keys import Expected, Key

__all__ = ["Ask", "Fetch", "OnDone", "Rows"]

OnDone = Callable[[dict[Key, Tensor]], None]
Rows: TypeAlias = "dict[Key, tuple[Tensor, Event | None]]"
"""Rows by key, with the point behind which they are written where they might not be yet."""


class Fetch:
    """Rows that are being fetched. Made by `TieredStore.prefetch`; `poll` it, or give a callback there.

    What was found is shared with whoever else found it: rows are not to be written to. Rows on a device are for the
    stream that is current where they are handed out: it waits until they are written, the host does not. Rows that are
    removed from the store before they are handed out are not: they are missing.
    """

    def __init__(
        self,
        expected: Mapping[Key, Expected | None],
        on_done: OnDone | None,
        on_cancel: Callable[[Fetch], None],
        began: int,
        removed_after: Callable[[Key, int], bool],
    ) -> None:
        self.expected = expected
        self.began = began
        """A moment before anything was looked for; see `Removals`."""
        self.on_done = on_done
        self.stage = 0
        """Index of the tier to ask next; whoever settled the last question moves it on."""
        self.ask: Ask | None = None
        self.cancelled = False
        self._on_cancel = on_cancel
        self._removed_after = removed_after
        self._lock = Lock()
        self._missing = dict.fromkeys(expected)
        self._found: Rows = {}
        self._new: Rows = {}
        self._done = Flag()

    @property
    def done(self) -> bool:
        """Whether nothing more will arrive: what is not found by now is missing."""
        return self._done.is_set()

    def poll(self) -> dict[Key, Tensor]:
        """What arrived since the last call. Never waits."""
        with self._lock:
            new, self._new = self._new, {}
        return self._handed_out(new)

    def wait(self, timeout: float | None = None) -> dict[Key, Tensor]:
        """Wait, at most `timeout` seconds, and return everything that was found by then.

        Raises:
            ConfigError: the timeout is no number.
        """
        self._done.wait(patience(timeout))
        with self._lock:
            found = dict(self._found)
        return self._handed_out(found)

    def cancel(self) -> None:
        """Nobody needs the rest any more; the callback is not called. Idempotent."""
        if not self.done:
            self.cancelled = True
            self._on_cancel(self)

    def missing(self) -> list[Key]:
        """What is not found yet."""
        with self._lock:
            return list(self._missing)

    def deliver(self, found: Rows) -> None:
        """Take in what a tier gave, or what waits to be written."""
        with self._lock:
            for key, rows in found.items():
                if key in self._missing:
                    del self._missing[key]
                    self._found[key] = self._new[key] = rows

    def finish(self) -> bool:
        """Nothing more will arrive; True for the one caller that made it so."""
        with self._lock:
            if self._done.is_set():
                return False
            self._done.set()
            return True

    def _handed_out(self, found: Rows) -> dict[Key, Tensor]:
        return {
            key: handed_out(rows, written)
            for key, (rows, written) in found.items()
            if not self._removed_after(key, self.began)
        }


class Ask:
    """The keys that one fetch asks one tier for; settled once: by the answer, the deadline or the asker.

    Args:
        fetch: who asks.
        keys: what for.
        stage: index of the tier.
    """

    __slots__ = ("_lock", "fetch", "keys", "settled", "stage")

    def __init__(self, fetch: Fetch, keys: Sequence[Key], stage: int) -> None:
        self.fetch: Fetch | None = fetch
        self.keys = keys
        self.stage = stage
        self.settled = False
        self._lock = Lock()

    def settle(self) -> Fetch | None:
        """The fetch, for the first caller; None for all others, who have come too late."""
        with self._lock:
            fetch, self.fetch = self.fetch, None  # an ask in a queue does not keep the rows alive
            self.settled = True
        return fetch
