"""The comparison with the plain run can fail: each of these mistakes gives another answer.

Without this the equality tests would prove little, since a model with the usual random weights answers nearly the same
whatever it sees.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from tiny_models import TOLERANCE, ChatLoop, clip, largest_difference, medium, noise_floor, photo, plain, sound

from mmcache.engines.chat import Message
from mmcache.engines.transformers import Generation

pytestmark = pytest.mark.engine

FAMILIES = ("qwen2_5_vl", "llava", "idefics3", "qwen2_audio", "qwen3_vl")


def turns(family: str) -> list[list[Message]]:
    first = [Message("user", ("Look at this: ", medium(family, 1), " and this: ", medium(family, 2), " what?"))]
    second = [*first, Message("assistant", ("Two.",)), Message("user", ("Then ", medium(family, 3), "?"))]
    return [first, second]


def assert_noticed(family: str, messages: list[Message], found: Generation, other_tokens: bool = True) -> None:
    """Far beyond rounding and the tolerance, so that no test of equality would have passed."""
    difference = largest_difference(plain(family, tuple(messages)), found)
    assert difference > max(0.05, 100 * TOLERANCE, 1000 * noise_floor(family, tuple(messages)))
    if other_tokens:
        assert found.tokens != plain(family, tuple(messages)).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_swapped_under_equal_token_ids(family: str) -> None:
    loop = ChatLoop(family, "picture swapped")
    pictures = (sound(1), sound(5)) if family == "qwen2_audio" else (photo(1), photo(5))
    one, other = ([Message("user", ("What is it? ", picture, " Tell me."))] for picture in pictures)
    loop.turn(one)
    found = loop.turn(other)
    assert loop.prefix_tokens > 0, "token ids alone match"
    assert_noticed(family, other, found)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_positions_of_the_window_alone(family: str) -> None:
    loop = ChatLoop(family, "positions of the window alone")
    first, second = turns(family)
    loop.turn(first)
    assert_noticed(family, second, loop.turn(second))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_text_only_positions(family: str) -> None:
    loop = ChatLoop(family, "text-only positions")
    first, _ = turns(family)
    assert_noticed(family, first, loop.turn(first))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_rows_for_tail_rows_of_a_half_covered_item(family: str) -> None:
    first, _ = turns(family)
    right, wrong = ChatLoop(family), ChatLoop(family, "head rows for tail rows")
    placeholder = right.request(first).items[1].placeholder
    half = placeholder.offset + placeholder.length // 2
    for loop in (right, wrong):
        loop.turn(first)
        loop.cache.clear()  # so that the half-covered item is encoded again
        found = loop.turn(first, computed=half)
        assert found.encoder_runs == 1
        if loop is wrong:
            assert_noticed(family, first, found, other_tokens=family not in ("qwen2_audio", "qwen3_vl"))
        else:
            assert largest_difference(plain(family, tuple(first)), found) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_covered_images_grid_dropped(family: str) -> None:
    first = [Message("user", ("A wide one: ", photo(7, 110, 60), " what?"))]
    second = [*first, Message("assistant", ("One.",)), Message("user", ("And ", photo(8, 60, 110), "?"))]
    loop = ChatLoop(family, "covered grid dropped")
    loop.turn(first)
    assert_noticed(family, second, loop.turn(second))


def test_a_covered_videos_grid_dropped() -> None:
    first = [Message("user", ("A film: ", clip(3), " what?"))]
    second = [*first, Message("assistant", ("One.",)), Message("user", ("And ", photo(8), "?"))]
    loop = ChatLoop("qwen2_5_vl", "covered grid dropped")
    loop.turn(first)
    assert_noticed("qwen2_5_vl", second, loop.turn(second))


def test_every_mistake_of_the_loop_is_tried_here() -> None:
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    assert all(f'"{mistake}"' in text for mistake in ChatLoop.MISTAKES)
