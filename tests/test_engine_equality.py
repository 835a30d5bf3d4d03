"""The answers of a real model are the same with the cache and without, on every way a prompt can be computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import torch
from tiny_models import (
    FAMILY_NAMES,
    ChatLoop,
    adapter_of,
    assert_equal_to_plain,
    clip,
    conversation,
    largest_difference,
    medium,
    photo,
    plain,
)

from mmcache.engines.chat import Message
from mmcache.engines.transformers import Engine, Running, default_engine
from mmcache.items import MultimodalRequest

pytestmark = pytest.mark.engine


def answer(engine: Engine, messages: Sequence[Message], chunk: int | None = None, name: str = "r") -> Running:
    running = engine.submit(messages, request_id=name)
    engine.run([running], chunk=chunk)
    return running


@pytest.mark.parametrize("chunk", [None, 7, 64, 1000])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_turn_is_answered_as_without_a_cache(family: str, chunk: int | None) -> None:
    engine = default_engine(adapter_of(family))
    for turn, messages in enumerate(conversation(family)):
        running = answer(engine, messages, chunk)
        assert_equal_to_plain(family, messages, running.generation)
        if turn:
            assert running.account.prefix_tokens > 0
            assert running.account.items["covered"] > 0


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_loop_over_the_public_api_agrees_as_well(family: str) -> None:
    loop = ChatLoop(family)
    for messages in conversation(family):
        assert_equal_to_plain(family, messages, loop.turn(messages, chunk=50))
    assert loop.prefix_tokens > 0


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_conversations_that_take_turns_share_an_image_behind_other_text(family: str) -> None:
    engine = default_engine(adapter_of(family))
    shared = medium(family, 5)
    first = [Message("user", ("A long introduction to something else entirely. ", shared, "what?"))]
    second = [Message("user", ("Short. ", shared, "and?", medium(family, 6)))]
    third = [*first, Message("assistant", ("That.",)), Message("user", ("More?",))]
    encoded = 0
    for messages in (first, second, third, second):
        running = answer(engine, messages)
        assert_equal_to_plain(family, messages, running.generation)
        encoded += running.generation.encoder_runs
    assert encoded == 2


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_oldest_image_may_leave(family: str) -> None:
    engine = default_engine(adapter_of(family))
    frames = [
        [Message("user", (f"Frame {index}. ", medium(family, 20 + index))), Message("assistant", ("Seen.",))]
        for index in range(4)
    ]
    for index in range(4):
        window = [message for frame in frames[max(0, index - 1) : index + 1] for message in frame]
        running = answer(engine, [*window, Message("user", ("Now?",))])
        assert_equal_to_plain(family, [*window, Message("user", ("Now?",))], running.generation)
        assert running.generation.encoder_runs == 1, "what stays in the window is stored, not covered, and not encoded"
    assert running.account.items == {"covered": 0, "stored": 1, "in_flight": 0, "missing": 1}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_prefix_may_end_anywhere_inside_an_item(family: str) -> None:
    messages = conversation(family, turns=2)[1]
    engine = default_engine(adapter_of(family))
    placeholders = [item.placeholder for item in engine.submit(messages, request_id="shape").request.items]
    target = placeholders[1]
    for cut in (target.offset, target.offset + 1, target.offset + target.length // 2, target.offset + target.length):
        loop = ChatLoop(family)
        loop.turn(messages)
        assert_equal_to_plain(family, messages, loop.turn(messages, computed=cut))
        assert loop.prefix_tokens == cut


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_request_that_was_aborted_inside_an_item_leaves_a_prefix_to_go_on_from(family: str) -> None:
    messages = conversation(family, turns=2)[1]
    engine = Engine(
        adapter_of(family),
        default_engine(adapter_of(family)).cache,
        default_engine(adapter_of(family)).intake.features,
        block_size=4,
    )
    aborted = engine.submit(messages, request_id="aborted")
    target = aborted.request.items[1].placeholder
    while aborted.computed < target.offset + target.length // 2:
        engine.step([aborted], chunk=5)
    assert not aborted.generation.tokens
    engine.finish(aborted)
    running = answer(engine, messages)
    prefix = running.account.prefix_tokens
    assert target.offset < prefix < target.offset + target.length
    assert_equal_to_plain(family, messages, running.generation)
    assert running.account.items == {"covered": 1, "stored": 1, "in_flight": 0, "missing": 1}


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_fully_cached_prompt_recomputes_its_last_token_only(family: str, block_size: int) -> None:
    messages = conversation(family, turns=2)[1]
    fresh = default_engine(adapter_of(family))
    engine = Engine(adapter_of(family), fresh.cache, fresh.intake.features, block_size=block_size)
    answer(engine, messages)
    again = answer(engine, messages, name="again")
    assert_equal_to_plain(family, messages, again.generation)
    assert again.request.num_tokens - 4 < again.account.prefix_tokens + 4 + block_size
    if block_size == 1:
        assert again.account.prefix_tokens == again.generation.prompt_tokens - 1
    assert again.account.bytes["transferred"] == 0
    assert again.generation.encoder_runs == again.generation.preprocessed == 0


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_last_token_of_a_fully_cached_prompt_may_be_a_placeholder(family: str) -> None:
    """A prompt cut right behind an item's last row: that row is merged again, from the store."""
    adapter = adapter_of(family)
    whole = default_engine(adapter).submit(conversation(family, turns=1)[0], request_id="whole").request
    end = whole.items[0].placeholder.end_row
    answers = []
    engine = default_engine(adapter)
    for target, name in ((default_engine(adapter), "fresh"), (engine, "first"), (engine, "second")):
        running = target.submit(conversation(family, turns=1)[0], request_id=name)
        item = whole.items[0]
        placeholder = type(item.placeholder)(
            item.placeholder.offset,
            end - item.placeholder.offset,
            None if item.placeholder.is_embed is None else item.placeholder.is_embed[: end - item.placeholder.offset],
        )
        items = [type(item)(item.modality, item.fields, placeholder, item.identifier)]
        running.request = MultimodalRequest(name, whole.token_ids[:end], items)
        target.run([running])
        answers.append(running)
    for running in answers[1:]:
        assert running.generation.tokens == answers[0].generation.tokens
        assert largest_difference(running.generation, answers[0].generation) <= 1e-4
    assert answers[2].account.prefix_tokens > 0
    assert answers[2].account.items["stored"] == 1, "the last row is needed once more"


