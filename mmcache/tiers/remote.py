"""What the tiers on servers have in common: how keys are called there, and how large a value may be."""

from __future__ import annotations

import hashlib

from mmcache.tiers.keys import FORMAT_VERSION, Key

__all__ = ["DEFAULT_LARGEST_ENTRY", "key_prefix", "remote_name"]

DEFAULT_LARGEST_ENTRY = 256 << 20
"""Bytes; a value that is larger is not fetched: sizes are checked before memory is allocated."""


def key_prefix(namespace: str | None = None) -> str:
    """What the names of all entries, or of a namespace's, begin with. Letters, digits and dashes."""
    everything = f"mmcache{FORMAT_VERSION}-"
    if namespace is None:
        return everything
    # Half of a digest of the fingerprint tells namespaces apart; the entry's own name and header decide
    return f"{everything}{hashlib.sha256(namespace.encode()).hexdigest()[:32]}-"


def remote_name(key: Key) -> str:
    """An entry's name on a server; the format version is part of it, so that formats live side by side."""
    return key_prefix(key.namespace) + key.name
