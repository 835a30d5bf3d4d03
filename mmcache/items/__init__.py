"""Requests and items: what an engine's scheduler hands to the cache."""

from mmcache.items.item import MultimodalItem
from mmcache.items.placeholders import PlaceholderRange
from mmcache.items.request import MultimodalRequest
from mmcache.items.tokens import TokenIds

__all__ = ["MultimodalItem", "MultimodalRequest", "PlaceholderRange", "TokenIds"]
