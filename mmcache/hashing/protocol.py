"""What the rest of the package asks of a hasher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Hasher", "StoppableHasher"]


class Hasher(Protocol):
    """Makes identifiers of content. `ContentHasher` is one; tests inject weak ones, to see collisions handled.

    A hasher is hashable, and equal to those that make the same digests: a `Source` remembers its digest for each.
    """

    def digest(self, /, *parts: object, **named_parts: object) -> str:
        """The digest of some content."""
        ...

    def __hash__(self) -> int: ...


class StoppableHasher(Hasher, Protocol):
    """A hasher whose work can be given up halfway."""

    def digest_until(self, stop: Callable[[], bool], parts: tuple[Any, ...], named_parts: dict[str, Any], /) -> str:
        """`digest`, given up with `CancelledError` soon after `stop()` is true."""
        ...
