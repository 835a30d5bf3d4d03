"""Tiers by what an operator writes: a directory, `redis://...`, `rediss://...` or `mooncake://host:port`."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from mmcache.errors import ConfigError
from mmcache.tiers.disk import DiskTier
from mmcache.tiers.mooncake import MooncakeTier
from mmcache.tiers.protocol import Tier
from mmcache.tiers.redis import RedisTier

__all__ = ["open_tier"]


def open_tier(
    location: str | os.PathLike[str], *, capacity_bytes: int | None = None, one_trust_domain: bool = False
) -> Tier:
    """The tier at a location.

    Args:
        location: a directory, or a URL of one of the schemes above.
        capacity_bytes: budget of a directory; None leaves its entries alone. Servers have budgets of their own.
        one_trust_domain: see the tiers.

    Raises:
        ConfigError: an unknown scheme, an address that cannot be read, or an extra that is missing.
    """
    if not isinstance(location, str):
        if not isinstance(location, os.PathLike):
            raise ConfigError("not a location", field="location", found=repr(location), expected="a directory or a URL")
        location = os.fspath(location)
    if not isinstance(location, str) or not location:
        raise ConfigError("not a location", field="location", found=repr(location), expected="a directory or a URL")
    try:
        scheme = urlsplit(location).scheme if "://" in location else ""
    except ValueError as error:  # the message leaves out what may hold a password
        raise ConfigError("not a URL", field="location", expected="redis, rediss or mooncake://host:port") from error
    if scheme in ("redis", "rediss", "unix"):
        return RedisTier(location, one_trust_domain=one_trust_domain)
    if scheme == "mooncake":
        return MooncakeTier(urlsplit(location).netloc, one_trust_domain=one_trust_domain)
    if scheme:
        raise ConfigError("unknown kind of store", field="location", found=scheme, expected="redis, rediss, mooncake")
    capacity = 1 << 62 if capacity_bytes is None else capacity_bytes
    return DiskTier(Path(location), capacity, one_trust_domain=one_trust_domain)
