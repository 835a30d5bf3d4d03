"""Metadata as it came, a column of one field for many items; unpacked when somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    indices: Sequence[int]
    column: Column
    block: bytearray
    unpacked: dict[object, FieldValue]
    values: list[FieldValue] | None = None

    def unpack(self) -> list[FieldValue]:
        """The items' values, made once."""
        if self.values is None:
            stacked = self.column.stacked
            if stacked is not None:
                shape = stacked[1]
                if len(shape) == 2 and all(shape):
                    # Most metadata is a row of a few numbers: one operation cuts the flat tensor. Nothing is "unsafe"
                    # about it where no part overlaps another; the parts are just not noted as views of one tensor.
                    self.values = list(torch.unsafe_split_with_sizes(self._flat(stacked), [shape[1]] * shape[0]))
                else:
                    self.values = list(self._read(stacked).unbind(0))
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
        name, shape, _ = leaf
        return self._flat(leaf).view(shape) if all(shape) else torch.empty(shape, dtype=DTYPES[name])

    def _flat(self, leaf: Leaf) -> Tensor:
        name, shape, offset = leaf
        return torch.frombuffer(self.block, dtype=DTYPES[name], count=math.prod(shape), offset=offset)
