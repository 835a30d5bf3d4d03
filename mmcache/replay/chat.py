"""Chat traces: one request a line, in the OpenAI chat-messages format, with the whole history every time.

A line is a JSON object with `messages`, and optionally `conversation` (a name) and `timestamp` (seconds). Content is
text or a list of parts: `text`, `image_url` (a base64 data URI, or a path relative to the trace) and `input_audio`
(base64 WAV). Nothing is ever downloaded. Other fields are ignored.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcache.engines.chat import Audio, Media, Message, Photo
from mmcache.errors import TraceError

__all__ = ["DEMO_TRACE", "ChatTurn", "read_chat"]

DEMO_TRACE = Path(__file__).parent / "demo" / "chat.jsonl"
"""The trace that ships with mmcache."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request of a trace.

    Attributes:
        conversation: name of the conversation; of a line without one, `"line N"`.
        timestamp: seconds, or None.
        messages: the whole chat so far.
        line: number of the line in the trace, from 1.
    """

    conversation: str
    timestamp: float | None
    messages: tuple[Message, ...]
    line: int


class _Line:
    """Where a complaint is about: raises with the file, the line and the part of it."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number

    def error(self, message: str, **details: Any) -> TraceError:
        return TraceError(message, path=str(self.path), line=self.number, **details)


def read_chat(path: str | Path) -> Iterator[ChatTurn]:
    """Read a chat trace line by line, plain or gzipped; blank lines are skipped.

    Images are read but not decoded.

    Raises:
        TraceError: names the file, the line and what is wrong with it.
    """
    path = Path(path)
    number = 0
    try:
        with path.open("rb") as raw:
            # A gzip file says so in its first two bytes, whatever its name.
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            lines = gzip.GzipFile(fileobj=raw) if packed else raw
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _turn(line, _Line(path, number))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TraceError(f"cannot be read: {reason}", path=str(path), line=number + 1 if number else None) from error


def _turn(raw: bytes, line: _Line) -> ChatTurn:
    try:
        record = json.loads(raw.decode("utf-8-sig" if line.number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise line.error(f"is not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise line.error(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise line.error("a request is a JSON object", found=type(record).__name__)
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise line.error("a request has a non-empty list of messages", field="messages", found=_brief(messages))
    conversation = record.get("conversation", f"line {line.number}")
    if isinstance(conversation, bool) or not isinstance(conversation, (str, int)) or conversation == "":
        raise line.error("a conversation is named by text", field="conversation", found=_brief(conversation))
    timestamp = record.get("timestamp")
    if timestamp is not None:
        number = isinstance(timestamp, (int, float)) and not isinstance(timestamp, bool)
        if not number or not math.isfinite(_float(timestamp)):
            raise line.error("a timestamp is a finite number of seconds", field="timestamp", found=_brief(timestamp))
        timestamp = float(timestamp)
    read = tuple(_message(message, f"message {index}", line) for index, message in enumerate(messages))
    return ChatTurn(str(conversation), timestamp, read, line.number)


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _message(message: object, place: str, line: _Line) -> Message:
    if not isinstance(message, dict):
        raise line.error(f"{place} is not a JSON object", found=_brief(message))
    role = message.get("role")
    if role not in _ROLES:
        raise line.error(f"{place} has an unknown role", expected=f"one of {', '.join(_ROLES)}", found=_brief(role))
    content = message.get("content")
    if content is None and role == "assistant":
        return Message(role, ())  # a turn of tool calls alone
    if isinstance(content, str):
        return Message(role, (_text(content, place, line),))
    if not isinstance(content, list):
        raise line.error(f"{place} has neither text nor parts as its content", found=_brief(content))
    return Message(role, tuple(_part(part, f"{place}, part {index}", line) for index, part in enumerate(content)))


def _part(part: object, place: str, line: _Line) -> str | Media:
    if not isinstance(part, dict):
        raise line.error(f"{place} is not a JSON object", found=_brief(part))
    kind = part.get("type")
    if kind == "text":
        return _text(part.get("text"), place, line)
    if kind == "image_url":
        image = part.get("image_url")
        return _image(image.get("url") if isinstance(image, Mapping) else image, place, line)
    if kind == "input_audio":
        return _audio(part.get("input_audio"), place, line)
    raise line.error(f"{place} has an unknown type", expected="text, image_url or input_audio", found=_brief(kind))


def _text(text: object, place: str, line: _Line) -> str:
    if not isinstance(text, str):
        raise line.error(f"{place} has no text", found=_brief(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise line.error(f"{place} is not valid Unicode: {error}") from error
    return text


def _image(url: object, place: str, line: _Line) -> Photo:
    if not isinstance(url, str) or not url:
        raise line.error(f"{place} has no image url", found=_brief(url))
    if url[:5].lower() == "data:":
        header, comma, body = url[5:].partition(",")
        media_type, *options = header.split(";")
        if not comma or "base64" not in [option.strip().lower() for option in options]:
            raise line.error(f"{place} is a broken data URI", expected="data:image/...;base64,...", found=_brief(url))
        if not media_type.lower().startswith("image/"):
            raise line.error(f"{place} is a data URI of another type", expected="image/...", found=_brief(media_type))
        return Photo(_base64(body, place, line), f"{place} (data URI, {media_type})")
    if url[:7].lower() == "http://" or url[:8].lower() == "https://":
        raise line.error(
            f"{place} is a web address, and nothing is downloaded",
            expected="a data URI, or a path relative to the trace",
            found=_brief(url),
        )
    if _SCHEME.match(url) or Path(url).is_absolute():
        raise line.error(f"{place} is no path relative to the trace", found=_brief(url))
    file = line.path.parent / url
    try:
        # Not a device, pipe or folder, which could be endless or block.
        if not file.is_file():
            raise line.error(f"{place}: there is no such image file", found=str(file))
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise line.error(f"{place} cannot be read: {error}", found=_brief(url)) from error
    if not data:
        raise line.error(f"{place}: the image file is empty", found=str(file))
    return Photo(data, f"{place} ({url})")


def _audio(audio: object, place: str, line: _Line) -> Audio:
    if not isinstance(audio, Mapping) or not isinstance(audio.get("data"), str):
        raise line.error(f"{place} has no audio data", found=_brief(audio))
    if audio.get("format", "wav") != "wav":
        raise line.error(f"{place} is audio of an unknown format", expected="wav", found=_brief(audio.get("format")))
    return Audio(_base64(audio["data"], place, line), f"{place} (wav)")


def _base64(text: str, place: str, line: _Line) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise line.error(f"{place} is not base64: {error}", found=_brief(text)) from error
    if not data:
        raise line.error(f"{place} holds no bytes")
    return data


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
