"""Salts, adapters and workers without number: what is kept follows the entries that there are, not who ever asked."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, images, request
from step_count import steps

from mmcache import (
    CacheConfig,
    EncoderLedger,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
)

ROWS = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
FIELDS = images((1, 4))[0]


def one(name: str, salt: str | None, adapter: str | None = None) -> MultimodalRequest:
    return MultimodalRequest(name, range(6), [FIELDS], cache_salt=salt, adapter=adapter)


class Passing:
    """What requests of ever new salts do with a ledger before they leave."""

    @staticmethod
    def lookup(ledger: EncoderLedger, req: MultimodalRequest) -> None:
        ledger.release(ledger.plan(req, num_computed_tokens=0))

    @staticmethod
    def encode(ledger: EncoderLedger, req: MultimodalRequest) -> None:
        plan = ledger.plan(req, num_computed_tokens=0)
        ledger.settle(plan, {0: 4 * ROW_BYTES})
        ledger.release(plan)

    @staticmethod
    def abort(ledger: EncoderLedger, req: MultimodalRequest) -> None:
        ledger.plan(req, num_computed_tokens=0)

    @staticmethod
    def encode_uncached(ledger: EncoderLedger, req: MultimodalRequest) -> None:
        first = MultimodalRequest("holds the room", range(6), [FIELDS], cache_salt="first")
        Passing.encode(ledger, first)
        Passing.encode(ledger, req)
        ledger.finish("holds the room")

    @staticmethod
    def invalidate_while_it_encodes(ledger: EncoderLedger, req: MultimodalRequest) -> None:
        plan = ledger.plan(req, num_computed_tokens=0)
        ledger.invalidate()
        ledger.settle(plan, {0: 4 * ROW_BYTES})

    @staticmethod
    def lose(ledger: EncoderLedger, req: MultimodalRequest) -> None:
        plan = ledger.plan(req, num_computed_tokens=0)
        ledger.settle(plan, {0: 4 * ROW_BYTES})
        ledger.reconcile("w", (), ())

    @staticmethod
    def announce(ledger: EncoderLedger, req: MultimodalRequest) -> None:
        ledger.announce(req)


ACTS: list[Callable[[EncoderLedger, MultimodalRequest], None]] = [
    act.__func__ for name, act in vars(Passing).items() if isinstance(act, staticmethod)
]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("where", ["salt", "adapter"])
def test_memory_is_of_the_entries(act: Callable[[EncoderLedger, MultimodalRequest], None], where: str) -> None:
    ledger = EncoderLedger(4 * ROW_BYTES, "lru", row_bytes={"image": ROW_BYTES})

    def pass_by(first: int, last: int) -> None:
        for n in range(first, last):
            req = one(f"r{n}", f"tenant {n}") if where == "salt" else one(f"r{n}", None, f"adapter {n}")
            act(ledger, req)
            ledger.finish(req)
            ledger.take_drops()

    pass_by(0, 300)
    gc.collect()
    tracemalloc.start()
    try:
        pass_by(300, 1300)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 20_000  # a salt and its dictionary alone are 340 bytes
    ledger.check()
    assert ledger.stats().entries <= 1


def test_a_content_is_forgotten_in_steps_of_the_entries() -> None:
    """Not of the salts that passed by: counted in lines of Python."""

    def invalidation(salts: int) -> int:
        ledger = EncoderLedger(4 * ROW_BYTES, "lru", row_bytes={"image": ROW_BYTES})
        for n in range(salts):
            Passing.encode(ledger, one("r", f"tenant {n}"))
            ledger.finish("r")
        return steps(lambda: ledger.invalidate("other"))

    assert invalidation(500) == invalidation(5)


class TestOneScope:
    """All entries of a salt that live are found by, or were made by, requests of one and the same salt."""

    def ledger(self, lease: float = 100.0) -> EncoderLedger:
        return EncoderLedger(8 * ROW_BYTES, "lru", row_bytes={"image": ROW_BYTES}, lease_seconds=lease)

    def test_a_holder_of_older_rows_loses_them(self) -> None:
        """Nothing of the salt can be found meanwhile; then there are newer rows, and the holder shares them."""
        ledger = self.ledger()
        holder = ledger.plan(one("r1", "s"), num_computed_tokens=0)
        ledger.settle(holder, {0: 4 * ROW_BYTES})
        old = holder.items[0].handle
        ledger.invalidate()
        ledger.check()
        newer = ledger.plan(one("r2", "s"), num_computed_tokens=0)
        ledger.settle(newer, {0: 4 * ROW_BYTES})
        ledger.reconcile("w", None, [old])
        ledger.check()
        again = ledger.refresh(holder)
        assert (again.stored, again.items[0].handle) == ((0,), newer.items[0].handle)

    def test_both_lose_them_at_once(self) -> None:
        ledger = self.ledger()
        holder = ledger.plan(one("r1", "s"), num_computed_tokens=0)
        ledger.settle(holder, {0: 4 * ROW_BYTES})
        ledger.invalidate()
        newer = ledger.plan(one("r2", "s"), num_computed_tokens=0)
        ledger.settle(newer, {0: 4 * ROW_BYTES})
        ledger.reconcile("w", (), ())
        ledger.check()
        plans = [ledger.refresh(plan) for plan in (holder, newer)]
        assert sorted((plan.missing, plan.in_flight) for plan in plans) == [((), (0,)), ((0,), ())]

    def test_waiters_of_a_reservation_that_was_forgotten(self) -> None:
        """The first of them encodes anew, and a new request joins it."""
        ledger = self.ledger()
        plans = [ledger.plan(one(f"r{n}", "s"), num_computed_tokens=0) for n in range(2)]
        ledger.invalidate()
        ledger.check()
        plans.append(ledger.plan(one("r2", "s"), num_computed_tokens=0))
        ledger.check()
        ledger.finish("r0")
        ledger.check()
        now = [ledger.refresh(plan) for plan in plans[1:]]
        assert len({plan.items[0].handle for plan in now}) == 1
        assert [(plan.missing, plan.in_flight) for plan in now] == [((0,), ()), ((), (0,))]

    def test_a_lease_that_ran_out(self) -> None:
        """The next to ask takes the content over; once all are gone the salt has nothing."""
        ledger = self.ledger(lease=1e-9)
        plans = [ledger.plan(one(f"r{n}", "s"), num_computed_tokens=0) for n in range(3)]
        ledger.check()
        now = [ledger.refresh(plan) for plan in plans]
        assert now[-1].missing == (0,)
        for plan in now:
            ledger.settle(plan, dict.fromkeys(plan.missing, 4 * ROW_BYTES))
            ledger.check()
        assert ledger.stats().entries >= 1
        for n in range(3):
            ledger.finish(f"r{n}")
            ledger.check()
        assert ledger.plan(one("r3", "s"), num_computed_tokens=0).stored == (0,)

    def test_the_last_entry_goes_for_the_room_of_the_next(self) -> None:
        ledger = EncoderLedger(4 * ROW_BYTES, "lru", row_bytes={"image": ROW_BYTES})
        for name, ids in (("r1", "a"), ("r2", "b"), ("r3", "a")):
            req = request(name, 6, images((1, 4), ids=ids), salt="s")
            plan = ledger.plan(req, num_computed_tokens=0)
            assert plan.missing == (0,)
            ledger.check()
            ledger.settle(plan, {0: 4 * ROW_BYTES})
            assert ledger.plan(req, num_computed_tokens=0).stored == (0,)
            ledger.finish(name)
            ledger.check()

    def test_listeners_hear_of_no_removal_while_newer_rows_are_there(self) -> None:
        cache = MultimodalCache(CacheConfig(capacity_bytes=8 * ROW_BYTES, row_bytes={"image": ROW_BYTES}))
        kinds: list[str] = []
        cache.subscribe(lambda event: kinds.append(event.kind))
        holder = cache.lookup(one("r1", "s"), num_computed_tokens=0)
        cache.insert(holder, [torch.zeros(4, 4)])
        cache.invalidate()
        newer = cache.lookup(one("r2", "s"), num_computed_tokens=0)
        cache.insert(newer, [torch.ones(4, 4)])
        cache.finish("r1")
        assert kinds == ["stored", "stored"]
        cache.finish("r2")
        cache.invalidate()
        assert kinds == ["stored", "stored", "removed"]


SALTS = [f"s{n}" for n in range(6)]


class Lives:
    """One random life in two ledgers: in one requests have salts, in the other the salt is a part of the identifier."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.ledgers = [
            EncoderLedger(
                12 * ROW_BYTES,
                policy,
                row_bytes={"image": ROW_BYTES},
                lease_seconds=5.0,
                clock=lambda: self.now,
            )
            for policy in [self.random.choice(["lru", "gdsf", "queue-aware"])] * 2
        ]
        self.lives: dict[str, tuple[MultimodalRequest, MultimodalRequest]] = {}
        self.open: list[list[Any]] = []

    def make(self, name: str) -> tuple[MultimodalRequest, MultimodalRequest]:
        salt = self.random.choice(SALTS)
        ids = self.random.choices(list(ROWS), k=self.random.randint(1, 3))
        spans, at = [], 1
        for content in ids:
            spans.append((at, ROWS[content]))
            at += ROWS[content] + 1
        salted = request(name, at, images(*spans, ids=ids), salt=salt)
        return salted, request(name, at, images(*spans, ids=[f"{salt}:{content}" for content in ids]))

    def step(self) -> None:
        self.now += 1.0
        kind = self.random.choice(
            ["look"] * 5 + ["settle"] * 4 + ["release", "finish", "finish", "announce"] + ["rare"]
        )
        name = f"r{self.random.randrange(5)}"
        if kind == "rare":
            kind = self.random.choice(["invalidate", "invalidate one", "lose"])
        if kind in ("look", "announce") and name not in self.lives:
            self.lives[name] = self.make(name)
        if kind == "look":
            pair = zip(self.ledgers, self.lives[name], strict=True)
            self.open.append([ledger.plan(req, num_computed_tokens=0) for ledger, req in pair])
        elif kind in ("settle", "release") and self.open:
            plans = self.open[self.random.randrange(len(self.open))]
            plans[:] = [ledger.refresh(plan) for ledger, plan in zip(self.ledgers, plans, strict=True)]
            sizes = {item.index: item.num_rows * ROW_BYTES for item in plans[0].items if item.index in plans[0].missing}
            for ledger, plan in zip(self.ledgers, plans, strict=True):
                ledger.settle(plan, sizes) if kind == "settle" else ledger.release(plan)
            if kind == "release":
                self.open.remove(plans)
        elif kind == "finish":
            self.lives.pop(name, None)
            for ledger in self.ledgers:
                ledger.finish(name)
            self.open = [plans for plans in self.open if plans[0].request_id != name]
        elif kind == "announce":
            for ledger, req in zip(self.ledgers, self.lives[name], strict=True):
                ledger.announce(req)
        elif kind == "lose":
            for ledger in self.ledgers:
                ledger.reconcile(f"epoch {self.now}", (), ())
        elif kind == "invalidate":
            for ledger in self.ledgers:
                ledger.invalidate()
        elif kind == "invalidate one":
            content = self.random.choice(list(ROWS))
            self.ledgers[0].invalidate(content)
            names = {f"{salt}:{content}" for salt in SALTS}
            # In the order of one invalidation: ready ones first, since what is encoded anew takes room.
            entries = [e for e in self.ledgers[1].budget.entries.values() if e.identifier in names and not e.detached]
            for entry in sorted(entries, key=lambda entry: entry.owner is not None):
                self.ledgers[1].invalidate(entry.identifier)

    def decisions(self) -> list[Any]:
        """Of both: what is open, used, pinned, evicted, encoded."""
        both = []
        for number, ledger in enumerate(self.ledgers):
            ledger.check()
            stats = ledger.stats()
            plans = [ledger.refresh(plans[number]) for plans in self.open]
            both.append(
                (
                    [[(item.index, item.status, item.nbytes, item.num_rows) for item in plan.items] for plan in plans],
                    (stats.used_bytes, stats.pinned_bytes, stats.entries, stats.encodes, stats.joins, stats.takeovers),
                    (stats.evictions, stats.uncached, stats.lost),
                )
            )
        return both


