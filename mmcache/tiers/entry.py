"""One entry format for every tier: a header that says everything, and the raw bytes of the rows.

Header (little-endian), padded with zeros to a multiple of 64 bytes so that a payload behind it stays aligned:

    8 s  magic                     8 Q  rows
    2 H  format version            8 Q  width, in elements
    2 H  header bytes              8 Q  payload bytes
    2 H  identifier bytes          32 s namespace fingerprint
    1 B  dtype code                16 s XXH3-128 of the payload
    1 x                            16 s XXH3-128 of the header without this field
    2 H  levels (DeepStack)        ...  identifier, UTF-8

The size of a header follows from its key alone, so a reader can put header and payload into two buffers with one call.
Checksums find damage, not malice: who may write to a store is for the store's own access control.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from mmcache.errors import ConfigError, DamagedEntryError, EmbeddingError

__all__ = [
    "FORMAT_VERSION",
    "MAX_IDENTIFIER_BYTES",
    "Entry",
    "EntryInfo",
    "Expected",
    "Key",
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

FORMAT_VERSION = 1
MAX_IDENTIFIER_BYTES = 4096

_MAGIC = b"MMCEMBED"
_FIXED = struct.Struct("<8sHHHBxHQQQ32s16s")
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


@dataclass(frozen=True)
class Key:
    """What rows are stored under: a namespace fingerprint (salt and adapter included) and a content identifier.

    Args:
        namespace: fingerprint, 64 hexadecimal digits (`mmcache.namespaces.namespace_fingerprint`).
        identifier: content identifier, at most 4096 bytes of UTF-8; opaque.

    Raises:
        ConfigError: the namespace is no fingerprint, or the identifier is no text, empty or too long.
    """

    namespace: str
    identifier: str

    def __post_init__(self) -> None:
        space = self.namespace
        if not isinstance(space, str) or len(space) != 64 or space.strip("0123456789abcdef"):
            raise ConfigError(
                "not a namespace fingerprint", field="namespace", found=repr(space), expected="64 hex digits"
            )
        if not isinstance(self.identifier, str):
            raise ConfigError("not an identifier", field="identifier", found=repr(self.identifier), expected="text")
        size = len(self.identifier.encode("utf-8", "surrogatepass"))
        if not 0 < size <= MAX_IDENTIFIER_BYTES:
            raise ConfigError(
                "identifier of unusable length",
                field="identifier",
                found=f"{size} bytes",
                expected=f"1 to {MAX_IDENTIFIER_BYTES}",
            )

    def __hash__(self) -> int:
        return hash(self.identifier)  # strings keep their hash; namespaces are few

    @cached_property
    def name(self) -> str:
        """The entry's name in every store: 64 hexadecimal digits that depend on the format version and the key."""
        digest = hashlib.sha256(b"mmcache-entry-%d\0" % FORMAT_VERSION)
        digest.update(bytes.fromhex(self.namespace))  # of fixed size, so that no two keys feed the same bytes
        digest.update(self.identifier.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """An encoded entry in two parts, so that neither storing nor reading it has to join them.

    Attributes:
        header: see the module's docstring.
        payload: uint8 `[payload bytes]`, contiguous, on the CPU; may share memory with the rows it was made from.
    """

    header: bytes
    payload: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the entry takes in a store."""
        return len(self.header) + self.payload.numel()


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
    """The bytes of a uint8 CPU tensor as a memoryview, for calls that read or fill buffers in place."""
    return buffer.numpy().data


def header_bytes(key: Key) -> int:
    """Size of the header of this key's entry, in bytes."""
    return _padded(_FIXED.size + _SUM_BYTES + len(key.identifier.encode("utf-8", "surrogatepass")))


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
    if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.layout != torch.strided or rows.device.type != "cpu":
        raise EmbeddingError(
            "only rows on the CPU are stored",
            found=f"{list(rows.shape)} on {rows.device}" if isinstance(rows, Tensor) else type(rows).__name__,
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
    identifier = key.identifier.encode("utf-8", "surrogatepass")
    size = _padded(_FIXED.size + _SUM_BYTES + len(identifier))
    fixed = _FIXED.pack(
        _MAGIC,
        FORMAT_VERSION,
        size,
        len(identifier),
        code,
        levels,
        rows.shape[0],
        rows.shape[1],
        payload.numel(),
        bytes.fromhex(key.namespace),
        _checksum(payload),
    )
    header = fixed + xxhash.xxh3_128_digest(fixed + identifier) + identifier
    return Entry(header.ljust(size, b"\0"), payload)


def read_header(header: bytes | memoryview) -> EntryInfo:
    """What a header says, checked against its own checksum.

    Args:
        header: at least the header; what follows it is not looked at.

    Raises:
        DamagedEntryError: foreign bytes, another format version, cut short, or damaged.
    """
    if len(header) < _FIXED.size + _SUM_BYTES:
        reason = "truncated" if bytes(header[:8]) == _MAGIC[: len(header)] else "foreign"
        raise DamagedEntryError("not a whole header", reason=reason, found=f"{len(header)} bytes")
    fixed = bytes(header[: _FIXED.size])
    magic, version, size, id_bytes, code, levels, rows, width, payload_bytes, namespace, checksum = _FIXED.unpack(fixed)
    if magic != _MAGIC:
        raise DamagedEntryError("not an entry", reason="foreign", found=repr(magic), expected=repr(_MAGIC))
    if version != FORMAT_VERSION:
        raise DamagedEntryError("another format", reason="version", found=version, expected=FORMAT_VERSION)
    start = _FIXED.size + _SUM_BYTES
    if size != _padded(start + id_bytes) or len(header) < size:
        raise DamagedEntryError("not a whole header", reason="truncated", found=f"{len(header)} bytes", expected=size)
    identifier = bytes(header[start : start + id_bytes])
    if xxhash.xxh3_128_digest(fixed + identifier) != bytes(header[_FIXED.size : start]):
        raise DamagedEntryError("the header is damaged", reason="checksum")
    dtype = _DTYPES.get(code)
    if dtype is None or payload_bytes != rows * width * dtype.itemsize or not levels:
        raise DamagedEntryError("the header contradicts itself", reason="foreign", found=f"dtype code {code}")
    try:
        key = Key(namespace.hex(), identifier.decode("utf-8", "surrogatepass"))
    except (UnicodeDecodeError, ConfigError) as error:
        raise DamagedEntryError("the header names no key", reason="foreign") from error
    return EntryInfo(key, rows, width, dtype, levels, size + payload_bytes, checksum)


def decode_entry(key: Key, entry: Entry, expected: Expected | None = None) -> Tensor:
    """The rows of an entry, bit for bit, sharing the payload's memory.

    Args:
        key: what was asked for.
        entry: what a store gave.
        expected: what the rows must be.

    Returns:
        `[num_embeds, width]` on the CPU, the dtype they were stored in.

    Raises:
        DamagedEntryError: anything about the entry is not as it was stored under this key, or not as expected.
    """
    info = read_header(entry.header)
    if info.key.namespace != key.namespace:
        raise DamagedEntryError(
            "stored under another namespace", reason="namespace", found=info.key.namespace, expected=key.namespace
        )
    if info.key.identifier != key.identifier:
        raise DamagedEntryError(
            "stored under another identifier", reason="identifier", found=info.key.identifier, expected=key.identifier
        )
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
    if _checksum(entry.payload) != info.checksum:
        raise DamagedEntryError("the payload is damaged", reason="checksum")
    return entry.payload.view(info.dtype).view(info.rows, info.width)


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


class _Unshared:
    """Bytes that nobody else has, as numpy takes them for an array that may be written to, without a copy."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        described: dict[str, Any] = np.frombuffer(value, np.uint8).__array_interface__
        self.__array_interface__ = described | {"data": (described["data"][0], False)}


def _as_bytes(rows: Tensor) -> Tensor:
    # Of a tensor without elements a view under another dtype may have any stride; an empty buffer says the same
    return rows.contiguous().view(-1).view(torch.uint8) if rows.numel() else host_bytes(0)


def _checksum(payload: Tensor) -> bytes:
    data: np.ndarray[Any, Any] = payload.numpy()
    return xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]  # takes any buffer; releases the GIL


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
