"""The reading side of one tier: a thread that asks it, for several fetches at once, and never makes an asker wait."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeAlias, TypeVar

from torch import Tensor

from mmcache.errors import DamagedEntryError, TierError
from mmcache.tiers.breaker import CircuitBreaker
from mmcache.tiers.counters import Counters
from mmcache.tiers.entry import Entry, decode_entry
from mmcache.tiers.fetch import Ask, Fetch
from mmcache.tiers.keys import Key
from mmcache.tiers.knowledge import Knowledge
from mmcache.tiers.protocol import Tier
from mmcache.tiers.timers import Timers

__all__ = ["TierReader"]

_log = logging.getLogger("mmcache.tiers")
_KEYS_A_CALL = 128
_KEYS_A_DEADLINE = 8

_V = TypeVar("_V")
Found: TypeAlias = "dict[Key, tuple[Tensor, Entry]]"


class TierReader:
    """Asks a tier on a thread of its own.

    Args:
        tier: the tier.
        deadline: seconds in which it has to answer, for every eight keys of a question.
        knowledge: what is known of its contents; kept up to date.
        counters: counters of the tier.
        timers: for deadlines and probes.
        on_answer: called with an ask that an answer has settled, its fetch's found rows, and entries that are damaged.
        on_expired: called with an ask that its deadline has settled.
        on_lost: called with keys that were known and turned out not to be there.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        deadline: float,
        knowledge: Knowledge,
        counters: Counters,
        timers: Timers,
        on_answer: Callable[[Ask, Fetch, Found, Sequence[Key]], None],
        on_expired: Callable[[Ask, Fetch], None],
        on_lost: Callable[[Sequence[Key]], None],
    ) -> None:
        self.breaker = CircuitBreaker(retry_seconds=min(0.5, deadline))
        self._tier = tier
        self._deadline = deadline
        self._knowledge = knowledge
        self._counters = counters
        self._timers = timers
        self._on_answer = on_answer
        self._on_expired = on_expired
        self._on_lost = on_lost
        self._queue: SimpleQueue[Ask | _Learn | _Probe | None] = SimpleQueue()
        self._warned = False
        self._stopping = False
        self._thread = Thread(target=self._run, name=f"mmcache-{tier.name}-read", daemon=True)
        self._thread.start()

    def submit(self, ask: Ask) -> None:
        """Ask the tier; the ask is settled within the deadline, whatever the tier does."""
        self._counters.add(asked=len(ask.keys))
        self._timers.after(self._allowed(ask.keys), lambda: self._expire(ask))
        self._queue.put(ask)

    def learn(self, keys: Sequence[Key], began: int) -> None:
        """Find out, some time soon, which of the keys the tier holds; what is removed after `began` stays unknown."""
        if self.breaker.closed:
            self._queue.put(_Learn(keys, began))

    def cancel(self, ask: Ask) -> bool:
        """Settle an ask for its asker; False if it is settled already."""
        if ask.settle() is None:
            return False
        self._counters.add(cancelled=len(ask.keys))
        return True

    def close(self, timeout: float) -> bool:
        """Stop after what is queued; False if the thread hangs in the tier."""
        self._stopping = True
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            work = [self._queue.get()]
            while len(work) < _KEYS_A_CALL:  # what has piled up meanwhile goes into one call
                try:
                    work.append(self._queue.get_nowait())
                except Empty:
                    break
            stopping = None in work
            asks = [ask for ask in work if isinstance(ask, Ask) and not ask.settled]
            try:
                self._answer(asks)
            except Exception:  # an answer of another shape than `Tier` says; nobody is to wait for its deadline
                _log.exception("tier %s: unexpected answer", self._tier.name)
                for ask in asks:
                    self._give_up(ask)
            learn = [item for item in work if isinstance(item, _Learn)]
            if learn and self.breaker.closed:
                self._look(list({key: None for item in learn for key in item.keys}), min(item.began for item in learn))
            for probe in (item for item in work if isinstance(item, _Probe)):
                self._probe(probe)

    def _answer(self, asks: list[Ask]) -> None:
        keys = list(dict.fromkeys(key for ask in asks for key in ask.keys))
        entries: dict[Key, Entry] = {}
        failed: dict[Key, None] = {}
        for start in range(0, len(keys), _KEYS_A_CALL):
            part = keys[start : start + _KEYS_A_CALL]
            began = time.monotonic()
            got = self._call(self._tier.get_many, part)
            self._counters.timed("read", time.monotonic() - began)
            if got is None:
                failed |= dict.fromkeys(part)
            else:
                entries |= got
        for ask in asks:
            self._decode(ask, entries, failed)

    def _give_up(self, ask: Ask) -> None:
        fetch = ask.settle()
        if fetch is not None:
            self._counters.add(errors=len(ask.keys))
            self._failed(TierError("unexpected answer", field=self._tier.name), ask.keys[0])
            self._on_expired(ask, fetch)

    def _decode(self, ask: Ask, entries: dict[Key, Entry], failed: dict[Key, None]) -> None:
        fetch = ask.fetch
        if fetch is None:
            return
        found: Found = {}
        damaged: dict[Key, str] = {}
        for key in ask.keys:
            if key in entries:
                try:
                    found[key] = (decode_entry(key, entries[key], fetch.expected.get(key)), entries[key])
                except DamagedEntryError as error:
                    damaged[key] = error.reason
        missing = [key for key in ask.keys if key not in entries and key not in failed]
        self._knowledge.add(found, fetch.began)
        if gone := self._knowledge.discard([*missing, *damaged]):
            self._on_lost(gone)
        if ask.settle() is None:
            return  # too late; the deadline has counted it
        errors = sum(key in failed for key in ask.keys)
        self._counters.add(
            hits=len(found),
            misses=len(missing),
            damaged=len(damaged),
            errors=errors,
            bytes_read=sum(entry.nbytes for _, entry in found.values()),
            **{f"damaged_{reason}": n for reason, n in Counter(damaged.values()).items()},
        )
        self._on_answer(ask, fetch, found, list(damaged))

    def _look(self, keys: list[Key], began: int) -> None:
        for start in range(0, len(keys), _KEYS_A_CALL):
            part = keys[start : start + _KEYS_A_CALL]
            held = self._call(self._tier.contains_many, part)
            if held is None:
                return
            self._knowledge.add(held, began)
            if gone := self._knowledge.discard([key for key in part if key not in held]):
                self._on_lost(gone)

    def _call(self, function: Callable[[Sequence[Key]], dict[Key, _V]], keys: list[Key]) -> dict[Key, _V] | None:
        """The tier's answer, or None if it failed."""
        start = time.monotonic()
        try:
            answer = function(keys)
        except Exception as error:  # a tier that raises anything else is as broken, and must not end the thread
            if not isinstance(error, TierError):
                _log.error("tier %s: unexpected error", self._tier.name, exc_info=error)
            self._failed(error, keys[0])
            return None
        if time.monotonic() - start <= self._allowed(keys):
            self._worked()
        return answer

    def _allowed(self, keys: Sequence[Key]) -> float:
        return self._deadline * max(1.0, len(keys) / _KEYS_A_DEADLINE)

    # -- the breaker

    def _expire(self, ask: Ask) -> None:
        fetch = ask.settle()
        if fetch is not None:
            self._counters.add(timeouts=len(ask.keys))
            self._failed(
                TierError(f"no answer within {self._allowed(ask.keys):g} s", field=self._tier.name), ask.keys[0]
            )
            self._on_expired(ask, fetch)

    def _failed(self, error: Exception, key: Key) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("tier %s fails and counts as missing until it works again: %s", self._tier.name, error)
        if self.breaker.failure():
            self._counters.add(opened=1)
            self._schedule_probe(key)

    def _worked(self) -> None:
        if self.breaker.success():
            _log.warning("tier %s works again", self._tier.name)
        self._warned = False

    def _schedule_probe(self, key: Key) -> None:
        due = self.breaker.probe_due()
        if due is not None and not self._stopping:
            self._timers.after(max(due, 0.001), lambda: self._send_probe(key))

    def _send_probe(self, key: Key) -> None:
        probe = _Probe(key)
        self._queue.put(probe)
        self._timers.after(self._deadline, lambda: self._expire_probe(probe))

    def _probe(self, probe: _Probe) -> None:
        start = time.monotonic()
        try:
            self._tier.contains_many([probe.key])
        except Exception:
            return  # its deadline counts it
        if time.monotonic() - start <= self._deadline:
            probe.answered = True
            self._worked()

    def _expire_probe(self, probe: _Probe) -> None:
        if not probe.answered and not self.breaker.closed:
            self.breaker.failure()
            self._schedule_probe(probe.key)


class _Learn:
    __slots__ = ("began", "keys")

    def __init__(self, keys: Sequence[Key], began: int) -> None:
        self.keys = keys
        self.began = began


class _Probe:
    __slots__ = ("answered", "key")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.answered = False
