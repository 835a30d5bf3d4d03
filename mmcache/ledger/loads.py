"""Rows that a tier has: loaded into an entry instead of encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from mmcache.items import MultimodalRequest
from mmcache.ledger.records import RESERVED, Entry, Ticket
from mmcache.ledger.table import EntryTable

__all__ = ["TierLoads"]


@dataclass(frozen=True, slots=True)
class TierLoads:
    """The part of a ledger that tiers talk to. An entry that is being loaded is reserved and has no owner.

    Attributes:
        table: the ledger's entries.
        lock: the ledger's.
        wake: called without the lock when lookups may have news.
    """

    table: EntryTable
    lock: threading.Lock
    wake: Callable[[], None]

    def owned(self, ticket: Ticket) -> list[Entry]:
        """Entries that the lookup would encode and that others could share."""
        with self.lock:
            return [entry for entry in ticket.unsettled or () if entry.owner is ticket and not entry.detached]

    def delegate(self, ticket: Ticket, entry: Entry) -> bool:
        """Have a tier load what the lookup owns, which is then the first to wait; False if it owns it no longer."""
        with self.lock:
            if entry.owner is not ticket or entry.state is not RESERVED or entry.detached:
                return False
            entry.owner = None
            entry.waiters = (ticket, *entry.waiters)
            return True

    def reserve(self, request: MultimodalRequest, index: int) -> Entry | None:
        """Reserve for a content that nobody has and nobody asked for yet, if that needs nobody's room; else None."""
        table = self.table
        modality, identifier = request.items[index].modality, request._identifiers[index]
        with self.lock:
            scope, row_bytes = table.scope_of(request), table.row_bytes.get(modality)
            nbytes = (row_bytes or 0) * request._num_rows[index]
            if row_bytes is None or identifier in scope or nbytes > table.budget.capacity - table.budget.used:
                return None
            entry = table.entry(scope, identifier, modality, request._num_rows[index])
            table.budget.reserve(entry, nbytes)
            return entry

    def loaded(self, entry: Entry, nbytes: int | None) -> None:
        """A load has ended: with that many bytes in the store, or with nothing, and the first who waits encodes."""
        with self.lock:
            if entry.state is RESERVED and entry.owner is None:
                if nbytes is None:
                    self.table.counts["failed_loads"] += 1
                    self.table.abandon(entry)
                else:
                    self.table.publish(entry, nbytes, None)
        self.wake()
