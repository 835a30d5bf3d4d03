"""Which blocks of KV a request can reuse."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prefix_helpers import IMG, ask, image, matched

from mmcache.errors import ConfigError, MMCacheError, ReleasedError, RequestError, WindowError
from mmcache.items import MultimodalRequest
from mmcache.prefix import PrefixIndex, block_keys


def both(block_size: int, first: MultimodalRequest, second: MultimodalRequest) -> int:
    """Tokens of whole blocks that two requests share: in an index, and by their keys."""
    index = PrefixIndex(block_size)
    index.insert(first, first.num_tokens)
    second.extend([1])  # so that the last token caps nothing
    found = matched(index, second)
    pairs = zip(block_keys(first, block_size), block_keys(second, block_size))
    agree = [a == b for a, b in pairs]
    assert agree == sorted(agree, reverse=True), "keys agree again after they parted"
    assert found == sum(agree) * block_size
    return found


class TestWhatIsShared:
    def test_equal_text(self) -> None:
        assert both(4, ask(range(10)), ask(range(10))) == 8
        assert both(4, ask(range(10)), ask([0, 1, 2, 3, 4, 5, 6, 8])) == 4
        assert both(4, ask(range(10)), ask([1, 1, 2, 3, 4])) == 0

    def test_another_image_behind_equal_token_ids(self) -> None:
        tokens = [1, IMG, IMG, 2, 5, 6, 7, 8]
        assert both(4, ask(tokens, image("A", 1, 2)), ask(tokens, image("A", 1, 2))) == 8
        assert both(4, ask(tokens, image("A", 1, 2)), ask(tokens, image("B", 1, 2))) == 0
        assert both(4, ask(tokens, image("A", 1, 2)), ask(tokens)) == 0

    def test_text_before_the_first_difference(self) -> None:
        tokens = [1, 2, 3, 4, IMG, IMG, IMG, IMG, 5, 6, 7, 8]
        assert both(4, ask(tokens, image("A", 4, 4)), ask(tokens, image("B", 4, 4))) == 4
        assert both(4, ask(tokens, image("A", 4, 4)), ask(tokens)) == 4

    def test_the_same_image_at_another_offset(self) -> None:
        tokens = [IMG] * 16
        assert both(4, ask(tokens, image("A", 2, 10)), ask(tokens, image("A", 3, 10))) == 0
        assert both(4, ask(tokens, image("A", 5, 10)), ask(tokens, image("A", 6, 10))) == 4

    def test_a_later_block_of_the_image_at_another_offset(self) -> None:
        tokens = [IMG] * 16
        assert both(4, ask(tokens, image("A", 4, 12)), ask(tokens, image("A", 4, 11))) == 4

    def test_the_mask_counts(self) -> None:
        tokens = [IMG] * 12
        mask = [True, True, False, True] * 3
        other = [True, False, True, True] * 3
        assert both(4, ask(tokens, image("A", 0, 12, mask)), ask(tokens, image("A", 0, 12, mask))) == 12
        assert both(4, ask(tokens, image("A", 0, 12, mask)), ask(tokens, image("A", 0, 12, other))) == 0
        assert both(4, ask(tokens, image("A", 0, 12, mask)), ask(tokens, image("A", 0, 12))) == 0
        assert both(4, ask(tokens, image("A", 0, 12, [True] * 12)), ask(tokens, image("A", 0, 12))) == 12

    def test_an_image_that_ends_at_the_edge_of_a_block_is_not_in_the_next(self) -> None:
        tokens = [*[IMG] * 4, 1, 2, 3, 4]
        first = block_keys(ask(tokens, image("A", 0, 4)), 4)
        # The first block differs, and with it the chain; the index has only what is common from the start.
        assert block_keys(ask(tokens, image("B", 0, 4)), 4)[0] != first[0]
        assert both(4, ask(tokens, image("A", 0, 4)), ask([*tokens[:4], 1, 2, 3, 5], image("A", 0, 4))) == 4

    def test_adjacent_images(self) -> None:
        tokens = [IMG] * 12
        pair = (image("A", 0, 6), image("B", 6, 6))
        assert both(4, ask(tokens, *pair), ask(tokens, *pair)) == 12
        assert both(4, ask(tokens, *pair), ask(tokens, image("A", 0, 6), image("C", 6, 6))) == 4
        assert both(4, ask(tokens, *pair), ask(tokens, image("B", 0, 6), image("A", 6, 6))) == 0

    def test_nested_ranges(self) -> None:
        tokens = [IMG] * 12
        video = image("V", 0, 12, [True] * 3 + [False] * 6 + [True] * 3)
        assert both(4, ask(tokens, video, image("S", 5, 2)), ask(tokens, video, image("S", 5, 2))) == 12
        assert both(4, ask(tokens, video, image("S", 5, 2)), ask(tokens, video, image("S", 6, 2))) == 4
        assert both(4, ask(tokens, video, image("S", 5, 2)), ask(tokens, video)) == 4

    def test_items_without_tokens_are_in_no_block(self) -> None:
        assert both(4, ask(range(8), image("A", 2, 0)), ask(range(8))) == 8

    def test_an_image_swapped_far_behind_in_a_long_prompt(self) -> None:
        tokens = np.random.default_rng(0).integers(0, 1000, 20_000, dtype=np.int32)
        items = [image(f"i{n}", 16 + n * 700, 600) for n in range(28)]
        swapped = list(items)
        swapped[20] = image("other", 16 + 20 * 700, 600)
        assert both(16, MultimodalRequest("a", tokens, items), MultimodalRequest("b", tokens, swapped)) == 14_016
        changed = tokens.copy()
        changed[17_777] += 1
        assert both(16, MultimodalRequest("a", tokens, items), MultimodalRequest("b", changed, items)) == 17_776

    def test_salts_and_adapters_separate(self) -> None:
        scopes: list[dict[str, str | None]] = [
            {},
            {"cache_salt": ""},
            {"cache_salt": "a"},
            {"adapter": ""},
            {"adapter": "a"},
            {"cache_salt": "a", "adapter": "a"},
            {"cache_salt": "aa"},
        ]
        for one in scopes:
            for other in scopes:
                assert both(4, ask(range(8), **one), ask(range(8), **other)) == (8 if one == other else 0)

    def test_appending_keeps_every_earlier_block(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(10), image("A", 3, 4))
        index.insert(request, 10)
        longer = ask([*range(10), *range(50, 60)], image("A", 3, 4), image("B", 12, 5))
        assert matched(index, longer) == 8
        keys = block_keys(request, 4)
        assert block_keys(longer, 4)[:2] == keys


class TestMatch:
    def test_only_whole_blocks(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(12))
        assert index.insert(request, 7) == range(1)
        assert matched(index, request) == 4

    def test_the_last_token_is_always_computed(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(8))
        index.insert(request, 8)
        with index.match(request) as match:
            assert match.num_tokens == 7
            assert len(match.block_ids) == 2
        single = PrefixIndex(1)
        single.insert(request, 8)
        with single.match(request) as match:
            assert match.num_tokens == 7
            assert len(match.block_ids) == 7

    def test_nothing_known(self) -> None:
        with PrefixIndex().match(ask(range(100))) as match:
            assert (match.num_tokens, match.block_ids) == (0, [])

    def test_short_and_empty_requests(self) -> None:
        index = PrefixIndex(1)
        one, empty = ask([5]), ask([])
        index.insert(one, 1)
        index.insert(empty, 0)
        assert matched(index, one) == 0
        assert matched(index, empty) == 0

    def test_a_request_that_parts_in_the_middle_of_another(self) -> None:
        index = PrefixIndex(4)
        a, b = ask(range(16)), ask([*range(8), *range(100, 108)])
        index.insert(a, 16, [10, 11, 12, 13])
        assert index.insert(b, 16, [20, 21, 22, 23]) == range(2, 4)
        assert index.match(a).block_ids == [10, 11, 12, 13]
        assert index.match(b).block_ids == [10, 11, 22, 23]
        assert index.num_blocks == 6

    def test_the_same_request_again_after_it_grew(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(9))
        index.insert(request, 9)
        assert matched(index, request) == 8
        request.extend(range(9, 30), [image("A", 12, 8)])
        assert matched(index, request) == 8
        assert index.insert(request, 30) == range(2, 7)
        assert matched(index, request) == 28
        assert matched(index, ask(range(30), image("A", 12, 8))) == 28
        assert matched(index, ask(range(30))) == 12

    def test_what_others_insert_is_found_by_a_request_that_was_matched_before(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(21))
        assert matched(index, request) == 0
        index.insert(ask(range(12)), 12)
        assert matched(index, request) == 12
        index.insert(ask(range(20)), 20)
        assert matched(index, request) == 20

    def test_a_request_never_hits_what_took_the_place_of_its_evicted_blocks(self) -> None:
        index = PrefixIndex(4, capacity_blocks=4)
        request = ask(range(16))
        index.insert(request, 16)
        index.insert(ask(range(100, 108)), 8)  # evicts its last two blocks
        index.clear(cache_salt="another")
        other = ask([*range(8), *range(50, 58)])
        index.insert(other, 16)  # stands where its last two blocks stood
        assert matched(index, request) == 8

    def test_block_ids_after_release_are_an_error(self) -> None:
        index = PrefixIndex(4)
        match = index.match(ask(range(8)))
        match.release()
        match.release()
        with pytest.raises(ReleasedError):
            _ = match.block_ids


class TestInsert:
    def test_blocks_keep_the_ids_that_they_have(self) -> None:
        index = PrefixIndex(4)
        assert index.insert(ask(range(8)), 8, [5, 6]) == range(2)
        assert index.insert(ask(range(12)), 12, [7, 8, 9]) == range(2, 3)  # 7 and 8 are the engine's to free
        assert index.insert(ask(range(12)), 12, [1, 2, 3]) == range(3, 3)
        assert index.match(ask(range(13))).block_ids == [5, 6, 9]

    @pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
    def test_ids_from_a_block_table(self, make: Any) -> None:
        index = PrefixIndex(4)
        index.insert(ask(range(10)), 10, make([3, 1, 4, 1]))  # what follows the whole blocks is ignored
        assert index.match(ask(range(10))).block_ids == [3, 1]

    def test_the_index_numbers_blocks_itself(self) -> None:
        index = PrefixIndex(4, capacity_blocks=3)
        evicted: list[int] = []
        index.on_evict(evicted.extend)
        index.insert(ask(range(8)), 8)
        index.insert(ask(range(50, 58)), 8)
        assert index.match(ask(range(50, 59))).block_ids == [2, 3]
        assert evicted == [1]

    def test_it_is_idempotent(self) -> None:
        index = PrefixIndex(4)
        request = ask(range(12))
        index.insert(request, 12)
        assert index.insert(request, 12) == range(3, 3)
        assert index.insert(request, 5) == range(1, 1)
        assert index.num_blocks == 3

    @pytest.mark.parametrize("num_tokens", [-1, 9, 1.0, None, "4"])
    def test_outside_the_request(self, num_tokens: Any) -> None:
        index = PrefixIndex(4)
        with pytest.raises(WindowError, match="'r'"):
            index.insert(ask(range(8)), num_tokens)
        assert index.num_blocks == 0

    @pytest.mark.parametrize(
        "ids", [[1], [1, 1, 2], [1, 2, 7], [1, "a", 2], [1, 2.5, 3], [1, None, 2], [1, 1 << 70, 2]], ids=repr
    )
    def test_bad_ids_change_nothing(self, ids: Any) -> None:
        index = PrefixIndex(4, capacity_blocks=3)
        evicted: list[int] = []
        index.on_evict(evicted.extend)
        index.insert(ask(range(100, 104)), 4, [7])
        with pytest.raises(RequestError, match="'r'"):
            index.insert(ask(range(12)), 12, ids)
        assert (index.num_blocks, evicted) == (1, [])
        assert index.insert(ask(range(12)), 12, [1, 2, 3]) == range(3)
        assert evicted == [7]

    def test_ids_are_given_always_or_never(self) -> None:
        index = PrefixIndex(4)
        index.insert(ask(range(4)), 4, [0])
        with pytest.raises(ConfigError, match="block_ids"):
            index.insert(ask(range(8)), 8)
        other = PrefixIndex(4)
        other.insert(ask(range(4)), 4)
        with pytest.raises(ConfigError, match="no block_ids"):
            other.insert(ask(range(8)), 8, [0, 1])

    @pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
    def test_sizes_are_positive_integers(self, size: Any) -> None:
        with pytest.raises(ConfigError):
            PrefixIndex(size)
        with pytest.raises(ConfigError):
            PrefixIndex(4, capacity_blocks=size)
        with pytest.raises(ConfigError):
            block_keys(ask(range(8)), size)


class TestBlockKeys:
    def test_one_for_each_whole_block(self) -> None:
        assert block_keys(ask(range(3)), 4) == []
        keys = block_keys(ask(range(11)), 4)
        assert [len(key) for key in keys] == [32, 32]

    def test_the_block_size_is_part_of_them(self) -> None:
        assert block_keys(ask([0, 0, 0, 0]), 2)[1] != block_keys(ask([0, 0, 0, 0]), 4)[0]
        assert block_keys(ask([0, 0]), 2) != block_keys(ask([0]), 1)

    def test_they_are_fixed(self) -> None:
        request = ask(range(40), image("A", 5, 20, [True, False] * 10), cache_salt="s")
        assert block_keys(request, 8)[-1].hex() == "ea466d6b6e25f0ccdda987eb65fd7cb13e25d17822ce7c7b15a0203731b7130f"

    def test_they_continue_from_known_ones(self) -> None:
        request = ask(range(40), image("A", 5, 20), image("B", 30, 7))
        keys = block_keys(request, 4)
        for known in range(len(keys) + 1):
            assert block_keys(request, 4, keys[:known]) == keys
        with pytest.raises(RequestError):
            block_keys(ask(range(8)), 4, keys)

    @pytest.mark.slow
    def test_they_are_the_same_in_every_process(self) -> None:
        script = (
            "from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange\n"
            "from mmcache.prefix import block_keys\n"
            "item = MultimodalItem('image', None, PlaceholderRange(5, 20, [True, False] * 10), 'A')\n"
            "print(block_keys(MultimodalRequest('r', range(40), [item], cache_salt='s'), 8)[-1].hex())"
        )
        outputs = set()
        for seed in ("1", "2"):
            environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
            command = [sys.executable, "-c", script]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            outputs.add(done.stdout.strip())
        assert outputs == {"ea466d6b6e25f0ccdda987eb65fd7cb13e25d17822ce7c7b15a0203731b7130f"}


def test_threads_share_an_index() -> None:
    index = PrefixIndex(4, capacity_blocks=40)
    errors: list[BaseException] = []
    evicted: list[int] = []
    index.on_evict(evicted.extend)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                tokens = [*range(8 * int(rng.integers(1, 4))), *[int(rng.integers(0, 3))] * 20]
                request = ask(tokens, cache_salt=str(rng.integers(0, 2)))
                with index.match(request) as match:
                    index.insert(request, int(rng.integers(0, len(tokens) + 1)))
                    assert len(match.block_ids) == -(-match.num_tokens // 4)
                assert index.num_blocks <= 40
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    index.clear()
    assert index.num_blocks == 0
    assert len(evicted) == len(set(evicted))


def test_errors_are_typed() -> None:
    with pytest.raises(MMCacheError):
        PrefixIndex(0)
