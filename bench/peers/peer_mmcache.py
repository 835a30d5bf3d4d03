"""mmcache's ledger, as an engine with worker processes uses it, and its index of KV blocks."""

from __future__ import annotations

from asks import BLOCK, Ask, Tally, timed

from mmcache import EncoderLedger, ItemStatus, MultimodalRequest, PrefixIndex
from mmcache.ledger import Ticket
from mmcache.planning import StepPlan
from mmcache.policies import make_policy


class Ledger:
    """Decisions about embeddings: with a plan that goes to worker processes, or within one process without."""

    def __init__(self, capacity_bytes: int, row_bytes: int, *, split: bool) -> None:
        rows = dict.fromkeys(("image", "video", "audio"), row_bytes)
        self._ledger = EncoderLedger(capacity_bytes, make_policy("queue-aware"), row_bytes=rows)
        self._row_bytes = row_bytes
        self._split = split
        name, first = ("mmcache, ledger, split engine", "plan") if split else ("mmcache, ledger, one process", "open")
        self._tally = Tally(name, f"{first}, settle, commit, release, finish; ships what is missing")

    def serve(self, ask: Ask) -> None:
        ledger, request, computed = self._ledger, ask.request, ask.num_computed_tokens

        def step() -> None:
            end = request.num_tokens
            if self._split:
                decided: StepPlan | Ticket = ledger.plan(request, num_computed_tokens=computed)
                missing = decided.missing
            else:
                decided = ledger.open(request, computed, end, computed, 0)
                missing = decided.with_status(ItemStatus.MISSING)
            if missing:
                ledger.settle(decided, {i: request.items[i].placeholder.num_embeds * self._row_bytes for i in missing})
            ledger.commit(request, end)
            ledger.release(decided)
            ledger.finish(request)
            ledger.take_drops()

        timed(self._tally, step)

    def tallies(self) -> list[Tally]:
        stats, tally = self._ledger.stats(), self._tally
        tally.found = stats.items["stored"]
        tally.asked = tally.found + stats.items["missing"]
        tally.shipped = stats.bytes["transfer"]
        return [tally]


class Prefix:
    def __init__(self, blocks: int) -> None:
        self._index = PrefixIndex(BLOCK, blocks)
        self._before: MultimodalRequest | None = None
        self._tally = Tally("mmcache, PrefixIndex", "match and insert; hits are tokens of prompts", ships=False)

    def serve(self, ask: Ask) -> None:
        request, index, before = ask.request, self._index, self._before

        def step() -> int:
            if before is not None:
                index.insert(before, before.num_tokens)  # the answer to the request before this one
            match = index.match(request)
            index.insert(request, request.num_tokens)
            match.release()
            return match.num_tokens

        self._tally.asked += request.num_tokens
        self._tally.found += timed(self._tally, step)
        self._before = request

    def tallies(self) -> list[Tally]:
        return [self._tally]
