"""Encoded media with the options they are decoded with: identity without decoding, and decoding when it is needed.

A source is immutable. It digests its encoded bytes once for each hasher and carries the digest along. Options are part
of the identity where they change what decoding gives, and only there: an explicit default is as good as none, and a
background colour does not matter to an opaque image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypeAlias

from mmcache.errors import MediaError, MissingContentError
from mmcache.hashing.protocol import Hasher

__all__ = ["Digest", "Source", "check_data"]

Digest: TypeAlias = Callable[[object], str]


class Source(ABC):
    """One image, video or audio clip, not decoded yet."""

    __slots__ = ("_contents", "_digests")

    def __init__(self) -> None:
        self._contents: dict[Hasher, object] = {}
        self._digests: dict[Hasher, str] = {}

    def __setattr__(self, name: str, value: object) -> None:
        # a digest that is carried must stay true
        if hasattr(self, name):
            raise AttributeError(f"a {type(self).__name__} cannot be changed")
        object.__setattr__(self, name, value)

    def digest(self, hasher: Hasher) -> str:
        """Digest of the content and of the options that matter, computed once for each hasher.

        Raises:
            MediaError: the options need a look at the file's header, and it cannot be read.
            MissingContentError: the source is known by a digest of another hasher only.
        """
        digest = self._digests.get(hasher)
        if digest is None:
            digest = self._digests[hasher] = hasher.digest(self)
        return digest

    def content(self, hasher: Hasher, digest: Digest | None = None) -> object:
        """The content's digest without options (where a video is given by frames: these). Computed once.

        This is what a client-given id is bound to; `known` makes a source of it that has no bytes.

        Args:
            hasher: whose digest it is.
            digest: computes it, where this is not simply `hasher.digest`: one that can be given up, say.
        """
        content = self._contents.get(hasher)
        if content is None:
            content = self._contents[hasher] = self._content(hasher.digest if digest is None else digest)
        return content

    def identity(self, hasher: Hasher, digest: Digest | None = None) -> tuple[str, object, dict[str, object]]:
        """What the digest is made of: the kind of source, its content, and the options that are not defaults."""
        return self._kind(), self.content(hasher, digest), self._options()

    @abstractmethod
    def decode(self) -> Any:
        """Decode the content. Not kept: decoding twice costs twice."""

    @abstractmethod
    def _kind(self) -> str: ...

    @abstractmethod
    def _content(self, digest: Digest) -> object: ...

    @abstractmethod
    def _options(self) -> dict[str, object]: ...

    def _know(self, content: object, hasher: Hasher) -> Self:
        if not isinstance(content, str) or not content:
            raise MediaError("content is known by its digest", found=repr(content))
        self._contents[hasher] = content
        return self

    def _missing(self) -> MissingContentError:
        return MissingContentError(f"{type(self).__name__} is known by its digest only, its bytes are not here")


def check_data(data: object) -> None:
    """Refuse encoded content that is not `bytes`."""
    # not bytearray or memoryview: whoever holds them may write to them later
    if data is not None and type(data) is not bytes:
        raise MediaError("encoded content is immutable bytes", found=type(data).__name__, expected="bytes")
