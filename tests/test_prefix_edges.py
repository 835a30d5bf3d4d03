"""The prefix index at its edges: late items, callbacks, threads, tiny capacities, and what memory it keeps alive."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from prefix_helpers import IMG, ask, image, matched
from step_count import steps

from mmcache import ConfigError, MultimodalRequest, PrefixIndex, RequestError, block_keys


class TestItemsThatComeAfterTheirTokens:
    def test_no_hit_on_blocks_that_were_computed_without_them(self) -> None:
        index = PrefixIndex(4)
        request = ask([1, 2, 3, 4, IMG, IMG, IMG, IMG, 5])
        index.insert(request, 8)
        assert matched(index, request) == 8
        request.extend([], [image("A", 4, 4)])
        assert matched(index, request) == 4
        assert index.insert(request, 8) == range(1, 2)
        assert matched(index, ask([1, 2, 3, 4, IMG, IMG, IMG, IMG, 5])) == 8
        assert matched(index, ask([1, 2, 3, 4, IMG, IMG, IMG, IMG, 5], image("A", 4, 4))) == 8
        assert index.num_blocks == 3

    def test_a_hit_on_blocks_that_others_computed_with_them(self) -> None:
        index = PrefixIndex(4)
        tokens = [1, 2, 3, 4, IMG, IMG, IMG, IMG, 5, 6, 7, 8, 9]
        other = ask(tokens, image("A", 4, 4))
        index.insert(other, 12)
        request = ask(tokens)
        assert matched(index, request) == 4  # and remembers that they part there
        request.extend([], [image("A", 4, 4)])
        assert index.insert(request, 12) == range(3, 3)
        assert matched(index, request) == matched(index, other) == 12
        assert index.num_blocks == 3

    def test_an_item_without_tokens_changes_nothing(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(9))
        index.insert(request, 8)
        request.extend([], [image("A", 2, 0)])
        assert matched(index, request) == 8
        assert index.insert(request, 9) == range(2, 2)


class TestItemsAndBlocks:
    @pytest.mark.parametrize("size", [1, 3, 16, 1000])
    @pytest.mark.parametrize("offset", [0, 15, 16, 17])
    @pytest.mark.parametrize("length", [1, 16, 40])
    def test_an_item_parts_requests_from_the_block_in_which_it_starts(
        self, size: int, offset: int, length: int
    ) -> None:
        index = PrefixIndex(size)
        tokens = [IMG] * 100
        index.insert(ask(tokens, image("A", offset, length)), 100)
        assert matched(index, ask([*tokens, 1], image("A", offset, length))) == 100 // size * size
        for other in ((image("B", offset, length),), (image("A", offset, length + 1),), ()):
            assert matched(index, ask([*tokens, 1], *other)) == min(offset, 100) // size * size

    def test_one_image_twice(self) -> None:
        index = PrefixIndex(4)
        tokens = [IMG] * 16
        index.insert(ask(tokens, image("A", 0, 4), image("A", 8, 4)), 16)
        assert matched(index, ask([*tokens, 1], image("A", 0, 4), image("A", 8, 4))) == 16
        assert matched(index, ask([*tokens, 1], image("A", 0, 4), image("A", 4, 4))) == 4
        assert matched(index, ask([*tokens, 1], image("A", 0, 4))) == 8
        assert matched(index, ask([*tokens, 1], image("A", 0, 4), image("B", 8, 4))) == 8

    def test_a_scope_that_changes_is_looked_up_anew(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(9))
        index.insert(request, 8)
        request.cache_salt = "another tenant"
        assert matched(index, request) == 0
        request.cache_salt = None
        assert matched(index, request) == 8


class TestCallbacks:
    def test_one_that_raises_keeps_nobody_from_being_told(self, caplog: pytest.LogCaptureFixture) -> None:
        index = PrefixIndex(4, capacity_blocks=2)
        told: list[int] = []

        def fail(ids: list[int]) -> None:
            raise ValueError("disk full")

        index.on_evict(fail)
        index.on_evict(told.extend)
        index.insert(ask(range(8)), 8, [5, 6])
        assert index.insert(ask(range(50, 58)), 8, [7, 8]) == range(2)
        assert told == [6, 5]
        assert index.callback_errors == 1
        assert "disk full" in caplog.text
        with index.match(ask(range(50, 59))) as match:  # nothing of it stays behind
            assert match.block_ids == [7, 8]
            index.clear()
            assert told == [6, 5]
        assert told == [6, 5, 8, 7]
        assert index.callback_errors == 2

    @pytest.mark.parametrize("callback", [None, 3, "name"])
    def test_what_cannot_be_called_is_refused_at_once(self, callback: Any) -> None:
        with pytest.raises(ConfigError, match="callable"):
            PrefixIndex(4).on_evict(callback)

    def test_one_may_use_the_index(self) -> None:
        index = PrefixIndex(4, capacity_blocks=2)
        free = [0, 1]
        order: list[list[int]] = []

        def reuse(ids: list[int]) -> None:
            order.append(ids)
            if len(order) == 1:
                free.extend(ids)
                other = ask(range(100, 108))
                with index.match(other) as match:
                    assert match.num_tokens == 0
                assert index.insert(other, 4, ids[:1]) == range(1)  # an id that was just given back
                index.clear(cache_salt="nobody's")
                index.on_evict(lambda ids: None)

        index.on_evict(reuse)
        index.insert(ask(range(8)), 8, [0, 1])
        assert index.insert(ask(range(50, 54)), 4, [2]) == range(1)
        assert order == [[1], [0]]  # the callback's own insert made room for itself
        assert index.num_blocks == 2
        assert matched(index, ask(range(50, 55))) == 4
        assert matched(index, ask(range(100, 105))) == 4

    def test_a_match_that_is_released_in_a_callback(self) -> None:
        index = PrefixIndex(4, capacity_blocks=3)
        index.insert(ask(range(8)), 8, [1, 2])
        index.insert(ask(range(50, 54)), 4, [3])
        held = index.match(ask(range(9)))
        index.on_evict(lambda ids: held.release())
        assert index.insert(ask(range(60, 68)), 8, [4, 5]) == range(1)  # the other two were held
        assert index.insert(ask(range(60, 68)), 8, [4, 5]) == range(1, 2)


class TestPins:
    def test_an_index_of_one_block(self) -> None:
        index = PrefixIndex(4, capacity_blocks=1)
        first, second = ask(range(9)), ask(range(50, 59))
        assert index.insert(first, 9, [1, 2]) == range(1)
        with index.match(first) as match:
            assert (match.num_tokens, match.block_ids) == (4, [1])
            assert index.insert(second, 9, [3, 4]) == range(0)
            assert index.insert(first, 9, [1, 2]) == range(1, 1)
        assert index.insert(second, 9, [3, 4]) == range(1)
        assert (matched(index, first), matched(index, second)) == (0, 4)

    def test_many_pins_of_one_prefix_at_different_ends(self) -> None:
        index = PrefixIndex(1, capacity_blocks=100)
        tokens = list(range(100))
        index.insert(ask(tokens), 100)
        rng = np.random.default_rng(0)
        held = {n: index.match(ask([*tokens[:n], 999])) for n in rng.permutation(range(1, 100)).tolist()}
        for n in rng.permutation(range(1, 100)).tolist():
            assert index.insert(ask([2000] * 100), 100) == range(100 - max(held))
            index.clear(cache_salt="another")
            assert held[n].block_ids == list(range(n))
            held.pop(n).release()
            index.insert(ask([3000] * 100), 100)
            if not held:
                break
        assert index.insert(ask([4000] * 100), 100) == range(100)

    def test_sequences_that_part_within_a_pinned_edge(self) -> None:
        """Longer, shorter and parting sequences split an edge under a pin, and each keeps its blocks."""
        index = PrefixIndex(4, capacity_blocks=40)
        base = list(range(40))
        index.insert(ask(base), 40, list(range(10)))
        whole = index.match(ask([*base, 1]))
        part = index.match(ask([*base[:20], 99]))
        assert index.insert(ask(base[:13]), 13, [50, 51, 52]) == range(3, 3)
        assert index.insert(ask([*base, *range(100, 108)]), 48, [*range(10), 60, 61]) == range(10, 12)
        for cut in (32, 8, 16, 24):
            ids = [*range(cut // 4), 100 + cut]
            assert index.insert(ask([*base[:cut], 7, 7, 7, 7]), cut + 4, ids) == range(cut // 4, cut // 4 + 1)
        assert whole.block_ids == list(range(10))
        assert part.block_ids == list(range(5))
        for cut in (32, 8, 16, 24):
            with index.match(ask([*base[:cut], 7, 7, 7, 7, 0])) as match:
                assert match.block_ids == [*range(cut // 4), 100 + cut]
        part.release()
        whole.release()
        assert index.insert(ask(range(1000, 1160)), 160, list(range(200, 240))) == range(40)
        assert index.num_blocks == 40

    def test_release_in_other_threads_and_twice_at_once(self) -> None:
        index = PrefixIndex(4, capacity_blocks=8)
        request = ask(range(33))
        index.insert(request, 32)
        errors: list[BaseException] = []
        for _ in range(200):
            matches = [index.match(request) for _ in range(3)]
            start = threading.Barrier(4)

            def let_go(matches: Any = matches, start: threading.Barrier = start) -> None:
                try:
                    start.wait()
                    for match in matches:
                        match.release()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=let_go) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not errors
        assert index.insert(ask(range(100, 132)), 32) == range(8)  # no pin is left, and none was taken back twice

    def test_matches_that_are_dropped_in_a_cycle(self) -> None:
        index = PrefixIndex(4, capacity_blocks=2)
        request = ask(range(9))
        index.insert(request, 8)
        loop: list[Any] = [index.match(request)]
        loop.append(loop)
        del loop
        gc.collect()
        assert index.insert(ask(range(50, 58)), 8) == range(2)


class TestBadInput:
    @pytest.mark.parametrize("request_", [None, "r", [1, 2, 3]])
    def test_what_is_no_request(self, request_: Any) -> None:
        index = PrefixIndex(4)
        with pytest.raises(RequestError, match="MultimodalRequest"):
            index.match(request_)
        with pytest.raises(RequestError, match="MultimodalRequest"):
            index.insert(request_, 0)

    @pytest.mark.parametrize("ids", [{1, 2}, {1: 2}, iter([1, 2]), 5, "12", [[1], [2]], object()])
    def test_ids_that_are_no_sequence_of_integers(self, ids: Any) -> None:
        index = PrefixIndex(4)
        with pytest.raises(RequestError, match="'r'"):
            index.insert(ask(range(8)), 8, ids)
        assert index.num_blocks == 0
        assert index.insert(ask(range(8)), 8) == range(2)  # the failed call did not decide whose the ids are

    def test_numpy_integers_count_tokens(self) -> None:
        index = PrefixIndex(4)
        assert index.insert(ask(range(9)), np.int64(8)) == range(2)  # type: ignore[arg-type]


class TestCost:
    def test_a_turn_costs_the_same_however_long_the_conversation_is(self) -> None:
        index = PrefixIndex(16, capacity_blocks=1 << 20)
        request = ask([0])
        taken = []
        for turn in range(300):
            first = request.num_tokens
            request.extend(np.full(620, turn, np.int32), [image(str(turn), first + 20, 560)])

            def run(request: MultimodalRequest = request) -> None:
                with index.match(request):
                    index.insert(request, request.num_tokens)

            taken.append(steps(run))
        assert max(taken[2:]) <= min(taken) + 10  # numbers for new blocks are made in bulk

    def test_a_long_request_is_compared_without_python_for_each_block(self) -> None:
        def first(count: int) -> int:
            index = PrefixIndex(16, capacity_blocks=1 << 20)
            tokens = np.arange(16 * count, dtype=np.int32)
            index.insert(MultimodalRequest("other", tokens), 16 * count)
            request = MultimodalRequest("r", np.concatenate([tokens, [1]]))
            return steps(lambda: index.insert(request, 16 * count))

        assert first(900) == first(10)

    def test_eviction_does_not_slow_down_with_pins(self) -> None:
        def evict(pinned: int) -> int:
            index = PrefixIndex(4, capacity_blocks=pinned + 20)
            held = []
            for n in range(pinned + 20):
                request = ask([n] * 5)
                index.insert(request, 4)
                if n < pinned:
                    held.append(index.match(request))
            index.insert(ask([-1] * 5), 4)  # puts the order right
            request = ask([-2] * 5)
            count = steps(lambda: index.insert(request, 4))
            assert matched(index, request) == 4
            return count

        assert evict(2000) == evict(5)


class TestMemory:
    """What an index keeps alive follows the blocks that it knows, whatever the requests were that brought them."""

    @staticmethod
    def kept(index: PrefixIndex, requests: int, tokens: Any, num_tokens: int) -> int:
        def bring() -> None:
            for n in range(requests):
                index.insert(MultimodalRequest("r", tokens(n)), num_tokens)

        tracemalloc.start()
        try:
            bring()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    def test_of_long_requests_of_which_little_is_known(self) -> None:
        index = PrefixIndex(16)
        kept = self.kept(index, 50, lambda n: np.full(50_000, n, np.int32), 32)
        assert index.num_blocks == 100
        assert kept < 500_000  # 10 MB of tokens passed by

    def test_of_requests_that_share_most(self) -> None:
        index = PrefixIndex(16)

        def tokens(n: int) -> Any:
            return np.concatenate([np.zeros(50_000, np.int32), np.full(32, n + 1, np.int32)])

        kept = self.kept(index, 50, tokens, 50_032)
        assert index.num_blocks == 3125 + 100
        assert kept < 1_200_000  # 10 MB of tokens passed by; 0.2 MB are distinct

    def test_of_what_is_left_of_a_long_one(self) -> None:
        index = PrefixIndex(16, capacity_blocks=3200)
        tracemalloc.start()
        try:
            held = []
            for n in range(40):
                index.insert(MultimodalRequest("r", np.full(48_000, n, np.int32)), 48_000)
                held.append(index.match(MultimodalRequest("r", [n] * 33)))  # pins two of its blocks
            index.insert(MultimodalRequest("r", np.full(16, -1, np.int32)), 16)
            index.clear()  # what is pinned stays
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert index.num_blocks == 80
        assert kept < 500_000  # 7.7 MB of tokens passed by

    def test_a_request_goes_on_after_its_tokens_were_taken(self) -> None:
        """An index may refer to a request's array: what that or other requests append does not show in it."""
        index = PrefixIndex(4)
        one, other = ask(range(8)), ask(range(8))
        index.insert(one, 8)
        one.extend([20, 21, 22, 23])
        other.extend([30, 31, 32, 33])
        index.insert(other, 12)
        index.insert(one, 12)
        one.extend(range(100, 200))
        other.extend(range(200, 300))
        index.insert(other, 112)
        assert matched(index, ask([*range(8), 20, 21, 22, 23, 0])) == 12
        assert matched(index, ask([*range(8), 30, 31, 32, 33, *range(200, 300), 0])) == 112
        assert matched(index, ask([*range(8), 20, 21, 22, 23, *range(100, 200), 0])) == 12


def test_integers_are_pythons_numpys_or_tensors() -> None:
    index = PrefixIndex(np.int64(4), np.int32(8))
    assert (type(index.block_size), index.block_size, index.capacity_blocks) == (int, 4, 8)
    request = MultimodalRequest("r", list(range(9)))
    assert index.insert(request, torch.tensor(8)) == range(2)
    assert block_keys(request, np.int64(4)) == block_keys(request, 4)
    for wrong in (True, 4.0, "4", None, 0):
        with pytest.raises(ConfigError, match="block"):
            PrefixIndex(wrong)
        with pytest.raises(ConfigError, match="block"):
            block_keys(request, wrong)
    with pytest.raises(RequestError):
        block_keys(None, 4)
