"""Metadata as it came, a column of one field for many items; unpacked when somebody reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmcache.fields import FieldValue
from mmcache.ipc.messages import Column
from mmcache.ipc.values import DTYPES, Leaf, unflatten

__all__ = ["StoredColumn"]


@dataclass(slots=True)
class StoredColumn:
    """One column of metadata of the items `indices`; `unpacked` are the values that columns of its block share."""

    name: str
    indices: list[int]
    column: Column
    block: bytearray
    unpacked: dict[object, FieldValue]
    values: list[FieldValue] | None = None

    def unpack(self) -> list[FieldValue]:
        """The items' values, made once."""
        if self.values is None:
            if self.column.stacked is not None:
                self.values = list(self._read(self.column.stacked).unbind(0))
            else:
                distinct = [self._value(nest, leaves) for nest, leaves in self.column.values]
                self.values = [distinct[ref] for ref in self.column.refs]
        return self.values

    def _value(self, nest: list[int], leaves: list[Leaf]) -> FieldValue:
        # One value that items of several schemas share has one place in the block, and stays one value.
        key = (tuple(nest), tuple(leaves))
        if key not in self.unpacked:
            self.unpacked[key] = unflatten(nest, leaves, self._read)
        return self.unpacked[key]

    def _read(self, leaf: Leaf) -> Tensor:
        name, shape, offset = leaf
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=DTYPES[name])
        return torch.frombuffer(self.block, dtype=DTYPES[name], count=count, offset=offset).view(shape)
