"""What a tier is: a place where encoded entries live, asked for many keys at a time.

A tier is synchronous and may block; everything that must not wait for it goes through `TieredStore`. It raises
`TierError` when it cannot do what it was asked (and nothing else that a caller could not have prevented), and it does
not look into entries: whoever reads one decodes it, and a tier is told to remove what did not decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mmcache.tiers.entry import Entry
from mmcache.tiers.keys import Key

__all__ = ["PutOutcome", "StoredEntry", "Tier", "TierUsage"]


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What became of a put.

    Attributes:
        stored: keys that the tier holds now, whether this put wrote them or they were there before.
        evicted: keys that had to leave for them, as far as the tier knows.
    """

    stored: frozenset[Key]
    evicted: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is. A store that does not say is None."""

    entries: int | None
    nbytes: int | None
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One line of a tier's inventory.

    Attributes:
        name: the entry's name in the store (`Key.name`).
        key: its key, or None where the store holds something that is no entry under this name.
        nbytes: bytes it takes, header included.
        last_used: seconds since the epoch, or None where the store does not keep that.
    """

    name: str
    key: Key | None
    nbytes: int
    last_used: float | None = None


@runtime_checkable
class Tier(Protocol):
    """A place where entries live. Methods may be called from several threads at once.

    Attributes:
        name: short name for counters and events, unique within a `TieredStore`.
        shared: others than this trust domain may write to it, so it refuses namespaces with weak digests.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def shared(self) -> bool: ...  # noqa: D102

    def contains_many(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Which of the keys are held, with their entries' bytes. One round trip. May be out of date when it returns."""

    def get_many(self, keys: Sequence[Key]) -> dict[Key, Entry]:
        """The entries that are held, as they are stored, each in memory of its own. One round trip."""

    def put_many(self, entries: Mapping[Key, Entry]) -> PutOutcome:
        """Store entries. One that is held already may be left as it is; one that does not fit is left out."""

    def remove_many(self, keys: Sequence[Key]) -> int:
        """Remove entries, whatever they hold; the number that were there."""

    def clear(self, namespace: str | None = None) -> int:
        """Remove all entries, or those of one namespace fingerprint; the number removed, as far as the tier knows."""

    def scan(self) -> Iterator[StoredEntry]:
        """Everything that is stored, in no order, while others read and write.

        Raises:
            UnsupportedError: the store cannot list what it holds.
        """

    def usage(self) -> TierUsage:
        """How full the tier is."""

    def close(self) -> None:
        """Give up connections and files. Idempotent; other calls afterwards raise `TierError`."""