@pytest.mark.parametrize("chunk", [None, 7, 64])
def test_a_video_of_several_frames(chunk: int | None) -> None:
    family = "qwen2_5_vl"
    engine = default_engine(adapter_of(family))
    history = [Message("user", ("A picture ", photo(1), " and a film: ", clip(1), " what moves?"))]
    history_2 = [*history, Message("assistant", ("All.",)), Message("user", ("And here? ", clip(2), photo(2)))]
    for messages in (history, history_2):
        running = answer(engine, messages, chunk)
        assert_equal_to_plain(family, messages, running.generation)
    assert int(running.request.items[1].fields["video_grid_thw"][0]) == 3
    assert running.account.items == {"covered": 2, "stored": 0, "in_flight": 0, "missing": 2}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_two_conversations_in_one_forward_pass(family: str) -> None:
    """Shared and own images: each content is encoded once, without waiting, and rows go where they belong."""
    engine = default_engine(adapter_of(family))
    shared = medium(family, 40)
    one = [Message("user", ("One. ", shared, medium(family, 41), "?"))]
    two = [Message("user", ("The second one is longer than the first. ", medium(family, 42), shared, "and what?"))]
    answer(engine, [Message("user", ("One. ",))])
    for chunk, names in ((None, "ab"), (40, "cd")):
        batch = [engine.submit(messages, request_id=name) for messages, name in zip((one, two), names)]
        engine.run(batch, chunk=chunk)
        for messages, running in zip((one, two), batch):
            assert_equal_to_plain(family, messages, running.generation)
        encoded = sum(running.generation.encoder_runs for running in batch)
        assert encoded == (3 if chunk is None else 0)
    assert batch[0].account.prefix_tokens > 0


def test_a_batch_may_mix_prefill_and_decoding_of_different_lengths() -> None:
    family = "qwen2_5_vl"
    engine = default_engine(adapter_of(family))
    first, second = conversation(family, turns=2, first=60)[1], conversation(family, turns=1, first=70)[0]
    early = engine.submit(first, request_id="early")
    while not early.generation.tokens:
        engine.step([early], chunk=64)
    late = engine.submit(second, request_id="late")
    engine.run([early, late], chunk=30)
    assert_equal_to_plain(family, first, early.generation)
    assert_equal_to_plain(family, second, late.generation)


def test_greedy_answers_depend_on_the_pictures() -> None:
    """Else equal answers would prove nothing."""
    for family in FAMILY_NAMES:
        one, other = ((Message("user", ("What is it? ", medium(family, seed))),) for seed in (80, 84))
        logits = [plain(family, messages).logits[0] for messages in (one, other)]
        assert float((logits[0] - logits[1]).abs().max()) > 0.5
        assert float(logits[0].abs().max()) > 2
        assert torch.isfinite(logits[0]).all()
