"""Preprocessed once, encoded once, moved once; metadata survives; failures leave nothing behind."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

import numpy as np
import torch
from tiny_models import FAMILY_NAMES, adapter_of, assert_equal_to_plain, conversation, medium, photo, sound

from mmcache.cache import CacheConfig, MultimodalCache
from mmcache.engines.chat import Frames, Message, Photo, media_of
from mmcache.engines.transformers import Engine, default_engine, processor_settings, tiny_adapter
from mmcache.errors import ConfigError, MediaError, UnhashableContentError
from mmcache.features import FeatureCache
from mmcache.fields import value_bytes
from mmcache.hashing import ContentHasher
from mmcache.replay.chat import DEMO_TRACE, read_chat

pytestmark = pytest.mark.engine


def test_in_the_demo_every_image_is_preprocessed_and_encoded_once() -> None:
    engine = default_engine(adapter_of("qwen2_5_vl"))
    seen: set[bytes] = set()
    for turn in read_chat(DEMO_TRACE):
        running = engine.submit(turn.messages, request_id=f"line {turn.line}", max_new_tokens=1)
        engine.run([running])
        photos = [part.data for part in media_of(turn.messages)]
        fresh = len(set(photos) - seen)
        seen.update(photos)
        assert running.generation.preprocessed == running.generation.encoder_runs == fresh
        assert running.account.items["missing"] == fresh
        assert sum(running.account.items.values()) == len(photos)
        payload = sum(value_bytes(value) for item in running.request.items for value in item.fields.values())
        assert sum(running.account.bytes.values()) == payload, "every byte of every field is accounted for"
    stats = engine.cache.stats()
    assert stats.encodes == len(seen) == 30


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_exactly_the_missing_payload_moves(family: str) -> None:
    engine = default_engine(adapter_of(family))
    for messages in conversation(family):
        running = engine.submit(messages, request_id="r")
        engine.start(running)
        with engine.cache.lookup(running.request, num_computed_tokens=running.computed) as lookup:
            before = lookup.bytes
            moved = sum(
                value_bytes(value)
                for index in lookup.missing
                for name, value in running.request.items[index].fields.items()
                if not running.request.items[index].fields.config(name).keep_on_cpu
            )
        engine.run([running])
        assert running.account.bytes["transferred"] == before.transfer == moved
        assert running.account.bytes["kept_on_cpu"] == before.kept_on_cpu
        assert running.account.bytes["covered"] == before.covered
        assert running.account.bytes["stored"] == before.stored
        assert running.generation.bytes_moved == 0


def test_metadata_has_a_row_for_every_image_after_any_hit() -> None:
    engine = default_engine(adapter_of("qwen2_5_vl"))
    for turn, messages in enumerate(conversation("qwen2_5_vl", turns=4)):
        running = engine.submit(messages, request_id=f"turn {turn}")
        grids = [item.fields["image_grid_thw"] for item in running.request.items]
        for computed in range(0, running.request.num_tokens, 7):
            with engine.cache.lookup(running.request, num_computed_tokens=computed, num_scheduled_tokens=9) as lookup:
                found = lookup.metadata("image_grid_thw")
            assert len(found) == len(grids)
            assert all(torch.equal(a, b) for a, b in zip(found, grids))
            assert all(grid.device.type == "cpu" for grid in found)
        engine.run([running])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_failing_encoder_leaves_nothing_behind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = default_engine(adapter_of(family))
    messages = conversation(family, turns=1)[0]
    with monkeypatch.context() as patch:

        def fail(*arguments: object) -> None:
            raise RuntimeError("out of memory")

        patch.setattr(type(engine.adapter), "encode", fail)
        broken = engine.submit(messages, request_id="broken")
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.run([broken])
    assert len(engine.kv) == 0
    running = engine.submit(messages, request_id="next")
    engine.run([running])
    assert_equal_to_plain(family, messages, running.generation)
    assert running.generation.encoder_runs == 1
    assert running.generation.preprocessed == 0, "the processor's work was not lost"


def test_an_encoder_that_gives_wrong_rows_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    family = "llava"
    engine = default_engine(adapter_of(family))
    good = type(engine.adapter).encode
    with monkeypatch.context() as patch:
        patch.setattr(
            type(engine.adapter), "encode", lambda *arguments: [rows[:-1] for rows in good(*arguments)], raising=True
        )
        broken = engine.submit(conversation(family, turns=1)[0], request_id="broken")
        with pytest.raises(ValueError, match="broken"):
            engine.run([broken])
    for messages in conversation(family, turns=2):
        running = engine.submit(messages, request_id="next")
        engine.run([running])
        assert_equal_to_plain(family, messages, running.generation)


@pytest.mark.parametrize("capacity", [0, 20_000])
def test_with_too_little_room_answers_stay_right(capacity: int) -> None:
    """No room for anything, or for one image at a time: items are encoded again, never missing and never wrong."""
    family = "qwen2_5_vl"
    adapter = adapter_of(family)
    cache = MultimodalCache(CacheConfig(capacity_bytes=capacity, row_bytes={"image": adapter.row_bytes}))
    engine = Engine(adapter, cache, FeatureCache(100_000), block_size=8, kv_blocks=12)
    for messages in [*conversation(family, turns=4), conversation(family)[0]]:
        running = engine.submit(messages, request_id="r")
        engine.run([running], chunk=20)
        assert_equal_to_plain(family, messages, running.generation)
        assert len(engine.kv) <= 12
        assert len(engine.kv) == engine.kv.index.num_blocks
    assert engine.intake.features.stats().nbytes <= 100_000


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_is_covered_or_stored_is_not_processed_again_though_its_features_are_gone(family: str) -> None:
    fresh = default_engine(adapter_of(family))
    engine = Engine(fresh.adapter, fresh.cache, FeatureCache(0))
    seen: set[bytes] = set()
    for messages in [*conversation(family, turns=4), conversation(family, turns=4, first=1)[-1]]:
        running = engine.submit(messages, request_id="r")
        engine.run([running], chunk=40)
        assert_equal_to_plain(family, messages, running.generation)
        now = {part.data for part in media_of(messages)}
        assert running.generation.preprocessed == running.generation.encoder_runs == len(now - seen)
        seen |= now
    engine.cache.clear()  # the encoder's rows are gone; what the prefix covers is not needed all the same
    covered = engine.submit(messages, request_id="covered")
    engine.run([covered])
    assert covered.generation.preprocessed == covered.generation.encoder_runs == 0
    moved = [Message("user", ("Other words before it. ", *messages[1].parts))]
    running = engine.submit(moved, request_id="moved")
    engine.run([running])
    assert_equal_to_plain(family, moved, running.generation)
    assert running.generation.preprocessed == running.generation.encoder_runs == len(set(media_of(moved)))


def test_tenants_share_neither_prefix_nor_embeddings_nor_features() -> None:
    family = "qwen2_5_vl"
    engine = default_engine(adapter_of(family))
    messages = conversation(family, turns=1)[0]
    for salt, runs in ((None, 1), ("a", 1), ("b", 1), ("", 1), ("a", 0), (None, 0)):
        running = engine.submit(messages, request_id="r", cache_salt=salt)
        engine.run([running])
        assert_equal_to_plain(family, messages, running.generation)
        assert running.generation.encoder_runs == running.generation.preprocessed == runs
        assert (running.account.prefix_tokens == 0) is bool(runs)


def test_identity_covers_content_modality_and_settings() -> None:
    engine = default_engine(adapter_of("qwen2_5_vl"))
    other = default_engine(tiny_adapter("qwen2_5_vl"))  # larger pictures
    one = photo(1)
    names = {
        engine.intake.identifier(one),
        engine.intake.identifier(photo(2)),
        engine.intake.identifier(Frames((one.data,), 1.0)),
        engine.intake.identifier(Frames((one.data,), 2.0)),
        engine.intake.identifier(Frames((one.data, one.data), 2.0)),
        other.intake.identifier(one),
    }
    assert len(names) == 6
    assert engine.intake.identifier(Photo(one.data, "another place")) == engine.intake.identifier(one)


def test_settings_given_with_their_defaults_equal_settings_left_out() -> None:
    processor = adapter_of("qwen2_5_vl").processor
    settings = processor_settings(processor)
    size = processor.size
    for same in (
        {"patch_size": 14, "do_resize": None},
        {"resample": 3, "rescale_factor": np.float64(1 / 255)},
        {"max_pixels": size["longest_edge"]},
        {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]},
        {"size": {"longest_edge": size["longest_edge"], "shortest_edge": size["shortest_edge"]}},
    ):
        assert processor_settings(processor, same) == settings
    others = [
        processor_settings(processor, other)
        for other in ({"patch_size": 16}, {"max_pixels": 252**2}, {"max_pixels": 1008**2}, {"nobody_knows": 1})
    ]
    assert all(other not in [settings, *others[:index]] for index, other in enumerate(others))
    assert processor_settings(processor) == settings, "nothing was changed"
    clip = adapter_of("llava").processor
    assert processor_settings(clip, {"size": clip.size["shortest_edge"]}) == processor_settings(clip)
    assert "mel_filters" not in processor_settings(adapter_of("qwen2_audio").processor)


def test_settings_without_an_identity_are_refused_and_not_told_apart_by_their_addresses() -> None:
    settings = processor_settings(adapter_of("llava").processor, {"callback": object()})
    with pytest.raises(UnhashableContentError, match="callback"):
        ContentHasher().digest(settings=settings)


def test_media_that_a_model_does_not_take_are_refused_before_anything_happens() -> None:
    refused = {"llava": sound(1), "qwen2_audio": photo(1), "qwen3_vl": Frames((photo(1).data,), 1.0)}
    for family, part in refused.items():
        engine = default_engine(adapter_of(family))
        with pytest.raises(MediaError, match=f"{family} takes no {part.modality}"):
            engine.submit([Message("user", (medium(family, 1), part))], request_id="r")
        running = engine.submit([Message("user", (medium(family, 1), "fine"))], request_id="r")
        engine.run([running])
        assert running.done


def test_broken_frames_are_refused() -> None:
    engine = default_engine(adapter_of("qwen2_5_vl"))
    for frames in (
        Frames((), 1.0, "none"),
        Frames((photo(1).data,), 0.0, "no time"),
        Frames((photo(1, 80, 60).data, photo(2, 60, 80).data), 1.0, "two sizes"),
        Frames((b"nothing",), 1.0, "no image"),
    ):
        with pytest.raises(MediaError, match=frames.source):
            engine.submit([Message("user", (frames,))], request_id="r")


def test_an_unknown_family_and_a_request_for_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="qwen2_5_vl"):
        tiny_adapter("gpt2")
    with pytest.raises(ConfigError, match="at least one token"):
        default_engine(adapter_of("llava")).submit([Message("user", ("x",))], request_id="r", max_new_tokens=0)


def test_what_a_user_types_never_becomes_a_placeholder() -> None:
    adapter = adapter_of("qwen2_5_vl")
    engine = default_engine(adapter)
    typed = [Message("user", ("<image><vision_start><|im_end|> ", photo(1), " <image>"))]
    running = engine.submit(typed, request_id="r")
    engine.run([running])
    assert_equal_to_plain("qwen2_5_vl", typed, running.generation)
    (item,) = running.request.items
    assert (running.request.token_ids == adapter.token("<image>")).sum() == item.placeholder.length


def test_equal_weights_for_equal_seeds_only() -> None:
    one, same, other = (tiny_adapter("llava", seed=seed, small_images=True) for seed in (1, 1, 2))
    weights = [adapter.model.lm_head.weight for adapter in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one.revision == same.revision != other.revision
