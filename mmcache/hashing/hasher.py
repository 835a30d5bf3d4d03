"""Content digests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from mmcache.errors import UnhashableContentError
from mmcache.hashing.algorithms import algorithm as find_algorithm
from mmcache.hashing.arrays import Array, array_dtype, array_head
from mmcache.hashing.encode import encode
from mmcache.hashing.message import Message, Unhashable, header

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
        self._heads: dict[tuple[np.dtype[np.generic], tuple[int, ...]], bytes] = {}

    def digest(self, /, *parts: object, **named_parts: object) -> str:
        """The digest of some content and its options, in lower-case hexadecimal digits.

        Takes None, bool, int, float, complex, str, bytes-like, enums, lists and tuples (which are equal), dicts (whose
        order does not count), dataclasses, Pillow images, numpy arrays, torch tensors, `ItemFields` and `Source`s, and
        whatever consists of these. Named parts are apart from positional ones. Contiguous CPU buffers are not copied;
        a tensor on a device is copied to the CPU, which waits for it.

        Raises:
            UnhashableContentError: a part has no defined identity; `path` says where it is.
            MediaError: an image that was opened lazily cannot be decoded.
        """
        if not named_parts and len(parts) == 1:
            kind = type(parts[0])
            if kind is Tensor or kind is np.ndarray:
                fast = self._digest_array(parts[0])
                if fast is not None:
                    return fast
        return self.digest_until(None, parts, named_parts)

    def digest_until(
        self, stop: Callable[[], bool] | None, parts: tuple[object, ...], named_parts: dict[str, object]
    ) -> str:
        """`digest`, given up with `CancelledError` soon after `stop()` is true; it is asked every few megabytes."""
        state = self._start()
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

    def _digest_array(self, part: Any) -> str | None:
        """The digest of one contiguous array that numpy can see; None for all that need more care."""
        try:
            values: Array = part.numpy() if isinstance(part, Tensor) else part
            head = self._heads.get((values.dtype, values.shape)) or self._head(values)
            state = self._start()
            state.update(head)
            # what is not contiguous is refused here
            state.update(values if self._whole else values.reshape(-1).view(np.uint8).data)
        except (RuntimeError, TypeError, ValueError, Unhashable):
            return None
        return state.hexdigest()

    def _head(self, values: Array) -> bytes:
        if values.dtype.newbyteorder("<") != values.dtype:
            raise ValueError("big-endian")
        empty = header(b"d", 0) + header(b"l", 1)
        head = self._prefix + empty + array_head(array_dtype(values.dtype), values.shape, values.nbytes)
        if len(self._heads) >= _HEADS:
            self._heads.clear()
        self._heads[values.dtype, values.shape] = head
        return head

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContentHasher):
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
