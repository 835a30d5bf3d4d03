"""mmcache's ledger, as an engine with worker processes uses it, and its index of KV blocks."""

from __future__ import annotations

from asks import BLOCK, Ask, Tally, timed

from mmcache import EncoderLedger, MultimodalRequest, PrefixIndex
from mmcache.policies import make_policy


class Ledger:
    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        rows = dict.fromkeys(("image", "video", "audio"), row_bytes)
        self._ledger = EncoderLedger(capacity_bytes, make_policy("queue-aware"), row_bytes=rows)
        self._row_bytes = row_bytes
        self._tally = Tally("mmcache, ledger", "plan, settle, commit, release, finish; ships what is missing")

    def serve(self, ask: Ask) -> None:
        ledger, request, tally = self._ledger, ask.request, self._tally

        def step() -> None:
            plan = ledger.plan(request, num_computed_tokens=ask.num_computed_tokens)
            missing = plan.missing
            if missing:
                ledger.settle(plan, {i: request.items[i].placeholder.num_embeds * self._row_bytes for i in missing})
            ledger.commit(request, request.num_tokens)
            ledger.release(plan)
            ledger.finish(request)
            tally.asked += len(plan.missing) + len(plan.stored)
            tally.found += len(plan.stored)
            tally.shipped += plan.bytes.transfer

        timed(tally, step)

    def tallies(self) -> list[Tally]:
        return [self._tally]


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
