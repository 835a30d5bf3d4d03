"""Which entry goes next: least recently used, cheapest per byte with ageing, and with knowledge of the queue."""

from __future__ import annotations

import math
from typing import Any

import pytest
from step_count import steps

from mmcache.errors import ConfigError
from mmcache.policies import EvictionPolicy, GdsfPolicy, LruPolicy, QueueAwarePolicy, make_policy

NAMES = ["lru", "gdsf", "queue-aware"]


def drain(policy: EvictionPolicy) -> list[Any]:
    order = []
    while (key := policy.victim()) is not None:
        order.append(key)
    return order


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param)


def test_policies_have_names() -> None:
    assert [type(make_policy(name)) for name in NAMES] == [LruPolicy, GdsfPolicy, QueueAwarePolicy]
    for name in ("fifo", "", [], None, 7, LruPolicy):
        with pytest.raises(ConfigError, match="policy"):
            make_policy(name)  # type: ignore[arg-type]


def test_equal_entries_used_once_leave_in_the_order_of_their_use(policy: EvictionPolicy) -> None:
    for key in range(5):
        policy.add(key, 10)
    assert drain(policy) == [0, 1, 2, 3, 4]
    assert policy.victim() is None


def test_a_used_entry_stays_longer(policy: EvictionPolicy) -> None:
    for key in range(3):
        policy.add(key, 10)
    policy.touch(0)
    assert drain(policy) == [1, 2, 0]


def test_what_is_pinned_is_no_victim_and_comes_back(policy: EvictionPolicy) -> None:
    for key in range(3):
        policy.add(key, 10)
    policy.remove(0)
    policy.remove(0)
    policy.touch(7)
    policy.remove(7)
    assert policy.victim() == 1
    policy.add(0, 10)
    assert drain(policy) == [2, 0]


def test_a_victim_is_forgotten(policy: EvictionPolicy) -> None:
    policy.add(0, 10)
    assert policy.victim() == 0
    policy.remove(0)
    policy.touch(0)
    assert policy.victim() is None
    policy.add(0, 10)
    assert drain(policy) == [0]


def test_adding_a_candidate_again_does_not_double_it(policy: EvictionPolicy) -> None:
    policy.add(0, 10)
    policy.add(0, 10)
    policy.add(0, 20, 2.5)
    assert drain(policy) == [0]


def test_eviction_does_not_slow_down_with_what_is_pinned_or_announced(policy: EvictionPolicy) -> None:
    taken = []
    for n in (10, 5000):
        policy = make_policy({LruPolicy: "lru", GdsfPolicy: "gdsf"}.get(type(policy), "queue-aware"))  # type: ignore[call-overload]
        for key in range(2 * n + 20):
            policy.add(key, 10, 1.0, key)
        policy.pin(range(n))
        if isinstance(policy, QueueAwarePolicy):
            for key in range(n, 2 * n):
                policy.announce(key, [key])
        assert policy.victim() == (n if type(policy) is not QueueAwarePolicy else 2 * n)  # puts the order right
        taken.append([steps(policy.victim) for _ in range(10)])
    assert taken[0] == taken[1]


