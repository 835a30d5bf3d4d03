"""The message of a digest while it is being written: small pieces are gathered, large buffers are never copied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

from mmcache.hashing.protocol import StoppableHasher

__all__ = ["DEEPEST", "PIECE", "Message", "Unhashable", "header"]

DEEPEST = 128  # levels of containers
_INLINE = 4096
_FLUSH_ABOVE = 1 << 16
PIECE = 4 << 20  # bytes between two questions whether to go on


class Unhashable(Exception):
    """A part has no defined identity. Gathers the path to it, innermost step first, on its way up."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.steps: list[str] = []
        super().__init__(reason)


def header(tag: bytes, length: int) -> bytes:
    """A type tag and a length, which stand before every part."""
    return tag + length.to_bytes(8, "little")


class Message:
    """Where encoders write.

    Attributes:
        hasher: digests the content of sources.
        pending: small pieces, to be appended to by encoders.
        depth: how many containers are open.
    """

    __slots__ = ("_stop", "_write", "depth", "hasher", "pending")

    def __init__(
        self,
        hasher: StoppableHasher,
        write: Callable[[bytes | bytearray | memoryview], object],
        stop: Callable[[], bool] | None,
    ) -> None:
        self.hasher = hasher
        self.pending = bytearray()
        self.depth = 0
        self._write = write
        self._stop = stop

    def open(self) -> None:
        """Enter a container. Endless recursion ends here, as an error."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unhashable(f"nested more than {DEEPEST} levels deep, or contains itself")
        if len(self.pending) > _FLUSH_ABOVE:
            self.flush()

    def close(self) -> None:
        """Leave the container."""
        self.depth -= 1

    def digest(self, part: object) -> str:
        """The digest of a source's content, which is given up together with this message."""
        if self._stop is None:
            return self.hasher.digest(part)
        return self.hasher.digest_until(self._stop, (part,), {})

    def data(self, view: memoryview) -> None:
        """Write a buffer of any size: a C-contiguous view of unsigned bytes."""
        if view.nbytes <= _INLINE:
            self.pending += view
            return
        self.flush()
        if self._stop is None:
            self._write(view)
            return
        for start in range(0, view.nbytes, PIECE):
            self._check()
            self._write(view[start : start + PIECE])

    def flush(self) -> None:
        """Hand on what is pending."""
        self._check()
        if self.pending:
            self._write(self.pending)
            self.pending = bytearray()

    def _check(self) -> None:
        if self._stop is not None and self._stop():
            raise CancelledError
