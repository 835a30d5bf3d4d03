"""Decoded images: mode, size, palette, transparency, orientation and pixels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from mmcache.errors import MediaError
from mmcache.hashing.message import Unhashable

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["image_content", "is_image", "orientation"]

_ORIENTATION = 0x0112
# modes whose pixels have more than one byte, in the machine's order
_WIDE = {"I": np.uint32, "F": np.uint32, "I;16N": np.uint16}


def is_image(value: object) -> TypeGuard[Image.Image]:
    """Whether this is a Pillow image. Where Pillow was never imported, nothing is."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def image_content(image: Image.Image) -> tuple[dict[str, object], bytes]:
    """What the frame that `image` stands at shows: what describes its pixels, and the pixels.

    Raises:
        MediaError: the image is opened lazily and its file is damaged or closed.
    """
    try:
        image.load()
        pixels = image.tobytes()
        turned = orientation(image)
    except Exception as error:  # damaged files make Pillow's readers raise almost anything
        raise MediaError(f"an image cannot be decoded: {error}", found=f"{image.mode} {image.size}") from error
    described: dict[str, object] = {"mode": image.mode, "size": image.size}
    if sys.byteorder == "big" and image.mode in _WIDE:
        pixels = np.frombuffer(pixels, _WIDE[image.mode]).byteswap().tobytes()
    if image.palette is not None and image.mode in ("P", "PA"):
        described["palette"] = (image.palette.mode, bytes(image.getpalette(None) or b""))
    if (transparency := image.info.get("transparency")) is not None:
        described["transparency"] = _transparency(transparency)
    if turned != 1:
        described["orientation"] = turned
    return described, pixels


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8, as Pillow would apply it; 1 where there is none."""
    value = image.getexif().get(_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _transparency(value: Any) -> object:
    if isinstance(value, int | bytes) or (isinstance(value, tuple | list) and all(isinstance(v, int) for v in value)):
        return value
    raise Unhashable(f"transparency of an image given as {type(value).__qualname__}")
