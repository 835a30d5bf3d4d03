"""A video with its sound inside: one span of tokens, two items whose rows take turns, on a real model.

Qwen2.5-Omni's thinker lays frames and sound out by chunks of time. Its own forward pass, which merges by token id, says
what is right.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from audit_subjects import rows
from torch import Tensor

from mmcache import (
    CacheConfig,
    ItemStatus,
    Lookup,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
    encoder_inputs,
    split_fields,
)
from mmcache.audit import Subject, load_subject

pytestmark = pytest.mark.engine


@cache
def subject() -> Subject:
    torch.set_num_threads(1)
    made = load_subject("qwen2_5_omni_thinker")
    generator = torch.Generator().manual_seed(0)
    for parameter in made.model.parameters():  # so that a row in a wrong place shows
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.15, generator=generator)
    return made


def token_ids() -> Tensor:
    _, interleaved = subject().batch["input_ids"]
    return interleaved[interleaved > 0]


def tokens_of(modality: str) -> Tensor:
    config = subject().model.config
    ids = {"image": config.image_token_id, "video": config.video_token_id, "audio": config.audio_token_id}
    return token_ids() == ids[modality]


def placeholders(modality: str, counts: list[int]) -> list[PlaceholderRange]:
    """Ranges from an item's first row to its last; between them may lie rows of another item."""
    places = tokens_of(modality).nonzero().flatten().split(counts)
    made = []
    for place in places:
        offset, mask = int(place[0]), torch.zeros(int(place[-1] - place[0]) + 1, dtype=torch.bool)
        mask[place - offset] = True
        made.append(PlaceholderRange(offset, len(mask), mask))
    return made


