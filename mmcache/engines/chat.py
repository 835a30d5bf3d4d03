"""Chat messages with media, as every engine of this package takes them, and decoding of the media.

Media stay encoded until somebody needs pixels or samples: identity is decided on the encoded bytes, so an image that
was processed before is never decoded again.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mmcache.errors import MediaError
from mmcache.hashing import AudioSource, ImageSource, Samples

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Audio", "Frames", "Media", "Message", "Photo", "decode_audio", "decode_image", "encode_wav", "media_of"]


@dataclass(frozen=True, slots=True)
class Photo:
    """One encoded image file. `source` says where it came from; it serves error messages and is no part of a digest."""

    data: bytes
    source: str = field(default="image", metadata={"content": False})
    modality: ClassVar[str] = "image"


@dataclass(frozen=True, slots=True)
class Frames:
    """A video given as encoded frames, `fps` of them a second."""

    frames: tuple[bytes, ...]
    fps: float = 2.0
    source: str = field(default="video", metadata={"content": False})
    modality: ClassVar[str] = "video"


@dataclass(frozen=True, slots=True)
class Audio:
    """One PCM WAV file."""

    data: bytes
    source: str = field(default="audio", metadata={"content": False})
    modality: ClassVar[str] = "audio"


Media = Photo | Frames | Audio


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat: a role and its parts in order, text and media."""

    role: str
    parts: tuple[str | Media, ...]


def media_of(messages: Sequence[Message]) -> list[Media]:
    """The media of a chat, in the order in which the model sees them."""
    return [part for message in messages for part in message.parts if not isinstance(part, str)]


def decode_image(data: bytes, source: str = "image") -> Image.Image:
    """Decode an image file to RGB, as `ImageSource` does: orientation applied, transparency flattened onto white.

    Raises:
        MediaError: the bytes are no complete image that Pillow reads.
        ConfigError: Pillow is not installed.
    """
    with _naming(source):
        return ImageSource(data).decode()


def decode_audio(data: bytes, source: str = "audio") -> tuple[Samples, int]:
    """Decode a PCM WAV file, as `AudioSource` does.

    Returns:
        Mono samples as float32 in [-1, 1] of shape `[n]` (channels are averaged), and the sampling rate in hertz.

    Raises:
        MediaError: the bytes are no WAV file of integers, its data ends early, or it holds no samples.
    """
    with _naming(source):
        samples, rate = AudioSource(data).decode()
        if not samples.size:
            raise MediaError("the WAV file holds no samples", found=f"{len(data)} bytes")
        return samples, rate


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Say in errors which medium of a chat cannot be decoded."""
    try:
        yield
    except MediaError as error:
        raise MediaError(f"{source}: {error.message}", found=error.found, expected=error.expected) from error


def encode_wav(samples: Samples, rate: int) -> bytes:
    """Mono float samples of shape `[n]` in [-1, 1] as a 16 bit PCM WAV file of `rate` hertz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2").tobytes())
    return buffer.getvalue()
