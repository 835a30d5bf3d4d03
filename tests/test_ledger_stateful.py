"""Random lives of a cache on both forms: the books balance and no lookup ever has a wrong row, after every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, rows_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from split_engine import SplitEngine

from mmcache import CacheConfig, EmbeddingError, ItemStatus, MultimodalCache, MultimodalRequest, ReleasedError

# Contents and their rows; with a budget of 12 rows, "huge" never fits and few of the others do together.
CONTENTS = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6, "huge": 13}
NAMES = ["r0", "r1", "r2", "r3", "r4"]


class OneProcess(MultimodalCache):
    @property
    def ledger(self) -> Any:
        return self._ledger

    def held_bytes(self) -> int:
        return self._store.nbytes


class CacheLife(RuleBasedStateMachine):
    """The model: per live request, its object and how far it is committed; per open lookup, the truth of its rows."""

    @initialize(
        split=st.booleans(),
        policy=st.sampled_from(["lru", "gdsf", "queue-aware"]),
        known=st.booleans(),
        lease=st.sampled_from([1e-9, 100.0, 100.0]),
    )
    def start(self, split: bool, policy: str, known: bool, lease: float) -> None:
        config = CacheConfig(
            capacity_bytes=12 * ROW_BYTES,
            policy=policy,
            row_bytes={"image": ROW_BYTES} if known else {},
            lease_seconds=lease,
        )
        self.cache: Any = SplitEngine(config) if split else OneProcess(config)
        self.split = split
        self.requests: dict[str, MultimodalRequest] = {}
        self.committed: dict[str, int] = {}
        self.lookups: list[Any] = []
        self.num_items: dict[int, int] = {}  # of a lookup's request, when it was made

    # -- rules ----------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        contents=st.lists(st.sampled_from(sorted(CONTENTS)), min_size=1, max_size=4),
        salt=st.sampled_from([None, None, "s"]),
    )
    def new_request(self, name: str, contents: list[str], salt: str | None) -> None:
        if name in self.requests:
            return
        spans, position = [], 1
        for content in contents:
            spans.append((position, CONTENTS[content]))
            position += CONTENTS[content] + 1
        self.requests[name] = MultimodalRequest(
            name, list(range(position)), images(*spans, ids=contents), cache_salt=salt
        )
        self.committed[name] = 0

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), contents=st.lists(st.sampled_from(sorted(CONTENTS)), max_size=2))
    def next_turn(self, data: st.DataObject, contents: list[str]) -> None:
        """A request grows, whatever of it is under way."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if len(request.items) > 6:
            return
        spans, position = [], request.num_tokens
        for content in contents:
            spans.append((position, CONTENTS[content]))
            position += CONTENTS[content] + 1
        request.extend(list(range(request.num_tokens, position + 1)), images(*spans, ids=contents))

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(), scheduled=st.none() | st.integers(0, 12), ahead=st.sampled_from([0, 0, 3]), anew=st.booleans()
    )
    def look_up(self, data: st.DataObject, scheduled: int | None, ahead: int, anew: bool) -> None:
        """The next step of a request, or of one that was preempted and starts over somewhere."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        start = self.committed[name]
        if anew:
            start = self.committed[name] = data.draw(st.integers(0, start))
        lookup = self.cache.lookup(
            self.requests[name], num_computed_tokens=start, num_scheduled_tokens=scheduled, lookahead=ahead
        )
        self.lookups.append(lookup)
        self.num_items[id(lookup)] = len(self.requests[name].items)

    @precondition(lambda self: self.lookups)
    @rule(data=st.data(), copy=st.booleans())
    def insert(self, data: st.DataObject, copy: bool) -> None:
        lookup = data.draw(st.sampled_from(self.lookups))
        missing = lookup.missing
        chosen = data.draw(st.sets(st.sampled_from(missing))) if missing else set()
        self.cache.insert(lookup, {i: self.truth(lookup, i) for i in sorted(chosen)}, copy=copy)
        assert all(lookup.status(i) is ItemStatus.STORED for i in chosen)

    @precondition(lambda self: self.lookups and self.split)
    @rule(data=st.data())
    def encode_and_never_tell(self, data: st.DataObject) -> None:
        """Workers have the rows, and the scheduler does not hear of them (yet)."""
        lookup = data.draw(st.sampled_from(self.lookups))
        plan = lookup.plan
        for store in self.cache.stores:
            store.put_planned(plan, {i: self.truth(lookup, i) for i in plan.missing})

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def insert_badly(self, data: st.DataObject) -> None:
        lookup = data.draw(st.sampled_from(self.lookups))
        wrong = {index: torch.zeros(99, WIDTH) for index in range(len(lookup.request.items))}
        with pytest.raises(EmbeddingError):
            self.cache.insert(lookup, wrong)

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        lookup = data.draw(st.sampled_from(self.lookups))
        progress = lookup.poll()
        assert all(lookup.status(i) is ItemStatus.STORED for i in progress.ready)
        assert all(lookup.status(i) is ItemStatus.MISSING for i in progress.mine)

    @precondition(lambda self: self.lookups and not self.split)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        lookup = data.draw(st.sampled_from(self.lookups))
        start, end = lookup.window
        lookup.shrink(data.draw(st.integers(0, end - start)))

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lookup = self.lookups.pop(data.draw(st.integers(0, len(self.lookups) - 1)))
        lookup.release()
        lookup.release()
        with pytest.raises(ReleasedError):
            lookup.poll()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[name]
        self.committed[name] = data.draw(st.integers(self.committed[name], request.num_tokens))
        self.cache.commit(request, self.committed[name])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.cache.finish(self.requests.pop(name))
        self.lookups = [lookup for lookup in self.lookups if lookup.request.request_id != name]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), wait=st.booleans())
    def queue(self, data: st.DataObject, wait: bool) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        (self.cache.announce if wait else self.cache.withdraw)(request)

    @rule(content=st.none() | st.sampled_from(sorted(CONTENTS)))
    def invalidate(self, content: str | None) -> None:
        self.cache.invalidate(identifier=content) if content else self.cache.clear()

    @precondition(lambda self: self.split)
    @rule()
    def restart_worker(self) -> None:
        self.cache.restart_worker()
        for lookup in self.lookups:
            assert lookup.plan.missing is not None  # any plan makes the new worker report

    # -- what always holds ------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        self.cache.ledger.check()
        stats = self.cache.stats()
        assert stats.used_bytes <= stats.capacity_bytes

    @invariant()
    def rows_are_right(self) -> None:
        for lookup in self.lookups:
            for index in range(self.num_items[id(lookup)]):
                if lookup.status(index) is ItemStatus.STORED:
                    assert torch.equal(lookup.rows(index), self.truth(lookup, index))

    @invariant()
    def store_holds_no_more_than_the_ledger_knows(self) -> None:
        held = self.cache.held_bytes()
        stats = self.cache.stats()
        uncached = 13 * ROW_BYTES * (len(self.lookups) + 1) * 9
        assert held <= stats.used_bytes + uncached

    def truth(self, lookup: Any, index: int) -> torch.Tensor:
        identifier = lookup.request.items[index].identifier
        return rows_of(f"{identifier}{lookup.request.cache_salt}", CONTENTS[identifier])

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for lookup in self.lookups:
            lookup.release()
        for request in self.requests.values():
            self.cache.finish(request)
        # Any plan makes a worker that started anew report what it holds.
        self.cache.lookup(MultimodalRequest("text", [1]), num_computed_tokens=0).release()
        self.cache.ledger.check()
        stats = self.cache.stats()
        assert stats.pinned_bytes == 0
        assert self.cache.held_bytes() == stats.used_bytes


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


def test_a_short_life() -> None:
    run_state_machine_as_test(
        CacheLife,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=QUIET),
    )


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    run_state_machine_as_test(
        CacheLife,
        settings=settings(max_examples=1400, stateful_step_count=80, deadline=None, suppress_health_check=QUIET),
    )
