"""Between a cache and its tiers: rows that are known to lie in a tier are loaded instead of encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from mmcache.items import MultimodalRequest
from mmcache.ledger import EncoderLedger, Entry, Ticket
from mmcache.store import EmbeddingStore
from mmcache.tiers import Expected, Key, TieredStore

__all__ = ["TierLink"]

_MODALITIES = ("image", "video", "audio")
"""What other processes may have stored an identifier under, whatever came by here."""


class TierLink:
    """Loads what a lookup misses and a tier has, and writes behind what an encoder made.

    A content that is being loaded is in flight: `poll` tells the lookup when it arrives, or that it is to encode it
    after all. Nothing here waits; what tiers hold is learned in the background, in batches.
    """

    def __init__(
        self,
        tiers: TieredStore,
        ledger: EncoderLedger,
        store: EmbeddingStore,
        split_by_adapter: bool,
        fits: Callable[[str, Tensor], bool],
        settled: Callable[[Sequence[Entry]], None],
    ) -> None:
        """Link a cache's ledger and store to tiers.

        Args:
            tiers: the tiers; the link closes them.
            ledger, store: the cache's.
            split_by_adapter: whether adapters have keys of their own.
            fits: whether rows can be those of a modality, by width and dtype.
            settled: called after rows were loaded, or not, so that drops and events are dealt with.
        """
        self.tiers = tiers
        self._ledger = ledger
        self._store = store
        self._split_by_adapter = split_by_adapter
        self._fits = fits
        self._settled = settled
        self._modalities = set(_MODALITIES)

    def key(self, request: MultimodalRequest, identifier: str, modality: str) -> Key:
        """The tiers' key of a content for a request. One identifier has rows of its own in each modality."""
        self._modalities.add(modality)
        adapter = request.adapter if self._split_by_adapter else None
        return self.tiers.key(identifier, modality, salt=request.cache_salt, adapter=adapter)

    def load(self, ticket: Ticket) -> None:
        """Have what this lookup would encode loaded instead, as far as tiers are known to have it."""
        owned = self._ledger.loads.owned(ticket)
        if not owned:
            return
        keys = {self.key(ticket.request, entry.identifier, entry.modality): entry for entry in owned}
        known = self.tiers.known(keys)
        if len(known) < len(keys):
            self.tiers.learn([key for key in keys if key not in known])
        loading = {key: keys[key] for key in known if self._ledger.loads.delegate(ticket, keys[key])}
        self._fetch(loading)

    def prefetch(self, request: MultimodalRequest, indices: Iterable[int]) -> None:
        """Learn whether tiers have what a waiting request will need, and load it as far as there is free room."""
        contents: dict[Key, int] = {}
        for index in indices:
            item = request.items[index]
            contents.setdefault(self.key(request, item.identifier, item.modality), index)
        if not contents:
            return
        known = self.tiers.known(contents)
        self.tiers.learn([key for key in contents if key not in known])
        loading = {}
        for key in known:
            entry = self._ledger.loads.reserve(request, contents[key])
            if entry is not None:
                loading[key] = entry
        self._fetch(loading)

    def write(self, request: MultimodalRequest, entries: Iterable[Entry]) -> None:
        """Write what the store holds of these entries to the tiers, behind the caller's back."""
        for entry in entries:
            rows = self._store.get(entry.handle)
            if rows is not None:
                self.tiers.put(self.key(request, entry.identifier, entry.modality), rows)

    def forget(self, identifier: str | None) -> None:
        """Remove a content, or everything, of all modalities, salts and adapters that were seen."""
        for salt, adapter in self._ledger.loads.scopes():
            if identifier is None:
                self.tiers.clear(self.tiers.key("any", "", salt=salt, adapter=adapter).namespace)
            else:
                modalities = tuple(self._modalities)
                self.tiers.remove([self.tiers.key(identifier, m, salt=salt, adapter=adapter) for m in modalities])

    def _fetch(self, loading: Mapping[Key, Entry]) -> None:
        if not loading:
            return

        def done(found: dict[Key, Tensor]) -> None:
            for key, entry in loading.items():
                rows = found.get(key)
                if rows is not None and rows.shape[0] == entry.num_rows and self._fits(entry.modality, rows):
                    nbytes = self._store.put(entry.handle, rows, copy=False)
                    self._ledger.loads.loaded(entry, nbytes)
                    if entry.gone:  # invalidated meanwhile
                        self._store.drop((entry.handle,))
                else:
                    self._ledger.loads.loaded(entry, None)
            self._settled(list(loading.values()))

        self.tiers.prefetch({key: Expected(rows=entry.num_rows) for key, entry in loading.items()}, done)
