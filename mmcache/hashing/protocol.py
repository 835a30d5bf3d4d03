"""What the rest of the package asks of a hasher."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Hasher"]


class Hasher(Protocol):
    """Makes identifiers of content. `ContentHasher` is one; tests inject weak ones, to see collisions handled.

    A hasher is hashable, and equal to those that make the same digests: a `Source` remembers its digest for each.
    """

    def digest(self, /, *parts: object, **named_parts: object) -> str:
        """The digest of some content."""
        ...

    def __hash__(self) -> int: ...
