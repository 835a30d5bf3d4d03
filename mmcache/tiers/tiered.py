"""Several tiers as one store that is asked in order and never makes an engine wait, fail or use wrong rows.

put ──► a queue for every tier ──► writer threads ──► tiers
prefetch / fetch ──► the queues' rows ──► tier 0 ──► tier 1 ...      (reader threads; a deadline for each)
                                           └─ a hit is promoted to the tiers before it
known ──► what was learned of the tiers, no I/O
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from types import TracebackType

import torch
from torch import Tensor

from mmcache.errors import ConfigError, EmbeddingError, TierError
from mmcache.namespaces import Namespace, namespace_fingerprint, require_trusted_digests
from mmcache.tiers.arguments import check_callable, check_seconds, check_whole, keys_of, patience, wanted_of
from mmcache.tiers.callbacks import Callbacks
from mmcache.tiers.counters import Counters, TieredStats
from mmcache.tiers.fetch import Ask, Fetch, OnDone, Rows
from mmcache.tiers.keys import MAX_IDENTIFIER_BYTES, MAX_MODALITY_BYTES, Expected, Key, as_utf8
from mmcache.tiers.knowledge import Knowledge
from mmcache.tiers.lane import Lane
from mmcache.tiers.lifetime import call_at_exit, forked_with
from mmcache.tiers.memory import MemoryTier
from mmcache.tiers.pending import PendingRows
from mmcache.tiers.protocol import Tier, TierUsage
from mmcache.tiers.reader import Found, TierReader
from mmcache.tiers.timers import Timers
from mmcache.tiers.writer import TierWriter

__all__ = ["OnEvent", "TieredStore"]

_log = logging.getLogger("mmcache.tiers")

_LONG_IDENTIFIER = 4000
_LONG_MODALITY = 200

OnEvent = Callable[[str, str, str, str], None]
"""Called with "stored" or "removed", the tier's name, the namespace fingerprint and the identifier."""


