"""`MultimodalCache`: ledger and store joined, for engines that live in one process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

from mmcache.cache.config import CacheConfig
from mmcache.cache.events import CacheEvent, EventBus, Listener
from mmcache.cache.intake import Embeddings, Intake
from mmcache.cache.lookup import Lookup
from mmcache.cache.tiering import TierLink
from mmcache.errors import ConfigError, RequestError
from mmcache.items import MultimodalRequest
from mmcache.ledger import EncoderLedger, Entry, Ticket
from mmcache.ledger.checks import check_seconds
from mmcache.namespaces import Namespace, namespace_fingerprint
from mmcache.planning import check_window
from mmcache.prefix import PrefixIndex
from mmcache.stats import CacheStats
from mmcache.store import EmbeddingStore
from mmcache.tiers import Tier, TieredStats, TieredStore, TierUsage

__all__ = ["MultimodalCache"]


class MultimodalCache:
    """Says for every item of a request which tensors the model still needs, and holds the embeddings it has seen.

    Thread-safe. Nothing here waits but `Lookup.wait`.

    Attributes:
        config: as given.
        prefix: the cache's own prefix index, or None where the config leaves it out.
    """

    def __init__(self, config: CacheConfig, tiers: Sequence[Tier] = ()) -> None:
        """Make an empty cache.

        Args:
            config: its settings.
            tiers: where embeddings live beside the cache's own memory, fastest first; the cache closes them.

        Raises:
            ConfigError: the config names an unknown policy, or a shared tier refuses its namespace.
        """
        if not isinstance(config, CacheConfig):
            raise ConfigError("a cache is made of a CacheConfig", found=type(config).__name__)
        self.config = config
        self.prefix = PrefixIndex(config.block_size, config.prefix_blocks) if config.prefix_blocks else None
        self._ledger = EncoderLedger(
            config.capacity_bytes,
            config.policy,
            row_bytes=config.row_bytes,
            lease_seconds=config.lease_seconds,
            split_by_adapter=config.adapter_touches_encoder,
        )
        self._budget = self._ledger.budget
        self._store = EmbeddingStore(config.device)
        self._intake = Intake(self._ledger)
        self._orphans: deque[Ticket] = deque()
        self._events = EventBus()
        self._telling = threading.Lock()
        self._tiers: TierLink | None = None
        if tiers:
            tiered = TieredStore(
                tiers,
                namespace=config.namespace,
                deadline=config.tier_deadline,
                write_behind_bytes=config.write_behind_bytes,
                on_event=self._tier_event,
            )
            self._tiers = TierLink(
                tiered, self._ledger, self._store, config.adapter_touches_encoder, self._intake, self._tell_stored
            )
        self._prefix_asked = 0
        self._prefix_found = 0

    # -- steps ---------------------------------------------------------------------------------------------------------

    def lookup(
        self,
        request: MultimodalRequest,
        *,
        num_computed_tokens: int | None = None,
        num_scheduled_tokens: int | None = None,
        needed_from: int | None = None,
        lookahead: int = 0,
    ) -> Lookup:
        """Decide, for every item of a request, what this step needs of it; reserve and pin accordingly, in one go.

        Costs O(log n + k) for n items of which the step needs k.

        Args:
            request: the request.
            num_computed_tokens: length of the prefix whose KV exists; None asks the cache's own prefix index. It holds
                for full attention: hybrid engines pass the length that is valid for all layers.
            num_scheduled_tokens: tokens of this step; None, or more than there are, means to the end of the request.
            needed_from: first token whose embedding is needed, where it is not `num_computed_tokens` (tokens before it
                run again).
            lookahead: tokens after the window whose items are wanted as well (a draft model reads ahead; prefetch).

        Raises:
            WindowError: a bound lies outside the request's tokens.
            ConfigError: the prefix index is asked for and left out.
        """
        if self._orphans:
            self._release_forgotten()
        match = None
        if num_computed_tokens is None:
            if not isinstance(request, MultimodalRequest):
                raise RequestError("a lookup is for a MultimodalRequest", found=type(request).__name__)
            if self.prefix is None:
                raise ConfigError("the cache has no prefix index: pass num_computed_tokens", field="prefix_blocks")
            match = self.prefix.match(request)
            num_computed_tokens = match.num_tokens
            self._prefix_asked += request.num_tokens
            self._prefix_found += num_computed_tokens
        try:
            if (
                num_scheduled_tokens is None is needed_from
                and lookahead == 0
                and type(request) is MultimodalRequest
                and type(num_computed_tokens) is int
                and 0 <= num_computed_tokens <= request.num_tokens
            ):  # the whole rest of the prompt: what most calls ask for
                start = needed_from = num_computed_tokens
                end, lookahead = request.num_tokens, 0
            else:
                start, end, needed_from, lookahead = check_window(
                    request, num_computed_tokens, num_scheduled_tokens, needed_from, lookahead
                )
            ticket = self._ledger.open(request, start, end, needed_from, lookahead, match)
        except BaseException:
            if match is not None:
                match.release()
            raise
        if self._tiers is not None and ticket.unsettled:
            self._tiers.load(ticket)
        if self._budget.drops:
            self._apply_drops()
        return Lookup(self, ticket)

    def insert(
        self,
        lookup: Lookup,
        embeddings: Embeddings,
        *,
        copy: bool = True,
        seconds: float | None = None,
    ) -> None:
        """Hand in what the encoder made. Whoever waits for it has it, too.

        Args:
            lookup: the lookup that said these items are missing.
            embeddings: {item index: rows} for any of `lookup.missing`, or a sequence in its order; rows are
                floating-point `[num_embeds, width]`, on any device.
            copy: False hands over tensors that are all of their storage and will not be written again; others are
                copied all the same.
            seconds: what encoding all of them took, if measured; what costs more is evicted later.

        Raises:
            EmbeddingError: an index is not missing, rows do not fit, or `seconds` is no time; nothing has been stored
                then.
            ReleasedError: the lookup has been released.
            RequestError: the lookup is another cache's.
        """
        if not isinstance(lookup, Lookup):
            raise RequestError("embeddings are for a Lookup", found=type(lookup).__name__)
        if lookup._cache is not self:
            raise RequestError("the lookup belongs to another cache", request_id=lookup.request.request_id)
        ticket = lookup._open()
        check_seconds(seconds, ticket.request.request_id)
        rows_of = self._intake.check(ticket, embeddings)
        sizes = {index: rows.numel() * rows.element_size() for index, rows in rows_of.items()}
        self._drop(self._ledger.admit(ticket, sizes))
        # An abort in another thread may come between any two of these steps; it empties the ticket.
        entries = [(ticket.entries.get(index), rows) for index, rows in rows_of.items()]
        for entry, rows in entries:
            if entry is not None:
                self._store.put(entry.handle, rows, copy=copy)
        if self._tiers is not None:
            self._tiers.write(lookup.request, [e for e, _ in entries if e is not None and not e.detached])
        self._ledger.settle(ticket, sizes, seconds)
        # What the abort gave up before the copy was made has no other way out of the store.
        self._store.drop(entry.handle for entry, _ in entries if entry is not None and entry.gone)
        self._tell_stored([entry for entry, _ in entries if entry is not None])

    # -- requests ------------------------------------------------------------------------------------------------------

    def commit(self, request: MultimodalRequest, num_tokens: int) -> None:
        """The KV of the request's first `num_tokens` tokens exists now. Idempotent.

        Unpins the items that have no row beyond them, and enters whole blocks into the cache's own prefix index.

        Raises:
            WindowError: more tokens than the request has, or fewer than none.
        """
        self._release_forgotten()
        num_tokens = self._ledger.commit(request, num_tokens)
        if self.prefix is not None:
            self.prefix.insert(request, num_tokens)
        self._apply_drops()

    def finish(self, request: MultimodalRequest | str) -> None:
        """The request, or the one of that id, is done, aborted or gone: all it holds is given up. Idempotent."""
        self._release_forgotten()
        for ticket in self._ledger.finish(request):
            if ticket.match is not None:
                ticket.match.release()
        self._apply_drops()

    def announce(self, request: MultimodalRequest, *, num_computed_tokens: int = 0) -> None:
        """The request waits in the queue, after those announced before: what it needs is evicted last.

        A request that was running gives up its pins by this: while it waits, its room may be needed.

        Args:
            request: the request. Announcing it again keeps its place; its next lookup ends the announcement.
            num_computed_tokens: length of the prefix whose KV exists, if known: items covered by it are not needed.

        Raises:
            WindowError: `num_computed_tokens` lies outside the request's tokens.
        """
        self._release_forgotten()
        needed = self._ledger.announce(request, num_computed_tokens)
        if self._tiers is not None:
            self._tiers.prefetch(request, needed)
        self._apply_drops()

    def withdraw(self, request: MultimodalRequest | str) -> None:
        """The request no longer waits in the queue. Idempotent."""
        self._ledger.withdraw(request)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def invalidate(
        self, *, namespace: str | Namespace | None = None, identifier: str | None = None, prefix: bool = False
    ) -> None:
        """Forget embeddings: the encoder's weights changed, or a content has to go.

        Lookups that hold rows keep them; an encode that began earlier serves its own lookup and is not stored. The
        prefix index is cleared only if asked for; processed features stay valid whatever the weights.

        It goes from the tiers, too: at once under the latest salts and adapters (a hundred or more), and under
        others before the first lookup that brings them. Other processes' caches forget nothing: each is told for
        itself.

        Args:
            namespace: forget only if this is the cache's namespace; None means it is.
            identifier: forget this content alone.
            prefix: clear the prefix index as well.

        Raises:
            ConfigError: the namespace is none.
            RequestError: the identifier is none.
        """
        self._release_forgotten()
        if namespace is not None and not isinstance(namespace, (str, Namespace)):
            raise ConfigError("a namespace is a name or a Namespace", field="namespace", found=repr(namespace))
        if namespace is not None and namespace != self.config.namespace:
            return
        with self._tiers.forgetting(identifier) if self._tiers is not None else nullcontext():
            self._ledger.invalidate(identifier)
        if identifier is None:
            self._intake.forget()
        if prefix and self.prefix is not None:
            self.prefix.clear()
        self._apply_drops()

    def clear(self, *, prefix: bool = False) -> None:
        """Forget all embeddings; see `invalidate`."""
        self.invalidate(prefix=prefix)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with a `CacheEvent` for every embedding that is stored or removed, by tier, from now on.

        It is called on whatever thread made the change, without a lock of the cache; it should return quickly.

        Returns:
            A function that ends the subscription.

        Raises:
            ConfigError: the listener cannot be called.
        """
        return self._events.subscribe(listener)

    def close(self) -> None:
        """Write what waits to be written to the tiers, and close them. Idempotent; without tiers nothing to do."""
        if self._tiers is not None:
            self._tiers.tiers.close()

    def tier_stats(self) -> TieredStats | None:
        """Counters of the tiers, or None without tiers."""
        return None if self._tiers is None else self._tiers.tiers.stats()

    def tier_usage(self) -> dict[str, TierUsage]:
        """How full each tier is, by name; see `TieredStore.usage`."""
        return {} if self._tiers is None else self._tiers.tiers.usage()

    def stats(self) -> CacheStats:
        """What the cache has done so far, and what it holds."""
        self._release_forgotten()
        return self._ledger.stats(self._prefix_found, self._prefix_asked)

    # -- within the package --------------------------------------------------------------------------------------------

    def _release(self, ticket: Ticket) -> None:
        if self._ledger.release(ticket):
            if ticket.match is not None:
                ticket.match.release()
            if self._budget.drops:
                self._apply_drops()

    def _release_forgotten(self) -> None:
        while self._orphans:
            try:
                ticket = self._orphans.popleft()
            except IndexError:  # another thread was faster
                return
            if not ticket.released:
                self._ledger.counts["forgotten_lookups"] += 1
                self._release(ticket)

    def _apply_drops(self) -> None:
        if self._budget.drops:
            self._drop(self._ledger.take_drops())

    def _drop(self, entries: Sequence[Entry]) -> None:
        self._store.drop(entry.handle for entry in entries)
        if self._events:
            with self._telling:
                for entry in entries:
                    heir = self._budget.heir_of(entry)  # of newer weights, say, while holders kept the old rows
                    if entry.told and (heir is None or not heir.told):
                        self._events.add(self._event("removed", entry))
            self._events.deliver()

    def _tell_stored(self, entries: Sequence[Entry]) -> None:
        """Rows have come in: deal with what had to go for them, and tell the listeners."""
        self._apply_drops()
        if self._events:
            with self._telling:
                for entry in entries:
                    if entry.cached and not entry.gone and entry.owner is None:
                        entry.told = True
                        self._events.add(self._event("stored", entry))
            self._events.deliver()

    def _event(self, kind: Literal["stored", "removed"], entry: Entry) -> CacheEvent:
        salt, adapter, identifier = entry.content
        return CacheEvent(
            kind, "device", namespace_fingerprint(self.config.namespace, salt=salt, adapter=adapter), identifier
        )

    def _tier_event(self, kind: str, tier: str, namespace: str, identifier: str) -> None:
        if self._events:
            self._events.add(CacheEvent("stored" if kind == "stored" else "removed", tier, namespace, identifier))
            self._events.deliver()
