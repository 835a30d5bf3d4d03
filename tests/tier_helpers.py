"""Rows, keys and waiting, for the tests of tiers."""

import time

import torch

from mmcache.namespaces import Namespace, namespace_fingerprint
from mmcache.tiers import Key, Tier, decode_entry, encode_entry

torch.set_num_threads(1)

NAMESPACE = Namespace("tiny-vl", revision="1", encoder_dtype="float32", digest_scheme="sha256")
WEAK = Namespace("tiny-vl", revision="1", encoder_dtype="float32", digest_scheme="xxh3_128")


def key_of(identifier: str, modality: str = "image", **where: str | None) -> Key:
    return Key(namespace_fingerprint(NAMESPACE, **where), identifier, modality)


def rows_of(identifier: str, rows: int = 4, width: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that follow from the identifier alone, so that a wrong tensor is told from a right one anywhere."""
    generator = torch.Generator().manual_seed(sum(identifier.encode()) * 1000 + len(identifier) * 7 + rows)
    offset = float(int.from_bytes(identifier.encode()[-4:], "big") % 997)
    return (torch.randn(rows, width, generator=generator) + offset).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
    )


def write(tier: Tier, *identifiers: str, **shape: object) -> list[Key]:
    keys = [key_of(identifier) for identifier in identifiers]
    tier.put_many({key: encode_entry(key, rows_of(key.identifier, **shape)) for key in keys})
    return keys


def read(tier: Tier, *keys: Key) -> dict[str, torch.Tensor]:
    return {key.identifier: decode_entry(key, entry).cpu() for key, entry in tier.get_many(keys).items()}


def until(condition, seconds: float = 20.0) -> None:
    """Wait for something that happens on another thread; fails loudly instead of for ever."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("what was waited for did not happen")
        time.sleep(0.005)


def put_all(store, *identifiers):
    keys = [store.key(identifier, "image") for identifier in identifiers]
    for key in keys:
        store.put(key, rows_of(key.identifier))
    return keys


def balanced(store):
    """Every look-up is accounted for, in the whole and in every tier."""
    stats = store.stats()
    assert stats.lookups == stats.queue_hits + sum(tier.hits for tier in stats.tiers) + stats.misses
    for tier in stats.tiers:
        ends = tier.hits + tier.misses + tier.damaged + tier.errors + tier.timeouts + tier.cancelled
        assert tier.asked == ends, tier
        assert sum(tier.reasons.values()) == tier.damaged
    return stats
