"""Values as self-delimiting bytes, so that no two values serialise alike.

Every part is written as a type tag, a length, and its body; `docs/digest.md` has the table. A type without a defined
identity is an error: nothing falls back to pickling, text or addresses.
"""

from __future__ import annotations

import array
import enum
import mmap
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mmcache.fields import ItemFields
from mmcache.hashing.arrays import Array, array_dtype, array_head, blocks, host_array, plain_array
from mmcache.hashing.images import image_content, is_image
from mmcache.hashing.message import DEEPEST, Message, Unhashable, header
from mmcache.hashing.source import Source

__all__ = ["encode"]

Encoder = Callable[[Any, Message], None]


def encode(value: object, out: Message) -> None:
    """Append `value` to the message.

    Raises:
        Unhashable: a part of it has no defined identity.
    """
    (_ENCODERS.get(type(value)) or _encoder(value))(value, out)


def _none(_: None, out: Message) -> None:
    out.pending += header(b"n", 0)


def _bool(value: bool, out: Message) -> None:
    out.pending += header(b"t", 1) + (b"\1" if value else b"\0")


def _int(value: int, out: Message) -> None:
    size = value.bit_length() // 8 + 1  # room for the sign bit, and no more: one encoding a number
    out.pending += header(b"i", size) + value.to_bytes(size, "little", signed=True)


def _float(value: float, out: Message) -> None:
    out.pending += header(b"f", 8) + struct.pack("<d", value)


def _complex(value: complex, out: Message) -> None:
    out.pending += header(b"c", 16) + struct.pack("<dd", value.real, value.imag)


def _str(value: str, out: Message) -> None:
    # surrogatepass: a lone surrogate is a character like others here
    data = value.encode("utf-8", "surrogatepass")
    out.pending += header(b"s", len(data)) + data


def _bytes(value: bytes | bytearray | mmap.mmap, out: Message) -> None:
    with _view(value) as view:
        out.pending += header(b"b", view.nbytes)
        out.data(view)


def _memoryview(value: memoryview | array.array[Any], out: Message) -> None:
    with _view(value) as view:
        if view.format == "B" and view.ndim == 1:
            if view.c_contiguous:
                out.pending += header(b"b", view.nbytes)
                out.data(view)
            else:
                _bytes(view.tobytes(), out)
            return
        try:
            typed = np.asarray(view)
        except (ValueError, TypeError) as error:
            raise Unhashable(f"a buffer of format {view.format!r} has no defined identity") from error
        _array(typed, out)


def _view(value: bytes | bytearray | mmap.mmap | memoryview | array.array[Any]) -> memoryview:
    try:
        return memoryview(value)
    except ValueError as error:  # closed or released
        raise Unhashable(f"a buffer that cannot be read: {error}") from error


def _array(value: Array, out: Message) -> None:
    value = plain_array(value)
    name = array_dtype(value.dtype)
    out.pending += array_head(name, value.shape, value.nbytes)
    for block in blocks(value):
        out.data(block)


def _tensor(value: torch.Tensor, out: Message) -> None:
    name, shape, bits = host_array(value)
    out.pending += array_head(name, shape, bits.nbytes)
    for block in blocks(bits):
        out.data(block)


def _list(value: Iterable[object], out: Message) -> None:
    items = tuple(value)
    out.pending += header(b"l", len(items))
    out.open()
    index = 0
    try:
        for index, item in enumerate(items):  # noqa: B007
            encode(item, out)
    except Unhashable as error:
        error.steps.append(f"[{index}]")
        raise
    out.close()


def _dict(value: Any, out: Message) -> None:
    _entries(list(value.items()), out, _key_step)


def _entries(entries: list[tuple[Any, object]], out: Message, step: Callable[[Any], str]) -> None:
    keyed: dict[bytes, tuple[object, object]] = {}
    for key, item in entries:
        if (encoded := _key(key, out, step)) in keyed:
            raise Unhashable(f"two keys of one identity: {step(key)}")
        keyed[encoded] = key, item
    out.pending += header(b"d", len(keyed))
    out.open()
    key = None
    try:
        for encoded in sorted(keyed):
            key, item = keyed[encoded]
            out.pending += encoded
            encode(item, out)
    except Unhashable as error:
        error.steps.append(step(key))
        raise
    out.close()


