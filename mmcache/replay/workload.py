"""What a workload is made of: turns of conversations, told by sizes and identities instead of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch

from mmcache.fields import FieldConfig, ItemFields
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange

__all__ = [
    "KEPT_BYTES",
    "PAYLOAD_BYTES_PER_ROW",
    "Clip",
    "Conversations",
    "Int32Array",
    "Serial",
    "Turn",
    "tokens_from",
]

Int32Array: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"

PAYLOAD_BYTES_PER_ROW = 4 * 1176 * 4
"""Processor output behind one embedding row of the Qwen2.5-VL family: four float32 patches of 1,176 values."""

KEPT_BYTES = 24
"""Metadata of each clip: one grid of three int64."""

_INT32 = np.dtype(np.int32)
_LAST_TOKEN = 2**31 - 1
_AHEAD = 1 << 14


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as `Turn`
class Clip:
    """An image, video or audio clip. Not to be changed.

    Attributes:
        identifier: equal for equal content.
        rows: embedding rows, and placeholder tokens.
        payload_bytes: bytes that the encoder reads.
        modality: "image", "video" or "audio".
    """

    identifier: str
    rows: int
    payload_bytes: int
    modality: str = "image"


@dataclass(slots=True)  # not frozen: one is made for every request, and that would take three times as long
class Turn:
    """One request of a workload. Not to be changed.

    Attributes:
        conversation: its name. The turns of one conversation run one after the other.
        token_ids: int32; the whole prompt, or what it adds where it `follows`.
        clips: (offset in `token_ids`, clip), by offset.
        time: seconds at which it arrives; None: as soon as there is room for it.
        output_tokens: tokens that the model generates. Those of a turn that is followed become part of the next prompt.
        follows: the prompt begins with everything of the conversation's turn before, its output included.
        last: no later turn follows this one.
        number: number of the turn in its conversation, from 1.
        salt: the request's cache salt.
    """

    conversation: str
    token_ids: Int32Array
    clips: tuple[tuple[int, Clip], ...] = ()
    time: float | None = None
    output_tokens: int = 0
    follows: bool = False
    last: bool = True
    number: int = 1
    salt: str | None = None


class Serial:
    """Token ids that no other call gave, until the 31 bits are used up and it starts anew."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._ahead = np.empty(0, np.int32)  # made in one piece: one array for each call would take ten times as long
        self._taken = 0  # of these

    def __call__(self, count: int) -> Int32Array:
        """The next ids, int32 `[count]`, read-only."""
        first = self._taken
        last = first + count
        if last > len(self._ahead):
            made = max(count, _AHEAD)
            if self._next + made > _LAST_TOKEN:
                self._next = 0
            self._ahead = np.arange(self._next, self._next + made, dtype=np.int32)
            self._ahead.flags.writeable = False
            self._next += made
            first, last = 0, count
        self._taken = last
        return self._ahead[first:last]


def tokens_from(*parts: Int32Array | Clip) -> tuple[Int32Array, tuple[tuple[int, Clip], ...]]:
    """Text and clips in a row as (token ids, clips with offsets). A clip's own tokens are zeros."""
    clips: list[tuple[int, Clip]] = []
    texts: list[tuple[int, Int32Array]] = []
    length = 0
    for part in parts:
        if isinstance(part, Clip):
            clips.append((length, part))
            length += part.rows
        else:
            texts.append((length, part))
            length += len(part)
    tokens = np.zeros(length, _INT32)
    for offset, text in texts:
        tokens[offset : offset + len(text)] = text
    return tokens, tuple(clips)


class Conversations:
    """Requests as an engine would see them: a turn that follows extends the request of the turn before.

    Only conversations that go on are kept. All numbers of a request that grow with its items are carried along, so that
    a turn costs what it adds.
    """

    def __init__(self) -> None:
        self._open: dict[str, MultimodalRequest] = {}
        self._count = 0

    def __len__(self) -> int:
        """Number of conversations that are kept."""
        return len(self._open)

    def request(self, turn: Turn) -> MultimodalRequest:
        """The request of a turn."""
        known = self._open.get(turn.conversation) if turn.follows else None
        if known is not None:
            known.extend(turn.token_ids, _items(turn, known.num_tokens))
            request = known
        else:
            self._count += 1
            request = MultimodalRequest(str(self._count), turn.token_ids, _items(turn, 0), cache_salt=turn.salt)
        if turn.last:
            self._open.pop(turn.conversation, None)
        elif known is None:
            self._open[turn.conversation] = request
        return request


def _items(turn: Turn, start: int) -> Sequence[MultimodalItem]:
    return [
        MultimodalItem(
            clip.modality,
            _fields(clip.modality, clip.payload_bytes),
            PlaceholderRange(start + offset, clip.rows),
            clip.identifier,
        )
        for offset, clip in turn.clips
    ]


@lru_cache(maxsize=65536)
def _fields(modality: str, payload_bytes: int) -> ItemFields:
    """Fields of that size, without memory: the payload lies on the meta device."""
    return ItemFields(
        {
            "pixel_values": torch.empty(payload_bytes, dtype=torch.uint8, device="meta"),
            "grid": torch.zeros(KEPT_BYTES // 8, dtype=torch.int64),
        },
        {
            "pixel_values": FieldConfig.batched(modality),
            "grid": FieldConfig.batched(modality, keep_on_cpu=True),
        },
    )
