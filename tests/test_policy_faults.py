"""A policy of one's own that does wrong: a typed error says what, nothing wrong is evicted, and the books balance."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of

from mmcache import CacheConfig, ConfigError, EncoderLedger, MultimodalCache, MultimodalRequest
from mmcache.policies import LruPolicy, QueueAwarePolicy

ROWS = 4


class Faulty(LruPolicy):
    """LRU, until it is told what to do wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.victims: Callable[[], Any] | None = None
        self.raises: set[str] = set()

    def _may(self, method: str) -> None:
        if method in self.raises:
            raise ZeroDivisionError(f"within {method}")

    def victim(self) -> Hashable | None:
        self._may("victim")
        return super().victim() if self.victims is None else self.victims()

    def add(self, key: Hashable, nbytes: int, cost: float = 1.0, content: Hashable = None) -> None:
        self._may("add")
        super().add(key, nbytes, cost, content)

    def remove(self, key: Hashable) -> None:
        self._may("remove")
        super().remove(key)

    def pin(self, keys: Iterable[Hashable]) -> None:
        self._may("pin")
        super().pin(keys)

    def unpin(self, keys: Iterable[Hashable]) -> None:
        self._may("unpin")
        super().unpin(keys)


def ask(name: str, *contents: str) -> MultimodalRequest:
    spans = [(1 + 5 * place, ROWS) for place in range(len(contents))]
    return request(name, 2 + 5 * len(contents), images(*spans, ids=contents))


class Ledger(EncoderLedger):
    """A ledger for so many rows, its policy, and a clock that is set."""

    def __init__(self, rows: int, *, width_known: bool = True) -> None:
        self.order = Faulty()
        self.now = 0.0
        super().__init__(
            rows * ROW_BYTES,
            self.order,
            row_bytes={"image": ROW_BYTES} if width_known else {},
            lease_seconds=10.0,
            clock=lambda: self.now,
        )

    def look(self, name: str, *contents: str) -> Any:
        return self.plan(ask(name, *contents), num_computed_tokens=0)

    def store(self, name: str, *contents: str) -> dict[str, int]:
        """Encode, keep open; the handles by content."""
        plan = self.look(name, *contents)
        self.settle(plan, dict.fromkeys(plan.missing, ROWS * ROW_BYTES))
        return {item.identifier: item.handle for item in plan.items}

    def leave(self, name: str, *contents: str) -> dict[str, int]:
        """Encode, and finish: candidates for eviction."""
        handles = self.store(name, *contents)
        self.finish(name)
        return handles

    def holds_all(self, *contents: str) -> bool:
        return all(self.holds(ask("who", content), 0) for content in contents)


def raising() -> Any:
    raise ZeroDivisionError("within victim")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (lambda: None, "found None"),
    "a key that it was not told of": (lambda: 12345, "12345"),
    "a key of another kind": (lambda: "no handle", "no handle"),
    "what has no hash": (lambda: [1], r"\[1\]"),
    "an exception": (raising, "ZeroDivisionError: within victim"),
}


def test_it_names_what_is_pinned() -> None:
    ledger = Ledger(8)
    pinned = ledger.store("r1", "a")["a"]
    ledger.leave("r2", "b")
    ledger.order.victims = lambda: pinned
    with pytest.raises(ConfigError, match=f"{pinned}, which is pinned") as caught:
        ledger.look("r3", "c")
    assert caught.value.field == "policy"
    assert ledger.holds_all("a", "b")
    assert not ledger.holds_all("c")
    assert not any(ledger.stats().evictions.values())
    ledger.check()


def test_it_names_what_is_reserved() -> None:
    ledger = Ledger(8)
    reserved = ledger.look("r1", "a").items[0].handle
    ledger.leave("r2", "b")
    ledger.order.victims = lambda: reserved
    with pytest.raises(ConfigError, match=f"{reserved}, which is reserved"):
        ledger.look("r3", "c")
    assert ledger.holds_all("a", "b")
    ledger.check()


