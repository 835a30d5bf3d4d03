"""Small things that a receiver needs: payload out of bytes, and which numbers it has seen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmcache.fields import FieldValue
from mmcache.ipc.values import DTYPES, Bytes, Leaf, leaf_bytes, unflatten

__all__ = ["Watermark", "unpack_fields"]


class Watermark:
    """A set of numbers from 1 on, most of which come in order: all up to `upto`, and `beyond`."""

    __slots__ = ("beyond", "upto")

    def __init__(self) -> None:
        self.upto = 0
        self.beyond: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number <= self.upto or number in self.beyond

    def add(self, number: int) -> None:
        """Put a number in; idempotent."""
        if number > self.upto:
            self.beyond.add(number)
        while self.upto + 1 in self.beyond:
            self.upto += 1
            self.beyond.remove(self.upto)


def unpack_fields(described: Sequence[tuple[str, list[int], list[Leaf]]], block: Bytes) -> dict[str, FieldValue]:
    """Fields as views of a block of bytes, which they keep alive.

    Raises:
        MessageError: they do not lie within the block.
    """

    def read(leaf: Leaf) -> Tensor:
        name, shape, offset = leaf
        if not leaf_bytes(leaf, len(block)):
            return torch.empty(shape, dtype=DTYPES[name])
        return torch.frombuffer(block, dtype=DTYPES[name], count=math.prod(shape), offset=offset).view(shape)

    return {name: unflatten(nest, leaves, read) for name, nest, leaves in described}