@pytest.mark.parametrize("seed", range(30))
def test_a_salt_decides_as_a_part_of_the_identifier_would(seed: int) -> None:
    lives = Lives(seed)
    for _ in range(120):
        lives.step()
        salted, named = lives.decisions()
        assert salted == named


def test_modalities_that_a_caller_makes_up() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=8 * ROW_BYTES, policy="lru", row_bytes={"image": ROW_BYTES}))

    def pass_by(first: int, last: int) -> None:
        for n in range(first, last):
            item = MultimodalItem(f"modality {n}", None, PlaceholderRange(1, 4), "a")
            req = MultimodalRequest("r", range(6), [item])
            with cache.lookup(req, num_computed_tokens=0) as lookup:
                cache.insert(lookup, [torch.zeros(4, 4)])
            cache.finish(req)

    pass_by(0, 500)
    gc.collect()
    tracemalloc.start()
    try:
        pass_by(500, 1000)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        pass_by(1000, 1500)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 60_000  # 600 bytes each, were they kept
    widths = cache._ledger.row_bytes
    assert widths["image"] == widths["modality 1499"] == ROW_BYTES
    assert len(widths) < 500
    cache._ledger.check()
    cache.clear()
    assert dict(cache._ledger.row_bytes) == {"image": ROW_BYTES}


