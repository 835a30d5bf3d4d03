"""What one turn moved, and why the rest did not have to move."""

from __future__ import annotations

from mmcache.cache import Lookup
from mmcache.fields import value_bytes
from mmcache.items import MultimodalRequest
from mmcache.planning import FieldAction, ItemStatus

__all__ = ["BYTE_REASONS", "TurnAccount"]

BYTE_REASONS = ("transferred", "kept_on_cpu", "covered", "stored", "in_flight")
"""What becomes of the bytes of a turn; with chunked prefill nothing stays `later` to the end of it."""

_REASON = {
    FieldAction.TRANSFER: "transferred",
    FieldAction.KEEP_ON_CPU: "kept_on_cpu",
    FieldAction.SKIP_COVERED: "covered",
    FieldAction.SKIP_STORED: "stored",
    FieldAction.SKIP_IN_FLIGHT: "in_flight",
}


class TurnAccount:
    """The items and bytes of one request over all its steps; each item counts once, when its window comes.

    Attributes:
        prefix_tokens: tokens whose keys and values existed before the turn.
        items: number of items covered, stored, in_flight (another request of the batch encoded them) and missing (this
            request encoded them); repeats of a missing item count as stored.
        bytes: bytes of their fields by `BYTE_REASONS`.
    """

    def __init__(self, num_items: int) -> None:
        self.prefix_tokens = 0
        self.items = dict.fromkeys(("covered", "stored", "in_flight", "missing"), 0)
        self.bytes = dict.fromkeys(BYTE_REASONS, 0)
        self._open = list(range(num_items))

    def settle(self, request: MultimodalRequest, lookup: Lookup) -> None:
        """Count the items that are not `LATER` any more; called once a step, before anything is encoded."""
        if not self._open:
            return
        missing = set(lookup.missing)
        later = []
        for index in self._open:
            status = lookup.status(index)
            if status is ItemStatus.LATER:
                later.append(index)
                continue
            repeat = status is ItemStatus.MISSING and index not in missing
            self.items["stored" if repeat else status.value] += 1
            for name, value in (request.items[index].fields or {}).items():
                self.bytes[_REASON[lookup.action(index, name)]] += value_bytes(value)
        self._open = later
