"""One entry format for every tier: a header that says everything, and the raw bytes of the rows.

Header (little-endian), padded with zeros to a multiple of 64 bytes so that a payload behind it stays aligned:

    8 s  magic                     8 Q  rows
    2 H  format version            8 Q  width, in elements
    2 H  header bytes              8 Q  payload bytes
    2 H  identifier bytes          32 s namespace fingerprint
    1 B  dtype code                16 s XXH3-128 of the payload
    1 B  modality bytes            16 s XXH3-128 of the header without this field
    2 H  levels (DeepStack)        ...  modality and identifier, UTF-8

The size of a header follows from its key alone, so a reader can put header and payload into two buffers with one call.
Checksums find damage, not malice: who may write to a store is for the store's own access control.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from mmcache.errors import ConfigError, DamagedEntryError, EmbeddingError
from mmcache.tiers.devices import on_host
from mmcache.tiers.keys import FORMAT_VERSION, Expected, Key, as_utf8, from_utf8

__all__ = [
    "Entry",
    "EntryInfo",
    "check_pinning",
    "decode_entry",
    "encode_entry",
    "header_bytes",
    "host_bytes",
    "join_entry",
    "read_header",
    "split_entry",
    "writable_view",
]

_MAGIC = b"MMCEMBED"
_FIXED = struct.Struct("<8sHHHBBHQQQ32s16s")
_SUM_BYTES = 16
_ALIGN = 64
_DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.float16,
    3: torch.bfloat16,
    4: torch.float64,
    5: torch.float8_e4m3fn,
    6: torch.float8_e5m2,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """An encoded entry in two parts, so that neither storing nor reading it has to join them.

    Attributes:
        header: see the module's docstring.
        payload: uint8 `[payload bytes]`, contiguous, on the CPU, or on the device of a tier that keeps it there; may
            share memory with the rows it was made from.
    """

    header: bytes
    payload: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the entry takes in a store."""
        return len(self.header) + self.payload.nbytes


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What a header says about its entry."""

    key: Key
    rows: int
    width: int
    dtype: torch.dtype
    levels: int
    nbytes: int
    """Header and payload together."""
    checksum: bytes


def check_pinning(pinned: bool) -> None:
    """Refuse page-locked memory where there is no GPU to copy it to.

    Raises:
        ConfigError: it is asked for and not to be had.
    """
    if pinned and not torch.cuda.is_available():
        raise ConfigError("page-locked memory needs a GPU", field="pinned", found="no GPU", expected="pinned=False")


def host_bytes(nbytes: int, *, pinned: bool = False) -> Tensor:
    """A new uint8 buffer `[nbytes]` on the CPU that owns its memory; `pinned`: page-locked, for copies to a GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def writable_view(buffer: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor as a memoryview, for calls that read or fill buffers in place."""
    return np.asarray(_Lent(buffer)).data if buffer.numel() else memoryview(bytearray())


def header_bytes(key: Key) -> int:
    """Size of the header of this key's entry, in bytes."""
    return _padded(_FIXED.size + _SUM_BYTES + len(as_utf8(key.modality)) + len(as_utf8(key.identifier)))


def encode_entry(key: Key, rows: Tensor, *, levels: int = 1) -> Entry:
    """Encode rows. The payload shares their memory where they are contiguous: do not write to them afterwards.

    Args:
        key: what they are stored under.
        rows: `[num_embeds, width]`, a floating dtype, on the CPU.
        levels: into how many equal levels the width divides (DeepStack models); 1 elsewhere.

    Raises:
        ConfigError: the key is no `Key`.
        EmbeddingError: not a tensor, not two-dimensional and dense, not on the CPU, of a dtype that is not stored, or
            levels that do not divide the width.
    """
    if not isinstance(key, Key):
        raise ConfigError("not a key", field="key", found=repr(key), expected="a `Key`")
    if (
        not isinstance(rows, Tensor)
        or rows.is_nested
        or rows.ndim != 2
        or rows.layout != torch.strided
        or rows.device.type != "cpu"
    ):
        raise EmbeddingError(
            "only rows on the CPU are stored",
            found=_described(rows) if isinstance(rows, Tensor) else type(rows).__name__,
            expected="a dense tensor [num_embeds, width] on cpu",
        )
    code = _CODES.get(rows.dtype)
    if code is None:
        raise EmbeddingError(
            "rows of this dtype are not stored", found=rows.dtype, expected=", ".join(str(d) for d in _CODES)
        )
    if not isinstance(levels, int) or not 1 <= levels <= 0xFFFF or rows.shape[1] % levels:
        raise EmbeddingError(
            "levels do not divide the width", found=f"{levels!r} levels", expected=f"a divisor of {rows.shape[1]}"
        )
    payload = _as_bytes(rows.detach())
    modality, identifier = as_utf8(key.modality), as_utf8(key.identifier)
    size = header_bytes(key)
    fixed = _FIXED.pack(
        _MAGIC,
        FORMAT_VERSION,
        size,
        len(identifier),
        code,
        len(modality),
        levels,
        rows.shape[0],
        rows.shape[1],
        payload.numel(),
        bytes.fromhex(key.namespace),
        _checksum(payload),
    )
    names = modality + identifier
    header = fixed + xxhash.xxh3_128_digest(fixed + names) + names
    return Entry(header.ljust(size, b"\0"), payload)


def read_header(header: bytes | memoryview) -> EntryInfo:
    """What a header says, checked against its own checksum.

    Args:
        header: at least the header; what follows it is not looked at.

    Raises:
        ConfigError: the header is not bytes.
        DamagedEntryError: foreign bytes, another format version, cut short, or damaged.
    """
    if not isinstance(header, bytes | bytearray | memoryview):
        raise ConfigError("not a header", field="header", found=type(header).__name__, expected="bytes")
    if len(header) < _FIXED.size + _SUM_BYTES:
        reason = "truncated" if bytes(header[:8]) == _MAGIC[: len(header)] else "foreign"
        raise DamagedEntryError("not a whole header", reason=reason, found=f"{len(header)} bytes")
    fixed = bytes(header[: _FIXED.size])
    magic, version, size, id_bytes, code, mod_bytes, levels, *numbers, namespace, checksum = _FIXED.unpack(fixed)
    rows, width, payload_bytes = numbers
    if magic != _MAGIC:
        raise DamagedEntryError("not an entry", reason="foreign", found=repr(magic), expected=repr(_MAGIC))
    if version != FORMAT_VERSION:
        raise DamagedEntryError("another format", reason="version", found=version, expected=FORMAT_VERSION)
    start = _FIXED.size + _SUM_BYTES
    middle, end = start + mod_bytes, start + mod_bytes + id_bytes
    if size != _padded(end) or len(header) < size:
        raise DamagedEntryError("not a whole header", reason="truncated", found=f"{len(header)} bytes", expected=size)
    if xxhash.xxh3_128_digest(fixed + bytes(header[start:end])) != bytes(header[_FIXED.size : start]):
        raise DamagedEntryError("the header is damaged", reason="checksum")
    dtype = _DTYPES.get(code)
    if dtype is None or payload_bytes != rows * width * dtype.itemsize or not levels:
        raise DamagedEntryError("the header contradicts itself", reason="foreign", found=f"dtype code {code}")
    try:
        key = Key(namespace.hex(), from_utf8(bytes(header[middle:end])), from_utf8(bytes(header[start:middle])))
    except (UnicodeDecodeError, ConfigError) as error:
        raise DamagedEntryError("the header names no key", reason="foreign") from error
    return EntryInfo(key, rows, width, dtype, levels, size + payload_bytes, checksum)


def decode_entry(key: Key, entry: Entry, expected: Expected | None = None) -> Tensor:
    """The rows of an entry, bit for bit, sharing the payload's memory. One on a device is copied to the host for its
    checksum, beside the engine's work; the caller waits for that.

    Args:
        key: what was asked for.
        entry: what a store gave.
        expected: what the rows must be.

    Returns:
        `[num_embeds, width]` where the payload is, in the dtype they were stored in.

    Raises:
        ConfigError: the key is no `Key`, the entry no `Entry` of bytes, or what is expected no `Expected`.
        DamagedEntryError: anything about the entry is not as it was stored under this key, or not as expected.
    """
    _check_asked(key, entry, expected)
    info = read_header(entry.header)
    for part in ("namespace", "modality", "identifier"):
        found, asked = getattr(info.key, part), getattr(key, part)
        if found != asked:
            raise DamagedEntryError(f"stored under another {part}", reason=part, found=found, expected=asked)
    if info.nbytes != entry.nbytes:
        raise DamagedEntryError("cut short or grown", reason="truncated", found=entry.nbytes, expected=info.nbytes)
    wanted = expected or Expected()
    for name, want, have in (
        ("rows", wanted.rows, info.rows),
        ("width", wanted.width, info.width),
        ("dtype", wanted.dtype, info.dtype),
    ):
        if want is not None and want != have:
            raise DamagedEntryError("not of use to the asker", reason="mismatch", field=name, found=have, expected=want)
    payload = entry.payload
    if not payload.is_contiguous() or payload.storage_offset() % info.dtype.itemsize:
        payload = payload.clone(memory_format=torch.contiguous_format)  # else it cannot be seen as another dtype
    if _checksum(payload) != info.checksum:
        raise DamagedEntryError("the payload is damaged", reason="checksum")
    return payload.view(info.dtype).view(info.rows, info.width)


def _check_asked(key: Key, entry: Entry, expected: Expected | None) -> None:
    for field, found, kind in (("key", key, Key), ("entry", entry, Entry), ("expected", expected, Expected)):
        if not isinstance(found, kind) and (found is not None or kind is not Expected):
            raise ConfigError(f"not the {field}", field=field, found=type(found).__name__, expected=kind.__name__)
    payload = entry.payload
    if not isinstance(payload, Tensor) or payload.dtype is not torch.uint8 or payload.is_nested or payload.ndim != 1:
        raise ConfigError(
            "not a payload",
            field="payload",
            found=_described(payload) if isinstance(payload, Tensor) else type(payload).__name__,
            expected="uint8 [payload bytes]",
        )


def _described(tensor: Tensor) -> str:
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    return f"{tensor.dtype} {shape} on {tensor.device}"


def join_entry(entry: Entry) -> bytes:
    """Header and payload as one value, for stores that take nothing else. One copy."""
    return b"".join((entry.header, writable_view(entry.payload)))


def split_entry(key: Key, value: bytes, *, pinned: bool = False) -> Entry:
    """The entry in one value: the header, and the payload in the value's own memory, or copied into a pinned buffer.

    A value that is too short for a header becomes an entry that does not decode.

    Args:
        key: what was asked for.
        value: what a store gave; nobody else has it.
        pinned: copy into page-locked memory.
    """
    size = header_bytes(key)
    if len(value) <= size:
        return Entry(value, host_bytes(0))
    payload = torch.from_numpy(np.asarray(_Unshared(value))[size:])
    if pinned:
        payload = host_bytes(payload.numel(), pinned=True).copy_(payload)
    return Entry(value[:size], payload)


class _Lent:
    """A tensor's bytes, as numpy takes them. `Tensor.numpy` would mark the memory as lent, and what is lent is copied
    wherever rows in memory of their own are needed."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        data = (buffer.data_ptr(), False)
        self.__array_interface__ = {"version": 3, "data": data, "shape": (buffer.numel(),), "typestr": "|u1"}


class _Unshared:
    """Bytes that nobody else has, as numpy takes them for an array that may be written to, without a copy."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        described: dict[str, Any] = np.frombuffer(value, np.uint8).__array_interface__
        self.__array_interface__ = described | {"data": (described["data"][0], False)}


def _as_bytes(rows: Tensor) -> Tensor:
    # Of a tensor without elements a view under another dtype may have any stride; an empty buffer says the same
    return rows.resolve_neg().contiguous().view(-1).view(torch.uint8) if rows.numel() else host_bytes(0)


def _checksum(payload: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(writable_view(on_host(payload)))  # releases the GIL


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
