"""A workload without a model: the cache's own ledger, policies and prefix index decide, sizes stand in for tensors.

The engine has a queue, a number of requests that run at once, and one device for its encoder and for prefill, which
does one thing at a time in the order of the requests' beginning; decoding does not occupy it.
"""

from __future__ import annotations

import math
import time as clock
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from heapq import heappop, heappush
from itertools import count
from typing import Any

from mmcache.items import MultimodalItem, MultimodalRequest
from mmcache.ledger import EncoderLedger, Entry, Ticket
from mmcache.planning import ItemStatus
from mmcache.policies import make_policy
from mmcache.prefix import PrefixIndex, PrefixMatch
from mmcache.replay.costs import EngineModel, TierModel
from mmcache.replay.measures import Simulation
from mmcache.replay.workload import KEPT_BYTES, Conversations, Serial, Turn

__all__ = ["simulate"]

MODALITIES = ("image", "video", "audio")
_MISSING, _IN_FLIGHT = ItemStatus.MISSING, ItemStatus.IN_FLIGHT
_NOTHING = (0, 0.0)
_FIRST_OUTPUT = (1 << 30) + (1 << 20)  # tokens that the model makes are no tokens of a prompt


def simulate(turns: Iterable[Turn], engine: EngineModel) -> Simulation:
    """Run a workload on a simulated engine. Memory does not grow with its length, time is linear in it.

    Args:
        turns: requests in the order of their arrival.
        engine: what they run on.
    """
    return _Simulator(turns, engine).run()


class _Running:
    """A request from its arrival to its end."""

    __slots__ = ("arrived", "encoding", "match", "moved", "own", "pending", "request", "ticket", "turn")

    def __init__(self, turn: Turn, request: MultimodalRequest, arrived: float) -> None:
        self.turn = turn
        self.request = request
        self.arrived = arrived
        self.pending = 0  # entries whose rows it waits for, its own included
        self.moved = 0
        self.encoding = 0.0  # seconds that the encoder takes for what it encodes
        self.match: PrefixMatch | None = None
        self.ticket: Ticket
        self.own: dict[Entry, int]  # what it encodes, and the item of each


class _Tier:
    """Contents of a tier, the least recently used first."""

    def __init__(self, model: TierModel) -> None:
        self.model = model
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()
        self._used = 0
        self._free_at = 0.0

    def has(self, content: Hashable) -> bool:
        return content in self._sizes

    def read(self, content: Hashable, now: float) -> float:
        """When the content has been read; reads follow each other."""
        self._sizes.move_to_end(content)
        begin = max(now, self._free_at)
        self._free_at = begin + self._sizes[content] / self.model.bandwidth
        return self._free_at + self.model.latency

    def write(self, content: Hashable, nbytes: int) -> None:
        if content in self._sizes:
            self._sizes.move_to_end(content)
        elif nbytes <= self.model.capacity_bytes:
            self._sizes[content] = nbytes
            self._used += nbytes
            while self._used > self.model.capacity_bytes:
                self._used -= self._sizes.popitem(last=False)[1]


