"""Audio clips as WAV files or as samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmcache.errors import MediaError
from mmcache.hashing.media import Samples, decode_wav
from mmcache.hashing.protocol import Hasher
from mmcache.hashing.source import Digest, Source, check_data

__all__ = ["AudioSource"]


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
            if content.ndim not in (1, 2) or content.dtype.kind not in "iuf" or content.dtype.itemsize > 8:
                raise MediaError("samples are numbers [n] or [channels, n]", found=f"{content.dtype} {content.shape}")
            if content.ndim == 2 and not len(content):
                raise MediaError("samples of no channel", found=content.shape)
            samples = np.array(content)
            samples.flags.writeable = False
        else:
            check_data(content)
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

    def _content(self, digest: Digest) -> object:
        if self.samples is not None:
            return digest(self.samples)
        if self.data is None:
            raise self._missing()
        return digest(self.data)

    def _options(self) -> dict[str, object]:
        options: dict[str, object] = {} if self.sampling_rate is None else {"sampling_rate": self.sampling_rate}
        return options if self.mono else {**options, "mono": False}

    def __reduce__(self) -> tuple[Any, ...]:
        content = self.data if self.samples is None else self.samples
        return _rebuild_audio, (content, self.sampling_rate, self.mono)


def _rebuild_audio(content: Any, sampling_rate: int | None, mono: bool) -> AudioSource:
    return AudioSource(content, sampling_rate, mono=mono)


def _scaled(samples: np.ndarray[Any, np.dtype[Any]]) -> Samples:
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    info = np.iinfo(samples.dtype)
    middle = (int(info.max) + 1) // 2 if info.min == 0 else 0
    return ((samples.astype(np.float64) - middle) / float(int(info.max) + 1 - middle)).astype(np.float32)
