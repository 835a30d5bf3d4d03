"""Videos as encoded frames or as whole files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from mmcache.errors import MediaError
from mmcache.hashing.audio_source import AudioSource
from mmcache.hashing.image_source import ImageSource
from mmcache.hashing.media import decode_frames
from mmcache.hashing.protocol import Hasher
from mmcache.hashing.source import Digest, Source

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["VideoSource"]


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

    def _content(self, digest: Digest) -> object:
        if self.frames is not None:
            return self.frames
        if self.data is None:
            raise self._missing()
        return digest(self.data)

    def _options(self) -> dict[str, object]:
        options = {"indices": self.indices, "fps": self.fps, "timestamps": self.timestamps, "audio": self.audio}
        if self.frames is not None and self.indices == tuple(range(len(self.frames))):
            options["indices"] = None
        return {name: value for name, value in options.items() if value is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        content = self.data if self.frames is None else self.frames
        return _rebuild_video, (content, self.indices, self.fps, self.timestamps, self.audio)


def _rebuild_video(
    content: Any, indices: Any, fps: float | None, timestamps: Any, audio: AudioSource | None
) -> VideoSource:
    return VideoSource(content, indices=indices, fps=fps, timestamps=timestamps, audio=audio)


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
