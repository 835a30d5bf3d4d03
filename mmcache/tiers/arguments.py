"""Checks of what callers hand in: a wrong kind of argument is named at once, before anything has changed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mmcache.errors import ConfigError
from mmcache.tiers.entry import Entry
from mmcache.tiers.keys import Expected, Key

__all__ = [
    "check_callable",
    "check_entries",
    "check_name",
    "check_namespace",
    "check_seconds",
    "check_whole",
    "keys_of",
    "patience",
    "wanted_of",
]

_LONGEST_SECONDS = 1e9
"""What clocks, sockets and servers can all count."""


def check_whole(field: str, value: object, *, least: int = 1) -> None:
    """Refuse what is no whole number of at least `least`.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError("not a usable number", field=field, found=repr(value), expected=f"a whole number >= {least}")


def check_seconds(field: str, value: object) -> None:
    """Refuse what is no finite, positive number of seconds.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LONGEST_SECONDS:
        raise ConfigError(
            "not a usable time", field=field, found=repr(value), expected=f"seconds, > 0 and <= {_LONGEST_SECONDS:g}"
        )


def check_name(value: object) -> None:
    """Refuse what cannot name a tier.

    Raises:
        ConfigError: it is no text, or empty.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError("a tier needs a name", field="name", found=repr(value), expected="text")


def check_namespace(value: object) -> None:
    """Refuse what cannot be a namespace's fingerprint.

    Raises:
        ConfigError: it is neither text nor None.
    """
    if value is not None and not isinstance(value, str):
        raise ConfigError("not a namespace", field="namespace", found=repr(value), expected="a fingerprint, or None")


def check_callable(field: str, function: object) -> None:
    """Refuse what is there and cannot be called.

    Raises:
        ConfigError: it is neither a function nor None.
    """
    if function is not None and not callable(function):
        raise ConfigError("cannot be called", field=field, found=repr(function), expected="a function, or None")


def patience(timeout: float | None) -> float | None:
    """A time that a caller may wait, as locks can count it: one that is over already, or for ever, is no error.

    Raises:
        ConfigError: it is no number.
    """
    if timeout is None or timeout == math.inf:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or math.isnan(timeout):
        raise ConfigError("not a time", field="timeout", found=repr(timeout), expected="seconds, or None")
    return min(max(0.0, timeout), threading.TIMEOUT_MAX)


def keys_of(keys: Iterable[Key]) -> list[Key]:
    """The keys, in their order.

    Raises:
        ConfigError: something among them is no `Key`, or they are not a collection at all.
    """
    try:
        found = list(keys)
    except TypeError:
        raise ConfigError("not keys", field="keys", found=repr(keys), expected="several `Key`") from None
    for key in found:
        if not isinstance(key, Key):
            raise ConfigError("not a key", field="keys", found=repr(key), expected="a `Key`")
    return found


def wanted_of(keys: Iterable[Key] | Mapping[Key, Expected | None]) -> dict[Key, Expected | None]:
    """Keys with what their rows must be; each key once.

    Raises:
        ConfigError: a key is no `Key`, or what is expected of its rows is no `Expected`.
    """
    if not isinstance(keys, Mapping):
        return dict.fromkeys(keys_of(keys))
    wanted = dict(zip(keys_of(keys), keys.values(), strict=True))
    for key, expected in wanted.items():
        if expected is not None and not isinstance(expected, Expected):
            raise ConfigError(
                f"not what rows can be expected to be, for {key.identifier!r}",
                field="keys",
                found=repr(expected),
                expected="an `Expected`, or None",
            )
    return wanted


def check_entries(entries: Mapping[Key, Entry], *, on_host: bool = True) -> None:
    """Refuse what are no entries by key, have a payload that is not plain bytes, or, with `on_host`, have it elsewhere.

    Raises:
        ConfigError: they are not.
    """
    if not isinstance(entries, Mapping):
        raise ConfigError("not entries by key", field="entries", found=repr(entries), expected="a mapping")
    keys_of(entries)
    for key, entry in entries.items():
        if not isinstance(entry, Entry) or not isinstance(entry.header, bytes) or not isinstance(entry.payload, Tensor):
            raise ConfigError(
                f"not an entry, for {key.identifier!r}", field="entries", found=repr(entry), expected="an `Entry`"
            )
        payload = entry.payload
        if payload.dtype is not torch.uint8 or payload.is_nested or payload.layout is not torch.strided:
            raise _no_payload(key, payload)
        if payload.ndim != 1 or not payload.is_contiguous():
            raise _no_payload(key, payload)
        if on_host and not entry.payload.is_cpu:
            raise ConfigError(
                f"a payload on a device, for {key.identifier!r}",
                field="entries",
                found=entry.payload.device,
                expected="cpu",
            )


def _no_payload(key: Key, payload: Tensor) -> ConfigError:
    return ConfigError(
        f"a payload that is not plain bytes, for {key.identifier!r}",
        field="entries",
        found=f"{payload.dtype}, {payload.layout}, {payload.ndim} dimensions",
        expected="uint8 [payload bytes], contiguous",
    )