def test_it_names_what_it_gave_before() -> None:
    ledger = Ledger(8)
    first = ledger.leave("r1", "a")["a"]
    ledger.leave("r2", "b")
    ledger.order.victims = lambda: first
    ledger.leave("r3", "c")
    assert not ledger.holds_all("a")
    with pytest.raises(ConfigError, match=f"found {first}, .*gone"):
        ledger.look("r4", "d")
    assert ledger.holds_all("b", "c")
    ledger.check()


@pytest.mark.parametrize("wrong", WRONG)
class TestVictim:
    """Wherever one is asked for."""

    def refused(self, ledger: Ledger, wrong: str, act: Callable[[], object]) -> None:
        ledger.order.victims, text = WRONG[wrong]
        with pytest.raises(ConfigError, match=f"eviction policy.*{text}"):
            act()
        ledger.check()
        ledger.order.victims = None

    def test_a_lookup_is_as_if_never_made(self, wrong: str) -> None:
        ledger = Ledger(12)
        ledger.store("r1", "a")
        ledger.leave("r2", "b")
        ledger.leave("r3", "d")
        before = ledger.stats()
        self.refused(ledger, wrong, lambda: ledger.look("r4", "d", "c"))
        assert ledger.stats() == before
        plan = ledger.look("r4", "d", "c")
        assert (plan.stored, plan.missing) == ((0,), (1,))
        assert ledger.holds_all("a", "c", "d")
        assert not ledger.holds_all("b")
        ledger.check()

    def test_a_lookup_of_a_request_that_has_others_open(self, wrong: str) -> None:
        ledger = Ledger(8)
        ledger.leave("r1", "a")
        open_plan = ledger.look("r2", "b")
        self.refused(ledger, wrong, lambda: ledger.look("r2", "b", "c"))
        assert ledger.refresh(open_plan).missing == (0,)
        ledger.settle(open_plan, {0: ROWS * ROW_BYTES})
        assert ledger.stats().pinned_bytes == ROWS * ROW_BYTES
        ledger.finish("r2")
        assert ledger.stats().pinned_bytes == 0
        ledger.check()

    def test_whoever_waits_for_a_refused_lookup_is_told(self, wrong: str) -> None:
        """The lookup joined nobody, and nobody is left waiting for it."""
        ledger = Ledger(8)
        ledger.leave("r1", "a")
        owner = ledger.look("r2", "b")
        self.refused(ledger, wrong, lambda: ledger.look("r3", "b", "c"))
        ledger.settle(owner, {0: ROWS * ROW_BYTES})
        ledger.finish("r2")
        assert ledger.stats().pinned_bytes == 0
        assert ledger.look("r3", "b").stored == (0,)

    def test_the_width_becomes_known_with_the_rows(self, wrong: str) -> None:
        """Then room is made before they are stored: nothing is, and handing them in again stores them."""
        policy = Faulty()
        cache = MultimodalCache(CacheConfig(capacity_bytes=8 * ROW_BYTES, policy=policy))
        late = cache.lookup(ask("r1", "late"), num_computed_tokens=0)
        for name in ("a", "b"):
            with cache.lookup(ask(name, name), num_computed_tokens=0) as lookup:
                cache.insert(lookup, [rows_of(name, ROWS)])
            cache.finish(name)
        policy.victims, text = WRONG[wrong]
        with pytest.raises(ConfigError, match=text):
            cache.insert(late, [rows_of("late", ROWS)])
        cache._ledger.check()
        assert (late.missing, cache.stats().entries, cache._store.nbytes) == ((0,), 3, 8 * ROW_BYTES)
        policy.victims = None
        cache.insert(late, [rows_of("late", ROWS)])
        assert torch.equal(late.rows(0), rows_of("late", ROWS))
        assert (cache.stats().entries, cache._store.nbytes) == (2, 8 * ROW_BYTES)
        cache._ledger.check()

    def waiting(self) -> tuple[Ledger, Any, Any]:
        """One encodes and one waits, without room so far, since the width was unknown; all room is taken since."""
        ledger = Ledger(ROWS, width_known=False)
        owner, waiter = ledger.look("r1", "a"), ledger.look("r2", "a")
        ledger.leave("r3", "b")
        return ledger, owner, waiter

    def test_a_poll_takes_over(self, wrong: str) -> None:
        ledger, _, waiter = self.waiting()
        ledger.now = 11.0
        self.refused(ledger, wrong, lambda: ledger.poll(waiter))
        assert ledger.poll(waiter).mine == (0,)
        assert ledger.holds_all("b")
        self.encode(ledger, waiter)

    def test_an_invalidation_names_a_new_owner(self, wrong: str) -> None:
        ledger, _, waiter = self.waiting()
        epoch = ledger.epoch
        self.refused(ledger, wrong, lambda: ledger.invalidate("a"))
        assert ledger.epoch == epoch + 1
        assert ledger.poll(waiter).mine == (0,)
        self.encode(ledger, waiter)

    def test_a_worker_lost_what_was_served_uncached(self, wrong: str) -> None:
        ledger = Ledger(ROWS)
        ledger.store("r1", "a")
        plan = ledger.look("r2", "b")
        ledger.settle(plan, {0: ROWS * ROW_BYTES})
        ledger.finish("r1")
        self.refused(ledger, wrong, lambda: ledger.reconcile("w", None, [plan.items[0].handle]))
        assert ledger.refresh(plan).missing == (0,)
        self.encode(ledger, plan)

    def encode(self, ledger: Ledger, plan: Any) -> None:
        plan = ledger.refresh(plan)
        ledger.settle(plan, {0: ROWS * ROW_BYTES})
        assert ledger.refresh(plan).stored == (0,)
        ledger.check()
        for name in ("r1", "r2"):
            ledger.finish(name)
        ledger.check()
        assert ledger.stats().pinned_bytes == 0


