"""Content digests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import UnhashableContentError
from mmcache.hashing.algorithms import algorithm as find_algorithm
from mmcache.hashing.arrays import TENSOR_VIEWS, Array, array_dtype, array_head, tensor_dtype
from mmcache.hashing.encode import encode
from mmcache.hashing.message import PIECE, Message, Unhashable, header

__all__ = ["ContentHasher"]

_HEADS = 1024
_LONGEST_PATH = 200


class ContentHasher:
    """Makes identifiers of content: equal for equal content, in every process and on every machine.

    What is hashed is framed (a type tag and a length before every part), so that no two inputs are hashed as the same
    bytes. `xxh3_128` is as fast as memory and **does not resist anybody who can choose content**: two inputs of one
    digest can be made at will. Use it where one trust domain owns all content. Where identities are shared between
    tenants or leave the process, use `blake3` or `sha256`, keyed where digests could be guessed from known content.

    Thread-safe. Hashers of one algorithm and key are equal.

    Attributes:
        algorithm: "xxh3_128", "blake3" or "sha256".
        scheme: what a `Namespace` declares as its `digest_scheme`: the algorithm, or "blake3_keyed", "hmac_sha256".
    """

    __slots__ = ("_heads", "_key", "_prefix", "_start", "_whole", "algorithm", "scheme")

    def __init__(self, algorithm: str = "xxh3_128", *, key: bytes | None = None) -> None:
        """Make a hasher.

        Args:
            algorithm: "xxh3_128" (32 hexadecimal digits), "blake3" or "sha256" (64).
            key: 32 bytes for BLAKE3's keyed mode; any bytes for HMAC with SHA-256.

        Raises:
            ConfigError: unknown algorithm, a key that it cannot take, or BLAKE3 is not installed.
        """
        self.scheme, self._start = find_algorithm(algorithm, key)
        self.algorithm = algorithm
        self._key = key
        message = Message(self, _discard, None)
        message.pending += header(b"l", 5)
        for part in ("mmcache-digest", 1, self.scheme):
            encode(part, message)
        self._prefix = bytes(message.pending)
        self._whole = algorithm == "xxh3_128"  # takes arrays as they are; the others take bytes
        self._heads: dict[tuple[object, tuple[int, ...]], tuple[bytes, type[ctypes.Array[ctypes.c_ubyte]] | None]] = {}

    def digest(self, /, *parts: object, **named_parts: object) -> str:
        """The digest of some content and its options, in lower-case hexadecimal digits.

        Takes None, bool, int, float, complex, str, bytes-like, enums, lists and tuples (which are equal), dicts (whose
        order does not count), dataclasses, Pillow images, numpy arrays, torch tensors, `ItemFields` and `Source`s, and
        whatever consists of these. Named parts are apart from positional ones. Contiguous CPU buffers are not copied;
        a tensor on a device is copied to the CPU, which waits for it.

        Raises:
            UnhashableContentError: a part has no defined identity; `path` says where it is.
            MediaError: an image that was opened lazily cannot be decoded.
            MissingContentError: a source is known by a digest of another hasher only.
        """
        if not named_parts and len(parts) == 1:
            part: Any = parts[0]
            kind = type(part)
            if kind is Tensor or kind is np.ndarray:
                # One contiguous array on the CPU: the same message, without writing it piece by piece.
                try:
                    head, memory = self._heads.get((part.dtype, part.shape)) or self._head(part)
                    if memory is None:
                        # refuses what is not contiguous, or copies it
                        data = part if self._whole else part.reshape(-1).view(np.uint8).data
                    elif part.is_cpu and part.is_contiguous() and not part.is_neg() and (address := part.data_ptr()):
                        # `numpy()` alone would take as long as all of this, and knows neither bfloat16 nor float8
                        data = memory.from_address(address)
                        if not self._whole:
                            data = np.frombuffer(memoryview(data), np.uint8).data
                    else:
                        return self.digest_until(None, parts, named_parts)
                    state = self._start(head)
                    state.update(data)
                    return state.hexdigest()
                except (RuntimeError, TypeError, ValueError, BufferError, Unhashable):
                    pass
        return self.digest_until(None, parts, named_parts)

    def digest_until(
        self, stop: Callable[[], bool] | None, parts: tuple[object, ...], named_parts: dict[str, object]
    ) -> str:
        """`digest`, given up with `CancelledError` soon after `stop()` is true; it is asked every few megabytes."""
        if stop is not None and len(parts) == 1 and not named_parts:
            part: Any = parts[0]
            dense = type(part) is np.ndarray or (type(part) is Tensor and part.layout is torch.strided)
            if dense and part.nbytes <= PIECE:  # in one piece, and faster
                if stop():
                    raise CancelledError
                return self.digest(part)
        state = self._start(b"")
        self._compose(Message(self, state.update, stop), parts, named_parts)
        return state.hexdigest()

    def frame(self, /, *parts: object, **named_parts: object) -> bytes:
        """The bytes that `digest` hashes, for those who implement it elsewhere. Copies everything."""
        written = bytearray()
        self._compose(Message(self, written.__iadd__, None), parts, named_parts)
        return bytes(written)

    def _compose(self, message: Message, parts: tuple[object, ...], named_parts: dict[str, object]) -> None:
        message.pending += self._prefix
        root = ""
        try:
            encode(named_parts, message)
            root = "parts"
            encode(parts, message)
        except Unhashable as error:
            steps = error.steps[::-1]
            if not root and steps:
                steps[0] = steps[0].removeprefix("['").removesuffix("']")
            path = root + "".join(steps)
            if len(path) > _LONGEST_PATH:
                path = path[:_LONGEST_PATH] + "..."
            raise UnhashableContentError(f"{path}: {error.reason}", path=path) from error.__cause__
        message.flush()

    def _head(self, part: Tensor | Array) -> tuple[bytes, type[ctypes.Array[ctypes.c_ubyte]] | None]:
        """What stands before the bits of such an array and, for a tensor, the type of the memory they lie in."""
        memory = None
        if isinstance(part, Tensor):
            name = tensor_dtype(part.dtype)
            if part.dtype not in TENSOR_VIEWS or part.is_complex() or part.layout != torch.strided:
                raise Unhashable(name)
            memory = ctypes.c_ubyte * part.nbytes
        else:
            name = array_dtype(part.dtype)
            if part.dtype.newbyteorder("<") != part.dtype:
                raise Unhashable("big-endian")
        empty = header(b"d", 0) + header(b"l", 1)
        head = self._prefix + empty + array_head(name, part.shape, part.nbytes), memory
        if len(self._heads) >= _HEADS:
            self._heads.clear()
        self._heads[part.dtype, tuple(part.shape)] = head
        return head

    def __eq__(self, other: object) -> bool:
        # of one type: a subclass may make other digests
        if not isinstance(other, ContentHasher) or type(other) is not type(self):
            return NotImplemented
        return self.algorithm == other.algorithm and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.algorithm, self._key))

    def __repr__(self) -> str:
        return f"ContentHasher({self.algorithm!r}{', key=...' if self._key is not None else ''})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.algorithm, self._key)


def _rebuild(algorithm: str, key: bytes | None) -> ContentHasher:
    return ContentHasher(algorithm, key=key)


def _discard(_: object) -> None:
    return
