"""Mooncake traces: requests told by the ids of their 512-token prefix blocks.

A line is a JSON object with `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`; equal
ids stand for equal blocks after equal prefixes. Some blocks can be taken as images: which ones a seeded rule says, so
that a block is an image wherever it occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mmcache.errors import TraceError
from mmcache.replay.lines import OnBadLine, brief, finite, json_object, parsed
from mmcache.replay.workload import PAYLOAD_BYTES_PER_ROW, Clip, Turn

__all__ = ["BLOCK_TOKENS", "read_mooncake"]

BLOCK_TOKENS = 512
_MOST_ID = (2**31 - 1) // BLOCK_TOKENS - 1
_OFFSETS = np.arange(BLOCK_TOKENS, dtype=np.int64)


def read_mooncake(
    path: str | Path, *, image_share: float = 0.0, seed: int = 0, on_bad: OnBadLine = None
) -> Iterator[Turn]:
    """Read a Mooncake trace line by line.

    Args:
        path: the trace, plain or gzipped.
        image_share: share of the whole blocks that are taken as images of 512 rows each.
        seed: of the rule that says which.
        on_bad: told of each line that is skipped; None: the first bad line ends the reading.

    Raises:
        TraceError: names the file, the line and what is wrong with it.
    """
    path = Path(path)
    key = seed.to_bytes(8, "little", signed=True)
    most = round(image_share * 2**32)

    def is_image(block: int) -> bool:
        digest = blake2b(block.to_bytes(8, "little"), digest_size=4, key=key).digest()
        return int.from_bytes(digest, "little") < most

    def turn(number: int, line: bytes) -> Turn:
        record = json_object(path, number, line)
        blocks, length = _blocks(record, path, number)
        tokens = (np.asarray(blocks, np.int64)[:, None] * BLOCK_TOKENS + _OFFSETS).ravel()[:length].astype(np.int32)
        clips: list[tuple[int, Clip]] = []
        if most:
            whole = blocks[: length // BLOCK_TOKENS]
            clips = [(i * BLOCK_TOKENS, _clip(block)) for i, block in enumerate(whole) if is_image(block)]
        milliseconds = _number(record, "timestamp", path, number)
        output = int(_number(record, "output_length", path, number))
        return Turn(f"line {number}", tokens, tuple(clips), milliseconds / 1000, output)

    return parsed(path, turn, on_bad)


def _clip(block: int) -> Clip:
    return Clip(f"block {block}", BLOCK_TOKENS, BLOCK_TOKENS * PAYLOAD_BYTES_PER_ROW)


def _blocks(record: dict[str, Any], path: Path, number: int) -> tuple[list[int], int]:
    blocks = record.get("hash_ids")
    if not isinstance(blocks, list) or not blocks or not all(type(b) is int and 0 <= b <= _MOST_ID for b in blocks):
        raise TraceError(
            "a request names its blocks",
            path=str(path),
            line=number,
            field="hash_ids",
            expected=f"integers from 0 to {_MOST_ID}",
            found=brief(blocks),
        )
    length = int(_number(record, "input_length", path, number))
    if not (len(blocks) - 1) * BLOCK_TOKENS < length <= len(blocks) * BLOCK_TOKENS:
        raise TraceError(
            f"the blocks of {BLOCK_TOKENS} tokens hold the prompt",
            path=str(path),
            line=number,
            field="input_length",
            expected=f"{(len(blocks) - 1) * BLOCK_TOKENS + 1} to {len(blocks) * BLOCK_TOKENS} for {len(blocks)} blocks",
            found=length,
        )
    return blocks, length


def _number(record: dict[str, Any], field: str, path: Path, line: int) -> float:
    value = finite(record.get(field))
    if value is None or value < 0:
        raise TraceError(
            f"{field} is a number >= 0", path=str(path), line=line, field=field, found=brief(record.get(field))
        )
    return value
