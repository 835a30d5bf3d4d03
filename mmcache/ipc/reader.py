"""The worker's side of an arena: regions as read-only tensors, without a copy."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import MessageError
from mmcache.ipc.segment import ReadSegment
from mmcache.ipc.values import ALIGNMENT

__all__ = ["GUARD", "ArenaReader", "bytes_at"]

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

    def view(self, offset: int, nbytes: int, serial: int) -> memoryview:
        """A region's bytes, without a copy.

        Raises:
            MessageError: the region is not there (any more).
        """
        self._check(offset, nbytes, serial)
        return self._segment.view[offset : offset + nbytes]

    def block(self, offset: int, nbytes: int, serial: int, on_last: Callable[[], None]) -> Tensor:
        """A region as a tensor uint8 `[nbytes]`, without a copy. Views of it are read-only: writing ends the process.

        Args:
            offset, nbytes, serial: of the region.
            on_last: called once, from any thread, when no tensor reads the region any more.

        Raises:
            MessageError: as `view`.
        """
        self._check(offset, nbytes, serial)
        array = bytes_at(self._segment.address + offset, nbytes)
        weakref.finalize(array, _gone, self._segment, on_last).atexit = False
        return torch.from_numpy(array)

    def _check(self, offset: int, nbytes: int, serial: int) -> None:
        if offset < ALIGNMENT or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise MessageError("a region lies outside the arena", found=f"{nbytes} bytes at {offset}")
        if GUARD.unpack_from(self._segment.view, offset - ALIGNMENT) != (serial, nbytes):
            raise MessageError("the region is no longer in the arena", found=f"{nbytes} bytes at {offset}")


def _gone(segment: ReadSegment, on_last: Callable[[], None]) -> None:
    """The last tensor in a region is gone; until now the segment stayed mapped."""
    on_last()


def bytes_at(address: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes at an address of this process as an array, without a copy; the caller keeps them mapped."""
    if not nbytes:
        return np.empty(0, np.uint8)
    # Through ctypes, since torch warns about arrays that say that they are read-only.
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B"), np.uint8)
