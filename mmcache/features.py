"""Processed features by content: an image that comes again is neither decoded nor processed again.

This is host memory for what a processor made, beside the embeddings that an encoder made of it: it saves the
processor's time when a request comes back, and its entries stay valid whatever the model's weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from cachetools import LRUCache

from mmcache.errors import ConfigError, FieldError, SelfWaitError
from mmcache.fields import ItemFields, SharedValue, owned_value
from mmcache.hashing import same_content
from mmcache.integers import as_int

__all__ = ["FeatureCache", "FeatureStats"]


@dataclass(frozen=True, slots=True)
class FeatureStats:
    """What a feature cache did, and holds.

    Attributes:
        hits, misses: contents found, and processed.
        joins: contents that were being processed for somebody else when they were asked for.
        collisions: contents that turned out to be others than the ones held under their identifiers.
        oversized: contents served without being kept, since they are larger than the whole cache.
        entries, nbytes: held now.
    """

    hits: int
    misses: int
    joins: int
    collisions: int
    oversized: int
    entries: int
    nbytes: int

    @property
    def hit_ratio(self) -> float:
        """Share of what was asked for that was held or joined; 0 where nothing was."""
        asked = self.hits + self.misses + self.joins
        return (self.hits + self.joins) / asked if asked else 0.0


@dataclass(frozen=True, slots=True)
class _Work:
    """A content that is being processed, and by which thread."""

    future: Future[ItemFields]
    thread: int


class FeatureCache:
    """`ItemFields` by content identifier, least recently used out first, bounded in bytes.

    Thread-safe; the lock is not held while anything is processed. What is handed out stays valid after its eviction.
    An entry owns its memory: a view into a larger batch, or into memory of another library (numpy), is copied when it
    comes in, so that it keeps nothing else alive. A tensor that is all of its storage is kept as it is: hand it over.
    """

    def __init__(
        self, capacity_bytes: int, *, verify: float = 0.0, on_collision: Callable[[str], None] | None = None
    ) -> None:
        """Make an empty cache of that many bytes.

        Args:
            capacity_bytes: its budget.
            verify: share of the hits of `get_or_process`, from 0 to 1, at which the content is processed all the same
                and compared with what is held, byte by byte: a digest that is not collision-resistant can be checked
                by sampling, or always.
            on_collision: called with the identifier when they differ, so that embeddings under it can be invalidated
                (`MultimodalCache.invalidate`); the fresh content replaces what was held.

        Raises:
            ConfigError: not an integer >= 0, or a share that is none.
        """
        capacity = as_int(capacity_bytes)
        if capacity is None or capacity < 0:
            raise ConfigError("capacity_bytes is an integer >= 0", field="capacity_bytes", found=repr(capacity_bytes))
        if isinstance(verify, bool) or not isinstance(verify, (int, float)) or not 0 <= verify <= 1:
            raise ConfigError("verify is a share of the hits", field="verify", expected="0 to 1", found=repr(verify))
        self._verify = float(verify)
        self._unverified = 0.0
        self._on_collision = on_collision
        self._entries: LRUCache[str, ItemFields] = LRUCache(capacity, getsizeof=_nbytes)
        self._working: dict[str, _Work] = {}
        self._waiting: dict[int, _Work] = {}  # thread -> the work of another one that it waits for
        self._inside: set[tuple[int, str]] = set()  # thread and content: `process` runs
        self._lock = threading.Lock()
        self._hits = self._misses = self._joins = self._collisions = self._oversized = 0

    def get(self, identifier: str) -> ItemFields | None:
        """The fields of a content, or None. What comes back is held by the caller: no later eviction takes it away."""
        with self._lock:
            fields = self._entries.get(identifier)
            if fields is None:
                self._misses += 1
            else:
                self._hits += 1
            return fields

    def put(self, identifier: str, fields: ItemFields) -> ItemFields:
        """Keep a content's fields; they replace what was held under this identifier, a fresh payload being the truth.

        Returns:
            The fields as they are kept, in memory of their own; if larger than the whole cache, as they came.
        """
        if not isinstance(fields, ItemFields):
            raise FieldError("a feature cache holds ItemFields", found=type(fields).__name__)
        if _nbytes(fields) > self._entries.maxsize:
            with self._lock:
                self._entries.pop(identifier, None)
                self._oversized += 1
            return fields
        owned = _owned(fields)
        with self._lock:
            self._entries[identifier] = owned
        return owned

    def get_or_process(self, identifier: str, process: Callable[[], ItemFields]) -> ItemFields:
        """The fields of a content; where they are not held, `process()` makes them, once for all who ask meanwhile.

        If `process` raises, its error reaches the one who called it, and of the others one tries anew.

        Raises:
            SelfWaitError: `process` asks for its own content, or for one whose processing waits for this one.
        """
        thread = threading.get_ident()
        while True:
            with self._lock:
                fields = self._entries.get(identifier)
                work = None if fields is not None else self._working.get(identifier)
                if (thread, identifier) in self._inside or (work is not None and self._waits_for(work, thread)):
                    raise SelfWaitError(f"processing {identifier!r} waits for itself")
                if fields is not None:
                    self._hits += 1
                    # One hit in every 1 / verify, evenly: chance would let a short run go unverified.
                    self._unverified += self._verify
                    if self._unverified < 1:
                        return fields
                    self._unverified -= 1
                elif work is None:
                    mine = self._working[identifier] = _Work(Future(), thread)
                    self._misses += 1
                else:
                    self._joins += 1
                    self._waiting[thread] = work
            if fields is not None:
                return self._verified(identifier, fields, self._run(identifier, process))
            if work is None:
                return self._process(identifier, process, mine.future)
            try:
                return work.future.result()
            except BaseException:
                if not work.future.done():
                    raise  # interrupted while waiting
                continue  # the error is its caller's; whoever waited tries for itself
            finally:
                with self._lock:
                    self._waiting.pop(thread, None)

    def _waits_for(self, work: _Work, thread: int) -> bool:
        """Whether the work, through whatever waits for whatever, waits for this thread."""
        while work.thread != thread:
            following = self._waiting.get(work.thread)
            if following is None or following.future.done():
                return False
            work = following
        return True

    def _run(self, identifier: str, process: Callable[[], ItemFields]) -> ItemFields:
        inside = threading.get_ident(), identifier
        with self._lock:
            self._inside.add(inside)
        try:
            return process()
        finally:
            with self._lock:
                self._inside.discard(inside)

    def _process(self, identifier: str, process: Callable[[], ItemFields], mine: Future[ItemFields]) -> ItemFields:
        try:
            fields = self.put(identifier, self._run(identifier, process))
        except BaseException as error:
            with self._lock:
                del self._working[identifier]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._working[identifier]
        mine.set_result(fields)
        return fields

    def _verified(self, identifier: str, held: ItemFields, fresh: ItemFields) -> ItemFields:
        """The fields of the content that was asked for: what is held, if it is the same."""
        if held.resembles(fresh) and all(same_content(held[name], fresh[name]) for name in fresh):
            return held
        with self._lock:
            self._collisions += 1
        if self._on_collision is not None:
            self._on_collision(identifier)
        return self.put(identifier, fresh)

    def discard(self, identifier: str) -> None:
        """Forget a content. Idempotent."""
        with self._lock:
            self._entries.pop(identifier, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def stats(self) -> FeatureStats:
        """What it did so far, and holds."""
        with self._lock:
            return FeatureStats(
                self._hits,
                self._misses,
                self._joins,
                self._collisions,
                self._oversized,
                len(self._entries),
                int(self._entries.currsize),
            )


def _nbytes(fields: ItemFields) -> int:
    return fields.payload_bytes + fields.kept_bytes + sum(size for _, size, _ in fields.shared)


def _owned(fields: ItemFields) -> ItemFields:
    shared = {name for name, _, _ in fields.shared}
    # A value that items share stays one: the copy is made once for all of them.
    values = {n: fields.shared_value(n).owned() if n in shared else owned_value(v) for n, v in fields.items()}
    if all((v.value if isinstance(v, SharedValue) else v) is fields[n] for n, v in values.items()):
        return fields
    configs = {name: fields.config(name) for name in fields}
    return ItemFields(values, configs, listed=frozenset(name for name in fields if fields.listed(name)))
