"""Which blocks a prefix index lets go of, which it may not, and who is told."""

from __future__ import annotations

import gc

import pytest
from prefix_helpers import ask, matched

from mmcache import MultimodalRequest, PrefixIndex


class TestEviction:
    def test_leaves_go_first_and_the_end_before_the_start(self) -> None:
        index = PrefixIndex(4, capacity_blocks=6)
        evicted: list[list[int]] = []
        index.on_evict(evicted.append)
        index.insert(ask(range(16)), 16, [0, 1, 2, 3])
        index.insert(ask([*range(8), 90, 91, 92, 93]), 12, [4, 5, 6])
        index.insert(ask(range(100, 108)), 8, [7, 8])
        assert evicted == [[3]]
        index.insert(ask(range(200, 216)), 16, [10, 11, 12, 13])
        assert evicted[1] == [2, 6, 1, 0]
        assert index.num_blocks == 6

    def test_what_was_matched_last_goes_last(self) -> None:
        index = PrefixIndex(4, capacity_blocks=3)
        requests = [ask([n] * 5) for n in range(4)]
        for request in requests[:3]:
            index.insert(request, 4)
        assert matched(index, requests[0]) == 4
        index.insert(requests[3], 4)
        assert [matched(index, request) for request in requests] == [4, 0, 4, 4]

    def test_a_match_pins_until_it_is_released(self) -> None:
        index = PrefixIndex(4, capacity_blocks=4)
        request = ask(range(9))
        index.insert(request, 8, [1, 2])
        match = index.match(request)
        assert index.insert(ask(range(100, 116)), 16, [3, 4, 5, 6]) == range(2)
        assert match.block_ids == [1, 2]
        assert index.insert(ask(range(200, 216)), 16, [7, 8, 9, 10]) == range(2)
        assert match.block_ids == [1, 2]
        match.release()
        assert index.insert(ask(range(300, 316)), 16, [11, 12, 13, 14]) == range(4)
        assert matched(index, request) == 0

    def test_a_match_pins_only_what_it_uses(self) -> None:
        index = PrefixIndex(4, capacity_blocks=4)
        index.insert(ask(range(16)), 16, [1, 2, 3, 4])
        match = index.match(ask([*range(8), 99, 99]))
        assert match.block_ids == [1, 2]
        assert index.insert(ask(range(100, 116)), 16, [5, 6, 7, 8]) == range(2)
        assert match.block_ids == [1, 2]

    def test_pins_survive_a_parting_within_what_they_pin(self) -> None:
        index = PrefixIndex(4, capacity_blocks=6)
        long, short = index.match, index.match
        index.insert(ask(range(16)), 16, [1, 2, 3, 4])
        first = long(ask(range(17)))
        second = short(ask([*range(4), 99]))
        index.insert(ask([*range(8), 90, 91, 92, 93]), 12, [0, 0, 5])
        index.insert(ask([*range(4), 80, 81, 82, 83]), 8, [0, 6])
        assert first.block_ids == [1, 2, 3, 4]
        assert second.block_ids == [1]
        first.release()
        assert index.insert(ask(range(100, 140)), 40, list(range(10, 20))) == range(5)
        assert second.block_ids == [1]
        second.release()
        assert index.insert(ask(range(200, 240)), 40, list(range(20, 30))) == range(6)

    def test_an_insert_does_not_evict_what_it_extends(self) -> None:
        index = PrefixIndex(4, capacity_blocks=3)
        request = ask(range(20))
        assert index.insert(request, 8, [1, 2]) == range(2)
        assert index.insert(request, 20, [1, 2, 3, 4, 5]) == range(2, 3)
        assert index.match(request).block_ids == [1, 2, 3]

    def test_more_than_fits_is_no_error(self) -> None:
        index = PrefixIndex(4, capacity_blocks=3)
        assert index.insert(ask(range(40)), 40) == range(3)
        held = index.match(ask(range(40)))
        assert index.insert(ask(range(100, 140)), 40) == range(0)
        assert held.num_tokens == 12

    def test_a_forgotten_match_is_released(self) -> None:
        index = PrefixIndex(4, capacity_blocks=2)
        index.insert(ask(range(8)), 8)
        match = index.match(ask(range(9)))
        del match
        gc.collect()
        assert index.insert(ask(range(100, 108)), 8) == range(2)

    def test_the_callback_is_called_outside_the_lock(self) -> None:
        index = PrefixIndex(4, capacity_blocks=2)
        seen: list[tuple[list[int], int]] = []
        index.on_evict(lambda ids: seen.append((ids, matched(index, ask(range(100, 109))))))
        index.insert(ask(range(8)), 8, [1, 2])
        index.insert(ask(range(100, 108)), 8, [3, 4])
        assert seen == [([2, 1], 8)]

    def test_every_callback_is_told(self) -> None:
        index = PrefixIndex(4, capacity_blocks=1)
        first: list[int] = []
        second: list[int] = []
        index.on_evict(lambda ids: first.append(ids.pop()))
        index.on_evict(second.extend)
        index.insert(ask(range(4)), 4)
        index.insert(ask(range(4, 8)), 4)
        assert (first, second) == ([0], [0])


