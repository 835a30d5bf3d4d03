"""`MultimodalCache`: ledger and store joined, for engines that live in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmcache.cache.config import CacheConfig
from mmcache.cache.lookup import Lookup
from mmcache.errors import ConfigError, EmbeddingError, RequestError
from mmcache.items import MultimodalRequest
from mmcache.ledger import EncoderLedger, Entry, Ticket
from mmcache.namespaces import Namespace
from mmcache.planning import check_window
from mmcache.policies import make_policy
from mmcache.prefix import PrefixIndex
from mmcache.stats import CacheStats
from mmcache.store import EmbeddingStore, check_rows

__all__ = ["MultimodalCache"]


class MultimodalCache:
    """Says for every item of a request which tensors the model still needs, and holds the embeddings it has seen.

    Thread-safe. Nothing here waits but `Lookup.wait`.

    Attributes:
        config: as given.
        prefix: the cache's own prefix index, or None where the config leaves it out.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Make an empty cache.

        Raises:
            ConfigError: the config names an unknown policy.
        """
        self.config = config
        self.prefix = PrefixIndex(config.block_size, config.prefix_blocks) if config.prefix_blocks else None
        self._ledger = EncoderLedger(
            config.capacity_bytes,
            make_policy(config.policy),
            row_bytes=config.row_bytes,
            lease_seconds=config.lease_seconds,
            split_by_adapter=config.adapter_touches_encoder,
        )
        self._budget = self._ledger.budget
        self._store = EmbeddingStore(config.device)
        self._dtypes: dict[str, torch.dtype] = {}
        self._orphans: deque[Ticket] = deque()
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
            end, needed_from = check_window(request, num_computed_tokens, num_scheduled_tokens, needed_from, lookahead)
            ticket = self._ledger.open(request, num_computed_tokens, end, needed_from, lookahead, match)
        except BaseException:
            if match is not None:
                match.release()
            raise
        if self._budget.drops:
            self._apply_drops()
        return Lookup(self, ticket)

    def insert(
        self,
        lookup: Lookup,
        embeddings: Mapping[int, Tensor] | Sequence[Tensor] | Tensor,
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
            EmbeddingError: an index is not missing, or rows do not fit; nothing has been stored then.
            ReleasedError: the lookup has been released.
        """
        if lookup._cache is not self:
            raise RequestError("the lookup belongs to another cache", request_id=lookup.request.request_id)
        ticket = lookup._open()
        rows_of = self._checked(lookup, embeddings)
        sizes = {index: rows.numel() * rows.element_size() for index, rows in rows_of.items()}
        self._drop(self._ledger.admit(ticket, sizes))
        entries = {index: ticket.entries[index] for index in rows_of}
        for index, rows in rows_of.items():
            entry = entries[index]
            if entry is not None:
                self._store.put(entry.handle, rows, copy=copy)
        self._ledger.settle(ticket, sizes, seconds)
        # An abort in another thread may have ended the reservation between the check and the copy.
        self._store.drop(entry.handle for entry in entries.values() if entry is not None and entry.gone)
        self._apply_drops()

    def _checked(
        self, lookup: Lookup, embeddings: Mapping[int, Tensor] | Sequence[Tensor] | Tensor
    ) -> dict[int, Tensor]:
        """The rows by item index, all checked before anything is stored."""
        request = lookup.request
        missing = lookup.missing
        if isinstance(embeddings, Mapping):
            by_index = dict(embeddings)
        else:
            if len(embeddings) != len(missing):
                raise EmbeddingError(
                    "a sequence of embeddings has one entry for each missing item",
                    request_id=request.request_id,
                    expected=f"{len(missing)} for items {list(missing)}",
                    found=len(embeddings),
                )
            by_index = dict(zip(missing, embeddings))
        row_bytes, dtypes = dict(self._ledger.row_bytes), dict(self._dtypes)
        for index, rows in by_index.items():
            if index not in missing:
                raise EmbeddingError(
                    "embeddings for an item that is not this lookup's to encode",
                    request_id=request.request_id,
                    item=index,
                    expected=f"one of {list(missing)}",
                )
            item = request.items[index]
            check_rows(rows, item.placeholder.num_embeds, request.request_id, index)
            width = rows.shape[1]
            expected = row_bytes.setdefault(item.modality, width * rows.element_size())
            if width * rows.element_size() != expected:
                raise EmbeddingError(
                    f"rows of modality {item.modality!r} have another width than before or than configured",
                    request_id=request.request_id,
                    item=index,
                    expected=f"{expected} bytes a row",
                    found=f"{width} x {rows.dtype}",
                )
            if dtypes.setdefault(item.modality, rows.dtype) is not rows.dtype:
                raise EmbeddingError(
                    f"rows of modality {item.modality!r} have another dtype than before",
                    request_id=request.request_id,
                    item=index,
                    expected=dtypes[item.modality],
                    found=rows.dtype,
                )
        self._dtypes.update(dtypes)
        return by_index

    # -- requests ------------------------------------------------------------------------------------------------------

    def commit(self, request: MultimodalRequest, num_tokens: int) -> None:
        """The KV of the request's first `num_tokens` tokens exists now. Idempotent.

        Unpins the items that have no row beyond them, and enters whole blocks into the cache's own prefix index.

        Raises:
            WindowError: more tokens than the request has, or fewer than none.
        """
        check_window(request, num_tokens, None, None, 0)
        self._ledger.commit(request, num_tokens)
        if self.prefix is not None:
            self.prefix.insert(request, num_tokens)
        self._apply_drops()

    def finish(self, request: MultimodalRequest | str) -> None:
        """The request, or the one of that id, is done, aborted or gone: all it holds is given up. Idempotent."""
        for ticket in self._ledger.finish(request if isinstance(request, str) else request.request_id):
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
        check_window(request, num_computed_tokens, None, None, 0)
        self._ledger.announce(request, num_computed_tokens)
        self._apply_drops()

    def withdraw(self, request: MultimodalRequest | str) -> None:
        """The request no longer waits in the queue. Idempotent."""
        self._ledger.withdraw(request if isinstance(request, str) else request.request_id)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def invalidate(
        self, *, namespace: str | Namespace | None = None, identifier: str | None = None, prefix: bool = False
    ) -> None:
        """Forget embeddings: the encoder's weights changed, or a content has to go.

        Lookups that hold rows keep them; an encode that began earlier serves its own lookup and is not stored. The
        prefix index is cleared only if asked for; processed features stay valid whatever the weights.

        Args:
            namespace: forget only if this is the cache's namespace; None means it is.
            identifier: forget this content alone.
            prefix: clear the prefix index as well.
        """
        if namespace is not None and namespace != self.config.namespace:
            return
        self._ledger.invalidate(identifier)
        if identifier is None:
            self._dtypes.clear()
        if prefix and self.prefix is not None:
            self.prefix.clear()
        self._apply_drops()

    def clear(self, *, prefix: bool = False) -> None:
        """Forget all embeddings; see `invalidate`."""
        self.invalidate(prefix=prefix)

    def stats(self) -> CacheStats:
        """What the cache has done so far, and what it holds."""
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
