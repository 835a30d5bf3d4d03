"""Keys of blocks, for engines that have a block table of their own."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from struct import pack

from mmcache.errors import ConfigError, RequestError
from mmcache.integers import as_int
from mmcache.items import MultimodalRequest

__all__ = ["block_keys"]

_DOMAIN = b"mmcache block key 1"


def block_keys(request: MultimodalRequest, block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of the request's whole blocks, 32 bytes each, one for each block from the first.

    Two requests have the same key for a block if and only if they agree in all tokens up to its end, in `(cache_salt,
    adapter)`, and in `(identifier, start relative to the block, length, is_embed)` of every item that overlaps it or a
    block before it. Keys are SHA-256 digests, equal in every process and on every machine.

    Args:
        request: the request.
        block_size: tokens of a block, positive.
        known: keys of its first blocks, from an earlier call for the same request and block size, to continue from
            there at the cost of what is new.

    Raises:
        ConfigError: `block_size` is not a positive integer.
        RequestError: `known` has more keys than the request has whole blocks, or it is no request.
    """
    if not isinstance(request, MultimodalRequest):
        raise RequestError("block keys are of a MultimodalRequest", found=type(request).__name__)
    block_size = check_block_size(block_size)
    count = request.num_tokens // block_size
    if len(known) > count:
        raise RequestError(
            "more keys are known than the request has whole blocks",
            request_id=request.request_id,
            expected=f"at most {count}",
            found=len(known),
        )
    keys = list(known)
    tokens = request.token_ids.astype("<i4", copy=False).tobytes()
    width = 4 * block_size
    extra = _items_of_blocks(request, block_size, len(known), count)
    key = keys[-1] if keys else _root_key(request, block_size)
    for block in range(len(known), count):
        # Of known lengths but for the end, which comes in units of 40 bytes: no two inputs serialise alike.
        key = sha256(key + tokens[block * width : (block + 1) * width] + extra.get(block, b"")).digest()
        keys.append(key)
    return keys


def check_block_size(block_size: object) -> int:
    """It, as an int; raises unless it is a positive integer."""
    size = as_int(block_size)
    if size is None or size < 1:
        raise ConfigError("a block has a positive number of tokens", expected="an integer >= 1", found=repr(block_size))
    return size


def _root_key(request: MultimodalRequest, block_size: int) -> bytes:
    digest = sha256(_DOMAIN + pack("<q", block_size))
    for part in (request.cache_salt, request.adapter):
        # A tag and a length before every part: None is not "", and a salt that ends like an adapter begins is not it.
        digest.update(b"n" if part is None else b"s" + _framed(part))
    return digest.digest()


def _items_of_blocks(request: MultimodalRequest, block_size: int, first: int, count: int) -> dict[int, bytes]:
    """What the items add to the keys of the blocks `[first, count)` that they overlap."""
    extra: dict[int, bytes] = {}
    for item in request.items:
        place = item.placeholder
        start, end = place.offset // block_size, -(-(place.offset + place.length) // block_size)
        if not place.length or end <= first or start >= count:
            continue
        runs = b"".join(pack("<qq", *run) for run in place.runs)
        digest = sha256(_framed(item.identifier) + pack("<q", place.length) + runs).digest()
        for block in range(max(start, first), min(end, count)):
            extra[block] = extra.get(block, b"") + digest + pack("<q", place.offset - block * block_size)
    return extra


def _framed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return pack("<q", len(data)) + data
