"""Any trace as turns: what kind it is, is seen from its first line or from its name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import xxhash

from mmcache.engines.chat import Audio, Media, Photo
from mmcache.errors import ConfigError, MediaError, TraceError
from mmcache.replay.chat import ROLES, ChatTurn, read_chat
from mmcache.replay.lines import OnBadLine, json_object, read_lines
from mmcache.replay.mooncake import read_mooncake
from mmcache.replay.servegen import is_servegen, read_servegen
from mmcache.replay.workload import PAYLOAD_BYTES_PER_ROW, Clip, Int32Array, Turn, tokens_from

__all__ = ["kind_of", "read_trace"]

_EDGE = 28  # pixels of a row's edge in the Qwen2.5-VL family: 14-pixel patches, merged two by two
_LEAST_ROWS, _MOST_ROWS = 4, 16384
_AUDIO_BYTES_PER_ROW = 16000 * 2 // 25  # 16-bit samples at 16 kHz, 25 rows a second

# What stands around text and media in a prompt, one token each. Negative ids of that size are no four bytes of UTF-8.
_MARKS = {name: -1 - place for place, name in enumerate(("start", "end", "newline", "open", "close", *ROLES))}


def read_trace(
    path: str | Path,
    *,
    image_share: float = 0.0,
    reuse: float = 0.0,
    seed: int = 0,
    on_bad: OnBadLine = None,
) -> Iterator[Turn]:
    """Read a trace as turns: chat messages (JSON lines), Mooncake's block ids (JSON lines), or ServeGen clients.

    JSON lines may be gzipped. Chat messages are laid out as in the Qwen2.5-VL family: images are resized to whole rows
    of 28 x 28 pixels, 4 to 16,384 of them, markers stand around each message and image, and the prompt ends where the
    assistant's answer begins. Text counts one token for four bytes.

    Args:
        path: a file, or a folder of ServeGen clients.
        image_share: of Mooncake's blocks, the share that is taken as images.
        reuse: of ServeGen's images, the share that was seen before.
        seed: of everything that is drawn.
        on_bad: told of each bad line, which is skipped then; None: the first bad line ends the reading.

    Raises:
        TraceError: the file cannot be read or is of no known kind; names the line and what is wrong with it.
    """
    path = Path(path)
    kind = kind_of(path, on_bad)
    if kind == "servegen":
        return read_servegen(path, seed=seed, reuse=reuse, on_bad=on_bad)
    if kind == "mooncake":
        return read_mooncake(path, image_share=image_share, seed=seed, on_bad=on_bad)
    return _chat_turns(read_chat(path, on_bad))


def kind_of(path: Path, on_bad: OnBadLine = None) -> str:
    """ "servegen" by the name, else "mooncake" or "chat" by the first line that can be read.

    Bad lines before it are reported by whoever reads the trace.

    Raises:
        TraceError: the file cannot be read or is of no known kind; without `on_bad`, its first line is a bad one.
    """
    if is_servegen(path):
        return "servegen"
    for number, line in read_lines(path):
        try:
            record = json_object(path, number, line)
        except TraceError:
            if on_bad is None:
                raise
            continue
        if "hash_ids" in record:
            return "mooncake"
        if "messages" in record:
            return "chat"
        if on_bad is None:
            raise TraceError(
                "is of no known kind",
                path=str(path),
                line=number,
                expected="messages (a chat) or hash_ids (a Mooncake trace)",
                found=", ".join(sorted(map(str, record))[:8]) or "an empty object",
            )
    raise TraceError("holds no requests", path=str(path))


def _chat_turns(turns: Iterator[ChatTurn]) -> Iterator[Turn]:
    for turn in turns:
        parts: list[Int32Array | Clip] = []
        for message in turn.messages:
            parts.append(_marks("start", message.role, "newline"))
            for part in message.parts:
                parts += [_text(part)] if isinstance(part, str) else [_marks("open"), _clip(part), _marks("close")]
            parts.append(_marks("end", "newline"))
        parts.append(_marks("start", "assistant", "newline"))
        tokens, clips = tokens_from(*parts)
        number = sum(message.role == "user" for message in turn.messages)
        yield Turn(turn.conversation, tokens, clips, turn.timestamp, number=max(1, number))


def _marks(*names: str) -> Int32Array:
    return np.array([_MARKS[name] for name in names], np.int32)


def _text(text: str) -> Int32Array:
    data = text.encode()
    return np.frombuffer(data + bytes(-len(data) % 4), np.dtype("<i4")).astype(np.int32)


def _clip(media: Media) -> Clip:
    if isinstance(media, Photo):
        rows = _rows(*_image_size(media))
    elif isinstance(media, Audio):
        rows = max(1, len(media.data) // _AUDIO_BYTES_PER_ROW)
    else:
        raise MediaError("a chat trace has images and audio clips", found=type(media).__name__)
    return Clip(xxhash.xxh3_128_hexdigest(media.data), rows, rows * PAYLOAD_BYTES_PER_ROW, media.modality)


def _rows(width: int, height: int) -> int:
    """Rows of an image: edges are rounded to whole rows, and scaled down or up where these are too many or too few."""
    across, down = max(1, round(width / _EDGE)), max(1, round(height / _EDGE))
    if not _LEAST_ROWS <= across * down <= _MOST_ROWS:
        least = across * down < _LEAST_ROWS
        whole = math.ceil if least else math.floor
        scale = math.sqrt((_LEAST_ROWS if least else _MOST_ROWS) / (width * height))
        across, down = max(1, whole(width * scale)), max(1, whole(height * scale))
    return across * down


def _image_size(photo: Photo) -> tuple[int, int]:
    """Width and height in pixels, from the file's head."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("sizes of a chat's images are read with Pillow: pip install mmcache[images]") from error
    try:
        with Image.open(BytesIO(photo.data)) as image:
            return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaError(f"{photo.source}: the image cannot be read: {error}") from error
