"""Which storage lies on which device. A view has its base's storage, so it lies where the base lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["CPU", "Labels"]

CPU = torch.device("cpu")
_PURGE_ABOVE = 4096


@dataclass(slots=True)
class _Entry:
    # The weak reference keeps the storage's address from being used again while the entry exists.
    storage: StorageWeakRef
    device: torch.device
    pinned: bool = False

    def expired(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class Labels:
    """Labels of live storages. What is not labelled lies on the CPU, unpinned."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._purge_at = _PURGE_ABOVE

    def device(self, tensor: torch.Tensor) -> torch.device:
        """The device that the tensor's storage is labelled with."""
        entry = self._find(tensor)
        return tensor.device if entry is None else entry.device

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is labelled as pinned host memory."""
        entry = self._find(tensor)
        return entry is not None and entry.pinned

    def put(self, tensor: torch.Tensor, device: torch.device, *, pinned: bool = False) -> None:
        """Label the tensor's storage; the tensor itself must be a dense CPU tensor (others are left alone)."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if device == CPU and not pinned:
            self._entries.pop(key, None)
            return
        self._entries[key] = _Entry(StorageWeakRef(storage), device, pinned)  # type: ignore[no-untyped-call]
        if len(self._entries) > self._purge_at:
            self._entries = {k: e for k, e in self._entries.items() if not e.expired()}
            self._purge_at = max(_PURGE_ABOVE, 2 * len(self._entries))

    def _find(self, tensor: torch.Tensor) -> _Entry | None:
        if not self._entries or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        return self._entries.get(tensor.untyped_storage()._cdata)
