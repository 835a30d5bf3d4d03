"""The heaps of GDSF and of the queue-aware policy against a plain search over all candidates."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmcache.policies import GdsfPolicy, QueueAwarePolicy


class AgainstModel(RuleBasedStateMachine):
    """The heap of the queue-aware policy against a plain search over all candidates."""

    @initialize(gdsf=st.booleans())
    def start(self, gdsf: bool) -> None:
        self.policy: Any = GdsfPolicy() if gdsf else QueueAwarePolicy()
        self.queue: list[tuple[int, int]] = []
        self.can_announce = not gdsf
        self.entries: dict[int, dict[str, Any]] = {}
        self.pinned: set[int] = set()
        self.age = 0.0
        self.tick = 0
        self.weight = 1.0 if gdsf else 0.5
        self.ghosts: list[tuple[int, bool]] = []  # content, whether it was used more than once; oldest first

    def held(self) -> int:
        return sum(entry["live"] for entry in self.entries.values()) + len(self.pinned)

    def learn(self, content: int) -> None:
        """A content is admitted; if it was evicted before, that says which kind is evicted too soon."""
        often = dict(self.ghosts).get(content)
        if often is None:
            return
        same = sum(other == often for _, other in self.ghosts)
        step = max(1.0, (len(self.ghosts) - same) / same) / (self.held() + 1)
        self.weight = min(1.0, self.weight + step) if often else max(0.0, self.weight - step)
        self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != content]

    def rank(self, entry: dict[str, Any]) -> None:
        self.tick += 1
        entry["tick"] = self.tick
        worth = entry["value"] * (1.0 + self.weight * (entry["uses"] - 1))
        entry["priority"] = max(entry["priority"], self.age + worth)

    @rule(key=st.integers(0, 12), nbytes=st.integers(1, 3), cost=st.integers(0, 3))
    def add(self, key: int, nbytes: int, cost: int) -> None:
        self.policy.add(key, nbytes, float(cost), key % 6)
        entry = self.entries.get(key)
        if entry is None or entry["shape"] != (nbytes, cost):
            uses = 1 if entry is None else entry["uses"]
            self.pinned.discard(key)
            entry = {"uses": uses, "live": False, "shape": (nbytes, cost), "value": cost / nbytes, "priority": 0.0}
            self.entries[key] = entry
            if self.can_announce:
                self.learn(key % 6)
        self.pinned.discard(key)
        if not entry["live"]:
            entry["live"] = True
            self.rank(entry)

    @rule(key=st.integers(0, 12))
    def touch(self, key: int) -> None:
        self.policy.touch(key)
        if entry := self.entries.get(key):
            entry["uses"] += 1
            self.rank(entry)

    @rule(key=st.integers(0, 12))
    def remove(self, key: int) -> None:
        self.policy.remove(key)
        self.pinned.discard(key)
        if entry := self.entries.get(key):
            entry["live"] = False

    @rule(keys=st.lists(st.integers(0, 12), max_size=4))
    def pin(self, keys: list[int]) -> None:
        self.policy.pin(keys)
        for key in keys:
            if entry := self.entries.get(key):
                entry["uses"] += 1
                if entry["live"]:
                    entry["live"] = False
                    self.pinned.add(key)

    @rule(keys=st.lists(st.integers(0, 12), max_size=4))
    def unpin(self, keys: list[int]) -> None:
        self.policy.unpin(keys)
        for key in keys:
            if key in self.pinned:
                self.pinned.remove(key)
                entry = self.entries[key]
                entry["live"] = True
                self.rank(entry)

    @rule(position=st.integers(0, 8), contents=st.lists(st.integers(0, 5), max_size=3))
    def announce(self, position: int, contents: list[int]) -> None:
        if self.can_announce:
            self.policy.announce(position, contents)
            self.queue += [(position, content) for content in contents]

    @rule(position=st.integers(0, 8), contents=st.lists(st.integers(0, 5), max_size=3))
    def withdraw(self, position: int, contents: list[int]) -> None:
        if self.can_announce:
            self.policy.withdraw(position, contents)
            for content in contents:
                if (position, content) in self.queue:
                    self.queue.remove((position, content))

    @rule()
    def victim(self) -> None:
        needed: dict[int, int] = {}
        for position, content in self.queue:
            needed[content] = min(position, needed.get(content, position))
        live = {key: entry for key, entry in self.entries.items() if entry["live"]}
        free = {key: entry for key, entry in live.items() if key % 6 not in needed}
        found = self.policy.victim()
        if not live:
            assert found is None
            return
        if free:
            assert found == min(free, key=lambda key: (free[key]["priority"], free[key]["tick"]))
        else:
            assert found in live
            assert needed[found % 6] == max(needed[key % 6] for key in live)
        gone = self.entries.pop(found)
        self.age = max(self.age, gone["priority"])
        if free and self.can_announce:
            self.ghosts = [ghost for ghost in self.ghosts if ghost[0] != found % 6]
            self.ghosts.append((found % 6, gone["uses"] > 1))
            del self.ghosts[: -max(1, self.held())]

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == sum(entry["live"] for entry in self.entries.values())


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