def request(name: str, sounds: str = "") -> MultimodalRequest:
    """`sounds` makes the clips of sound other content."""
    tried = subject()
    sizes = {name: (tried.batch[name].prod(-1) // 4).tolist() for name in ("image_grid_thw", "video_grid_thw")}
    heard = [((n - 1) // 2 + 1 - 2) // 2 + 1 for n in tried.batch["audio_feature_lengths"].tolist()]
    counts = {"image": sizes["image_grid_thw"], "video": sizes["video_grid_thw"], "audio": heard}
    items = [
        MultimodalItem(modality, fields, place, f"{modality} {index} {sounds if modality == 'audio' else ''}")
        for modality, parts in split_fields(tried.batch, tried.configs).items()
        for index, (fields, place) in enumerate(zip(parts, placeholders(modality, counts[modality]), strict=True))
    ]
    items.sort(key=lambda item: item.placeholder.offset)
    return MultimodalRequest(name, token_ids().tolist(), items)


@cache
def expected() -> dict[str, Tensor]:
    """What the model's own forward pass merges, at which positions, and what it makes of it."""
    seen: dict[str, Tensor] = {}

    def look(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        seen.update(embeds=named["inputs_embeds"], positions=named["position_ids"])

    tried = subject()
    hook = tried.model.language_model.register_forward_pre_hook(look, with_kwargs=True)
    fields = {name: tried.batch[name] for name in tried.configs}
    ids = token_ids()[None]
    with torch.no_grad():
        seen["hidden"] = tried.model(input_ids=ids, attention_mask=torch.ones_like(ids), **fields).last_hidden_state
    hook.remove()
    return seen


def encode(cache: MultimodalCache, lookup: Lookup) -> list[str]:
    """Encode what is missing; the identifiers of what was encoded."""
    done = []
    with torch.no_grad():
        for batch in encoder_inputs([lookup], "cpu"):
            made = torch.cat(list(rows(subject().encoder(**batch.kwargs)))).split(list(batch.num_embeds))
            for (_, index), item_rows in zip(batch.items, made, strict=True):
                cache.insert(lookup, {index: item_rows})
                done.append(lookup.request.items[index].identifier.strip())
    return done


def merged(lookup: Lookup) -> Tensor:
    start, end = lookup.window
    with torch.no_grad():
        text = subject().model.get_input_embeddings()(token_ids()[start:end])
        return lookup.merge_into(text.clone())


def new_cache() -> MultimodalCache:
    return MultimodalCache(CacheConfig(capacity_bytes=1 << 20))


def test_the_sound_lies_inside_the_video() -> None:
    video, sound = (next(i for i in request("r").items if i.modality == kind) for kind in ("video", "audio"))
    assert video.placeholder.offset < sound.placeholder.offset
    assert sound.placeholder.end_row < video.placeholder.end_row
    modalities = [tokens_of(modality) for modality in ("image", "video", "audio")]
    assert int(sum(mask.sum() for mask in modalities)) == int(torch.stack(modalities).any(0).sum())


@pytest.mark.parametrize("chunk", [None, 3, 7, 64])
def test_rows_positions_and_answers_are_those_of_the_model_s_own_forward_pass(chunk: int | None) -> None:
    cache, asked, encoded, parts = new_cache(), request("r"), [], []
    computed = 0
    while computed < asked.num_tokens:
        with cache.lookup(asked, num_computed_tokens=computed, num_scheduled_tokens=chunk) as lookup:
            encoded += encode(cache, lookup)
            parts.append(merged(lookup))
            fields = {name: lookup.metadata(name) for name in POSITION_FIELDS}
            computed = lookup.window[1]
        cache.commit(asked, computed)
    embeds, right = torch.cat(parts)[None], expected()
    assert sorted(encoded) == sorted(f"{kind} {i}" for kind in ("image", "video", "audio") for i in range(2))
    torch.testing.assert_close(embeds, right["embeds"], rtol=1e-5, atol=1e-5)
    positions = rope(fields)
    assert torch.equal(positions, right["positions"])
    with torch.no_grad():
        output = subject().model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    torch.testing.assert_close(output.last_hidden_state, right["hidden"], rtol=1e-4, atol=1e-4)


POSITION_FIELDS = ("image_grid_thw", "video_grid_thw", "audio_feature_lengths", "video_second_per_grid")


def rope(fields: dict[str, list[Tensor]]) -> Tensor:
    images, videos, lengths, seconds = (torch.stack(fields[name]) for name in POSITION_FIELDS)
    positions, _ = subject().model.get_rope_index(token_ids()[None], images, videos, None, True, lengths, seconds)
    return positions


def test_a_prefix_may_end_anywhere_inside_the_span() -> None:
    cache, asked = new_cache(), request("r")
    with cache.lookup(asked, num_computed_tokens=0) as lookup:
        encode(cache, lookup)
    for computed in range(asked.num_tokens):
        with cache.lookup(asked, num_computed_tokens=computed) as lookup:
            found = merged(lookup)
            assert [len(lookup.metadata(name)) for name in POSITION_FIELDS] == [2, 2, 2, 2]
        torch.testing.assert_close(found[None], expected()["embeds"][:, computed:], rtol=1e-5, atol=1e-5)


def test_either_half_of_a_pair_may_be_stored_alone() -> None:
    cache = new_cache()
    first, second = request("first"), request("second", sounds="dubbed")
    with cache.lookup(first, num_computed_tokens=0) as lookup:
        encode(cache, lookup)
    with cache.lookup(second, num_computed_tokens=0) as lookup:
        statuses = {item.modality: lookup.status(index) for index, item in enumerate(second.items)}
        assert statuses == {
            "image": ItemStatus.STORED,
            "video": ItemStatus.STORED,
            "audio": ItemStatus.MISSING,
        }
        assert sorted(encode(cache, lookup)) == ["audio 0 dubbed", "audio 1 dubbed"]
        torch.testing.assert_close(merged(lookup)[None], expected()["embeds"], rtol=1e-5, atol=1e-5)


def test_these_comparisons_can_fail() -> None:
    """Sound behind the video instead of inside it, and positions of text, give another answer."""
    right = expected()
    video, sound = tokens_of("video").nonzero().flatten()[:8], tokens_of("audio").nonzero().flatten()[:8]
    behind = right["embeds"].clone()
    behind[0, torch.cat([video, sound]).sort().values] = right["embeds"][0, torch.cat([video, sound])]
    assert float((behind - right["embeds"]).abs().max()) > 0.1
    plain = torch.arange(len(token_ids())).expand(3, 1, -1)
    with torch.no_grad():
        for embeds, positions in ((behind, right["positions"]), (right["embeds"], plain)):
            output = subject().model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
            assert float((output.last_hidden_state - right["hidden"]).abs().max()) > 0.05
