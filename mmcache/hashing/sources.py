"""Encoded media with the options they are decoded with: identity without decoding, and decoding when it is needed.

A source is immutable. It digests its encoded bytes once for each hasher and carries the digest along. Options are part
of the identity where they change what decoding gives, and only there: an explicit default is as good as none, and a
background colour does not matter to an opaque image.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmcache.errors import MediaError, MissingContentError
from mmcache.hashing.media import Color, Samples, decode_frames, decode_image, decode_wav, image_traits
from mmcache.hashing.protocol import Hasher

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["AudioSource", "ImageSource", "Source", "VideoSource"]

_WHITE = (255, 255, 255)


class Source(ABC):
    """One image, video or audio clip, not decoded yet."""

    __slots__ = ("_contents", "_digests")

    def __init__(self) -> None:
        self._contents: dict[Hasher, object] = {}
        self._digests: dict[Hasher, str] = {}

    def __setattr__(self, name: str, value: object) -> None:
        # a digest that is carried must stay true
        if hasattr(self, name):
            raise AttributeError(f"a {type(self).__name__} cannot be changed")
        object.__setattr__(self, name, value)

    def digest(self, hasher: Hasher) -> str:
        """Digest of the content and of the options that matter, computed once for each hasher.

        Raises:
            MediaError: the options need a look at the file's header, and it cannot be read.
            MissingContentError: the source is known by a digest of another hasher only.
        """
        digest = self._digests.get(hasher)
        if digest is None:
            digest = self._digests[hasher] = hasher.digest(self)
        return digest

    def content(self, hasher: Hasher) -> object:
        """The content's digest without options (where a video is given by frames: these). Computed once.

        This is what a client-given id is bound to; `known` makes a source of it that has no bytes.
        """
        content = self._contents.get(hasher)
        if content is None:
            content = self._contents[hasher] = self._content(hasher)
        return content

    def identity(self, hasher: Hasher) -> tuple[str, object, dict[str, object]]:
        """What the digest is made of: the kind of source, its content, and the options that are not defaults."""
        return self._kind(), self.content(hasher), self._options()

    @abstractmethod
    def decode(self) -> Any:
        """Decode the content. Not kept: decoding twice costs twice."""

    @abstractmethod
    def _kind(self) -> str: ...

    @abstractmethod
    def _content(self, hasher: Hasher) -> object: ...

    @abstractmethod
    def _options(self) -> dict[str, object]: ...

    def _know(self, content: object, hasher: Hasher) -> Self:
        if not isinstance(content, str) or not content:
            raise MediaError("content is known by its digest", found=repr(content))
        self._contents[hasher] = content
        return self

    def _missing(self) -> MissingContentError:
        return MissingContentError(f"{type(self).__name__} is known by its digest only, its bytes are not here")


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
        _check_data(data)
        if mode is not None and not isinstance(mode, str):
            raise MediaError("a mode is text or None", found=repr(mode))
        self.data = data
        self.mode = mode
        self.background = None if background is None else _color(background)
        self.orient = bool(orient)

    @classmethod
    def known(cls, content: str, hasher: Hasher, **options: Any) -> ImageSource:
        """A source without bytes: its digest equals that of the source whose `content(hasher)` is `content`.

        With another background, or with the orientation not applied, its digest cannot be told without the bytes.
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

    def _content(self, hasher: Hasher) -> object:
        if self.data is None:
            raise self._missing()
        return hasher.digest(self.data)

    def _options(self) -> dict[str, object]:
        options: dict[str, object] = {}
        if self.mode != "RGB":
            options["mode"] = self.mode
        if self.background != _WHITE or not self.orient:
            if self.data is None:
                raise self._missing()
            transparent, orientation = image_traits(self.data)
            if self.background != _WHITE and transparent:
                options["background"] = self.background
            if not self.orient and orientation != 1:
                options["orient"] = False
        return options

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_image, (self.data, self.mode, self.background, self.orient)