class TestClear:
    def test_everything(self) -> None:
        index = PrefixIndex(4)
        evicted: list[int] = []
        index.on_evict(evicted.extend)
        request = ask(range(16))
        index.insert(request, 16)
        index.insert(ask([*range(8), *range(50, 58)], cache_salt="a"), 16)
        index.clear()
        assert (matched(index, request), index.num_blocks, sorted(evicted)) == (0, 0, list(range(8)))
        assert index.insert(request, 16) == range(4)

    def test_one_salt_or_one_adapter(self) -> None:
        scopes: list[dict[str, str | None]] = [
            {},
            {"cache_salt": "a"},
            {"adapter": "x"},
            {"cache_salt": "a", "adapter": "x"},
        ]

        def left(**cleared: str | None) -> list[bool]:
            index = PrefixIndex(4)
            for scope in scopes:
                index.insert(ask(range(8), **scope), 8)
            index.clear(**cleared)  # type: ignore[arg-type]
            return [bool(matched(index, ask(range(9), **scope))) for scope in scopes]

        assert left(cache_salt="a") == [True, False, True, False]
        assert left(cache_salt=None) == [False, True, False, True]
        assert left(adapter="x") == [True, True, False, False]
        assert left(cache_salt="a", adapter="x") == [True, True, True, False]
        assert left(cache_salt="b") == [True, True, True, True]

    def test_pinned_blocks_go_with_their_last_pin(self) -> None:
        index = PrefixIndex(4, capacity_blocks=4)
        evicted: list[int] = []
        index.on_evict(evicted.extend)
        index.insert(ask(range(16)), 16, [1, 2, 3, 4])
        first, second = index.match(ask(range(13))), index.match(ask(range(9)))
        index.clear()
        assert evicted == [4]
        assert matched(index, ask(range(13))) == 0
        assert first.block_ids == [1, 2, 3]
        assert index.insert(ask(range(16)), 16, [5, 6, 7, 8]) == range(1)
        first.release()
        assert evicted == [4, 3]
        second.release()
        assert sorted(evicted) == [1, 2, 3, 4]
        assert index.num_blocks == 1


def in_turns(index: PrefixIndex, conversations: int, turns: int, gives_ids: bool = False) -> list[MultimodalRequest]:
    """Conversations that grow by a block at a time, one after the other: block n of conversation i is n * count + i."""
    requests = [ask([name]) for name in range(conversations)]
    for turn in range(turns):
        for i, request in enumerate(requests):
            request.extend([turn] * 4)
            ids = list(range(i, (turn + 1) * conversations, conversations)) if gives_ids else None
            assert index.insert(request, request.num_tokens, ids) == range(turn, turn + 1)
    return requests


@pytest.mark.parametrize("conversations", [1, 2])
class TestBlocksThatCameOneByOne:
    @pytest.mark.parametrize("gives_ids", [False, True])
    def test_keep_their_ids(self, conversations: int, gives_ids: bool) -> None:
        index = PrefixIndex(4)
        requests = in_turns(index, conversations, 100, gives_ids)
        for i, request in enumerate(requests):
            with index.match(request) as match:
                assert match.block_ids == list(range(i, 100 * conversations, conversations))

    @pytest.mark.parametrize("turns", [3, 33, 80])
    def test_part_and_go_in_order(self, conversations: int, turns: int) -> None:
        half, total = turns // 2, turns * conversations
        index = PrefixIndex(4, capacity_blocks=total + 2)
        evicted: list[int] = []
        index.on_evict(evicted.extend)
        first, *others = in_turns(index, conversations, turns)
        ids = list(range(0, total, conversations))
        branch = ask([*first.token_ids[: 4 * half].tolist(), *[99] * 8])
        assert index.insert(branch, 4 * half + 8) == range(half, half + 2)
        with index.match(branch) as match:
            assert match.block_ids == [*ids[:half], total, total + 1]
        for request in others:
            assert matched(index, request) == 4 * turns
        for gone in range(1, turns - half + 1):
            index.insert(ask([1000 + gone] * 4), 4)
            assert evicted == ids[: -gone - 1 : -1]