@pytest.mark.parametrize("name", ["gdsf", "queue-aware"])
class TestCostPerByte:
    def test_large_and_cheap_go_first(self, name: str) -> None:
        policy = make_policy(name)
        policy.add("dear", 10, 5.0)
        policy.add("small", 10, 1.0)
        policy.add("large", 1000, 1.0)
        policy.add("free", 1, 0.0)
        assert drain(policy) == ["free", "large", "small", "dear"]

    def test_a_change_of_size_or_cost_takes_effect(self, name: str) -> None:
        policy = make_policy(name)
        policy.add("a", 10, 5.0)
        policy.add("b", 10, 3.0)
        policy.remove("a")
        policy.add("a", 10, 1.0)
        assert drain(policy) == ["a", "b"]

    def test_old_merit_ages(self, name: str) -> None:
        policy = make_policy(name)
        policy.add("old", 10)
        for _ in range(20):
            policy.touch("old")
        for key in range(100):  # each comes, is used twice and makes room for the next
            policy.add(key, 10)
            policy.touch(key)
            policy.touch(key)
            if policy.victim() == "old":
                break
        else:
            pytest.fail("an entry that nobody used again never left")

    def test_a_pin_is_one_use_however_often_it_is_lifted(self, name: str) -> None:
        policy = make_policy(name)
        policy.add("once", 10)
        policy.add("twice", 10)
        policy.touch("twice")
        for _ in range(5):
            policy.remove("once")
            policy.add("once", 10)
        assert drain(policy) == ["once", "twice"]

    def test_uses_of_a_pinned_entry_count(self, name: str) -> None:
        policy = make_policy(name)
        policy.add("a", 10)
        policy.add("b", 10)
        policy.remove("a")
        policy.touch("a")
        policy.touch("a")
        policy.add("a", 10)
        policy.remove("b")
        policy.add("b", 10)  # used later, but less often
        assert drain(policy) == ["b", "a"]

    @pytest.mark.parametrize("cost", [-1.0, math.inf, math.nan])
    def test_a_cost_that_cannot_be_ordered_is_refused(self, name: str, cost: float) -> None:
        policy = make_policy(name)
        policy.add("a", 10)
        with pytest.raises(ConfigError):
            policy.add("b", 10, cost)
        with pytest.raises(ConfigError):
            policy.add("b", -1)
        assert drain(policy) == ["a"]

    def test_the_age_never_swallows_a_difference_for_good(self, name: str) -> None:
        policy = make_policy(name)
        policy.add("huge", 1, 1e300)
        assert policy.victim() == "huge"  # the age is now so large that adding 1e-8 does not change it
        for key in range(10_000):
            policy.add(key, 100_000_000)
            assert policy.victim() == key
        policy.add("dear", 100_000_000, 2.0)
        policy.add("cheap", 100_000_000, 1.0)
        assert drain(policy) == ["cheap", "dear"]

    def test_entries_that_go_without_eviction_leave_nothing_behind(self, name: str) -> None:
        policy = make_policy(name)
        for key in range(100_000):
            policy.add(key, 10)
            policy.remove(key)
        assert sum(len(v) for v in vars(policy).values() if isinstance(v, (list, dict))) < 50_000
        policy.add(1, 10)
        assert drain(policy) == [1]


def test_pins_of_several_entries_at_once(policy: EvictionPolicy) -> None:
    for key in range(5):
        policy.add(key, 10)
    policy.pin([0, 1, 2, 9])
    assert policy.victim() == 3
    policy.pin([0])  # a second request's
    policy.remove(2)  # gone
    policy.unpin([0, 1, 2, 4, 9])
    assert drain(policy) == ([4, 0, 1] if type(policy) is LruPolicy else [4, 1, 0])


def test_pinned_entries_are_never_lost(policy: EvictionPolicy) -> None:
    policy.add("kept", 10)
    policy.pin(["kept"])
    for key in range(50_000):
        policy.add(key, 10)
        policy.remove(key)
    assert policy.victim() is None
    policy.unpin(["kept"])
    assert drain(policy) == ["kept"]


