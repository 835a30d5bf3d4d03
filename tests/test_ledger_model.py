"""Random lives of a cache on both forms against an exact model: statuses, bytes, pins, uncached items, victims.

The model knows nothing of how the ledger works; only which entries make room it takes from the ledger, and checks that
none of them was pinned, nor needed sooner by a waiting request than one that stays.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, images, request, rows_of
from split_engine import SplitEngine

from mmcache import CacheConfig, ItemStatus, MultimodalCache, MultimodalRequest

ROWS = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6, "huge": 40}
NAMES = ["r0", "r1", "r2", "r3"]
ACTS = {
    "new_request": 15,
    "look_up": 27,
    "insert": 20,
    "shrink": 6,
    "release": 10,
    "commit": 9,
    "finish": 6,
    "announce": 5,
    "withdraw": 2,
}


@dataclass(eq=False)
class Step:
    """An open lookup: the contents of its needed items, and those that it was the first of its request to pin."""

    lookup: Any
    name: str
    needed: dict[int, str]
    brought: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Encode:
    """A content under way: who encodes it, who waits for it, and whether room is kept for it."""

    owner: Step
    cached: bool
    waiters: list[Step] = field(default_factory=list)


@dataclass(eq=False)
class Life:
    """A request: how far it is committed, what it pins, and what of that only until its open lookups end."""

    request: MultimodalRequest
    committed: int = 0
    held: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)


class AgainstModel:
    """One random life, the same for a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        split, policy, rows = seed % 2 == 0, self.one_of(["lru", "gdsf", "queue-aware"]), self.one_of([6, 12, 12, 20])
        config = CacheConfig(capacity_bytes=rows * ROW_BYTES, policy=policy, row_bytes={"image": ROW_BYTES})
        self.cache: Any = SplitEngine(config) if split else MultimodalCache(config)
        self.ledger = self.cache.ledger if split else self.cache._ledger
        self.rows, self.knows_queue = rows, policy == "queue-aware"
        self.lives: dict[str, Life] = {}
        self.steps: list[Step] = []
        self.ready: set[str] = set()
        self.encodes: dict[str, Encode] = {}
        self.queue: dict[str, list[str]] = {}  # in the order of arrival
        self.uncached = 0

    def live(self, steps: int) -> None:
        for _ in range(steps):
            act = self.random.choices(list(ACTS), list(ACTS.values()))[0]
            if act == "new_request" or (self.steps if act in ("insert", "shrink", "release") else self.lives):
                getattr(self, act)()
            self.the_ledger_agrees()
            self.lookups_agree()

    def one_of(self, choices: Iterable[Any]) -> Any:
        return self.random.choice(list(choices))

    def some_life(self) -> tuple[str, Life]:
        name = self.one_of(self.lives)
        return name, self.lives[name]

    # -- the model -------------------------------------------------------------------------------------

    def pinned(self) -> set[str]:
        return set().union(*(life.held for life in self.lives.values()))

    def under_way(self) -> int:
        return sum(ROWS[content] for content, encode in self.encodes.items() if encode.cached)

    def used(self) -> int:
        return sum(ROWS[content] for content in self.ready) + self.under_way()

    def fixed(self) -> int:
        return sum(ROWS[content] for content in self.ready & self.pinned()) + self.under_way()

    def let_go(self, name: str) -> None:
        """Pins that are needed no longer go, but for what an open lookup of the request has."""
        life = self.lives[name]
        in_use = {content for step in self.steps if step.name == name for content in step.needed.values()}
        life.held -= life.passed - in_use
        life.passed &= in_use

    def give_up(self, step: Step, content: str) -> None:
        """A lookup no longer encodes or awaits a content; of those that wait the first takes over."""
        encode = self.encodes.get(content)
        if encode is None:
            return
        if step in encode.waiters:
            encode.waiters.remove(step)
        elif encode.owner is step and encode.waiters:
            encode.owner = encode.waiters.pop(0)
        elif encode.owner is step:
            del self.encodes[content]

    def end(self, step: Step) -> None:
        self.steps.remove(step)
        for content in set(step.needed.values()):
            self.give_up(step, content)
        if step.name in self.lives:
            if step.name in self.queue:
                self.lives[step.name].passed |= self.lives[step.name].held
            self.let_go(step.name)

    def evict(self) -> None:
        """What the ledger evicted is nobody's, and of what waiting requests need the last needed went first."""
        gone = {content for content in self.ready if not self.ledger.holds(alone("probe", content), 0)}
        assert gone
        assert not gone & self.pinned()
        if self.knows_queue:
            turn: dict[str, int] = {}
            for place, needs in reversed(list(enumerate(self.queue.values()))):
                turn.update(dict.fromkeys(needs, place))
            candidates = self.ready - self.pinned() - gone
            never = len(self.queue)
            assert min(turn.get(c, never) for c in gone) >= max((turn.get(c, never) for c in candidates), default=0)
        self.ready -= gone
        assert self.used() <= self.rows

    # -- rules -----------------------------------------------------------------------------------------

    def new_request(self) -> None:
        name, contents = self.one_of(NAMES), self.random.choices(sorted(ROWS), k=self.random.randint(1, 4))
        if name in self.lives:
            return
        spans, position = [], 1
        for content in contents:
            spans.append((position, ROWS[content]))
            position += ROWS[content] + 1
        self.lives[name] = Life(request(name, position, images(*spans, ids=contents)))

    def look_up(self) -> None:
        name, life = self.some_life()
        scheduled = self.random.randint(0, 14)
        if len(self.steps) > 5:
            return
        if not self.random.randrange(5):  # preempted, and it starts over somewhere
            life.committed = self.random.randint(0, life.committed)
        start, end = life.committed, min(life.request.num_tokens, life.committed + scheduled)
        lookup = self.cache.lookup(life.request, num_computed_tokens=start, num_scheduled_tokens=scheduled)
        self.queue.pop(name, None)
        step = Step(lookup, name, needed(life.request, start, end))
        self.steps.append(step)
        contents = list(dict.fromkeys(step.needed.values()))
        for content in contents:
            if content in self.ready:
                step.brought |= {content} - life.held
                life.held.add(content)
                life.passed.discard(content)
        waiting = []
        for content in contents:  # room that is free is taken first
            if content not in self.ready and content not in self.encodes and ROWS[content] <= self.rows - self.used():
                self.encodes[content] = Encode(step, cached=True)
            elif content not in self.ready:
                waiting.append(content)
        made_room = False
        for content in waiting:
            if content in self.encodes:
                self.encodes[content].waiters.append(step)
                continue
            self.encodes[content] = Encode(step, cached=ROWS[content] <= self.rows - self.fixed())
            self.uncached += not self.encodes[content].cached
            made_room = made_room or self.encodes[content].cached
        if made_room:
            self.evict()

    def insert(self) -> None:
        step = self.one_of(self.steps)
        missing = step.lookup.missing
        chosen = [index for index in missing if self.random.randrange(5)]
        contents = [step.needed[index] for index in chosen]
        self.cache.insert(step.lookup, {i: rows_of(content, ROWS[content]) for i, content in zip(chosen, contents)})
        for content in contents:
            encode = self.encodes.pop(content)
            assert encode.owner is step
            if encode.cached:
                self.ready.add(content)
                for user in (encode.owner, *encode.waiters):
                    user.brought |= {content} - self.lives[user.name].held
                    self.lives[user.name].held.add(content)

    def shrink(self) -> None:
        step = self.one_of(self.steps)
        start, end = step.lookup.window
        length = self.random.randint(0, end - start)
        step.lookup.shrink(length)
        life = self.lives[step.name]
        before, step.needed = step.needed, needed(life.request, start, start + length, of=step.needed)
        others = {c for other in self.steps if other.name == step.name for c in other.needed.values()}
        for content in set(before.values()) - set(step.needed.values()):
            self.give_up(step, content)
            if content in step.brought:
                step.brought.remove(content)
                if content not in others:
                    life.held.discard(content)
                    life.passed.discard(content)

    def release(self) -> None:
        step = self.one_of(self.steps)
        step.lookup.release()
        self.end(step)

    def commit(self) -> None:
        name, life = self.some_life()
        life.committed = self.random.randint(life.committed, life.request.num_tokens)
        self.cache.commit(life.request, life.committed)
        left = set(needed(life.request, life.committed, life.request.num_tokens).values())
        life.passed |= life.held - left
        self.let_go(name)

    def finish(self) -> None:
        name, _ = self.some_life()
        self.cache.finish(self.lives.pop(name).request)
        self.queue.pop(name, None)
        for step in [step for step in self.steps if step.name == name]:
            self.end(step)

    def announce(self) -> None:
        name, life = self.some_life()
        self.cache.announce(life.request)
        self.queue[name] = [item.identifier for item in life.request.items]
        life.passed |= life.held
        self.let_go(name)

    def withdraw(self) -> None:
        name, life = self.some_life()
        self.cache.withdraw(life.request)
        self.queue.pop(name, None)

    # -- what always holds -----------------------------------------------------------------------------

    def the_ledger_agrees(self) -> None:
        stats = self.cache.stats()
        assert stats.used_bytes == self.used() * ROW_BYTES
        assert stats.pinned_bytes == self.fixed() * ROW_BYTES
        assert sum(stats.uncached.values()) == self.uncached
        assert all(self.ledger.holds(alone("probe", content), 0) for content in self.ready)

    def lookups_agree(self) -> None:
        for step in self.steps:
            for index, content in step.needed.items():
                encode = self.encodes.get(content)
                status = ItemStatus.STORED
                if encode is not None and encode.owner is step:
                    status = ItemStatus.MISSING
                elif encode is not None and step in encode.waiters:
                    status = ItemStatus.IN_FLIGHT
                assert step.lookup.status(index) is status
                if status is ItemStatus.STORED:
                    assert torch.equal(step.lookup.rows(index), rows_of(content, ROWS[content]))


def alone(name: str, content: str) -> MultimodalRequest:
    return request(name, ROWS[content], images((0, ROWS[content]), ids=[content]))


def needed(req: MultimodalRequest, start: int, end: int, of: Any = None) -> dict[int, str]:
    """The contents of the items, of all or of some, that have a token in `[start, end)`."""
    places = [(index, item, item.placeholder) for index, item in enumerate(req.items) if of is None or index in of]
    return {i: it.identifier for i, it, at in places if max(start, at.offset) < min(end, at.offset + at.length)}


@pytest.mark.parametrize("tens", range(10))
def test_a_life_is_that_of_the_model(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        AgainstModel(seed).live(80)


@pytest.mark.slow
def test_two_hundred_lives_are_those_of_the_model() -> None:
    for seed in range(1000, 1200):
        AgainstModel(seed).live(80)
