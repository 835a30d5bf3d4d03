"""Content digests: equal for equal content, different for everything that an encoder could tell apart.

`docs/digest.md` specifies what is hashed, byte by byte.
"""

from mmcache.hashing.audio_source import AudioSource
from mmcache.hashing.compare import same_content
from mmcache.hashing.hasher import ContentHasher
from mmcache.hashing.image_source import ImageSource
from mmcache.hashing.media import Samples
from mmcache.hashing.pool import HashPool
from mmcache.hashing.protocol import Hasher
from mmcache.hashing.source import Source
from mmcache.hashing.video_source import VideoSource

__all__ = [
    "AudioSource",
    "ContentHasher",
    "HashPool",
    "Hasher",
    "ImageSource",
    "Samples",
    "Source",
    "VideoSource",
    "same_content",
]
