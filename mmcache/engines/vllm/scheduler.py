"""The connector beside vLLM's scheduler: what to fetch, what to offer, what to save. Every decision is made here.

A yes (`has_item`) is an offer made for the request that `prepare` was last called for, which vLLM does just before it
asks: rows that were fetched whole, checked, and lie pinned in the memory that the workers share. Nothing that a store
does afterwards can take it back. Everything here runs on the scheduler's thread and waits for nothing; results of other
threads come in through one queue, and residents change only when that queue is emptied.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from mmcache.engines.vllm.intake import Fetches, Intake
from mmcache.engines.vllm.keys import Feature, Keyer, Refusal
from mmcache.engines.vllm.messages import Load, Save, StepPlan
from mmcache.engines.vllm.region import SharedRegion, SlotHeader, slot_bytes
from mmcache.engines.vllm.requests import RequestState
from mmcache.engines.vllm.residents import Resident, Residents, State
from mmcache.engines.vllm.writeback import WriteBack
from mmcache.tiers import Expected, Key

__all__ = ["SchedulerSide"]

_log = logging.getLogger("mmcache.vllm")
_TRIES_WITHOUT_MEDIA = 3
_LOOK_AHEAD_WINDOWS = 2


class SchedulerSide:
    """The deciding part.

    Args:
        region: the engine's shared memory.
        workers: number of the engine's workers. No offer is made before all of them share the memory.
        keyer: keys of items.
        store: where rows come from, or None.
        write_back: where saved rows go, or None.
        helper: runs a function soon, on another thread.
        consumes, produces: roles of this engine.
        width: elements of a row by modality, or None where that is unknown (then nothing of it is saved).
        dtype: of rows.
        window: most tokens that a step can schedule for a request, look-ahead included.
        patience: seconds that a request waits for an item.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        region: SharedRegion,
        *,
        workers: int,
        keyer: Keyer,
        store: Fetches | None,
        write_back: WriteBack | None,
        helper: Callable[[Callable[[], None]], None],
        consumes: bool,
        produces: bool,
        width: Callable[[str], int | None],
        dtype: torch.dtype,
        window: int,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._region = region
        self._workers = workers
        self._ranks: list[int] | None = None
        self._keyer = keyer
        self._write_back = write_back
        self._consumes = consumes
        self._produces = produces
        self._width = width
        self._dtype = dtype
        self._window = window
        self._patience = patience
        self._clock = clock
        self.residents = Residents(region.nbytes)
        self.counts: Counter[str] = Counter()
        self._requests: dict[str, RequestState] = {}
        self._unavailable: set[str] = set()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._intake: Intake | None = None
        if store is not None:
            self._intake = Intake(
                region,
                self.residents,
                store,
                helper=helper,
                call_soon=self._inbox.put,
                counts=self.counts,
                dtype=dtype,
            )
        self._offers: dict[str, Resident] = {}
        self._engine_holds: set[str] = set()
        self._step = 0
        self._loads: dict[str, Resident] = {}
        self._saves: dict[str, Resident] = {}
        self._under_way: deque[tuple[int, list[Resident], list[Resident]]] = deque()

    # -- before a request is scheduled

    def prepare(self, request: Any, num_computed_tokens: int) -> bool:
        """Get ready what the request needs, and make its offers; False while it is worth waiting for something.

        Args:
            request: vLLM's request; `mm_features` are sorted by offset.
            num_computed_tokens: tokens whose KV exists.
        """
        try:
            return self._prepare(request, num_computed_tokens)
        except Exception:  # no offer is the safe answer: vLLM encodes
            self._report()
            self._withdraw_offers()
            return self._without_offers(request, num_computed_tokens)

    def _prepare(self, request: Any, num_computed_tokens: int) -> bool:
        features: Sequence[Feature] = request.mm_features
        known = self._requests.get(request.request_id)
        life = (request.num_preemptions, len(features))
        if known is None or known.life != life:
            end = max((f.mm_position.offset + f.mm_position.length for f in features), default=0)
            known = self._requests[request.request_id] = RequestState(life, end)
        if known.end <= num_computed_tokens:
            return True  # decoding: nothing is left to load
        self.catch_up()
        self._withdraw_offers()
        if self._ready_ranks() is None:
            return self._without_offers(request, num_computed_tokens)
        end = num_computed_tokens + self._window
        ahead = num_computed_tokens + _LOOK_AHEAD_WINDOWS * self._window
        wanted: dict[Key, Expected | None] = {}
        wait = False
        for feature in features:
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens:
                continue
            if position.offset >= ahead:
                break
            waits = self._prepare_item(request, known, feature, wanted)
            wait |= waits and position.offset < end
        if wanted and self._intake is not None:
            self._intake.fetch(wanted)
        if request.request_id in self._unavailable:
            wait = True
        self._count_waiting(known, wait)
        return not wait

    def _prepare_item(
        self, request: Any, known: RequestState, feature: Feature, wanted: dict[Key, Expected | None]
    ) -> bool:
        """Offer an item, or start getting it; True while it is worth waiting for."""
        identifier = feature.identifier
        encodable = self._keyer.encodable(feature)
        if identifier in self._offers or identifier in known.given:
            return False
        # vLLM may drop what it holds before it comes to this item: what is ready anyway is offered all the same
        held = encodable and identifier in self._engine_holds
        key = self._keyer.key(request, feature, start=not held)
        if isinstance(key, Refusal):
            if not encodable:
                self._give_up_on(request)
            return False
        if not isinstance(key, Key):
            return not held and self._wait(known, identifier)
        resident = self.residents.get(key)
        rows = _rows_of(feature)
        if resident is not None and resident.state is State.READY:
            if resident.rows == rows:
                self.residents.pin(resident)
                self._offers[identifier] = resident
                return False
            self.counts["refused.mismatch"] += 1
            if not self.residents.drop(resident):
                return False
            resident = None
        if held:
            return False
        under_way = self._intake is not None and key in self._intake.under_way
        if resident is None and not under_way:
            tries = 1 if encodable else _TRIES_WITHOUT_MEDIA
            if self._intake is None or known.asked[key] >= tries:
                if not encodable:
                    self._give_up_on(request)
                return False
            known.asked[key] += 1
            known.gave_up.discard(identifier)
            wanted[key] = Expected(rows=rows, width=self._width(feature.modality), dtype=self._dtype)
            return self._wait(known, identifier)
        if resident is not None and resident.state is State.SAVING:
            return not encodable and self._wait_or_give_up(request, known, identifier)
        known.asked[key] = max(known.asked[key], 1)
        return self._wait(known, identifier) if encodable else self._wait_or_give_up(request, known, identifier)

    def _wait(self, known: RequestState, identifier: str) -> bool:
        if known.may_wait(identifier, self._clock(), self._patience):
            return True
        if identifier not in known.gave_up:
            known.gave_up.add(identifier)
            self.counts["refused.slow"] += 1
        return False

    def _wait_or_give_up(self, request: Any, known: RequestState, identifier: str) -> bool:
        if self._wait(known, identifier):
            return True
        self._give_up_on(request)
        return False

    def _give_up_on(self, request: Any) -> None:
        """The engine cannot encode an item, and it is not to be had: the request fails, and only that."""
        if request.request_id not in self._unavailable:
            self._unavailable.add(request.request_id)
            self.counts["failed_requests"] += 1

    def _without_offers(self, request: Any, num_computed_tokens: int) -> bool:
        """Let vLLM encode everything, if it can."""
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length > num_computed_tokens and not self._keyer.encodable(feature):
                self._give_up_on(request)
                return False
        return True

    def _count_waiting(self, known: RequestState, wait: bool) -> None:
        if wait and known.deferred_since is None:
            known.deferred_since = self._clock()
            self.counts["deferred"] += 1
        elif not wait and known.deferred_since is not None:
            self.counts["deferred_seconds"] += self._clock() - known.deferred_since  # type: ignore[assignment]
            known.deferred_since = None

    def take_unavailable(self) -> set[str]:
        """Requests that have to fail, once."""
        taken, self._unavailable = self._unavailable, set()
        return taken

    # -- while it is scheduled

    def has_item(self, identifier: str) -> bool:
        """Whether the item was offered to the request that `prepare` was last called for."""
        return identifier in self._offers

    def allocated(self, request: Any, index: int) -> None:
        """vLLM gave the item room in its encoder cache: it is loaded if it was offered, and encoded otherwise."""
        feature: Feature = request.mm_features[index]
        identifier = feature.identifier
        self._engine_holds.add(identifier)
        known = self._requests.get(request.request_id)
        if known is not None:
            known.given.add(identifier)
        resident = self._offers.get(identifier)
        if resident is not None:
            self.counts["hits." + ("store" if resident.fetched else "memory")] += 1
            resident.fetched = False
            if self._consumes and identifier not in self._loads:
                self.residents.pin(resident)
                self._loads[identifier] = resident
            return
        self.counts["encodes"] += 1
        if self._produces and identifier not in self._saves and self._ready_ranks() is not None:
            try:
                self._reserve(request, feature)
            except Exception:
                self._report()

    def _reserve(self, request: Any, feature: Feature) -> None:
        key = self._keyer.key(request, feature)
        width = self._width(feature.modality)
        if not isinstance(key, Key):
            self.counts["refused." + (key.reason if isinstance(key, Refusal) else "slow")] += 1
            return
        if width is None:
            self.counts["refused.width"] += 1
            return
        if self.residents.get(key) is not None:
            return
        rows = _rows_of(feature)
        size = slot_bytes(rows, width, self._dtype)
        resident = self.residents.admit(key, State.SAVING, size, rows, width, self._dtype)
        if resident is None:
            self.counts["refused.memory"] += 1
            return
        self._region.clear_header(resident.offset)
        self._saves[feature.identifier] = resident

    def plan_step(self, freed: Iterable[str]) -> StepPlan:
        """The step as the workers need to know it.

        Args:
            freed: identifiers that vLLM's encoder cache drops with this step.
        """
        self._withdraw_offers()
        self._engine_holds.difference_update(freed)
        self._step += 1
        loads = tuple(
            Load(identifier, resident.offset, resident.step, resident.rows, resident.width)
            for identifier, resident in self._loads.items()
        )
        saves = tuple(
            Save(identifier, resident.offset, resident.rows, resident.width)
            for identifier, resident in self._saves.items()
        )
        if loads or saves:
            self._under_way.append((self._step, list(self._loads.values()), list(self._saves.values())))
            self._loads, self._saves = {}, {}
        self.catch_up()
        return StepPlan(self._step, loads, saves)

    # -- afterwards

    def finished(self, request_id: str) -> None:
        """The request is over, in whatever way."""
        self._requests.pop(request_id, None)
        self._unavailable.discard(request_id)
        self.catch_up()

    def catch_up(self) -> None:
        """Take in what workers and threads have done meanwhile."""
        self._take_acknowledgements()
        while True:
            try:
                job = self._inbox.get_nowait()
            except Empty:
                return
            try:
                job()
            except Exception:
                self._report()

    def _take_acknowledgements(self) -> None:
        if not self._under_way:
            return
        ranks = self._ready_ranks()
        done = self._region.done_step(ranks) if ranks else 0
        while self._under_way and self._under_way[0][0] <= done:
            step, loads, saves = self._under_way.popleft()
            for resident in loads:
                self.residents.unpin(resident)
            for resident in saves:
                self._saved(step, resident)

    def _saved(self, step: int, resident: Resident) -> None:
        header = self._region.read_header(resident.offset)
        expected = SlotHeader(step, resident.rows, resident.width, resident.dtype)
        if header == expected:
            resident.state = State.READY
            resident.step = step
            if self._write_back is not None:
                self.residents.pin(resident)
                self._write_back.put(resident, lambda: self._inbox.put(lambda: self.residents.unpin(resident)))
        else:
            self.counts["refused.not_written"] += 1
        self.residents.unpin(resident)

    # -- inside

    def _report(self) -> None:
        """A fault of this package's own. It costs an encode, not the engine."""
        self.counts["refused.fault"] += 1
        _log.exception("the encoder-cache connector failed; vLLM encodes instead")

    def _ready_ranks(self) -> list[int] | None:
        """Ranks that load, once all workers share the memory; then its name is no longer needed."""
        if self._ranks is None:
            self._ranks = self._region.loading_ranks(self._workers)
            if self._ranks is not None:
                self._region.unlink()
        return self._ranks

    def _withdraw_offers(self) -> None:
        if self._offers:
            for resident in self._offers.values():
                self.residents.unpin(resident)
            self._offers = {}


def _rows_of(feature: Feature) -> int:
    return int(feature.mm_position.get_num_embeds())
