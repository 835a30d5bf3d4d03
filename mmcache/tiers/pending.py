"""Rows on their way into tiers: encoded once, by a writer's thread, however many tiers they go to."""

from __future__ import annotations

from threading import Lock

from torch import Tensor

from mmcache.tiers.devices import on_host, written_by_now
from mmcache.tiers.entry import Entry, encode_entry
from mmcache.tiers.keys import Key

__all__ = ["PendingRows"]


class PendingRows:
    """Rows that wait to be written, on whatever device they are; they must not be written to meanwhile.

    Args:
        key: what they are stored under.
        rows: `[num_embeds, width]`. On a device the copy to the host waits, in the writer's thread and on a stream of
            its own, for the work that is queued on the current stream now.
        levels: see `encode_entry`.
        entry: the rows encoded, where they were read from another tier.
    """

    def __init__(self, key: Key, rows: Tensor, *, levels: int = 1, entry: Entry | None = None) -> None:
        if entry is None and rows.is_cpu and not rows.untyped_storage().resizable():
            rows = rows.clone()  # memory that torch was lent may be a part of anything: nobody could budget it
        self.key = key
        self.rows = rows
        """The rows as they were given, or their copy on the host once there is one."""
        self.nbytes = max(rows.untyped_storage().nbytes(), rows.nbytes)  # what they keep alive, not what they say
        self.written = written_by_now(rows) if entry is None else None
        """The point behind which the rows are written; None where they are."""
        self._levels = levels
        self._lock = Lock()
        self._entry = entry

    def entry(self) -> Entry:
        """The encoded entry, on the host. May block for a copy from the device.

        Raises:
            EmbeddingError: the rows cannot be stored.
        """
        with self._lock:
            entry = self._entry
            if entry is None:
                host = on_host(self.rows, self.written)
                entry = encode_entry(self.key, host, levels=self._levels)
                self.rows = host
            elif not entry.payload.is_cpu:
                entry = Entry(entry.header, on_host(entry.payload))
            self._entry = entry
            return entry
