"""Comparison of contents byte by byte, for caches that check what a digest claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from mmcache.errors import UnhashableContentError
from mmcache.hashing.encode import encode
from mmcache.hashing.hasher import ContentHasher
from mmcache.hashing.message import Message, Unhashable

__all__ = ["same_content"]

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_HASHER = ContentHasher("sha256")  # for sources, which are compared by their digests
_CHUNK = 1 << 18
_NOTHING = np.empty(0, np.uint8)


def same_content(a: object, b: object) -> bool:
    """Whether two contents agree in every byte that a digest would be made of: a hash collision cannot hide here.

    Takes what `ContentHasher.digest` takes; `Source`s are compared by the SHA-256 of their bytes. Contiguous CPU
    buffers are not copied.

    Raises:
        UnhashableContentError: a part has no defined identity.
    """
    try:
        left, right = _pieces(a), _pieces(b)
    except Unhashable as error:
        path = "".join(error.steps[::-1])
        raise UnhashableContentError(f"{path}: {error.reason}" if path else error.reason, path=path) from error
    return _equal(left, right)


def _pieces(value: object) -> list[memoryview]:
    pieces: list[memoryview] = []
    message = Message(_HASHER, lambda data: pieces.append(memoryview(data)), None)
    encode(value, message)
    message.flush()
    return pieces


def _equal(left: list[memoryview], right: list[memoryview]) -> bool:
    """Whether two messages are one, however each is cut into pieces."""
    if sum(piece.nbytes for piece in left) != sum(piece.nbytes for piece in right):
        return False
    others = _chunks(right)
    other = next(others, _NOTHING)
    for chunk in _chunks(left):
        while len(chunk):
            if not len(other):
                other = next(others)
            size = min(len(chunk), len(other))
            if not np.array_equal(chunk[:size], other[:size]):
                return False
            chunk, other = chunk[size:], other[size:]
    return True


def _chunks(pieces: list[memoryview]) -> Iterator[Bytes]:
    """The pieces as arrays small enough to be compared in the CPU's cache."""
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]
