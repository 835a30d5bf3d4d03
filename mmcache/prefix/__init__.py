"""Prefixes of requests whose KV exists: which blocks can be reused, and under which keys."""

from mmcache.prefix.index import PrefixIndex
from mmcache.prefix.keys import block_keys
from mmcache.prefix.match import PrefixMatch

__all__ = ["PrefixIndex", "PrefixMatch", "block_keys"]
