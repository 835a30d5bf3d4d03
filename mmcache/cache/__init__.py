"""The cache of one process: ledger and store joined."""

from mmcache.cache.cache import MultimodalCache
from mmcache.cache.config import CacheConfig
from mmcache.cache.events import CacheEvent
from mmcache.cache.lookup import Lookup
from mmcache.planning import FieldAction, ItemStatus, PlanBytes, Progress, StepPlan

__all__ = [
    "CacheConfig",
    "CacheEvent",
    "FieldAction",
    "ItemStatus",
    "Lookup",
    "MultimodalCache",
    "PlanBytes",
    "Progress",
    "StepPlan",
]
