"""Which named values a storage was computed from, so that a record can say whose it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["NOTHING", "Origins"]

NOTHING: frozenset[str] = frozenset()


class Origins:
    """Names that live storages carry; what is computed from a tensor carries its names.

    Attributes:
        touched: names whose values an operation took or the host looked at. A tensor's shape is not its value.
    """

    def __init__(self) -> None:
        # The weak reference keeps a storage's address from being used again while the entry exists.
        self._names: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}
        self.touched: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._names)

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        """The names that a tensor carries."""
        if not self._names or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return NOTHING
        entry = self._names.get(tensor.untyped_storage()._cdata)
        return NOTHING if entry is None else entry[1]

    def of_all(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """The names that any of the tensors carries."""
        return NOTHING.union(*map(self.of, tensors)) if self._names else NOTHING

    def add(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        """The tensor's storage carries these names, too."""
        if not names or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        known = self._names.get(storage._cdata)
        if known is None:
            self._names[storage._cdata] = (StorageWeakRef(storage), names)  # type: ignore[no-untyped-call]
        elif not names <= known[1]:
            self._names[storage._cdata] = (known[0], known[1] | names)
