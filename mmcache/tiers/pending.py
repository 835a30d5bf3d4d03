"""Rows on their way into tiers: encoded once, by a writer's thread, however many tiers they go to."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from mmcache.tiers.entry import Entry, encode_entry
from mmcache.tiers.keys import Key

__all__ = ["PendingRows"]


class PendingRows:
    """Rows that wait to be written, on whatever device they are; they must not be written to meanwhile.

    Args:
        key: what they are stored under.
        rows: `[num_embeds, width]`. On a GPU the copy to the host waits, in the writer's thread and on a stream of its
            own, for the work that is queued on the current stream now.
        levels: see `encode_entry`.
        entry: the rows encoded, where they were read from another tier.
    """

    def __init__(self, key: Key, rows: Tensor, *, levels: int = 1, entry: Entry | None = None) -> None:
        self.key = key
        self.rows = rows
        """The rows as they were given, or their copy on the host once there is one."""
        self.nbytes = max(rows.untyped_storage().nbytes(), rows.nbytes)  # what they keep alive, not what they say
        self._levels = levels
        self._lock = Lock()
        self._entry = entry
        self._ready: torch.cuda.Event | None = None
        if type(rows) is Tensor and rows.device.type == "cuda":
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record(torch.cuda.current_stream(rows.device))

    def entry(self) -> Entry:
        """The encoded entry. May block for a copy from the device.

        Raises:
            EmbeddingError: the rows cannot be stored.
        """
        with self._lock:
            entry = self._entry
            if entry is None:
                host = self._on_host(self.rows)
                entry = self._entry = encode_entry(self.key, host, levels=self._levels)
                self.rows = host
            return entry

    def _on_host(self, rows: Tensor) -> Tensor:
        if rows.device.type == "cpu":
            return rows
        if self._ready is None:
            return rows.cpu()
        # The default stream would wait for, and hold up, the engine's own work
        stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._ready)
        with torch.cuda.stream(stream):
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
        stream.synchronize()
        return host
