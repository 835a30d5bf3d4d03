"""Encoded images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmcache.errors import MediaError
from mmcache.hashing.media import Color, decode_image, image_traits
from mmcache.hashing.protocol import Hasher
from mmcache.hashing.source import Digest, Source, check_data

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["ImageSource"]

_WHITE = (255, 255, 255)


class ImageSource(Source):
    """An encoded image file: the digest of 200 kB of JPEG instead of 6 MB of pixels.

    Attributes:
        data: the file's bytes, or None where only a digest is known.
        mode: Pillow mode that it is converted to, or None for its own.
        background: colour that transparency is flattened onto, or None to keep transparency.
        orient: whether the EXIF orientation is applied.
    """

    __slots__ = ("background", "data", "mode", "orient")

    def __init__(
        self,
        data: bytes | None,
        *,
        mode: str | None = "RGB",
        background: Color | None = _WHITE,
        orient: bool = True,
    ) -> None:
        """Take an encoded image.

        Raises:
            MediaError: `data` is not `bytes`, or an option is malformed.
        """
        super().__init__()
        check_data(data)
        if mode is not None and not isinstance(mode, str):
            raise MediaError("a mode is text or None", found=repr(mode))
        self.data = data
        self.mode = mode
        self.background = None if background is None else _color(background)
        self.orient = bool(orient)

    @classmethod
    def known(cls, content: str, hasher: Hasher, **options: Any) -> ImageSource:
        """A source without bytes: its digest equals that of the source whose `content(hasher)` is `content`.

        With another background, with its own mode, or with the orientation not applied, its digest cannot be told
        without the bytes.
        """
        return cls(None, **options)._know(content, hasher)

    def decode(self) -> Image.Image:
        """Decode to a Pillow image of `mode`; of an animation, the first frame.

        Raises:
            MediaError: not an image that Pillow reads, or it ends early.
            MissingContentError: the bytes are not here.
            ConfigError: Pillow is not installed.
        """
        if self.data is None:
            raise self._missing()
        return decode_image(self.data, self.mode, self.background, self.orient)

    def _kind(self) -> str:
        return "image"

    def _content(self, digest: Digest) -> object:
        if self.data is None:
            raise self._missing()
        return digest(self.data)

    def _options(self) -> dict[str, object]:
        options: dict[str, object] = {}
        mode = self.mode
        if mode is None or self.background != _WHITE or not self.orient:
            if self.data is None:
                raise self._missing()
            traits = image_traits(self.data)
            if mode is None and traits.mode is not None:
                # the mode that it comes out in, as if that had been asked for
                mode = "RGB" if traits.transparent and self.background is not None else traits.mode
            if self.background != _WHITE and traits.transparent:
                options["background"] = self.background
            if not self.orient and traits.orientation != 1:
                options["orient"] = False
        if mode != "RGB":
            options["mode"] = mode
        return options

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_image, (self.data, self.mode, self.background, self.orient)


def _rebuild_image(data: bytes | None, mode: str | None, background: Color | None, orient: bool) -> ImageSource:
    return ImageSource(data, mode=mode, background=background, orient=orient)


def _color(value: Sequence[int]) -> Color:
    channels = tuple(value) if isinstance(value, list | tuple) else ()
    if len(channels) != 3 or not all(type(v) is int and 0 <= v <= 255 for v in channels):
        raise MediaError("a background is three integers from 0 to 255", field="background", found=repr(value))
    return channels[0], channels[1], channels[2]
