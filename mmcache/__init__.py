"""mmcache: a prefix-cache-aware cache for the multimodal inputs of LLM serving engines.

For every image, video and audio clip of a request it says which tensors the model still needs, and where; see
`MultimodalCache`. The rooms of the package, from the bottom: `errors`, `integers`, `fields`, `testing`; `items`,
`hashing`, `identity`, `policies`, `namespaces`, `stats`; `planning`, `prefix`, `features`, `tiers`, `models`,
`staging`; `ledger`, `store`, `transfer`, `merge`; `cache`, `ipc`; `engines`, `audit`; `replay`, `metrics`, `cli`.
Rooms import downwards or sideways only.
"""

from mmcache.cache import CacheConfig, CacheEvent, Lookup, MultimodalCache
from mmcache.errors import (
    ConfigError,
    ContentConflictError,
    EmbeddingError,
    FieldError,
    MissingContentError,
    MMCacheError,
    PlaceholderError,
    ReleasedError,
    RequestError,
    SelfWaitError,
    UnhashableContentError,
    UnknownClientIdError,
    UnresolvedItemError,
    UnsupportedError,
    WaitTimeoutError,
    WindowError,
)
from mmcache.features import FeatureCache
from mmcache.fields import FieldConfig, ItemFields, join_fields, split_fields
from mmcache.hashing import AudioSource, ContentHasher, ImageSource, VideoSource, same_content
from mmcache.identity import ClientIds
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.merge import MergePlan, merge_embeddings
from mmcache.namespaces import Namespace
from mmcache.planning import FieldAction, ItemStatus, PlanBytes, Progress, StepPlan
from mmcache.policies import make_policy
from mmcache.prefix import PrefixIndex, PrefixMatch, block_keys
from mmcache.stats import CacheStats
from mmcache.store import EmbeddingStore, StoreReport
from mmcache.transfer import EncoderBatch, Transfer, encoder_inputs

__all__ = [
    "AudioSource",
    "CacheConfig",
    "CacheEvent",
    "CacheStats",
    "ClientIds",
    "ConfigError",
    "ContentConflictError",
    "ContentHasher",
    "EmbeddingError",
    "EmbeddingStore",
    "EncoderBatch",
    "EncoderLedger",
    "FeatureCache",
    "FieldAction",
    "FieldConfig",
    "FieldError",
    "ImageSource",
    "ItemFields",
    "ItemStatus",
    "Lookup",
    "MMCacheError",
    "MergePlan",
    "MissingContentError",
    "MultimodalCache",
    "MultimodalItem",
    "MultimodalRequest",
    "Namespace",
    "PlaceholderError",
    "PlaceholderRange",
    "PlanBytes",
    "PrefixIndex",
    "PrefixMatch",
    "Progress",
    "ReleasedError",
    "RequestError",
    "SelfWaitError",
    "StepPlan",
    "StoreReport",
    "Transfer",
    "UnhashableContentError",
    "UnknownClientIdError",
    "UnresolvedItemError",
    "UnsupportedError",
    "VideoSource",
    "WaitTimeoutError",
    "WindowError",
    "block_keys",
    "encoder_inputs",
    "join_fields",
    "make_policy",
    "merge_embeddings",
    "same_content",
    "split_fields",
]

__version__ = "0.1.0"