class TestWorkers:
    def test_memory_is_bounded(self) -> None:
        ledger = EncoderLedger(4 * ROW_BYTES, "lru", row_bytes={"image": ROW_BYTES})

        def report(first: int, last: int) -> None:
            for n in range(first, last):
                ledger.reconcile(f"epoch {n}", (), (), worker=f"worker {n}")

        report(0, 5000)
        gc.collect()
        tracemalloc.start()
        try:
            report(5000, 10_000)
            kept = tracemalloc.get_traced_memory()[0]
            report(10_000, 20_000)
            assert tracemalloc.get_traced_memory()[0] - kept < 100_000
        finally:
            tracemalloc.stop()

    def test_one_that_was_forgotten_counts_as_started_anew(self) -> None:
        """It may have been: rows that are there are encoded again, rather than taken for there while they are not."""
        ledger = EncoderLedger(4 * ROW_BYTES, "lru", row_bytes={"image": ROW_BYTES})
        ledger.reconcile("first", (), (), worker="idle")
        for n in range(5000):
            ledger.reconcile("e", (), (), worker=n)
        Passing.encode(ledger, one("r1", None))
        ledger.finish("r1")
        ledger.reconcile("e", None, (), worker=4999)
        assert ledger.holds(one("r", None), 0)
        ledger.reconcile("second", None, (), worker="idle")
        assert not ledger.holds(one("r", None), 0)
