"""Under what rows are stored, and what they have to be for whoever asks for them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmcache.errors import ConfigError

__all__ = ["FORMAT_VERSION", "MAX_IDENTIFIER_BYTES", "MAX_MODALITY_BYTES", "Expected", "Key", "as_utf8", "from_utf8"]

FORMAT_VERSION = 2
"""Of entries. It is part of their names, so that formats live side by side and never meet."""

MAX_IDENTIFIER_BYTES = 4096
MAX_MODALITY_BYTES = 255


def as_utf8(text: str) -> bytes:
    """Text as bytes, also where it came from bytes that are no UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def from_utf8(data: bytes) -> str:
    """The text that `as_utf8` made bytes of.

    Raises:
        UnicodeDecodeError: the bytes come from nowhere else than damage.
    """
    return data.decode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Key:
    """What rows are stored under: a namespace fingerprint (salt and adapter included), a content and its modality.

    The modality is a part of its own, since one identifier (a client's, say) may stand for an image and for a video.

    Args:
        namespace: fingerprint, 64 hexadecimal digits (`mmcache.namespaces.namespace_fingerprint`).
        identifier: content identifier, at most 4096 bytes of UTF-8; opaque.
        modality: `"image"`, `"video"`, `"audio"` ..., at most 255 bytes; empty where identifiers say it themselves.

    Raises:
        ConfigError: the namespace is no fingerprint, or another part is no text, or of unusable length.
    """

    namespace: str
    identifier: str
    modality: str = ""

    def __post_init__(self) -> None:
        space = self.namespace
        if not isinstance(space, str) or len(space) != 64 or space.strip("0123456789abcdef"):
            raise ConfigError(
                "not a namespace fingerprint", field="namespace", found=repr(space), expected="64 hex digits"
            )
        _check_text("identifier", self.identifier, 1, MAX_IDENTIFIER_BYTES)
        _check_text("modality", self.modality, 0, MAX_MODALITY_BYTES)

    def __hash__(self) -> int:
        return hash(self.identifier) ^ hash(self.namespace)  # strings keep their hashes; modalities are few

    @cached_property
    def name(self) -> str:
        """The entry's name in every store: 64 hexadecimal digits that depend on the format version and the key."""
        modality = as_utf8(self.modality)
        # Parts of fixed size and lengths come first, so that no two keys feed the same bytes
        digest = hashlib.sha256(b"mmcache-entry-%d\0" % FORMAT_VERSION)
        digest.update(bytes.fromhex(self.namespace) + bytes((len(modality),)) + modality)
        digest.update(as_utf8(self.identifier))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Expected:
    """What rows must be to be of use to the asker (None: whatever they are). Others are a miss, and are dropped.

    Raises:
        ConfigError: a count is no whole number, or negative, or the dtype is none.
    """

    rows: int | None = None
    width: int | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in ("rows", "width"):
            count = getattr(self, field)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
                raise ConfigError(
                    "not a count", field=field, found=repr(count), expected="a whole number >= 0, or None"
                )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ConfigError("not a dtype", field="dtype", found=repr(self.dtype), expected="a torch.dtype, or None")

    def fits(self, rows: Tensor) -> bool:
        """Whether rows `[num_embeds, width]` are of use."""
        have = (rows.shape[0], rows.shape[1], rows.dtype)
        return all(want in (None, found) for want, found in zip((self.rows, self.width, self.dtype), have, strict=True))


def _check_text(field: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"not the {field} of a content", field=field, found=repr(value), expected="text")
    size = len(as_utf8(value))
    if not least <= size <= most:
        raise ConfigError(
            f"{field} of unusable length", field=field, found=f"{size} bytes", expected=f"{least} to {most}"
        )
