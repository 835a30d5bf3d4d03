"""The hash functions, under one small interface, and the names of the schemes they make."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import xxhash

from mmcache.errors import ConfigError

__all__ = ["HashState", "algorithm"]


class HashState(Protocol):
    """A hash under way."""

    def update(self, data: Any, /) -> object:
        """Take in more bytes: a C-contiguous buffer."""
        ...

    def hexdigest(self) -> str:
        """The digest of what was taken in, in lower-case hexadecimal digits."""
        ...


def algorithm(name: str, key: bytes | None) -> tuple[str, Callable[[bytes], HashState]]:
    """The scheme's name, as namespaces declare it, and what starts a hash with its first bytes.

    Raises:
        ConfigError: unknown algorithm, a key that the algorithm cannot take, or BLAKE3 is not installed.
    """
    if key is not None and (not isinstance(key, bytes) or not key):
        raise ConfigError("a key is non-empty bytes", field="key", found=type(key).__name__)
    if name == "xxh3_128":
        if key is not None:
            raise ConfigError(
                "xxh3_128 takes no key: it resists no one who chooses content, keyed or not",
                field="key",
                expected="algorithm='blake3' or 'sha256' with a key",
            )
        return name, xxhash.xxh3_128
    if name == "sha256":
        if key is None:
            return name, hashlib.sha256
        return "hmac_sha256", partial(hmac.new, key, digestmod="sha256")
    if name == "blake3":
        try:
            from blake3 import blake3
        except ImportError as error:
            raise ConfigError("BLAKE3 is not installed: pip install mmcache[blake3]", field="algorithm") from error
        if key is None:
            return name, blake3
        if len(key) != 32:
            raise ConfigError("a BLAKE3 key has 32 bytes", field="key", found=f"{len(key)} bytes")
        return "blake3_keyed", partial(blake3, key=key)
    raise ConfigError(
        "unknown algorithm", field="algorithm", found=repr(name), expected="'xxh3_128', 'blake3' or 'sha256'"
    )
