"""Chat messages with media, as every engine of this package takes them, and decoding of the media.

Media stay encoded until somebody needs pixels or samples: identity is decided on the encoded bytes, so an image that
was processed before is never decoded again.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mmcache.errors import ConfigError, MediaError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Audio", "Frames", "Media", "Message", "Photo", "decode_audio", "decode_image", "encode_wav", "media_of"]


@dataclass(frozen=True, slots=True)
class Photo:
    """One encoded image file. `source` says where it came from and serves error messages only, no identity."""

    data: bytes
    source: str = field(default="image", metadata={"content": False})
    modality: ClassVar[str] = "image"

    @property
    def content(self) -> tuple[bytes]:
        """All that decides what it shows."""
        return (self.data,)


@dataclass(frozen=True, slots=True)
class Frames:
    """A video given as encoded frames, `fps` of them a second."""

    frames: tuple[bytes, ...]
    fps: float = 2.0
    source: str = field(default="video", metadata={"content": False})
    modality: ClassVar[str] = "video"

    @property
    def content(self) -> tuple[tuple[bytes, ...], float]:
        """All that decides what it shows."""
        return (self.frames, self.fps)


@dataclass(frozen=True, slots=True)
class Audio:
    """One PCM WAV file."""

    data: bytes
    source: str = field(default="audio", metadata={"content": False})
    modality: ClassVar[str] = "audio"

    @property
    def content(self) -> tuple[bytes]:
        """All that decides how it sounds."""
        return (self.data,)


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
    """Decode an image file to RGB: orientation applied, transparency flattened onto white.

    Raises:
        MediaError: the bytes are no complete image that Pillow reads.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError("decoding images needs Pillow: pip install mmcache[images]") from error
    try:
        with Image.open(io.BytesIO(data)) as opened:
            opened.load()
            image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                canvas = Image.new("RGBA", image.size, (255, 255, 255, 255))
                canvas.alpha_composite(image.convert("RGBA"))
                image = canvas
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise MediaError(f"{source} cannot be decoded as an image: {error}", found=f"{len(data)} bytes") from error


def decode_audio(data: bytes, source: str = "audio") -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    """Decode a PCM WAV file.

    Returns:
        Mono samples as float32 in [-1, 1] of shape `[n]` (channels are averaged), and the sampling rate in hertz.

    Raises:
        MediaError: the bytes are no WAV file of 8, 16 or 32 bit integers, or its data ends early.
    """
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate, announced = (
                file.getsampwidth(),
                file.getnchannels(),
                file.getframerate(),
                file.getnframes(),
            )
            raw = file.readframes(announced)
    except (wave.Error, EOFError) as error:
        raise MediaError(f"{source} cannot be decoded as WAV: {error}", found=f"{len(data)} bytes") from error
    if width not in (1, 2, 4):
        raise MediaError(f"{source} has samples of {8 * width} bits", expected="8, 16 or 32 bits")
    if len(raw) != announced * width * channels:
        raise MediaError(
            f"{source} ends early", found=f"{len(raw)} bytes", expected=f"{announced * width * channels} bytes"
        )
    if announced == 0:
        raise MediaError(f"{source} holds no samples")
    kinds: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}
    samples = np.frombuffer(raw, dtype=kinds[width]).astype(np.float64)
    samples = (samples - 128.0) / 128.0 if width == 1 else samples / float(1 << (8 * width - 1))
    return samples.reshape(-1, channels).mean(axis=1).astype(np.float32), rate


def encode_wav(samples: np.ndarray[Any, np.dtype[np.float32]], rate: int) -> bytes:
    """Mono float samples of shape `[n]` in [-1, 1] as a 16 bit PCM WAV file of `rate` hertz."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1.0, 1.0) * 32767.0).round().astype("<i2").tobytes())
    return buffer.getvalue()
