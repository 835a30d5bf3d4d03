"""Content digests: equal for equal content, different for everything that an encoder could tell apart.

`docs/digest.md` specifies what is hashed, byte by byte.
"""

from mmcache.hashing.compare import same_content
from mmcache.hashing.hasher import ContentHasher
from mmcache.hashing.pool import HashPool
from mmcache.hashing.protocol import Hasher
from mmcache.hashing.sources import AudioSource, ImageSource, Source, VideoSource

__all__ = [
    "AudioSource",
    "ContentHasher",
    "HashPool",
    "Hasher",
    "ImageSource",
    "Source",
    "VideoSource",
    "same_content",
]