class VideoSource(Source):
    """A video: encoded frames, or the bytes of a whole file.

    Attributes:
        data: the file's bytes, or None.
        frames: the frames in order, or None where the video is a whole file.
        indices: of a whole file, the frames that are taken (None: all); of frames, the places that they had in the
            video that they were taken from (None: 0, 1, 2, ...).
        fps: frames a second, or None where it is not known.
        timestamps: seconds from the start, one for each frame, or None.
        audio: the sound track where it is consumed, or None.
    """

    __slots__ = ("audio", "data", "fps", "frames", "indices", "timestamps")

    def __init__(
        self,
        content: bytes | Sequence[bytes | ImageSource] | None,
        *,
        indices: Sequence[int] | None = None,
        fps: float | None = None,
        timestamps: Sequence[float] | None = None,
        audio: AudioSource | None = None,
    ) -> None:
        """Take a video.

        Raises:
            MediaError: content of another kind, no frames, or options that do not fit them.
        """
        super().__init__()
        frames: tuple[ImageSource, ...] | None = None
        if isinstance(content, list | tuple) and content:
            frames = tuple(f if isinstance(f, ImageSource) else ImageSource(f) for f in content)
        elif content is not None and type(content) is not bytes:
            raise MediaError("a video is bytes or a non-empty sequence of frames", found=type(content).__name__)
        self.data: bytes | None = content if isinstance(content, bytes) else None
        self.frames = frames
        self.indices = None if indices is None else _indices(indices)
        self.fps = None if fps is None else _seconds(fps, "fps")
        if self.fps == 0.0:
            raise MediaError("frames a second are positive", field="fps", found=fps)
        self.timestamps = None if timestamps is None else tuple(_seconds(t, "timestamps") for t in timestamps)
        if audio is not None and not isinstance(audio, AudioSource):
            raise MediaError("a sound track is an AudioSource", field="audio", found=type(audio).__name__)
        self.audio = audio
        count = len(frames) if frames is not None else None if self.indices is None else len(self.indices)
        for name, values in (("indices", self.indices), ("timestamps", self.timestamps)):
            if values is not None and count is not None and len(values) != count:
                raise MediaError("one entry for each frame", field=name, found=len(values), expected=count)

    @classmethod
    def known(cls, content: str, hasher: Hasher, **options: Any) -> VideoSource:
        """A source without bytes, of a whole file whose `content(hasher)` is `content`; its digest is the same."""
        return cls(None, **options)._know(content, hasher)

    def decode(self) -> list[Image.Image]:
        """Decode the frames to RGB images, in order. Whole files: animated GIF, WebP, PNG and TIFF.

        Raises:
            MediaError: not something that Pillow reads, or an index beyond its end.
            MissingContentError: the bytes are not here.
            ConfigError: Pillow is not installed.
        """
        if self.frames is not None:
            return [frame.decode() for frame in self.frames]
        if self.data is None:
            raise self._missing()
        return decode_frames(self.data, self.indices)

    def _kind(self) -> str:
        return "video" if self.frames is None else "frames"

    def _content(self, hasher: Hasher) -> object:
        if self.frames is not None:
            return self.frames
        if self.data is None:
            raise self._missing()
        return hasher.digest(self.data)

    def _options(self) -> dict[str, object]:
        options = {"indices": self.indices, "fps": self.fps, "timestamps": self.timestamps, "audio": self.audio}
        if self.frames is not None and self.indices == tuple(range(len(self.frames))):
            options["indices"] = None
        return {name: value for name, value in options.items() if value is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        content = self.data if self.frames is None else self.frames
        return _rebuild_video, (content, self.indices, self.fps, self.timestamps, self.audio)


class AudioSource(Source):
    """An audio clip: a PCM WAV file, or samples with their rate.

    Attributes:
        data: the file's bytes, or None.
        samples: samples of shape `[n]` or `[channels, n]`, read-only, or None.
        sampling_rate: hertz; None for a file, which holds its own.
        mono: whether channels are averaged into one.
    """

    __slots__ = ("data", "mono", "samples", "sampling_rate")

    def __init__(
        self,
        content: bytes | np.ndarray[Any, np.dtype[Any]] | None,
        sampling_rate: int | None = None,
        *,
        mono: bool = True,
    ) -> None:
        """Take an audio clip; samples are copied, so that the source is immutable.

        Raises:
            MediaError: content of another kind or shape, samples without a rate, or a file with one.
        """
        super().__init__()
        samples = None
        if isinstance(content, np.ndarray):
            if content.ndim not in (1, 2) or content.dtype.kind not in "iuf":
                raise MediaError("samples are numbers [n] or [channels, n]", found=f"{content.dtype} {content.shape}")
            samples = np.array(content)
            samples.flags.writeable = False
        else:
            _check_data(content)
        self.data: bytes | None = content if isinstance(content, bytes) else None
        self.samples: np.ndarray[Any, np.dtype[Any]] | None = samples
        if (sampling_rate is None) != (self.samples is None):
            raise MediaError("samples need a sampling rate, files hold their own", found=sampling_rate)
        if sampling_rate is not None and (type(sampling_rate) is not int or sampling_rate <= 0):
            raise MediaError("a sampling rate is a positive integer, in hertz", found=repr(sampling_rate))
        self.sampling_rate = sampling_rate
        self.mono = bool(mono)

    @classmethod
    def known(cls, content: str, hasher: Hasher, **options: Any) -> AudioSource:
        """A source without bytes, of a file whose `content(hasher)` is `content`; its digest is the same."""
        return cls(None, **options)._know(content, hasher)

    def decode(self) -> tuple[Samples, int]:
        """Decode to samples and their rate in hertz.

        Returns:
            float32 `[n]` if `mono`, else `[channels, n]`. Integer samples, of files or arrays, are scaled to [-1, 1].

        Raises:
            MediaError: not a WAV file of integers, or it ends early.
            MissingContentError: the bytes are not here.
        """
        if self.samples is not None and self.sampling_rate is not None:
            samples, rate = _scaled(np.atleast_2d(self.samples)), self.sampling_rate
        elif self.data is not None:
            samples, rate = decode_wav(self.data)
        else:
            raise self._missing()
        return (samples.mean(axis=0, dtype=np.float64).astype(np.float32) if self.mono else samples), rate

    def _kind(self) -> str:
        return "audio" if self.samples is None else "samples"

    def _content(self, hasher: Hasher) -> object:
        if self.samples is not None:
            return hasher.digest(self.samples)
        if self.data is None:
            raise self._missing()
        return hasher.digest(self.data)

    def _options(self) -> dict[str, object]:
        options: dict[str, object] = {} if self.sampling_rate is None else {"sampling_rate": self.sampling_rate}
        return options if self.mono else {**options, "mono": False}

    def __reduce__(self) -> tuple[Any, ...]:
        content = self.data if self.samples is None else self.samples
        return _rebuild_audio, (content, self.sampling_rate, self.mono)


def _rebuild_image(data: bytes | None, mode: str | None, background: Color | None, orient: bool) -> ImageSource:
    return ImageSource(data, mode=mode, background=background, orient=orient)


def _rebuild_video(
    content: Any, indices: Any, fps: float | None, timestamps: Any, audio: AudioSource | None
) -> VideoSource:
    return VideoSource(content, indices=indices, fps=fps, timestamps=timestamps, audio=audio)


def _rebuild_audio(content: Any, sampling_rate: int | None, mono: bool) -> AudioSource:
    return AudioSource(content, sampling_rate, mono=mono)


def _check_data(data: object) -> None:
    # not bytearray or memoryview: whoever holds them may write to them later
    if data is not None and type(data) is not bytes:
        raise MediaError("encoded content is immutable bytes", found=type(data).__name__, expected="bytes")


def _color(value: Sequence[int]) -> Color:
    channels = tuple(value) if isinstance(value, list | tuple) else ()
    if len(channels) != 3 or not all(type(v) is int and 0 <= v <= 255 for v in channels):
        raise MediaError("a background is three integers from 0 to 255", field="background", found=repr(value))
    return channels[0], channels[1], channels[2]


def _indices(values: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(map(index, values))
    except TypeError:
        result = (-1,)
    if any(v < 0 for v in result):
        raise MediaError("frame indices are integers >= 0", field="indices", found=repr(values))
    return result


def _seconds(value: float, name: str) -> float:
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = -1.0
    if not math.isfinite(result) or result < 0.0:
        raise MediaError("must be a finite number >= 0", field=name, found=repr(value))
    return result


def _scaled(samples: np.ndarray[Any, np.dtype[Any]]) -> Samples:
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    info = np.iinfo(samples.dtype)
    middle = (int(info.max) + 1) // 2 if info.min == 0 else 0
    return ((samples.astype(np.float64) - middle) / float(int(info.max) + 1 - middle)).astype(np.float32)
