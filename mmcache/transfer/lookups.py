"""What a transfer asks of the lookups that it is given."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

from mmcache.errors import RequestError
from mmcache.items import MultimodalRequest

__all__ = ["PrefetchLookup", "TransferLookup", "listed"]


class TransferLookup(Protocol):
    """What a transfer asks of a lookup."""

    @property
    def request(self) -> MultimodalRequest:
        """The request."""

    @property
    def window(self) -> tuple[int, int]:
        """(first, end) of the tokens of this step."""

    @property
    def missing(self) -> Sequence[int]:
        """Indices of the items that this lookup has to encode."""

    def key(self, index: int) -> Hashable:
        """Equal for two items, of whatever lookups, whose rows are the same; of two caches no items are."""


class PrefetchLookup(TransferLookup, Protocol):
    """What `Transfer.prefetch` asks of a lookup besides."""

    def holds(self, index: int) -> bool:
        """Whether rows of an item, of this step or a later one, are stored, given or on their way."""


_L = TypeVar("_L", bound=TransferLookup)


def listed(lookups: Iterable[_L]) -> list[_L]:
    """The lookups of a step.

    Raises:
        RequestError: something that is no lookup.
    """
    if not isinstance(lookups, Iterable):
        raise RequestError("encoder inputs are of a sequence of lookups", found=type(lookups).__name__)
    found = list(lookups)
    for lookup in found:
        if not hasattr(lookup, "key"):
            raise RequestError(
                "encoder inputs are of lookups, or of what has their request, window, missing and key(index)",
                found=type(lookup).__name__,
            )
    return found
