"""Saved rows on their way from the shared memory to the stores, without a copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mmcache.engines.vllm.region import SharedRegion
from mmcache.engines.vllm.residents import Resident
from mmcache.tiers import Key

__all__ = ["Puts", "WriteBack"]


class Puts(Protocol):
    """What is used of a `TieredStore` for writing."""

    def put(self, key: Key, rows: Tensor) -> None:
        """Write rows behind the caller's back; they are kept alive until they are written or dropped."""


class WriteBack:
    """Hands rows to a store, and tells when the store has let go of their memory."""

    def __init__(self, region: SharedRegion, store: Puts) -> None:
        self._region = region
        self._store = store

    def put(self, resident: Resident, on_released: Callable[[], None]) -> None:
        """Write a resident's rows.

        Args:
            resident: pinned until `on_released` is called, once, on any thread.
            on_released: must do no more than put something into a queue: it may be called from a destructor.
        """
        # The tensors that a store makes of this one share one storage, and the storage keeps the array alive: it dies
        # when the rows are written, or were dropped
        array = self._region.payload_bytes(resident.offset, resident.nbytes)
        weakref.finalize(array, on_released).atexit = False
        rows = torch.from_numpy(array).view(resident.dtype).view(resident.rows, resident.width)
        self._store.put(resident.key, rows)
