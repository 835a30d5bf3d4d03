"""Small chats for the tiny models, and a scheduler loop written against the public API only.

The loop is a second, independent user of the cache beside the engine: it keeps one transformers cache a conversation
and crops it to what the cache's own prefix index matches. It can be told to make a mistake, so that the tests can show
that the comparison with the plain run notices.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mmcache.cache import CacheConfig, MultimodalCache
from mmcache.engines.chat import Audio, Frames, Media, Message, Photo, encode_wav, media_of
from mmcache.engines.transformers import Adapter, Generation, run_plain, tiny_adapter
from mmcache.engines.transformers.plain import greedy_token
from mmcache.engines.transformers.prompt import build_prompt
from mmcache.fields import split_fields
from mmcache.hashing import ContentHasher
from mmcache.items import MultimodalItem, MultimodalRequest
from mmcache.transfer import encoder_inputs

FAMILY_NAMES = ("qwen2_5_vl", "llava", "idefics3", "qwen2_audio", "qwen3_vl")
TOLERANCE = 1e-4


@functools.cache
def adapter_of(family: str) -> Adapter:
    torch.set_num_threads(1)
    return tiny_adapter(family, small_images=True)


@functools.cache
def photo(seed: int, width: int = 100, height: int = 70) -> Photo:
    """A picture of its own for every seed, with structure: random weights see little in pure noise."""
    from PIL import Image

    random = np.random.default_rng(seed)
    coarse = random.integers(0, 255, (5, 7, 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return Photo(buffer.getvalue(), f"picture {seed}")


@functools.cache
def sound(seed: int, seconds: float = 0.7) -> Audio:
    random = np.random.default_rng(seed)
    times = np.arange(int(16000 * seconds)) / 16000
    tones = sum(np.sin(2 * np.pi * f * times) for f in random.uniform(100, 4000, 5)) / 6
    return Audio(encode_wav(tones.astype(np.float32), 16000), f"sound {seed}")


@functools.cache
def clip(seed: int, frames: int = 6) -> Frames:
    return Frames(tuple(photo(1000 * seed + index, 84, 56).data for index in range(frames)), 2.0, f"clip {seed}")


def medium(family: str, seed: int) -> Media:
    """A medium of the kind that the family takes, of a size of its own."""
    if family == "qwen2_audio":
        return sound(seed, 0.5 + 0.2 * (seed % 4))
    return photo(seed, 90 + 17 * (seed % 3), 60 + 13 * (seed % 4))


def conversation(family: str, turns: int = 3, first: int = 0) -> list[list[Message]]:
    """The prompts of a chat that grows by one or two media a turn; its third turn sends one medium twice again."""
    history = [Message("system", ("You look closely.",))]
    prompts = []
    for turn in range(turns):
        parts: list[str | Media] = [f"Turn {turn}: ", medium(family, first + 2 * turn), " what is it? "]
        if turn % 2:
            parts += [medium(family, first + 2 * turn + 1), "and this?"]
        if turn % 3 == 2:
            parts += [medium(family, first), "again", medium(family, first), "and again"]
        history = [*history, Message("user", tuple(parts))]
        prompts.append(history)
        history = [*history, Message("assistant", (f"It is number {turn}.",))]
    return prompts


def largest_difference(one: Generation, other: Generation) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, other.logits, strict=True))


@functools.cache
def plain(family: str, messages: tuple[Message, ...]) -> Generation:
    return run_plain(adapter_of(family), messages, max_new_tokens=4)


@functools.cache
def noise_floor(family: str, messages: tuple[Message, ...]) -> float:
    """How far the plain run is from itself when its prefill is cut into chunks: mere rounding."""
    chunked = [run_plain(adapter_of(family), messages, max_new_tokens=4, chunk=chunk) for chunk in (7, 64)]
    return max(largest_difference(plain(family, messages), other) for other in chunked)


def assert_equal_to_plain(family: str, messages: Sequence[Message], found: Generation) -> None:
    expected = plain(family, tuple(messages))
    assert found.tokens == expected.tokens
    difference = largest_difference(expected, found)
    assert difference <= TOLERANCE
    assert difference <= 5 * noise_floor(family, tuple(messages))


class ChatLoop:
    """The scheduler loop of one conversation, over the public API of `MultimodalCache`.

    `mistake` is one of the mistakes of the class attribute, or None.
    """

    MISTAKES = (
        "picture swapped",
        "positions of the window alone",
        "text-only positions",
        "head rows for tail rows",
        "covered grid dropped",
    )

    def __init__(self, family: str, mistake: str | None = None) -> None:
        self.adapter = adapter_of(family)
        self.mistake = mistake
        self.hasher = ContentHasher()
        self.cache = MultimodalCache(CacheConfig(capacity_bytes=8 << 20, namespace=f"tests {family}"))
        self.past: list[tuple[Tensor, Tensor]] = []
        self.turns = 0
        self.prefix_tokens = 0

    def request(self, messages: Sequence[Message]) -> MultimodalRequest:
        self.turns += 1
        made = []
        for part in media_of(messages):
            batch = self.adapter.process([part])
            (fields,) = split_fields(batch, self.adapter.configs(batch))[part.modality]
            made.append((part, fields))
        tokens, ranges = build_prompt(self.adapter, messages, [fields for _, fields in made])
        items = [
            MultimodalItem(part.modality, fields, placeholder, self.identifier(part, fields))
            for (part, fields), placeholder in zip(made, ranges)
        ]
        return MultimodalRequest(f"turn {self.turns}", tokens, items)

    def identifier(self, part: Media, fields: object) -> str:
        if self.mistake == "picture swapped":  # identity that does not see the picture, as token ids alone do not
            return self.hasher.digest(part.modality)
        return self.hasher.digest(part)

    @torch.no_grad()
    def turn(self, messages: Sequence[Message], *, chunk: int | None = None, computed: int | None = None) -> Generation:
        """Answer a chat; `computed` overrides the prefix index, for prefixes that end anywhere."""
        from transformers import DynamicCache

        adapter, result = self.adapter, Generation()
        request = self.request(messages)
        prompt = request.num_tokens
        past, following = None, 0
        while len(result.tokens) < 4:
            with self.cache.lookup(request, num_computed_tokens=computed, num_scheduled_tokens=chunk) as lookup:
                start, end = lookup.window
                if past is None:
                    self.prefix_tokens = start
                    data = [(keys[:, :, :start], values[:, :, :start]) for keys, values in self.past] if start else None
                    past = DynamicCache(data, config=adapter.model.config)
                    positions = self.positions(request, lookup)
                    following = int(positions.max()) + 1
                for batch in encoder_inputs([lookup], adapter.device):
                    counts = [request.items[index].placeholder.num_embeds for _, index in batch.items]
                    rows = adapter.encode(batch.modality, batch.kwargs, counts)
                    if self.mistake == "head rows for tail rows":
                        rows = [self.turned(part, request, index, start) for part, (_, index) in zip(rows, batch.items)]
                    self.cache.insert(lookup, {index: part for part, (_, index) in zip(rows, batch.items)})
                    result.encoder_runs += len(rows)
                embeds = adapter.embed(torch.from_numpy(request.token_ids[start:end].astype(np.int64)))
                levels = [torch.zeros_like(embeds) for _ in range(adapter.levels - 1)]
                lookup.merge_into(embeds, *levels)
            where = positions[:, start:end]
            if start >= prompt:
                where = torch.full((positions.shape[0], 1), following + start - prompt)
            elif self.mistake == "positions of the window alone":
                where = where - where.min()
            hidden = adapter.decode(embeds[None], where[:, None], past, None, [level[None] for level in levels])
            self.cache.commit(request, end)
            computed = end
            if end == request.num_tokens:
                logits = adapter.logits(hidden[0, -1])
                token = greedy_token(adapter, logits)
                result.add(logits, token)
                request.extend([token])
        self.past = [(layer.keys, layer.values) for layer in past.layers]
        self.cache.finish(request)
        return result

    def positions(self, request: MultimodalRequest, lookup: object) -> Tensor:
        tokens = torch.from_numpy(request.token_ids.astype(np.int64))
        if self.mistake == "text-only positions":
            return torch.arange(len(tokens)).expand(self.adapter.positions(tokens, [], list).shape[0], -1)
        items, metadata = request.items, lookup.metadata
        if self.mistake == "covered grid dropped":
            needed = [i for i, item in enumerate(items) if item.placeholder.end_row > lookup.window[0]]
            items = [items[i] for i in needed]
            metadata = lambda field: [request.items[i].fields[field] for i in needed]  # noqa: E731
        return self.adapter.positions(tokens, items, metadata)

    @staticmethod
    def turned(rows: Tensor, request: MultimodalRequest, index: int, start: int) -> Tensor:
        """The rows of a half-covered item, so ordered that its head lies where its tail belongs."""
        placeholder = request.items[index].placeholder
        covered, _ = placeholder.embed_rows(
            min(max(0, start - placeholder.offset), placeholder.length), placeholder.length
        )
        return rows.roll(covered, 0) if covered else rows
