"""The worker's side of an arena: regions as read-only tensors, without a copy."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from mmcache.errors import MessageError
from mmcache.ipc.segment import ReadSegment
from mmcache.ipc.values import ALIGNMENT, Bytes, bytes_at

__all__ = ["GUARD", "ArenaReader"]

GUARD = struct.Struct("<QQ")
"""(serial, bytes), `ALIGNMENT` bytes in front of the content of every region."""


class ArenaReader:
    """The arena of another process, attached read-only under an epoch, as long as any tensor in it is alive."""

    def __init__(self, path: str, epoch: int) -> None:
        """Attach.

        Raises:
            ConfigError: there is no arena of this version under the path.
        """
        self._segment = ReadSegment(path, epoch)
        self.capacity_bytes = self._segment.capacity_bytes
        self._bytes = bytes_at(self._segment.address, self.capacity_bytes)

    def view(self, offset: int, nbytes: int, serial: int) -> memoryview:
        """A region's bytes, without a copy.

        Raises:
            MessageError: the region is not there (any more).
        """
        self.check(offset, nbytes, serial)
        return self._segment.view[offset : offset + nbytes]

    def block(self, offset: int, nbytes: int, serial: int, on_last: Callable[[], None]) -> Tensor:
        """A region as a tensor uint8 `[nbytes]`, without a copy; else as `array`."""
        return torch.from_numpy(self.array(offset, nbytes, serial, on_last))

    def array(self, offset: int, nbytes: int, serial: int, on_last: Callable[[], None]) -> Bytes:
        """A region's bytes, without a copy. Tensors made of it are read-only: writing ends the process.

        Args:
            offset, nbytes, serial: of the region.
            on_last: called once, from any thread, when neither the array nor a tensor made of it is alive any more.

        Raises:
            MessageError: as `view`.
        """
        self.check(offset, nbytes, serial)
        return self.array_ahead(offset, nbytes, on_last)

    def array_ahead(self, offset: int, nbytes: int, on_last: Callable[[], None]) -> Bytes:
        """As `array`, of a region that may not be written yet: `check` it before anything is read.

        Raises:
            MessageError: it lies outside the arena.
        """
        self._check_bounds(offset, nbytes)
        array = self._bytes[offset : offset + nbytes]
        weakref.finalize(array, _gone, self._segment, on_last).atexit = False
        return array

    def check(self, offset: int, nbytes: int, serial: int) -> None:
        """Raises MessageError where a region is not (or no longer, or not completely) in the arena."""
        self._check_bounds(offset, nbytes)
        if GUARD.unpack_from(self._segment.view, offset - ALIGNMENT) != (serial, nbytes):
            raise MessageError("the region is not in the arena", found=f"{nbytes} bytes at {offset}")

    def _check_bounds(self, offset: int, nbytes: int) -> None:
        if offset < ALIGNMENT or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise MessageError("a region lies outside the arena", found=f"{nbytes} bytes at {offset}")


def _gone(segment: ReadSegment, on_last: Callable[[], None]) -> None:
    """The last tensor in a region is gone; until now the segment stayed mapped."""
    on_last()
