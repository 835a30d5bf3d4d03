"""Where encoded rows live: memory of a device or the host, a local disk, Mooncake Store, Redis, or all of them."""

from mmcache.tiers.claims import EncodeClaims
from mmcache.tiers.counters import LATENCY_BOUNDS, Latency, TieredStats, TierStats
from mmcache.tiers.disk import DiskTier
from mmcache.tiers.entry import Entry, EntryInfo, decode_entry, encode_entry, read_header
from mmcache.tiers.fetch import Fetch
from mmcache.tiers.keys import Expected, Key
from mmcache.tiers.locations import open_tier
from mmcache.tiers.memory import MemoryTier
from mmcache.tiers.mooncake import MooncakeTier
from mmcache.tiers.protocol import PutOutcome, StoredEntry, Tier, TierUsage
from mmcache.tiers.redis import RedisTier
from mmcache.tiers.tiered import TieredStore

__all__ = [
    "LATENCY_BOUNDS",
    "DiskTier",
    "EncodeClaims",
    "Entry",
    "EntryInfo",
    "Expected",
    "Fetch",
    "Key",
    "Latency",
    "MemoryTier",
    "MooncakeTier",
    "PutOutcome",
    "RedisTier",
    "StoredEntry",
    "Tier",
    "TierStats",
    "TierUsage",
    "TieredStats",
    "TieredStore",
    "decode_entry",
    "encode_entry",
    "open_tier",
    "read_header",
]
