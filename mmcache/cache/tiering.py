"""Between a cache and its tiers: rows that are known to lie in a tier are loaded instead of encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from torch import Tensor

from mmcache.cache.forgotten import Forgotten
from mmcache.cache.intake import Intake
from mmcache.items import MultimodalRequest
from mmcache.ledger import EncoderLedger, Entry, Ticket
from mmcache.store import EmbeddingStore
from mmcache.tiers import Key, TieredStore

__all__ = ["TierLink"]


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
        intake: Intake,
        settled: Callable[[Sequence[Entry]], None],
    ) -> None:
        """Link a cache's ledger and store to tiers.

        Args:
            tiers: the tiers; the link closes them.
            ledger, store: the cache's.
            split_by_adapter: whether adapters have keys of their own.
            intake: knows what the rows of a modality are.
            settled: called after rows were loaded, or not, so that drops and events are dealt with.
        """
        self.tiers = tiers
        self._ledger = ledger
        self._store = store
        self._split_by_adapter = split_by_adapter
        self._intake = intake
        self._settled = settled
        self._lock = Lock()
        self._forgetting = 0
        self._forgotten = Forgotten(tiers)

    def key(self, request: MultimodalRequest, identifier: str, modality: str) -> Key:
        """The tiers' key of a content for a request. One identifier has rows of its own in each modality.

        What was forgotten has left its place in the tiers when this returns.
        """
        adapter = request.adapter if self._split_by_adapter else None
        key = self.tiers.key(identifier, modality, salt=request.cache_salt, adapter=adapter)
        if not self._forgotten.clean(key):
            with self._lock:
                self._forgotten.catch_up(key)
        return key

    def load(self, ticket: Ticket) -> None:
        """Have what this lookup would encode loaded instead, as far as tiers are known to have it."""
        owned = self._ledger.loads.owned(ticket)
        if not owned:
            return
        began = self._forgotten.number
        keys = {self.key(ticket.request, entry.identifier, entry.modality): entry for entry in owned}
        if self._forgetting:
            return
        known = self.tiers.known(keys)
        if len(known) < len(keys):
            self.tiers.learn([key for key in keys if key not in known])
        loading = {key: keys[key] for key in known if self._ledger.loads.delegate(ticket, keys[key])}
        self._fetch(loading, began)

    def prefetch(self, request: MultimodalRequest, indices: Iterable[int]) -> None:
        """Learn whether tiers have what a waiting request will need, and load it as far as there is free room."""
        began = self._forgotten.number
        contents: dict[Key, int] = {}
        for index in indices:
            item = request.items[index]
            contents.setdefault(self.key(request, item.identifier, item.modality), index)
        if not contents or self._forgetting:
            return
        known = self.tiers.known(contents)
        self.tiers.learn([key for key in contents if key not in known])
        loading = {}
        for key in known:
            entry = self._ledger.loads.reserve(request, contents[key])
            if entry is not None:
                loading[key] = entry
        self._fetch(loading, began)

    def write(self, request: MultimodalRequest, entries: Iterable[Entry]) -> None:
        """Write what the store holds of these entries to the tiers, behind the caller's back."""
        for entry in entries:
            rows = self._store.get(entry.handle)
            if rows is not None:
                key = self.key(request, entry.identifier, entry.modality)
                with self._lock:
                    if not entry.detached:  # else `forgetting` may be past the removal; if not, it waits for the lock
                        self.tiers.put(key, rows)

    @contextmanager
    def forgetting(self, identifier: str | None) -> Iterator[None]:
        """Within it the ledger forgets a content, or everything; at its end the tiers have forgotten it, too.

        It goes from the modalities, salts and adapters that were seen last, and from all others before they are looked
        for. Nothing is loaded meanwhile: a new entry of the ledger's would get old rows.
        """
        with self._lock:
            self._forgetting += 1
        try:
            yield
            with self._lock:
                if identifier != "":  # no content has that name
                    self._forgotten.forget(identifier)
        finally:
            with self._lock:
                self._forgetting -= 1

    def _fetch(self, loading: Mapping[Key, Entry], began: int) -> None:
        if not loading:
            return

        def done(found: dict[Key, Tensor]) -> None:
            for key, entry in loading.items():
                # What was read may be older than a forgetting, and the entry, reserved meanwhile, younger.
                old = self._forgetting or self._forgotten.since(key.identifier, began)
                rows = None if old else found.get(key)
                if rows is not None and rows.shape[0] == entry.num_rows and self._intake.fits(entry.modality, rows):
                    nbytes = self._store.put(entry.handle, rows, copy=False)
                    self._ledger.loads.loaded(entry, nbytes)
                    if entry.gone:  # invalidated meanwhile
                        self._store.drop((entry.handle,))
                else:
                    if rows is not None:  # another width or dtype: what is encoded in its place has to be stored
                        self.tiers.remove((key,))
                    self._ledger.loads.loaded(entry, None)
            self._settled(list(loading.values()))

        expected = self._intake.expected
        self.tiers.prefetch({key: expected(entry.modality, entry.num_rows) for key, entry in loading.items()}, done)
