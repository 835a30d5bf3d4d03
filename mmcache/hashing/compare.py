"""Comparison of contents byte by byte, for caches that check what a digest claims."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmcache.errors import UnhashableContentError
from mmcache.hashing.encode import encode
from mmcache.hashing.hasher import ContentHasher
from mmcache.hashing.message import Message, Unhashable

__all__ = ["same_content"]

_HASHER = ContentHasher("sha256")  # for sources, which are compared by their digests
_CHUNK = 1 << 18


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
    # a message is split into pieces at the same places if it is the same
    return len(left) == len(right) and all(map(_equal, left, right))


def _pieces(value: object) -> list[memoryview]:
    pieces: list[memoryview] = []
    message = Message(_HASHER, lambda data: pieces.append(memoryview(data)), None)
    encode(value, message)
    message.flush()
    return pieces


def _equal(a: memoryview, b: memoryview) -> bool:
    return a.nbytes == b.nbytes and all(np.array_equal(x, y) for x, y in zip(_chunks(a), _chunks(b)))


def _chunks(view: memoryview) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    data = np.frombuffer(view, np.uint8)
    for start in range(0, len(data), _CHUNK):
        yield data[start : start + _CHUNK]
