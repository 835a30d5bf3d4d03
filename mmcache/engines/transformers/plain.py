"""The same chat without a cache: the model's own forward pass, everything preprocessed, moved and encoded each time.

This is what the cached run is compared with, so it shares as little with it as possible: the processor sees all media
of a prompt at once, and merging, positions and masks are left to transformers. `chunk` cuts the prefill instead and
shows how much of a difference is mere rounding: the noise floor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmcache.engines.chat import Message, media_of
from mmcache.engines.transformers.adapter import Adapter
from mmcache.engines.transformers.prompt import batch_of, build_prompt, row_kinds
from mmcache.fields import ItemFields, join_fields, split_fields, value_bytes
from mmcache.items import MultimodalItem, PlaceholderRange

__all__ = ["Generation", "greedy_token", "run_plain", "to_device"]


@dataclass(slots=True)
class Generation:
    """What a model answered.

    Attributes:
        tokens: the generated tokens, greedily chosen among all but special ones.
        logits: float32 `[vocabulary]` before each of them, on the CPU.
        prompt_tokens: length of the prompt.
        ttft: seconds from the messages to the first token.
        bytes_moved: bytes of all tensors that the encoder and the positions were given.
        preprocessed, encoder_runs: media that were preprocessed, and that ran through the encoder.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    prompt_tokens: int = 0
    ttft: float = 0.0
    bytes_moved: int = 0
    preprocessed: int = 0
    encoder_runs: int = 0

    def add(self, logits: Tensor, token: int) -> None:
        """Record one decoded token and the logits it was chosen by."""
        self.logits.append(logits.cpu())
        self.tokens.append(token)


def greedy_token(adapter: Adapter, logits: Tensor) -> int:
    """The likeliest token that is not special: random weights would else emit placeholders."""
    allowed = logits.clone()
    allowed[adapter.special_ids] = float("-inf")
    return int(allowed.argmax())


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """All tensors of a batch on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


@torch.no_grad()
def run_plain(
    adapter: Adapter, messages: Sequence[Message], *, max_new_tokens: int = 4, chunk: int | None = None
) -> Generation:
    """Answer a chat without any cache.

    Args:
        adapter: of the model.
        messages: the whole chat.
        max_new_tokens: how many tokens to generate, at least 1.
        chunk: prefill in windows of so many tokens; None: at once, by the model's own forward pass.
    """
    started = time.perf_counter()
    media = media_of(messages)
    for part in media:
        adapter.check(part)
    batch = batch_of(adapter, media)
    items = split_fields(batch, adapter.configs(batch)) if media else {}
    queues = {modality: iter(fields) for modality, fields in items.items()}
    fields = [next(queues[part.modality]) for part in media]
    tokens, ranges = build_prompt(adapter, messages, fields)
    ids = torch.from_numpy(tokens).long()
    result = Generation(prompt_tokens=len(ids), preprocessed=len(media), encoder_runs=len(media))
    result.bytes_moved = sum(value_bytes(value) for item in fields for value in item.values())
    if chunk is None:
        kinds = row_kinds(len(ids), media, ranges)
        arguments = to_device(adapter.stock_inputs(batch, ids[None], kinds[None]), adapter.device)
        output = adapter.model(**arguments, use_cache=True)
        logits, past = output.logits[0, -1].float(), output.cache
        following = _next_position(adapter, ids, media, fields, ranges)
    else:
        logits, past, following = _prefill_in_chunks(adapter, ids, media, fields, ranges, chunk)
    token = greedy_token(adapter, logits)
    result.ttft = time.perf_counter() - started
    result.add(logits, token)
    for _ in range(max_new_tokens - 1):
        step = torch.tensor([[token]], device=adapter.device)
        where = torch.full((following[0], 1, 1), following[1], device=adapter.device)
        following = (following[0], following[1] + 1)
        zeros = [torch.zeros_like(adapter.embed(step))] * (adapter.levels - 1)
        hidden = adapter.decode(adapter.embed(step), where, past, None, zeros)
        logits = adapter.logits(hidden[0, -1])
        token = greedy_token(adapter, logits)
        result.add(logits, token)
    return result


def _positions(
    adapter: Adapter,
    ids: Tensor,
    media: Sequence[Any],
    fields: Sequence[ItemFields],
    ranges: Sequence[PlaceholderRange],
) -> Tensor:
    made = [
        MultimodalItem(part.modality, own, placeholder, f"item {index}")
        for index, (part, own, placeholder) in enumerate(zip(media, fields, ranges))
    ]
    return adapter.positions(ids, made, lambda name: [own[name] for own in fields if name in own])  # type: ignore[misc]


def _next_position(
    adapter: Adapter,
    ids: Tensor,
    media: Sequence[Any],
    fields: Sequence[ItemFields],
    ranges: Sequence[PlaceholderRange],
) -> tuple[int, int]:
    positions = _positions(adapter, ids, media, fields, ranges)
    return positions.shape[0], int(positions.max()) + 1


def _prefill_in_chunks(
    adapter: Adapter,
    ids: Tensor,
    media: Sequence[Any],
    fields: Sequence[ItemFields],
    ranges: Sequence[PlaceholderRange],
    chunk: int,
) -> tuple[Tensor, Any, tuple[int, int]]:
    from transformers import DynamicCache

    embeds = adapter.embed(ids[None].to(adapter.device)).clone()
    levels = [torch.zeros_like(embeds) for _ in range(adapter.levels - 1)]
    for modality in dict.fromkeys(part.modality for part in media):
        own = [index for index, part in enumerate(media) if part.modality == modality]
        joined = to_device(dict(join_fields([fields[index] for index in own])), adapter.device)
        rows = adapter.encode(modality, joined, [ranges[index].num_embeds for index in own])
        for index, item_rows in zip(own, rows):
            mask = ranges[index].is_embed
            where = torch.arange(ranges[index].length)[mask if mask is not None else slice(None)] + ranges[index].offset
            for target, part in zip([embeds, *levels], torch.split(item_rows, adapter.hidden_size, dim=-1)):
                target[0, where] = part.to(target.dtype)
    positions = _positions(adapter, ids, media, fields, ranges).to(adapter.device)
    past = DynamicCache(config=adapter.model.config)
    hidden = embeds
    for start in range(0, len(ids), chunk):
        window = slice(start, start + chunk)
        cut = [level[:, window] for level in levels]
        hidden = adapter.decode(embeds[:, window], positions[:, None, window], past, None, cut)
    return adapter.logits(hidden[0, -1]), past, (positions.shape[0], int(positions.max()) + 1)
