"""The prefix index against a brute-force model: a plain set of whole prefixes, block by block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.prefix import PrefixIndex, PrefixMatch, block_keys

Prefix = tuple[Any, ...]


def prefixes(request: MultimodalRequest, size: int) -> list[Prefix]:
    """What stands for each whole block: the scope, and of every block up to it tokens and overlapping items."""
    tokens = request.token_ids.tolist()
    path: Prefix = (request.cache_salt, request.adapter)
    found = []
    for start in range(0, len(tokens) - size + 1, size):
        overlapping = tuple(
            (item.identifier, item.placeholder.offset - start, item.placeholder.length, item.placeholder.runs)
            for item in request.items
            if item.placeholder.offset < start + size and item.placeholder.offset + item.placeholder.length > start
            and item.placeholder.length
        )  # fmt: skip
        path = (*path, tuple(tokens[start : start + size]), overlapping)
        found.append(path)
    return found


TEXT = st.lists(st.integers(0, 1), max_size=14)


class AgainstModel(RuleBasedStateMachine):
    requests = Bundle("requests")
    matches = Bundle("matches")

    @initialize(size=st.integers(1, 4), capacity=st.integers(1, 14), gives_ids=st.booleans())
    def start(self, size: int, capacity: int, gives_ids: bool) -> None:
        self.size, self.capacity, self.gives_ids = size, capacity, gives_ids
        self.index = PrefixIndex(size, capacity)
        self.known: dict[Prefix, int] = {}
        self.cleared: dict[int, int] = {}  # id of a pinned block of a cleared prefix -> pins
        self.pinned: list[list[int]] = []
        self.next_id = 100 if gives_ids else 0
        self.evicted: list[int] = []
        self.index.on_evict(self.evicted.extend)

    @rule(target=requests, tokens=TEXT, salt=st.sampled_from([None, "", "s"]), data=st.data())
    def ask(self, tokens: list[int], salt: str | None, data: st.DataObject) -> MultimodalRequest:
        request = MultimodalRequest("r", tokens, cache_salt=salt)
        self.grow(request, [], data)
        return request

    @rule(request=requests, tokens=TEXT, data=st.data())
    def grow(self, request: MultimodalRequest, tokens: list[int], data: st.DataObject) -> None:
        first = request.num_tokens
        count = len(tokens) if first else data.draw(st.integers(0, 6))
        tokens = tokens or [0] * count
        end = first + len(tokens)
        items = []
        # Items may also come after their tokens, for tokens that were matched and inserted without them.
        offset = max([i.placeholder.offset + i.placeholder.length for i in request.items], default=0)
        if data.draw(st.booleans()):
            offset = max(offset, first)
        while offset < end and data.draw(st.booleans()):
            offset = data.draw(st.integers(offset, end))
            length = data.draw(st.integers(0, end - offset))
            mask = data.draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=length, max_size=length)))
            place = PlaceholderRange(offset, length, mask)
            items.append(MultimodalItem("image", None, place, f"{data.draw(st.sampled_from('AB'))}{place.num_embeds}"))
            offset += length
        request.extend(tokens, items)

    @rule(target=requests, request=requests)
    def ask_anew(self, request: MultimodalRequest) -> MultimodalRequest:
        return MultimodalRequest("r", request.token_ids, request.items, cache_salt=request.cache_salt)

    @rule(target=matches, request=requests)
    def match(self, request: MultimodalRequest) -> Any:
        match = self.index.match(request)
        expected = []
        for prefix in prefixes(request, self.size):
            if prefix not in self.known:
                break
            expected.append(self.known[prefix])
        tokens = max(0, min(len(expected) * self.size, request.num_tokens - 1))
        ids = expected[: -(-tokens // self.size)]
        assert match.num_tokens == tokens
        assert match.block_ids == ids
        self.pinned.append(ids)
        return multiple((match, ids))

    @rule(entry=consumes(matches))
    def release(self, entry: tuple[PrefixMatch, list[int]]) -> None:
        match, ids = entry
        assert match.block_ids == ids
        self.pinned.remove(ids)
        match.release()
        self.settle()

    @rule(request=requests, data=st.data())
    def insert(self, request: MultimodalRequest, data: st.DataObject) -> None:
        num_tokens = data.draw(st.integers(0, request.num_tokens))
        wanted = prefixes(request, self.size)[: num_tokens // self.size]
        ids = None
        if self.gives_ids:
            ids = list(range(self.next_id, self.next_id + len(wanted)))
            self.next_id += len(wanted)
        before = dict(self.known)
        new = self.index.insert(request, num_tokens, ids)
        first = next((i for i, prefix in enumerate(wanted) if prefix not in before), len(wanted))
        assert new.start == first
        assert new.stop <= len(wanted)
        given = ids or []
        if ids is None:
            given = [-1] * first + list(range(self.next_id, self.next_id + len(new)))
            self.next_id += len(new)
        evicted = self.settle()
        for block in new:
            self.known[wanted[block]] = given[block]
        assert all(prefix in self.known for prefix in wanted[: new.stop]), "evicted what it extends"
        if new.stop < len(wanted):  # there was no room: all that is left is held, or is what was to be extended
            held = {i for pins in self.pinned for i in pins}
            own = set(wanted[: new.stop])
            for prefix, block_id in self.known.items():
                needed = any(other[: len(prefix)] == prefix and (self.known[other] in held or other in own)
                             for other in self.known)  # fmt: skip
                assert needed, f"block {block_id} could have been evicted"
        else:
            assert len(evicted) == max(0, len(before) + len(self.cleared) + len(new) - self.capacity)

    @rule(everything=st.booleans())
    def clear(self, everything: bool) -> None:
        if everything:
            self.index.clear()
        else:
            self.index.clear(cache_salt="s")
        held = {i for pins in self.pinned for i in pins}
        for prefix, block_id in list(self.known.items()):
            if everything or prefix[0] == "s":
                del self.known[prefix]
                self.cleared[block_id] = 1
        self.settle()
        assert set(self.cleared) <= held

    def settle(self) -> list[int]:
        """Take what was announced as evicted out of the model: each block was known, a leaf, and not held."""
        evicted = list(self.evicted)
        self.evicted.clear()
        held = {i for pins in self.pinned for i in pins}
        by_id = {block_id: prefix for prefix, block_id in self.known.items()}
        for block_id in evicted:
            assert block_id not in held
            if block_id in self.cleared:
                del self.cleared[block_id]
                continue
            prefix = by_id.pop(block_id)
            del self.known[prefix]
            assert not any(other[: len(prefix)] == prefix for other in self.known), "evicted before what follows it"
        return evicted

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "index"):
            assert self.index.num_blocks == len(self.known) + len(self.cleared) <= self.capacity
            held = {i for pins in self.pinned for i in pins}
            assert set(self.cleared) <= held

    @rule(one=requests, other=requests)
    def keys_agree_with_the_model(self, one: MultimodalRequest, other: MultimodalRequest) -> None:
        mine, theirs = prefixes(one, self.size), prefixes(other, self.size)
        for a, b, x, y in zip(block_keys(one, self.size), block_keys(other, self.size), mine, theirs):
            assert (a == b) == (x == y)


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestAgainstModelForLong(AgainstModel.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)
