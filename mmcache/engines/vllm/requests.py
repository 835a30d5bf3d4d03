"""What the connector remembers of a request while it lives."""

from __future__ import annotations

from collections import Counter

from mmcache.tiers import Key

__all__ = ["RequestState"]


class RequestState:
    """Memory of one request. It begins anew when the request is preempted or is given more media.

    Args:
        life: number of preemptions and of items; another pair is another life.
        end: end of the last item, in tokens.
    """

    __slots__ = ("asked", "deferred_since", "end", "first_wait", "gave_up", "given", "life")

    def __init__(self, life: tuple[int, int], end: int) -> None:
        self.life = life
        self.end = end
        self.asked: Counter[Key] = Counter()
        """How often a store was asked for a key."""
        self.first_wait: dict[str, float] = {}
        """When it began to wait, by identifier."""
        self.gave_up: set[str] = set()
        """Identifiers whose waiting was given up and counted."""
        self.given: set[str] = set()
        """Identifiers that have room in vLLM's encoder cache, which keeps them until their tokens are computed."""
        self.deferred_since: float | None = None

    def may_wait(self, identifier: str, now: float, patience: float) -> bool:
        """Whether it has not waited for this item for too long."""
        return now - self.first_wait.setdefault(identifier, now) < patience
