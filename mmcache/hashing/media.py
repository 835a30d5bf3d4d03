"""Decoding of encoded images, image sequences and WAV audio; what is not understood is a typed error."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mmcache.errors import ConfigError, MediaError
from mmcache.hashing.images import orientation

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Color", "ImageTraits", "Samples", "decode_frames", "decode_image", "decode_wav", "image_traits"]

Color: TypeAlias = tuple[int, int, int]
Samples: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

# formats whose header tells for sure the mode, and whether there is transparency
_TELLING = frozenset({"BMP", "JPEG", "PNG", "WEBP"})


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("decoding images needs Pillow: pip install mmcache[images]") from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            yield image
    except MediaError:
        raise
    except Exception as error:  # damaged files make Pillow's readers raise almost anything
        raise MediaError(f"not an image that can be decoded: {error}", found=f"{len(data)} bytes") from error


class ImageTraits(NamedTuple):
    """What a file's header tells, mostly without decoding.

    Attributes:
        transparent: whether it may have transparency.
        orientation: the EXIF orientation, 1 to 8.
        mode: Pillow mode of its pixels, or None where the header does not tell for sure.
    """

    transparent: bool
    orientation: int
    mode: str | None


def image_traits(data: bytes) -> ImageTraits:
    """What options of decoding an encoded image matter to it.

    Raises:
        MediaError: not an image that Pillow reads.
        ConfigError: Pillow is not installed.
    """
    with _opened(data) as image:
        telling = image.format in _TELLING
        mode = image.mode if telling else None  # before it is loaded
        return ImageTraits(not telling or image.has_transparency_data, orientation(image), mode)


def decode_image(data: bytes, mode: str | None, background: Color | None, orient: bool) -> Image.Image:
    """Decode the first frame of an image; see `ImageSource` for the options.

    Raises:
        MediaError: not an image that Pillow reads, or it ends early.
        ConfigError: Pillow is not installed.
    """
    with _opened(data) as image:
        return _finish(image, mode, background, orient)


def _finish(image: Image.Image, mode: str | None, background: Color | None, orient: bool) -> Image.Image:
    from PIL import Image, ImageOps

    image.load()
    result = ImageOps.exif_transpose(image) if orient else image.copy()
    if background is not None and result.has_transparency_data:
        canvas = Image.new("RGBA", result.size, (*background, 255))
        canvas.alpha_composite(result.convert("RGBA"))
        result = canvas.convert("RGB")
    return result if mode is None or result.mode == mode else result.convert(mode)


def decode_frames(data: bytes, indices: Sequence[int] | None) -> list[Image.Image]:
    """Decode frames of an animated image (GIF, WebP, PNG, TIFF) to RGB, transparency flattened onto white.

    Raises:
        MediaError: not a sequence of images that Pillow reads (other containers need a decoder of their own), or an
            index lies beyond its end.
        ConfigError: Pillow is not installed.
    """
    with _opened(data) as image:
        count = getattr(image, "n_frames", 1)
        wanted = range(count) if indices is None else indices
        if wanted and max(wanted) >= count:
            raise MediaError("a frame index lies beyond the end", found=max(wanted), expected=f"less than {count}")
        frames = {}
        for index in sorted(set(wanted)):
            image.seek(index)
            frames[index] = _finish(image, "RGB", (255, 255, 255), True)
        return [frames[index] for index in wanted]


def decode_wav(data: bytes) -> tuple[Samples, int]:
    """Decode a PCM WAV file to float32 samples in [-1, 1] of shape `[channels, n]`, and its sampling rate in hertz.

    Raises:
        MediaError: no WAV file of 8, 16, 24 or 32 bit integers, or its data ends early.
    """
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            expected = file.getnframes() * width * channels
            raw = file.readframes(file.getnframes())
    except Exception as error:  # damaged headers make the reader raise almost anything
        raise MediaError(f"not a WAV file: {error}", found=f"{len(data)} bytes") from error
    if width not in (1, 2, 3, 4):
        raise MediaError("WAV samples of an unknown width", found=f"{8 * width} bits", expected="8, 16, 24 or 32 bits")
    if len(raw) != expected:
        raise MediaError("the WAV file ends early", found=f"{len(raw)} bytes", expected=f"{expected} bytes")
    if width == 3:  # widened to 32 bits: three bytes on top of a zero byte
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        raw, width = wide.tobytes(), 4
    kinds: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4")}
    values = np.frombuffer(raw, kinds[width]).astype(np.float64)
    values = (values - 128.0) / 128.0 if width == 1 else values / float(1 << (8 * width - 1))
    return np.ascontiguousarray(values.reshape(-1, channels).T, dtype=np.float32), rate
