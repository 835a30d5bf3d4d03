"""What lies in an arena, and its counters. Plain records; `Arena` is the one that acts."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from mmcache.ipc.values import Leaf

__all__ = ["ArenaStats", "Region", "StoredField"]

StoredField = tuple[str, tuple[int, ...], tuple[Leaf, ...]]
"""(name, nest, leaves) of one field of a region; see `mmcache.ipc.values`."""


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """Counters of an arena, all in bytes but the last four.

    Attributes:
        capacity, used, referenced: of the arena; `used` includes what is kept in case it is needed again.
        written: all content that was ever copied into it, without messages and without gaps between tensors.
        regions, writes, reuses, evictions: regions now; contents written, found there, and given up to make room.
    """

    capacity: int
    used: int
    referenced: int
    written: int
    regions: int
    writes: int
    reuses: int
    evictions: int


class Region:
    """A piece of the arena. Hold it as long as anybody may read it.

    Attributes:
        offset: of the first byte behind the guard, in the arena.
        nbytes: bytes of content.
        serial: number of the write, never used twice in an arena.
        path: the arena's.
        fields: what lies in it.
        kind, note: as given to `hold`.
        unwritten: (offset, tensor, its source) of what is still to be written to it; None once it is.
    """

    __slots__ = ("fields", "key", "kind", "nbytes", "note", "offset", "path", "refs", "serial", "sources", "unwritten")

    def __init__(self, offset: int, nbytes: int, serial: int, path: str) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.serial = serial
        self.path = path
        self.refs = 1
        self.key: Hashable = None
        self.fields: tuple[StoredField, ...] = ()
        self.kind: Hashable = None
        self.note: object = None
        self.sources: tuple[tuple[weakref.ref[Tensor], int], ...] = ()
        self.unwritten: list[tuple[int, Tensor, Tensor]] | None = None