class TestLearning:
    """Without a queue, how much uses count follows what is wanted again after its eviction."""

    @staticmethod
    def wanted_again(times: int, uses: int) -> QueueAwarePolicy:
        """50 entries, and each time the content that was evicted last is wanted again."""
        policy = QueueAwarePolicy()
        contents: dict[Any, int] = {}
        for n in range(50 + times):
            contents[n] = n if n < 50 else contents[policy.victim()]
            policy.add(n, 10, 1.0, contents[n])
            for _ in range(uses - 1):
                policy.touch(n)
        return policy

    @staticmethod
    def two_uses_outweigh(cost: float, policy: QueueAwarePolicy) -> bool:
        drain(policy)
        policy.add("twice", 10, 1.0)
        policy.touch("twice")
        policy.add("dearer", 10, cost)
        return policy.victim() == "dearer"

    def test_at_first_a_second_use_is_worth_half(self) -> None:
        assert self.two_uses_outweigh(1.4, QueueAwarePolicy())
        assert not self.two_uses_outweigh(1.6, QueueAwarePolicy())

    def test_towards_gdsf_where_contents_come_back_that_were_used_often(self) -> None:
        assert self.two_uses_outweigh(1.9, self.wanted_again(40, uses=2))

    def test_towards_lru_where_contents_come_back_that_were_used_once(self) -> None:
        assert not self.two_uses_outweigh(1.1, self.wanted_again(40, uses=1))
        assert not self.two_uses_outweigh(1.0, self.wanted_again(40, uses=1))

    def test_a_few_that_come_back_change_little(self) -> None:
        assert self.two_uses_outweigh(1.3, self.wanted_again(5, uses=1))
        assert not self.two_uses_outweigh(1.7, self.wanted_again(5, uses=2))

    def test_contents_are_remembered_for_as_long_as_there_are_entries(self) -> None:
        policy = QueueAwarePolicy()
        for n in range(10):
            policy.add(n, 10, 1.0, n)
        for n in range(10, 5000):
            policy.victim()
            policy.add(n, 10, 1.0, n)
        assert sum(len(v) for v in vars(policy).values() if isinstance(v, (list, dict))) < 100


class TestQueue:
    def test_what_waits_goes_last_and_later_needs_before_sooner(self) -> None:
        policy = QueueAwarePolicy()
        policy.announce(1, ["A", "B"])
        policy.announce(2, ["B", "C"])
        for key in "abcd":
            policy.add(key, 10, content=key.upper())
        order = drain(policy)
        assert order[:2] == ["d", "c"]
        assert sorted(order[2:]) == ["a", "b"]

    def test_the_soonest_of_several_needs_counts(self) -> None:
        policy = QueueAwarePolicy()
        policy.announce(1, ["A"])
        policy.announce(2, ["B"])
        policy.announce(3, ["A"])
        policy.add("a", 10, content="A")
        policy.add("b", 10, content="B")
        policy.add("c", 10, content="C")
        assert policy.victim() == "c"
        policy.withdraw(1, ["A"])
        assert drain(policy) == ["a", "b"]

    def test_a_need_announced_after_the_entry_was_passed_over(self) -> None:
        policy = QueueAwarePolicy()
        policy.announce(5, ["A"])
        policy.announce(6, ["B"])
        for key in "abc":
            policy.add(key, 10, content=key.upper())
        assert policy.victim() == "c"
        policy.announce(4, ["B"])
        assert drain(policy) == ["a", "b"]

    def test_withdrawn_needs_give_their_entries_back_to_the_others(self) -> None:
        policy = QueueAwarePolicy()
        policy.announce(1, ["A"])
        policy.add("a", 10, content="A")
        policy.add("b", 10, content="B")
        policy.add("c", 10, content="C")
        assert policy.victim() == "b"
        policy.withdraw(1, ["A"])
        assert drain(policy) == ["a", "c"]

    def test_withdrawing_what_was_not_announced_changes_nothing(self) -> None:
        policy = QueueAwarePolicy()
        policy.announce(1, ["A"])
        policy.withdraw(2, ["A"])
        policy.withdraw(1, ["B"])
        policy.add("a", 10, content="A")
        policy.add("b", 10, content="B")
        assert drain(policy) == ["b", "a"]
        policy.withdraw(1, ["A"])
        policy.withdraw(1, ["A"])

    def test_an_entry_pinned_while_passed_over(self) -> None:
        policy = QueueAwarePolicy()
        policy.announce(1, ["A"])
        policy.add("a", 10, content="A")
        policy.add("b", 10, content="B")
        assert policy.victim() == "b"
        policy.add("c", 10, content="C")
        assert policy.victim() == "c"
        policy.remove("a")
        policy.withdraw(1, ["A"])
        assert policy.victim() is None
        policy.add("a", 10, content="A")
        policy.add("d", 10, content="D")
        assert drain(policy) == ["a", "d"]
