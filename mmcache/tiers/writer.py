"""The writing side of one tier: a queue bounded in bytes, and a thread that empties it into the tier.

Nobody waits for it. What does not fit into the queue is dropped: a cache that was not filled is slower, not wrong.
Removals are never dropped: until the tier has taken one, its key is not read from there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread

from mmcache.errors import TierError
from mmcache.tiers.breaker import CircuitBreaker
from mmcache.tiers.counters import Counters
from mmcache.tiers.entry import Entry
from mmcache.tiers.keys import Key
from mmcache.tiers.knowledge import Knowledge
from mmcache.tiers.pending import PendingRows
from mmcache.tiers.protocol import Tier

__all__ = ["TierWriter"]

_log = logging.getLogger("mmcache.tiers")
_ENTRIES_A_CALL = 32
_BYTES_A_CALL = 64 << 20
_RETRY_SECONDS = 0.5


class TierWriter:
    """Writes to a tier on a thread of its own.

    Args:
        tier: the tier.
        capacity_bytes: bytes that may wait, those that are being written included.
        knowledge: what is known of the tier's contents; kept up to date.
        counters: counters of the tier.
        on_stored: called with keys that are new in the tier.
        on_removed: called with keys that were known and are gone.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        capacity_bytes: int,
        knowledge: Knowledge,
        counters: Counters,
        on_stored: Callable[[Sequence[Key]], None],
        on_removed: Callable[[Sequence[Key]], None],
    ) -> None:
        self._breaker = CircuitBreaker(retry_seconds=_RETRY_SECONDS)
        self._tier = tier
        self._capacity = capacity_bytes
        self._knowledge = knowledge
        self._counters = counters
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._condition = Condition()
        self._puts: deque[Key] = deque()
        self._queued: dict[Key, _Item] = {}
        self._bytes = 0
        # With the call that asked for it last: one that is asked for while it is carried out is carried out again
        self._removals: dict[Key, object] = {}
        self._clears: dict[str | None, object] = {}
        self._busy = False
        self._stopping = False
        self._writing = _Attempts("takes no writes, they are dropped")
        self._removing = _Attempts("takes no removals, they wait")
        self._removals_at = 0.0
        self._thread = Thread(target=self._run, name=f"mmcache-{tier.name}-write", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait or are being written."""
        return self._bytes

    def queued(self, key: Key) -> PendingRows | None:
        """The rows of a key that wait here, or None. Takes no lock."""
        item = self._queued.get(key)
        return item.pending if item is not None else None

    @property
    def idle(self) -> bool:
        """Nothing waits: neither rows nor removals. Takes no lock."""
        return not (self._queued or self._removals or self._clears)

    def blocks(self, key: Key) -> bool:
        """Whether the key is to be removed and may still be there. Takes no lock."""
        return key in self._removals or key.namespace in self._clears or None in self._clears

    def put(self, pending: PendingRows, *, read: int | None = None) -> bool:
        """Queue rows; False if they are dropped. Never waits for the tier.

        Args:
            pending: the rows.
            read: a moment before they were read from another tier: what was removed after it does not come back. None:
                they are new.
        """
        key = pending.key
        with self._condition:
            if read is not None and self._knowledge.removed_after(key, read):
                return False
            if key in self._queued or (key in self._knowledge and not self.blocks(key)):
                return True
            fits = not self._stopping and self._breaker.allows and self._bytes + pending.nbytes <= self._capacity
            if fits:
                self._bytes += pending.nbytes
                self._queued[key] = _Item(pending, read is not None)
                self._puts.append(key)
                self._condition.notify_all()
        if not fits:
            self._counters.add(dropped=1)
        return fits

    def remove(self, keys: Sequence[Key], *, wanted: bool = False) -> None:
        """Queue removals, ahead of everything; from now on the keys are not read from the tier.

        Args:
            keys: what to remove.
            wanted: it is this tier's entries that are of no use; what other tiers hold is, and may be promoted.
        """
        call = object()
        with self._condition:
            for key in keys:
                self._forget(key)
                self._removals[key] = call
            gone = self._knowledge.discard(keys) if wanted else self._knowledge.remove(keys)
            self._condition.notify_all()
        self._report_removed(gone)

    def clear(self, namespace: str | None) -> None:
        """Queue the removal of a namespace (None: of everything)."""
        with self._condition:
            for key in [key for key in self._queued if namespace in (None, key.namespace)]:
                self._forget(key)
            self._clears[namespace] = object()
            gone = self._knowledge.clear(namespace)
            self._condition.notify_all()
        self._report_removed(gone)

    def flush(self, timeout: float | None) -> bool:
        """Wait until nothing waits or is being written; False if that takes longer than `timeout` seconds."""
        with self._condition:
            return self._condition.wait_for(lambda: self.idle and not self._busy, timeout)

    def close(self, timeout: float) -> bool:
        """Stop without what waits; False if the thread hangs in the tier."""
        with self._condition:
            self._stopping = True
            self._drop_all()
            self._condition.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._busy = False
                self._condition.notify_all()
                while not self._stopping and not self._ready():
                    self._condition.wait(self._pause())
                if self._stopping:
                    return
                self._busy = True
                due = self._removals_at <= time.monotonic()
                removals, clears = (dict(self._removals), dict(self._clears)) if due else ({}, {})
                batch = self._take_batch()
            if removals or clears:
                removed = self._attempt(self._removing, self._remove, removals, clears)
                self._removals_at = 0.0 if removed else time.monotonic() + _RETRY_SECONDS
            if batch and self._attempt(self._writing, self._put, batch):
                self._breaker.success()

    def _attempt(self, attempts: _Attempts, work: Callable[..., None], *arguments: object) -> bool:
        try:
            work(*arguments)
        except Exception as error:  # a tier that raises anything else is as broken, and must not end the thread
            if not isinstance(error, TierError):
                _log.error("tier %s: unexpected error", self._tier.name, exc_info=error)
            if not attempts.warned:
                attempts.warned = True
                _log.warning("tier %s %s until it works again: %s", self._tier.name, attempts.failure, error)
            if attempts is self._writing and self._breaker.failure():
                self._counters.add(opened=1)
            return False
        attempts.warned = False
        return True

    def _ready(self) -> bool:
        if self._has_removals() and self._removals_at <= time.monotonic():
            return True
        if self._breaker.allows:
            return bool(self._puts)
        self._drop_all()
        return False

    def _pause(self) -> float | None:
        """Seconds until a removal that failed is due again; None where nothing waits for anything but a call."""
        return max(self._removals_at - time.monotonic(), 0.001) if self._has_removals() else None

    def _has_removals(self) -> bool:
        return bool(self._removals or self._clears)

    def _take_batch(self) -> list[_Item]:
        batch: list[_Item] = []
        size = 0
        while self._puts and len(batch) < _ENTRIES_A_CALL and size < _BYTES_A_CALL:
            item = self._queued.get(self._puts.popleft())
            if item is not None and not item.writing:  # else it was removed, or removed and put again
                item.writing = True
                batch.append(item)
                size += item.pending.nbytes
        return batch

    def _put(self, batch: list[_Item]) -> None:
        entries: dict[Key, Entry] = {}
        stored: frozenset[Key] = frozenset()
        try:
            for item in batch:
                try:
                    entries[item.pending.key] = item.pending.entry()
                except Exception as error:  # no memory for the host copy, say: no reason to lose the others
                    _log.warning("rows of %s cannot be stored: %s", item.pending.key.identifier, error)
            if entries:
                began = time.monotonic()
                try:
                    outcome = self._tier.put_many(entries)
                finally:
                    self._counters.timed("write", time.monotonic() - began)
                stored = outcome.stored
                self._on_stored(self._knowledge.add(stored))
                self._report_removed(self._knowledge.discard(outcome.evicted))
        finally:
            self._counters.add(
                stored=len(stored),
                promoted=sum(item.promoted for item in batch if item.pending.key in stored),
                bytes_written=sum(entries[key].nbytes for key in stored),
                dropped=len(batch) - len(stored),
            )
            with self._condition:
                for item in batch:
                    if self._queued.get(item.pending.key) is item:
                        del self._queued[item.pending.key]
                    self._bytes -= item.pending.nbytes

    def _remove(self, removals: dict[Key, object], clears: dict[str | None, object]) -> None:
        removed = 0
        for namespace in clears:
            removed += self._tier.clear(namespace)
        if removals:
            removed += self._tier.remove_many(list(removals))
        self._counters.add(removed=removed)
        with self._condition:
            for key, call in removals.items():
                if self._removals[key] is call:
                    del self._removals[key]
            for namespace, call in clears.items():
                if self._clears[namespace] is call:
                    del self._clears[namespace]
        # A put that was under way when the removal was asked for has made its keys known again
        gone = self._knowledge.discard(removals)
        for namespace in clears:
            gone += self._knowledge.discard_namespace(namespace)
        self._report_removed(gone)

    def _forget(self, key: Key) -> None:
        item = self._queued.pop(key, None)
        if item is not None and not item.writing:
            self._bytes -= item.pending.nbytes
            self._counters.add(dropped=1)

    def _drop_all(self) -> None:
        for key in [key for key, item in self._queued.items() if not item.writing]:
            self._forget(key)
        self._puts.clear()

    def _report_removed(self, keys: Sequence[Key]) -> None:
        if keys:
            self._on_removed(keys)


class _Attempts:
    __slots__ = ("failure", "warned")

    def __init__(self, failure: str) -> None:
        self.failure = failure
        self.warned = False


class _Item:
    __slots__ = ("pending", "promoted", "writing")

    def __init__(self, pending: PendingRows, promoted: bool) -> None:
        self.pending = pending
        self.promoted = promoted
        self.writing = False
