"""Sums over lookups that have ended."""

from __future__ import annotations

from mmcache.ledger.records import READY, Entry, Ticket
from mmcache.planning import ItemStatus, count_bytes, covered_beyond

__all__ = ["Tally"]

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
        sums[5] += request.kept_bytes
        if later != ticket.num_items:
            items[4] += ticket.num_items - later
            sums[4] += until[ticket.num_items] - until[later]
        if not entries:
            return
        encoded = ticket.encoded
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
                if len(entries) == 1:
                    sums[3] += size
                    break
                if seen is None:
                    seen = set()
                # A content's payload goes once, with its first item.
                sums[1 if entry in seen else 3] += size
                seen.add(entry)

    def _add_uncommon(self, ticket: Ticket) -> None:
        """Shared fields, items without rows, and gaps between the needed ones need the whole account."""
        encoded: set[Entry] = ticket.encoded or set()

        def outcome(index: int) -> ItemStatus:
            entry = ticket.entries[index]
            return ItemStatus.MISSING if entry in encoded else ticket.status_of(entry)

        for index in ticket.entries:
            self._items[_STATUSES.index(outcome(index))] += 1
        beyond = covered_beyond(ticket.request, ticket.needed_from, ticket.first, ticket.later, ticket.entries)
        covered = ticket.first + len(beyond)
        self._items[0] += covered
        self._items[4] += ticket.num_items - covered - len(ticket.entries)
        firsts = ticket.firsts_of(lambda entry: entry in encoded or ticket.status_of(entry) is ItemStatus.MISSING)
        counted = count_bytes(
            ticket.request, ticket.needed_from, ticket.first, ticket.later, ticket.entries, outcome, firsts
        )
        for place, name in enumerate(_REASONS):
            self._bytes[place] += getattr(counted, name)
