"""Chat traces: one request a line, in the OpenAI chat-messages format, with the whole history every time.

A line is a JSON object with `messages`, and optionally `conversation` (a name) and `timestamp` (seconds). Where no
conversation is named, a line that begins with all messages of an earlier one goes on from it. Content is text or a list
of parts: `text`, `image_url` (a base64 data URI, or a path relative to the trace) and `input_audio` (base64 WAV).
Nothing is ever downloaded. Other fields are ignored.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcache.engines.chat import Audio, Media, Message, Photo
from mmcache.errors import TraceError
from mmcache.replay.lines import OnBadLine, brief, finite, json_object, parsed

__all__ = ["DEMO_TRACE", "ROLES", "ChatTurn", "read_chat"]

DEMO_TRACE = Path(__file__).parent / "demo" / "chat.jsonl"
"""The trace that ships with mmcache."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_UNNAMED = 1 << 16  # conversations without a name that may go on
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request of a trace.

    Attributes:
        conversation: its name; where no line names it, `"line N"` after its first.
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


def read_chat(path: str | Path, on_bad: OnBadLine = None) -> Iterator[ChatTurn]:
    """Read a chat trace line by line, plain or gzipped; blank lines are skipped.

    Images are read but not decoded.

    Args:
        path: the trace.
        on_bad: told of each line that cannot be read, which is skipped then; None ends the reading there.

    Raises:
        TraceError: names the file, the line and what is wrong with it.
    """
    path = Path(path)
    unnamed = _Unnamed()
    return parsed(path, lambda number, line: _turn(line, _Line(path, number), unnamed), on_bad)


class _Unnamed:
    """The conversations of lines that name none, by what was said so far."""

    def __init__(self) -> None:
        self._by_messages: OrderedDict[int, str] = OrderedDict()

    def name(self, messages: tuple[Message, ...], number: int) -> str:
        """The conversation that the messages go on, or a new one."""
        said = 0
        lengths = [said := hash((said, message)) for message in messages]
        name = f"line {number}"
        for shorter in reversed(lengths[:-1]):
            if shorter in self._by_messages:
                name = self._by_messages.pop(shorter)  # what goes on from there again is another conversation
                break
        self._by_messages[lengths[-1]] = name
        if len(self._by_messages) > _MOST_UNNAMED:
            self._by_messages.popitem(last=False)
        return name


def _turn(raw: bytes, line: _Line, unnamed: _Unnamed) -> ChatTurn:
    record = json_object(line.path, line.number, raw)
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise line.error("a request has a non-empty list of messages", field="messages", found=brief(messages))
    conversation = record.get("conversation", "line")
    if isinstance(conversation, bool) or not isinstance(conversation, (str, int)) or conversation == "":
        raise line.error("a conversation is named by text", field="conversation", found=brief(conversation))
    timestamp = record.get("timestamp")
    seconds = finite(timestamp)
    if timestamp is not None and seconds is None:
        raise line.error("a timestamp is a finite number of seconds", field="timestamp", found=brief(timestamp))
    read = tuple(_message(message, f"message {index}", line) for index, message in enumerate(messages))
    name = str(conversation) if "conversation" in record else unnamed.name(read, line.number)
    return ChatTurn(name, seconds, read, line.number)


def _message(message: object, place: str, line: _Line) -> Message:
    if not isinstance(message, dict):
        raise line.error(f"{place} is not a JSON object", found=brief(message))
    role = message.get("role")
    if role not in ROLES:
        raise line.error(f"{place} has an unknown role", expected=f"one of {', '.join(ROLES)}", found=brief(role))
    content = message.get("content")
    if content is None and role == "assistant":
        return Message(role, ())  # a turn of tool calls alone
    if isinstance(content, str):
        return Message(role, (_text(content, place, line),))
    if not isinstance(content, list):
        raise line.error(f"{place} has neither text nor parts as its content", found=brief(content))
    return Message(role, tuple(_part(part, f"{place}, part {index}", line) for index, part in enumerate(content)))


def _part(part: object, place: str, line: _Line) -> str | Media:
    if not isinstance(part, dict):
        raise line.error(f"{place} is not a JSON object", found=brief(part))
    kind = part.get("type")
    if kind == "text":
        return _text(part.get("text"), place, line)
    if kind == "image_url":
        image = part.get("image_url")
        return _image(image.get("url") if isinstance(image, Mapping) else image, place, line)
    if kind == "input_audio":
        return _audio(part.get("input_audio"), place, line)
    raise line.error(f"{place} has an unknown type", expected="text, image_url or input_audio", found=brief(kind))


def _text(text: object, place: str, line: _Line) -> str:
    if not isinstance(text, str):
        raise line.error(f"{place} has no text", found=brief(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise line.error(f"{place} is not valid Unicode: {error}") from error
    return text


def _image(url: object, place: str, line: _Line) -> Photo:
    if not isinstance(url, str) or not url:
        raise line.error(f"{place} has no image url", found=brief(url))
    if url[:5].lower() == "data:":
        header, comma, body = url[5:].partition(",")
        media_type, *options = header.split(";")
        if not comma or "base64" not in [option.strip().lower() for option in options]:
            raise line.error(f"{place} is a broken data URI", expected="data:image/...;base64,...", found=brief(url))
        if not media_type.lower().startswith("image/"):
            raise line.error(f"{place} is a data URI of another type", expected="image/...", found=brief(media_type))
        return Photo(_base64(body, place, line), f"{place} (data URI, {media_type})")
    if url[:7].lower() == "http://" or url[:8].lower() == "https://":
        raise line.error(
            f"{place} is a web address, and nothing is downloaded",
            expected="a data URI, or a path relative to the trace",
            found=brief(url),
        )
    if _SCHEME.match(url) or Path(url).is_absolute():
        raise line.error(f"{place} is no path relative to the trace", found=brief(url))
    file = line.path.parent / url
    try:
        # Not a device, pipe or folder, which could be endless or block.
        if not file.is_file():
            raise line.error(f"{place}: there is no such image file", found=str(file))
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        raise line.error(f"{place} cannot be read: {error}", found=brief(url)) from error
    if not data:
        raise line.error(f"{place}: the image file is empty", found=str(file))
    return Photo(data, f"{place} ({url})")


def _audio(audio: object, place: str, line: _Line) -> Audio:
    if not isinstance(audio, Mapping) or not isinstance(audio.get("data"), str):
        raise line.error(f"{place} has no audio data", found=brief(audio))
    if audio.get("format", "wav") != "wav":
        raise line.error(f"{place} is audio of an unknown format", expected="wav", found=brief(audio.get("format")))
    return Audio(_base64(audio["data"], place, line), f"{place} (wav)")


def _base64(text: str, place: str, line: _Line) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise line.error(f"{place} is not base64: {error}", found=brief(text)) from error
    if not data:
        raise line.error(f"{place} holds no bytes")
    return data
