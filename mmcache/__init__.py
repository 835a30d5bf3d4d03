"""mmcache: a prefix-cache-aware cache for multimodal inputs."""

from mmcache.errors import *  # noqa: F403
