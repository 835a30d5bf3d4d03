"""What the ledger asks of an order of eviction."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """An order of eviction over opaque keys. A key stands for the same entry for as long as that entry lives.

    What a policy raises, and a victim that is no candidate, a lookup or whatever else asks for room raises as
    `ConfigError`; nothing is evicted for it.
    """

    def add(self, key: Hashable, nbytes: int, cost: float = 1.0, content: Hashable = None) -> None:
        """Make an entry a candidate: a new one, or one whose last pin went. No use of it is counted but the first.

        Args:
            key: the entry.
            nbytes: bytes that evicting it gives back.
            cost: what making it again costs, in any one unit (encoder seconds, or 1 per item), finite and not negative.
            content: what announced requests call it, or None.
        """

    def touch(self, key: Hashable) -> None:
        """Count one use of an entry, a candidate or a pinned one. Unknown keys are ignored."""

    def remove(self, key: Hashable) -> None:
        """Make an entry no candidate: it is pinned, or gone. Idempotent; unknown keys are ignored."""

    def pin(self, keys: Iterable[Hashable]) -> None:
        """`touch` and `remove` each of several entries, pinned ones too; unknown keys are ignored."""

    def unpin(self, keys: Iterable[Hashable]) -> None:
        """Make entries that `pin` took candidates again, with the size, cost and content that they had.

        Keys whose entries were removed meanwhile are ignored. Who counts pins calls this for the last one.
        """

    def victim(self) -> Hashable | None:
        """Take the next entry to evict out of the policy and return its key, or None when there is no candidate."""
