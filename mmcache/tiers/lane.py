"""One tier of a store, with what belongs to it: two threads, what is known of its contents, counters."""

from __future__ import annotations

from collections.abc import Sequence

from mmcache.tiers.counters import Counters, TierStats
from mmcache.tiers.keys import Key
from mmcache.tiers.knowledge import Knowledge
from mmcache.tiers.protocol import Tier
from mmcache.tiers.reader import TierReader
from mmcache.tiers.writer import TierWriter

__all__ = ["Lane"]

_ASK_AGAIN_SECONDS = 1.0


class Lane:
    """A tier with its two threads."""

    __slots__ = ("asked", "counters", "knowledge", "reader", "tier", "writer")

    def __init__(
        self, tier: Tier, reader: TierReader, writer: TierWriter, knowledge: Knowledge, counters: Counters
    ) -> None:
        self.tier = tier
        self.reader = reader
        self.writer = writer
        self.knowledge = knowledge
        self.counters = counters
        self.asked = Knowledge(seconds=_ASK_AGAIN_SECONDS)

    def offered(self, keys: Sequence[Key]) -> list[Key]:
        """The keys that a fetch would very likely find here now. Takes no lock."""
        found = list(self.knowledge.held(keys)) if self.reader.breaker.closed else []
        writer = self.writer
        if not writer.idle:
            found = [key for key in found if not writer.blocks(key)]
            found += [key for key in keys if writer.queued(key) is not None]
        return found

    def stats(self) -> TierStats:
        """This tier's counters."""
        counts = self.counters.read()
        names = (
            "asked hits misses damaged errors timeouts cancelled skipped stored dropped promoted removed bytes_read "
            "bytes_written opened"
        )
        return TierStats(
            name=self.tier.name,
            closed=self.reader.breaker.closed,
            queued_bytes=self.writer.queued_bytes,
            reasons={name.removeprefix("damaged_"): n for name, n in counts.items() if name.startswith("damaged_")},
            reads=self.counters.latency("read"),
            writes=self.counters.latency("write"),
            **{name: counts[name] for name in names.split()},
        )