class _Simulator:
    def __init__(self, turns: Iterable[Turn], engine: EngineModel) -> None:
        self._engine = engine
        self._costs = engine.costs
        self._turns = iter(turns)
        self._now = 0.0
        self._begin: float | None = None
        self._ledger = EncoderLedger(
            engine.capacity_bytes,
            make_policy(engine.policy),
            row_bytes=dict.fromkeys(MODALITIES, engine.row_bytes),
            lease_seconds=math.inf,  # no owner fails here, however long the queue before the encoder is
            clock=lambda: self._now,
        )
        self._prefix = PrefixIndex(engine.block_size, engine.prefix_blocks) if engine.prefix_blocks else None
        self._tiers = [_Tier(model) for model in engine.tiers]
        self._conversations = Conversations()
        self._output = Serial(_FIRST_OUTPUT)
        self._events: list[tuple[float, int, Callable[[Any], None], object]] = []
        self._ties = count()  # events of one time come in the order of their making
        self._slots = engine.slots
        self._waiting: deque[_Running] = deque()
        self._busy: dict[str, list[tuple[Turn, float]] | None] = {}  # turns that wait for the turn before them
        self._held = 0
        self._awaited: dict[Entry, list[_Running]] = {}
        self._device_free = 0.0
        self._open: dict[str, tuple[int, float]] = {}  # payload and encoder seconds of conversations that go on
        self._sums = Simulation(engine.policy, engine.capacity_bytes)

    def run(self) -> Simulation:
        started = clock.perf_counter()
        events, waiting, queue, saturate = self._events, self._waiting, self._engine.queue, self._engine.saturate
        upcoming = next(self._turns, None)
        while upcoming is not None or events:
            if upcoming is not None and len(waiting) + self._held < queue:
                due = upcoming.time
                if due is None or saturate:
                    due = self._now
                if not events or due <= events[0][0]:
                    self._now = max(self._now, due)
                    self._arrive(upcoming, due)
                    upcoming = next(self._turns, None)
                    continue
            self._now, _, call, subject = heappop(events)
            call(subject)
        sums = self._sums
        stats = self._ledger.stats()
        sums.evictions = dict(stats.evictions)
        sums.uncached = dict(stats.uncached)
        sums.seconds = self._now - (self._begin or 0.0)
        sums.wall_seconds = clock.perf_counter() - started
        return sums

    # -- the way of a request ------------------------------------------------------------------------------------------

    def _arrive(self, turn: Turn, arrived: float) -> None:
        if self._begin is None:
            self._begin = arrived
        busy, conversation = self._busy, turn.conversation
        if conversation in busy:
            behind = busy[conversation]
            if behind is None:
                behind = busy[conversation] = []
            behind.append((turn, arrived))
            self._held += 1
            return
        busy[conversation] = None
        run = _Running(turn, self._conversations.request(turn), arrived)
        if self._slots and not self._waiting:
            self._start(run)
            return
        self._waiting.append(run)
        covered = 0
        if self._prefix is not None:
            with self._prefix.match(run.request) as match:
                covered = match.num_tokens
        self._ledger.announce(run.request, covered)

    def _start(self, run: _Running) -> None:
        self._slots -= 1
        request, length = run.request, run.request.num_tokens
        start = 0
        if self._prefix is not None:
            run.match = self._prefix.match(request)
            start = run.match.num_tokens
        ledger, budget, now = self._ledger, self._ledger.budget, self._now
        ticket = run.ticket = ledger.open(request, start, length, start, 0, run.match)
        own = run.own = self._count(run, start)
        if ticket.unsettled:
            if self._tiers:
                own = run.own = {entry: index for entry, index in own.items() if not self._load(run, entry, index)}
            for entry in ticket.unsettled:
                if entry.handle in budget.entries:
                    run.pending += 1
                    self._awaited.setdefault(entry, []).append(run)
        if budget.drops:
            ledger.take_drops()
        if budget.used > self._sums.most_used_bytes:
            self._sums.most_used_bytes = budget.used
        if own:
            run.encoding = encoding = sum([self._costs.encode(entry.num_rows) for entry in own])
            self._sums.encodes += len(own)
            self._sums.encode_seconds += encoding
            self._device_free = max(now, self._device_free) + run.moved / self._costs.link + encoding
            heappush(self._events, (self._device_free, next(self._ties), self._encoded, run))
        if not run.pending:
            self._ready(run)

    def _load(self, run: _Running, entry: Entry, index: int) -> bool:
        """Have the fastest tier that has it load what the request would encode."""
        if entry.detached:
            return False
        for tier in self._tiers:
            if tier.has(entry.content) and self._ledger.loads.delegate(run.ticket, entry):
                payload = _payload(run.request.items[index])
                run.moved -= payload
                self._sums.loaded(tier.model.name, self._costs.encode(entry.num_rows), payload)
                self._sums.series.add(self._now - (self._begin or 0.0), (-payload, 0, payload, 0, 0))
                nbytes = entry.num_rows * self._engine.row_bytes
                read = tier.read(entry.content, self._now)
                heappush(self._events, (read, next(self._ties), self._loaded, (entry, nbytes)))
                return True
        return False

    def _encoded(self, run: _Running) -> None:
        row_bytes = self._engine.row_bytes
        sizes = {index: entry.num_rows * row_bytes for entry, index in run.own.items()}
        self._ledger.settle(run.ticket, sizes, run.encoding)
        for entry in run.own:
            self._arrived(entry, entry.num_rows * row_bytes)

    def _loaded(self, load: tuple[Entry, int]) -> None:
        entry, nbytes = load
        self._ledger.loads.loaded(entry, nbytes)
        self._arrived(entry, nbytes)

    def _arrived(self, entry: Entry, nbytes: int) -> None:
        """Rows have come in: the tiers get them, whoever waits for them goes on."""
        for tier in self._tiers:
            tier.write(entry.content, nbytes)
        for waiter in self._awaited.pop(entry, ()):
            waiter.pending -= 1
            if not waiter.pending:
                self._ready(waiter)

    def _ready(self, run: _Running) -> None:
        tokens = run.ticket.end - run.ticket.start
        self._device_free = max(self._now, self._device_free) + tokens / self._costs.prefill
        heappush(self._events, (self._device_free, next(self._ties), self._first_token, run))

    def _first_token(self, run: _Running) -> None:
        seconds = self._now - run.arrived
        self._sums.ttft.add(seconds)
        self._sums.turns.add(run.turn.number, seconds, run.moved)
        length = run.request.num_tokens
        self._ledger.release(run.ticket)
        self._ledger.commit(run.request, length)
        if self._prefix is not None:
            self._prefix.insert(run.request, length)
        if run.match is not None:
            run.match.release()
        if run.turn.output_tokens:
            done = self._now + run.turn.output_tokens * self._costs.decode
            heappush(self._events, (done, next(self._ties), self._finish, run))
        else:
            self._finish(run)

    def _finish(self, run: _Running) -> None:
        turn = run.turn
        if turn.output_tokens:
            run.request.extend(self._output(turn.output_tokens))
            if self._prefix is not None:
                self._prefix.insert(run.request, run.request.num_tokens)
        self._ledger.finish(run.request.request_id)
        if self._ledger.budget.drops:
            self._ledger.take_drops()
        self._slots += 1
        later = self._busy.pop(turn.conversation)
        while self._slots and self._waiting:
            self._start(self._waiting.popleft())
        if later:
            self._held -= len(later)
            (following, arrived), *others = later
            # It could not come before the answer to which it is the reply.
            self._arrive(following, max(arrived, self._now))
            for other, when in others:
                self._arrive(other, when)

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count(self, run: _Running, start: int) -> dict[Entry, int]:
        """Count what becomes of the items; those that the request is to encode, each content with its first item."""
        sums, ticket, request, turn = self._sums, run.ticket, run.request, run.turn
        sums.requests += 1
        sums.tokens += request.num_tokens
        sums.prefix_tokens += start
        counts, costs, items, needed = sums.items, self._costs, request.items, ticket.entries
        counts["covered"] += ticket.num_items - len(needed)
        moved = stored = joined = 0
        own: dict[Entry, int] = {}
        for index, entry in needed.items():
            payload = _payload(items[index])
            status = ticket.status_of(entry)
            if entry is not None:
                sums.needed_seconds += costs.encode(entry.num_rows)
                # A content goes once, with its first item.
                if status is _MISSING and entry not in own:
                    own[entry] = index
                    counts["missing"] += 1
                    moved += payload
                    continue
            if status is _IN_FLIGHT:
                counts["in_flight"] += 1
                joined += payload
            else:
                counts["stored"] += 1
                stored += payload
        payloads, seconds = self._open.pop(turn.conversation, _NOTHING) if turn.follows else _NOTHING
        for _, clip in turn.clips:
            payloads += clip.payload_bytes
            seconds += costs.encode(clip.rows)
        sums.plain_encode_seconds += seconds
        if not turn.last:
            self._open[turn.conversation] = payloads, seconds
        run.moved = moved
        values = (moved, payloads - moved - stored - joined, stored, joined, KEPT_BYTES * ticket.num_items)
        sums.series.add(self._now - (self._begin or 0.0), values)
        return own


def _payload(item: MultimodalItem) -> int:
    fields = item.fields
    return 0 if fields is None else fields.payload_bytes
