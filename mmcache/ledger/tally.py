"""Sums over lookups that have ended."""

from __future__ import annotations

from mmcache.ledger.records import READY, Entry, Ticket
from mmcache.ledger.snapshots import bytes_of
from mmcache.ledger.table import EntryTable
from mmcache.planning import ItemStatus, covered_beyond
from mmcache.stats import CacheStats

__all__ = ["Tally", "stats_of"]

_STATUSES = (ItemStatus.COVERED, ItemStatus.STORED, ItemStatus.IN_FLIGHT, ItemStatus.MISSING, ItemStatus.LATER)
_REASONS = ("covered", "stored", "in_flight", "transfer", "later", "kept_on_cpu")


class Tally:
    """Items by status, and bytes of their fields by what became of them, as things stood at each lookup's end.

    What a lookup encoded counts as missing and as transferred.
    """

    __slots__ = ("_bytes", "_items")

    def __init__(self) -> None:
        self._items = [0] * len(_STATUSES)
        self._bytes = [0] * len(_REASONS)

    def items_by_status(self) -> dict[str, int]:
        """Number of items by status."""
        return {status.value: number for status, number in zip(_STATUSES, self._items)}

    def bytes_by_reason(self) -> dict[str, int]:
        """Bytes by what became of them."""
        return dict(zip(_REASONS, self._bytes))

    def add(self, ticket: Ticket) -> None:
        """Count a lookup that ends. It is on the way of every step: O(needed items), without an object made."""
        request, entries, first, later = ticket.request, ticket.entries, ticket.first, ticket.later
        if request._shared or request._zero_rows or len(entries) != later - first:
            self._add_uncommon(ticket)
            return
        items, sums, until = self._items, self._bytes, request._payload_until
        items[0] += first
        sums[0] += until[first]
        sums[5] += request._kept_until[ticket.num_items]
        if later != ticket.num_items:
            items[4] += ticket.num_items - later
            sums[4] += until[ticket.num_items] - until[later]
        unsettled, encoded = ticket.unsettled, ticket.encoded
        if not unsettled and not encoded:
            items[1] += later - first
            sums[1] += until[later] - until[first]
            return
        one = later - first == 1 and unsettled  # the next turn's: encoded, or given up
        if one and (entries[first] in encoded if encoded else one[0].owner is ticket):
            items[3] += 1
            sums[3] += until[later] - until[first]
            return
        seen: set[Entry] | None = None
        for index, entry in entries.items():
            size = until[index + 1] - until[index]
            if entry is None or (entry.state is READY and not (encoded and entry in encoded)):
                items[1] += 1
                sums[1] += size
            elif entry.owner is not ticket and entry.state is not READY:
                items[2] += 1
                sums[2] += size
            else:
                items[3] += 1
                if seen is None:
                    seen = set()
                # A content's payload goes once, with its first item.
                sums[1 if entry in seen else 3] += size
                seen.add(entry)

    def _add_uncommon(self, ticket: Ticket) -> None:
        """Shared fields, items without rows, and gaps between the needed ones need the whole account."""
        encoded = ticket.encoded or ()
        for entry in ticket.entries.values():
            status = ItemStatus.MISSING if entry is not None and entry in encoded else ticket.status_of(entry)
            self._items[_STATUSES.index(status)] += 1
        covered = ticket.first + len(covered_beyond(ticket.request, ticket, ticket.entries))
        self._items[0] += covered
        self._items[4] += ticket.num_items - covered - len(ticket.entries)
        counted = bytes_of(ticket, encoded)
        for place, name in enumerate(_REASONS):
            self._bytes[place] += getattr(counted, name)


def stats_of(table: EntryTable, tally: Tally, lookups: int, prefix_found: int, prefix_asked: int) -> CacheStats:
    """A ledger's counters as they stand."""
    budget, counts = table.budget, table.counts
    return CacheStats(
        lookups=lookups,
        items=tally.items_by_status(),
        bytes=tally.bytes_by_reason(),
        encodes=counts["encodes"],
        loads=counts["loads"],
        failed_loads=counts["failed_loads"],
        joins=counts["joins"],
        takeovers=counts["takeovers"],
        evictions=dict(budget.evictions),
        uncached=dict(budget.uncached),
        stale=counts["stale"],
        lost=counts["lost"],
        forgotten_lookups=counts["forgotten_lookups"],
        capacity_bytes=budget.capacity,
        used_bytes=budget.used,
        pinned_bytes=budget.fixed,
        entries=len(budget.entries),
        prefix_tokens=prefix_found,
        prefix_queries_tokens=prefix_asked,
        epoch=table.epoch,
    )
