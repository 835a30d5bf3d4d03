"""Frames: a fixed prefix, then a body of a header and buffers, or the place in the arena where the body lies.

    prefix   32 bytes: magic and version, kind, place, ahead, session, epoch, sequence number
    body     header length, number of buffers, their lengths; the header; the buffers, each at a multiple of 8
    region   or instead: offset, bytes and serial of an arena region that holds the body

The prefix differs from worker to worker, the body does not: it is made, and written to the arena, once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from mmcache.errors import MessageError

__all__ = [
    "MAX_BODY",
    "MAX_EPOCH",
    "Body",
    "Frame",
    "Kind",
    "body_parts",
    "inline_frame",
    "parse_body",
    "parse_frame",
    "place_of",
    "region_frame",
]

_MAGIC = b"mmc\x02"  # the last byte is the version of the protocol
_PREFIX = struct.Struct("<4sBBBxQQQ")
_REGION = struct.Struct("<QQQ")
_COUNTS = struct.Struct("<II")
_PADDING = [bytes(count) for count in range(8)]
_MAX_BUFFERS = 1 << 16
MAX_BODY = 1 << 34
"""Bytes that a body has at most."""
MAX_EPOCH = (1 << 63) - 1
"""Epochs name bytes that are locked (see `mmcache.ipc.segment`), so they are offsets in a file."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    STEP = 3
    RESEND = 4
    REPORT = 5
    WRITTEN = 6


_KINDS = {int(kind): kind for kind in Kind}


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A parsed frame; either `body` or `region` is set.

    Attributes:
        kind: what it is.
        session: number of the sender's life.
        epoch: number of the receiver's life.
        sequence: number of the message within both.
        body: the body's bytes, not parsed yet.
        region: (offset, bytes, serial) in the arena.
        ahead: whether payload that it names is still being written: a `Kind.WRITTEN` of the same sequence follows.
    """

    kind: Kind
    session: int
    epoch: int
    sequence: int
    body: memoryview | None
    region: tuple[int, int, int] | None
    ahead: bool = False


class Body(msgspec.Struct, frozen=True, gc=False):
    """A parsed body: header bytes, and the buffers that the header refers to by number."""

    header: memoryview
    buffers: list[memoryview]

    def buffer(self, index: int) -> memoryview:
        """A buffer by its number.

        Raises:
            MessageError: there is no such buffer.
        """
        if not 0 <= index < len(self.buffers):
            raise MessageError("there is no such buffer", expected=f"0 <= index < {len(self.buffers)}", found=index)
        return self.buffers[index]


def body_parts(header: bytes, buffers: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """The pieces of a body, to be written one behind the other."""
    lengths = list(map(len, buffers))
    start = struct.pack(f"<II{len(lengths)}Q", len(header), len(lengths), *lengths) + header
    parts: list[bytes | memoryview] = [start + _PADDING[-len(start) % 8]]
    for buffer, length in zip(buffers, lengths):
        if length:
            parts.append(buffer)
            if length % 8:
                parts.append(_PADDING[-length % 8])
    return parts


def inline_frame(
    kind: Kind, session: int, epoch: int, sequence: int, parts: Sequence[bytes | memoryview] = (), ahead: bool = False
) -> bytes:
    """A frame that carries its body."""
    return b"".join([_PREFIX.pack(_MAGIC, kind, 0, ahead, session, epoch, sequence), *parts])


def place_of(offset: int, nbytes: int, serial: int) -> bytes:
    """Where in the arena a body lies, for frames."""
    return _REGION.pack(offset, nbytes, serial)


def region_frame(kind: Kind, session: int, epoch: int, sequence: int, place: bytes, ahead: bool = False) -> bytes:
    """A frame whose body lies in the arena."""
    return _PREFIX.pack(_MAGIC, kind, 1, ahead, session, epoch, sequence) + place


def parse_frame(data: bytes | bytearray | memoryview) -> Frame:
    """Parse a frame.

    Raises:
        MessageError: it is no frame of this version.
    """
    length = len(data)
    if length < _PREFIX.size:
        raise MessageError("this is no message of mmcache", found=f"{length} bytes")
    magic, number, place, ahead, session, epoch, sequence = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        if magic[:3] != _MAGIC[:3]:
            raise MessageError("this is no message of mmcache", found=f"{len(data)} bytes")
        raise MessageError("the message has another version", expected=_MAGIC[3], found=magic[3])
    kind = _KINDS.get(number)
    if kind is None or place > 1 or ahead > 1:
        raise MessageError("the message is of an unknown kind", found=(number, place, ahead))
    if epoch > MAX_EPOCH:
        raise MessageError("an epoch is a possible one", expected=f"at most {MAX_EPOCH}", found=epoch)
    if not place:
        return Frame(kind, session, epoch, sequence, memoryview(data)[_PREFIX.size :], None, ahead == 1)
    if length != _PREFIX.size + _REGION.size:
        raise MessageError("a place in the arena has three numbers", expected=_REGION.size, found=length - _PREFIX.size)
    return Frame(kind, session, epoch, sequence, None, _REGION.unpack_from(data, _PREFIX.size), ahead == 1)


def parse_body(data: memoryview) -> Body:
    """Parse a body; the result shares memory with `data`.

    Raises:
        MessageError: lengths that do not add up to the bytes that are there.
    """
    if not _COUNTS.size <= len(data) <= MAX_BODY:
        raise MessageError("a body has a possible size", found=f"{len(data)} bytes")
    header_length, count = _COUNTS.unpack_from(data)
    start = _COUNTS.size + 8 * count
    if count > _MAX_BUFFERS or start + header_length > len(data):
        raise MessageError("a body's header lies within it", found=f"{count} buffers, header of {header_length}")
    lengths = struct.unpack_from(f"<{count}Q", data, _COUNTS.size)
    header = data[start : start + header_length]
    position = -(-(start + header_length) // 8) * 8
    buffers = []
    for length in lengths:
        buffers.append(data[position : position + length])
        position += -(-length // 8) * 8
    if position != len(data):
        raise MessageError("a body's buffers fill it", expected=f"{position} bytes", found=f"{len(data)}")
    return Body(header, buffers)