class TieredStore:
    """Rows by namespace and identifier, in tiers, fastest first.

    No method but `fetch` and `flush` waits for anything, and none raises because of a tier: what a tier does not give
    in time, or gives damaged, is missing. Rows that are given and that are returned are shared, not copied: nobody may
    write to them afterwards. A store that is closed finds nothing and takes nothing. It closes itself when its process
    ends; in a forked child, where its threads are not, it is closed from the start.

    Args:
        tiers: in the order in which they are asked; the store owns and closes them.
        namespace: what all keys of this store live under.
        deadline: seconds that each tier has to answer a look-up, for every eight keys of it (they may be megabytes).
        write_behind_bytes: bytes that may wait to be written to a tier, for each tier.
        on_event: called on the store's threads, outside its locks; exceptions are counted and logged.

    Raises:
        ConfigError: no tiers, two of one name, a number that is not positive, or a namespace that a shared tier
            refuses. Methods raise it, too, for keys that are none and the like, before anything has changed.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        namespace: str | Namespace,
        deadline: float = 1.0,
        write_behind_bytes: int = 256 << 20,
        on_event: OnEvent | None = None,
    ) -> None:
        if not isinstance(tiers, Sequence) or not all(isinstance(tier, Tier) for tier in tiers):
            raise ConfigError("not tiers", field="tiers", found=repr(tiers), expected="a sequence of `Tier`")
        names = [tier.name for tier in tiers]
        if not names or len(set(names)) != len(names):
            raise ConfigError("tiers need names of their own", field="tiers", found=names, expected="one or more")
        check_seconds("deadline", deadline)
        check_whole("write_behind_bytes", write_behind_bytes)
        check_callable("on_event", on_event)
        for tier in tiers:
            if tier.shared:
                require_trusted_digests(namespace, store=f"tier {tier.name!r}")
        self.namespace = namespace
        namespace_fingerprint(namespace)  # a namespace of the wrong type is an error now
        lasting = [tier.name for tier in tiers if not isinstance(tier, MemoryTier)]
        if lasting and not (namespace.model if isinstance(namespace, Namespace) else namespace):
            _log.warning(
                "the namespace of tiers %s names no model: whoever opens them with other weights gets these embeddings",
                ", ".join(map(repr, lasting)),
            )
        self._on_event = on_event
        self._tick = count().__next__
        self._counters = Counters()
        self._callbacks = Callbacks("mmcache-tiers-callbacks", self._counters)
        self._timers = Timers("mmcache-tiers-timers")
        self._lanes = [self._lane(tier, deadline, write_behind_bytes) for tier in tiers]
        self._closed = False
        self._do_not_close_at_exit = call_at_exit(self.close)
        forked_with(self)

    def key(self, identifier: str, modality: str, *, salt: str | None = None, adapter: str | None = None) -> Key:
        """The key of a content of a modality under this store's namespace and a request's salt and adapter.

        An identifier of more than 4000 bytes, which tiers do not keep, is known by its SHA-256; so is a modality of
        more than 200.
        """
        for field, value in (("identifier", identifier), ("modality", modality)):
            if not isinstance(value, str):
                raise ConfigError(f"not the {field} of a content", field=field, found=repr(value), expected="text")
        identifier = _bounded(identifier, _LONG_IDENTIFIER, MAX_IDENTIFIER_BYTES)
        modality = _bounded(modality, _LONG_MODALITY, MAX_MODALITY_BYTES)
        return Key(namespace_fingerprint(self.namespace, salt=salt, adapter=adapter), identifier, modality)

    # -- the scheduler's side: never waits

    def known(self, keys: Iterable[Key]) -> set[Key]:
        """Which keys are very likely to be found by a fetch, as far as is known here; no I/O, no lock.

        A key that is not in the answer may be stored all the same (`learn`); one that is may be gone when fetched.
        """
        keys = keys_of(keys)
        return {key for lane in self._lanes for key in lane.offered(keys)}

    def learn(self, keys: Iterable[Key]) -> None:
        """Ask all tiers, in the background and in one batch each, which keys they hold; `known` answers later."""
        keys = keys_of(keys)
        began = self._tick()
        for lane in self._lanes:
            unasked = set(keys).difference(lane.offered(keys), lane.asked.held(keys))
            unasked = {key for key in unasked if not lane.writer.blocks(key)}
            if unasked and not self._closed:
                lane.asked.add(unasked)
                lane.reader.learn(list(unasked), began)

    def prefetch(self, keys: Iterable[Key] | Mapping[Key, Expected | None], on_done: OnDone | None = None) -> Fetch:
        """Start fetching, in the background; tiers are asked in order, each once for all keys.

        Args:
            keys: what to fetch, with what the rows must be where that is known.
            on_done: called once, on a thread of the store, with everything that was found; not called when cancelled.
        """
        expected = wanted_of(keys)
        check_callable("on_done", on_done)
        fetch = Fetch(expected, on_done, self._cancel, self._tick(), self._removed_after)
        self._counters.add(lookups=len(expected))
        waiting = self._waiting_rows(expected)
        self._counters.add(queue_hits=len(waiting))
        fetch.deliver(waiting)
        self._advance(fetch)
        return fetch

    def put(self, key: Key, rows: Tensor, *, levels: int = 1) -> None:
        """Write rows to all tiers, behind the caller's back; dropped where a queue is full.

        Args:
            key: what they are stored under.
            rows: `[num_embeds, width]`, a floating dtype, on any device; kept alive until they are written, beside
                whatever budget they lived under.
            levels: into how many equal levels the width divides (DeepStack models).

        Raises:
            EmbeddingError: the rows are no tensor. What cannot be stored of tensors is refused and counted.
        """
        keys_of((key,))
        check_whole("levels", levels)
        if not isinstance(rows, Tensor):
            raise EmbeddingError("rows are a tensor", found=type(rows).__name__, expected="[num_embeds, width]")
        self._counters.add(puts=1)
        storable = not rows.is_nested and rows.ndim == 2 and rows.is_floating_point() and rows.layout == torch.strided
        if self._closed or not storable:
            self._counters.add(refused=1)
            return
        lanes = [lane for lane in self._lanes if not lane.offered((key,))]
        if lanes:
            pending = PendingRows(key, rows.detach(), levels=levels)
            for lane in lanes:
                lane.writer.put(pending)

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove rows from all tiers. They are not found any more from now on, nor do fetches that are under way give
        them or bring them back; tiers that are down take it later."""
        keys = keys_of(keys)
        for lane in reversed(self._open_lanes()):  # what is promoted meanwhile comes from a tier where it is to stay
            lane.writer.remove(keys)

    def clear(self, fingerprint: str) -> None:
        """Remove everything under a namespace fingerprint (`Key.namespace`), whoever stored it; as `remove` else."""
        Key(fingerprint, "any")  # a namespace that is none is an error
        for lane in reversed(self._open_lanes()):
            lane.writer.clear(fingerprint)

    def stats(self) -> TieredStats:
        """All counters."""
        counts = self._counters.read()
        return TieredStats(
            counts["lookups"],
            counts["queue_hits"],
            counts["misses"],
            counts["puts"],
            counts["refused"],
            counts["listener_errors"],
            tuple(lane.stats() for lane in self._lanes),
        )

    def usage(self) -> dict[str, TierUsage]:
        """How full each tier is, by name. They are asked, one after the other: not for a scheduler's path.

        A tier that fails, or is left alone after failures, is not in it.
        """
        found = {}
        for lane in self._open_lanes():
            if lane.reader.breaker.closed:
                with suppress(TierError):
                    found[lane.tier.name] = lane.tier.usage()
        return found

    # -- the worker's side

    def fetch(
        self, keys: Iterable[Key] | Mapping[Key, Expected | None], timeout: float | None = None
    ) -> dict[Key, Tensor]:
        """Rows of those keys that are found within `timeout` seconds (None: within the tiers' deadlines).

        Returns:
            rows by key, `[num_embeds, width]`, on the CPU, or on a device if they still wait to be written or lie in a
            tier there (see `Fetch`). What is not in it is missing: encode it.
        """
        timeout = patience(timeout)
        fetch = self.prefetch(keys)
        found = fetch.wait(timeout)
        fetch.cancel()
        return found

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was put and removed so far is in the tiers, or dropped; False if `timeout` seconds do not
        suffice. A closed store has nothing to wait for."""
        timeout = patience(timeout)
        return self._closed or self._flush(timeout)

    def _flush(self, timeout: float | None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        done = [lane.writer.flush(None if end is None else max(0.0, end - time.monotonic())) for lane in self._lanes]
        return all(done)

    def close(self, timeout: float = 5.0) -> None:
        """Flush, stop all threads and close the tiers, within about `timeout` seconds. Idempotent.

        A tier in which a thread hangs is left alone; its thread does not keep the process alive.
        """
        if self._closed:
            return
        check_seconds("timeout", timeout)
        self._closed = True
        self._do_not_close_at_exit()
        end = time.monotonic() + timeout
        self._flush(timeout)
        for lane in self._lanes:
            left = max(0.1, end - time.monotonic())
            stopped = lane.reader.close(left)
            if lane.writer.close(max(0.1, end - time.monotonic())) and stopped:
                lane.tier.close()
            else:
                _log.warning("tier %s hangs and is not closed", lane.tier.name)
        self._timers.close()
        self._callbacks.close(max(0.1, end - time.monotonic()))

    def __enter__(self) -> TieredStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def forked(self) -> None:
        """This is a forked child: see the class. Called before anything else runs in it."""
        self._closed = True
        self._callbacks.forked()
        for counters in (self._counters, *(lane.counters for lane in self._lanes)):
            counters.forked()

    def _removed_after(self, key: Key, moment: int) -> bool:
        return any(lane.knowledge.removed_after(key, moment) for lane in self._lanes)

    def _open_lanes(self) -> list[Lane]:
        return [] if self._closed else self._lanes

    def _lane(self, tier: Tier, deadline: float, write_behind_bytes: int) -> Lane:
        counters, knowledge = Counters(), Knowledge(tick=self._tick)
        reader = TierReader(
            tier,
            deadline=deadline,
            knowledge=knowledge,
            counters=counters,
            timers=self._timers,
            on_answer=self._answered,
            on_expired=lambda ask, fetch: self._advance(fetch),
            on_lost=lambda keys: self._tell("removed", tier.name, keys),
        )
        writer = TierWriter(
            tier,
            capacity_bytes=write_behind_bytes,
            knowledge=knowledge,
            counters=counters,
            on_stored=lambda keys: self._tell("stored", tier.name, keys),
            on_removed=lambda keys: self._tell("removed", tier.name, keys),
        )
        return Lane(tier, reader, writer, knowledge, counters)

    def _waiting_rows(self, expected: Mapping[Key, Expected | None]) -> Rows:
        found: Rows = {}
        for lane in self._open_lanes():
            if not lane.writer.idle:
                for key, wanted in expected.items():
                    pending = lane.writer.queued(key)
                    if pending is not None and wanted is not None and not wanted.fits(pending.rows):
                        lane.writer.remove((key,), wanted=True)
                    elif pending is not None:
                        found[key] = (pending.rows, pending.written)
        return found

    def _advance(self, fetch: Fetch) -> None:
        """Put the fetch's next question, or end it. Called by whoever settled its last one."""
        while not fetch.done:
            missing = fetch.missing()
            if not missing or fetch.cancelled or self._closed or fetch.stage == len(self._lanes):
                self._end(fetch)
                return
            stage = fetch.stage
            fetch.stage += 1
            lane = self._lanes[stage]
            keys = [key for key in missing if not lane.writer.blocks(key)] if lane.reader.breaker.closed else []
            lane.counters.add(skipped=len(missing) - len(keys))
            if keys:
                ask = Ask(fetch, keys, stage)
                fetch.ask = ask
                lane.reader.submit(ask)
                return

    def _answered(self, ask: Ask, fetch: Fetch, found: Found, damaged: Sequence[Key]) -> None:
        try:
            fetch.deliver({key: (rows, None) for key, (rows, _) in found.items()})
            if damaged:
                self._lanes[ask.stage].writer.remove(damaged, wanted=True)
            for lane in self._lanes[: ask.stage]:
                for key, (rows, entry) in found.items():
                    lane.writer.put(PendingRows(key, rows, entry=entry), read=fetch.began)
        finally:
            self._advance(fetch)  # the ask is settled, so that nobody else would

    def _cancel(self, fetch: Fetch) -> None:
        ask = fetch.ask
        if ask is not None and self._lanes[ask.stage].reader.cancel(ask):
            self._end(fetch)  # else whoever settled the ask is about to find the fetch cancelled

    def _end(self, fetch: Fetch) -> None:
        if fetch.finish():
            self._counters.add(misses=len(fetch.missing()))
            if fetch.on_done is not None and not fetch.cancelled:
                self._callbacks.call(_call_back, fetch, fetch.on_done)

    def _tell(self, kind: str, tier: str, keys: Sequence[Key]) -> None:
        if self._on_event is not None:
            for key in keys:
                self._callbacks.call(self._on_event, kind, tier, key.namespace, key.identifier)


def _call_back(fetch: Fetch, on_done: OnDone) -> None:
    on_done(fetch.wait(0))  # on the thread that is called: rows on a device are for its stream


def _bounded(text: str, longest: int, digested: int) -> str:
    """The text, or what stands for it where it has more than `longest` bytes: of `digested` bytes, which no text that
    is kept has, so that none can be given that equals it."""
    if len(text) > longest // 4:  # characters have up to four bytes
        data = as_utf8(text)
        if len(data) > longest:
            return f"sha256:{hashlib.sha256(data).hexdigest()}".ljust(digested, "-")
    return text