@pytest.mark.parametrize("method", ["add", "remove", "pin", "unpin"])
def test_another_method_raises(method: str) -> None:
    """Ends of steps and requests go through; the next lookup tells, once."""
    ledger = Ledger(8)
    ledger.leave("r1", "a")
    ledger.store("r2", "b")
    ledger.order.raises = {method}

    def live() -> None:
        ledger.store("r3", "a")  # pin
        ledger.finish("r3")  # unpin
        ledger.finish("r2")  # add
        ledger.check()
        ledger.invalidate("a")  # remove
        ledger.look("r4", "c")
        ledger.look("r5", "b")

    with pytest.raises(ConfigError, match=f"policy raised from `{method}`.*within {method}") as caught:
        live()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    ledger.check()
    ledger.order.raises = set()
    for name in ("r2", "r3", "r4"):
        ledger.finish(name)
    ledger.check()
    assert ledger.stats().pinned_bytes == 0
    ledger.look("r5", "e")


@pytest.mark.parametrize("method", ["announce", "withdraw"])
def test_a_queue_aware_one_raises(method: str) -> None:
    class Deaf(QueueAwarePolicy):
        def announce(self, position: float, contents: Iterable[Hashable]) -> None:
            self.raise_in("announce")

        def withdraw(self, position: float, contents: Iterable[Hashable]) -> None:
            self.raise_in("withdraw")

        def raise_in(self, this: str) -> None:
            if this == method:
                raise ZeroDivisionError

    ledger = EncoderLedger(8 * WIDTH * 4, Deaf(), row_bytes={"image": WIDTH * 4})

    def live() -> None:
        ledger.announce(ask("r1", "a"))
        ledger.plan(ask("r1", "a"), num_computed_tokens=0)

    with pytest.raises(ConfigError, match=f"policy raised from `{method}`"):
        live()
    ledger.check()
    assert ledger.plan(ask("r1", "a"), num_computed_tokens=0).missing == (0,)