def _key(key: object, out: Message, step: Callable[[Any], str]) -> bytes:
    if type(key) is str:
        data = key.encode("utf-8", "surrogatepass")
        return header(b"s", len(data)) + data
    if not _is_key(key):
        raise Unhashable(f"{type(key).__qualname__} as a key: keys are text, bytes, numbers, None, enums or tuples")
    written = bytearray()
    message = Message(out.hasher, written.__iadd__, None)
    try:
        encode(key, message)
    except Unhashable as error:
        error.steps.append(step(key))
        raise
    message.flush()
    return bytes(written)


def _is_key(key: object, depth: int = 0) -> bool:
    if isinstance(key, tuple):
        return depth < DEEPEST and all(_is_key(part, depth + 1) for part in key)
    return key is None or type(key) in _KEYS or isinstance(key, enum.Enum)


def _key_step(key: object) -> str:
    try:
        text = repr(key)
    except ValueError:  # an integer too long to be printed
        text = "..."
    return f"[{text}]"


def _enum(value: enum.Enum, out: Message) -> None:
    out.pending += header(b"e", 2)
    _str(_name(type(value)), out)
    _attribute(value, "value", out)


def _record(value: Any, out: Message) -> None:
    # `content: False` in a field's metadata declares it no content: a name to show in errors, say
    names = [field.name for field in fields(value) if field.metadata.get("content", True)]
    missing = [name for name in names if not hasattr(value, name)]
    if missing:
        raise Unhashable(f"{type(value).__qualname__} lacks its field {missing[0]!r}")
    out.pending += header(b"r", 2)
    _str(_name(type(value)), out)
    _entries([(name, getattr(value, name)) for name in names], out, ".{}".format)


def _image(value: Any, out: Message) -> None:
    described, pixels = image_content(value)
    out.pending += header(b"p", 2)
    _dict(described, out)
    _bytes(pixels, out)


def _source(value: Source, out: Message) -> None:
    kind, content, options = value.identity(out.hasher, out.digest)
    out.pending += header(b"m", 3)
    _str(kind, out)
    encode(content, out)
    _dict(options, out)


def _attribute(value: object, name: str, out: Message) -> None:
    out.open()
    try:
        encode(getattr(value, name), out)
    except Unhashable as error:
        error.steps.append(f".{name}")
        raise
    out.close()


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _encoder(value: object) -> Encoder:
    """The encoder of a value whose type is none of the common ones."""
    if isinstance(value, enum.Enum):
        return _enum
    if isinstance(value, Source):
        return _source
    if isinstance(value, torch.Tensor):
        return _tensor
    if isinstance(value, np.str_):
        return lambda text, out: _str(str.__str__(text), out)
    if isinstance(value, np.bytes_):
        return lambda data, out: _bytes(bytes(data), out)
    if isinstance(value, np.ndarray | np.generic):
        return _array
    if is_image(value):
        return _image
    if is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, dict | list | tuple | set | frozenset | str | bytes | int | float):
            raise Unhashable(f"{type(value).__qualname__} is both a dataclass and a built-in type")
        return _record
    if isinstance(value, PathLike):
        raise Unhashable("a path is a name, not content: read the file")
    raise Unhashable(f"objects of type {_name(type(value))} have no defined identity")


_KEYS = (str, np.str_, bytes, bool, int, float)

_ENCODERS: dict[type, Encoder] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytes,
    mmap.mmap: _bytes,
    memoryview: _memoryview,
    array.array: _memoryview,
    np.ndarray: _array,
    torch.Tensor: _tensor,
    list: _list,
    tuple: _list,
    torch.Size: _list,
    dict: _dict,
    OrderedDict: _dict,
    defaultdict: _dict,
    MappingProxyType: _dict,
    ItemFields: _dict,
}
