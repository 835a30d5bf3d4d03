"""From chat messages to tokens and placeholder ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcache.engines.chat import Media, Message
from mmcache.engines.transformers.adapter import Adapter
from mmcache.fields import ItemFields
from mmcache.items import PlaceholderRange

__all__ = ["batch_of", "build_prompt", "row_kinds"]


def build_prompt(
    adapter: Adapter, messages: Sequence[Message], fields: Sequence[ItemFields]
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], list[PlaceholderRange]]:
    """Tokens of a chat, ready for the assistant's answer, and the range of each of its media.

    A prompt is a prefix of the prompt of the next turn of its conversation.

    Args:
        adapter: of the model.
        messages: the chat so far.
        fields: what the processor made of each medium, in order.
    """
    start, end = adapter.token("<|im_start|>"), adapter.token("<|im_end|>")
    newline = adapter.text_ids("\n")
    tokens: list[int] = []
    ranges: list[PlaceholderRange] = []
    for message in messages:
        tokens += [start, *adapter.text_ids(message.role), *newline]
        for part in message.parts:
            if isinstance(part, str):
                tokens += adapter.text_ids(part)
                continue
            item = adapter.item_tokens(fields[len(ranges)])
            tokens += item.before
            ranges.append(PlaceholderRange(len(tokens), len(item.body), item.is_embed))
            tokens += item.body
            tokens += item.after
        tokens += [end, *newline]
    tokens += [start, *adapter.text_ids("assistant"), *newline]
    return np.asarray(tokens, np.int32), ranges


def row_kinds(num_tokens: int, media: Sequence[Media], ranges: Sequence[PlaceholderRange]) -> Tensor:
    """int32 `[num_tokens]`: 1 where a token receives a row of an image or audio clip, 2 of a video, else 0."""
    kinds = torch.zeros(num_tokens, dtype=torch.int32)
    for part, placeholder in zip(media, ranges):
        for start, length in placeholder.runs:
            first = placeholder.offset + start
            kinds[first : first + length] = 2 if part.modality == "video" else 1
    return kinds


def batch_of(adapter: Adapter, media: Sequence[Media]) -> dict[str, Any]:
    """What the processor makes of media of several modalities, each modality in one call."""
    batch: dict[str, Any] = {}
    for modality in dict.fromkeys(part.modality for part in media):
        batch.update(adapter.process([part for part in media if part.modality == modality]))
    return batch
