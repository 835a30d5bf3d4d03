"""The split engine as a cache: a ledger and two workers' stores, with every message pickled on its way.

It has the methods of `MultimodalCache` that the shared suite uses, so that one suite runs on both forms.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from mmcache import (
    CacheConfig,
    CacheStats,
    EmbeddingStore,
    EncoderLedger,
    MergePlan,
    MultimodalRequest,
    Progress,
    ReleasedError,
    StepPlan,
)

T = TypeVar("T")


def sent(message: T) -> T:
    """What arrives of a message at another process."""
    return pickle.loads(pickle.dumps(message))


class SplitLookup:
    """What a scheduler and a worker know of one step."""

    def __init__(self, engine: SplitEngine, request: MultimodalRequest, plan: StepPlan) -> None:
        self.engine, self.request, self.released = engine, request, False
        self._plan = plan

    @property
    def plan(self) -> StepPlan:
        """The plan as things stand; every plan goes to the workers, since it may name drops."""
        if self.released:
            raise ReleasedError("released", request_id=self.request.request_id)
        self._plan = self.engine.send(self.engine.ledger.refresh(self._plan))
        return self._plan

    @property
    def needed(self) -> tuple[int, ...]:
        return tuple(item.index for item in self.plan.items)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)  # window, status, missing, stored, in_flight: those of the plan as things stand

    def poll(self) -> Progress:
        return self.engine.ledger.poll(self._plan)

    def rows(self, index: int) -> Tensor:
        return self.engine.stores[-1].rows(self.plan, index)

    def merge_into(self, target: Tensor) -> Tensor:
        return MergePlan([self]).merge_into(target)

    def shrink(self, num_scheduled_tokens: int) -> None:
        self._plan = self.engine.send(self.engine.ledger.shrink(self.plan, num_scheduled_tokens))

    def release(self) -> None:
        self.released = True
        self.engine.ledger.release(self._plan)


class SplitEngine:
    def __init__(self, config: CacheConfig, workers: int = 2) -> None:
        self.ledger = EncoderLedger(
            config.capacity_bytes,
            config.policy,
            row_bytes=config.row_bytes,
            lease_seconds=config.lease_seconds,
            split_by_adapter=config.adapter_touches_encoder,
        )
        self.stores = [EmbeddingStore() for _ in range(workers)]

    def send(self, plan: StepPlan) -> StepPlan:
        """Give a plan to every worker and believe their reports, until they hold all that it calls stored."""
        while True:
            agreed = True
            for number, store in enumerate(self.stores):
                report = sent(store.apply(sent(plan)))
                self.ledger.reconcile(report.epoch, report.held, report.lost, worker=number)
                agreed = agreed and not report.lost
            if agreed:
                return plan
            plan = self.ledger.refresh(plan)

    def lookup(self, request: MultimodalRequest, *, num_computed_tokens: int, **window: int | None) -> SplitLookup:
        plan = self.ledger.plan(request, num_computed_tokens=num_computed_tokens, **window)
        return SplitLookup(self, request, self.send(plan))

    def insert(
        self, lookup: SplitLookup, embeddings: Mapping[int, Tensor] | Sequence[Tensor], *, copy: bool = True
    ) -> None:
        plan = lookup.plan
        for store in self.stores:
            sizes = sent(store.put_planned(sent(plan), embeddings, copy=copy))
        self.ledger.settle(plan, sizes)

    def commit(self, request: MultimodalRequest, num_tokens: int) -> None:
        self.ledger.commit(request, num_tokens)

    def finish(self, request: MultimodalRequest) -> None:
        self.ledger.finish(request.request_id)

    def announce(self, request: MultimodalRequest) -> None:
        self.ledger.announce(request)

    def withdraw(self, request: MultimodalRequest) -> None:
        self.ledger.withdraw(request.request_id)

    def invalidate(self, *, identifier: str | None = None) -> None:
        self.ledger.invalidate(identifier)

    def clear(self) -> None:
        self.ledger.clear()

    def stats(self) -> CacheStats:
        return self.ledger.stats()

    def held_bytes(self) -> int:
        """Bytes in a worker's store, once it has dropped what it was told to."""
        drops = [entry.handle for entry in self.ledger.take_drops()]
        for store in self.stores:
            store.drop(drops)
        return self.stores[0].nbytes

    def restart_worker(self) -> None:
        """A worker starts anew, with nothing."""
        self.stores[0] = EmbeddingStore()
