"""`mmcache store`: what operators do with a directory or a server full of entries."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from mmcache.errors import ConfigError, DamagedEntryError, MMCacheError, UnsupportedError
from mmcache.tiers.disk import DiskTier
from mmcache.tiers.entry import decode_entry, read_header
from mmcache.tiers.keys import Key
from mmcache.tiers.locations import open_tier
from mmcache.tiers.protocol import StoredEntry, Tier
from mmcache.tiers.redis import RedisTier

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_store_commands"]

_PAGE = 32


def add_store_commands(subparsers: Subparsers) -> None:
    """Add the command `store` with `ls`, `stat`, `verify`, `prune` and `clear`.

    Each parser's default `run` is a function of the parsed arguments that returns the exit status: 0, 1 where damage
    was found or the store failed, 2 for a location that cannot be used.
    """
    store = subparsers.add_parser("store", help="look after stored embeddings")
    actions = store.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, function, text in (
        ("ls", _ls, "list entries: name, bytes, last use, modality, rows x width, dtype, namespace, identifier"),
        ("stat", _stat, "entries and bytes, in all and by namespace"),
        ("verify", _verify, "read every entry, report damage and, with --remove, remove it"),
        ("prune", _prune, "shrink a directory to a size, least recently used first"),
        ("clear", _clear, "remove all entries, or one namespace's"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "location", metavar="DIR_OR_URL", help="a directory, redis[s]://... or mooncake://host:port"
        )
        action.set_defaults(run=_run, function=function)
        if name == "ls":
            action.add_argument("--limit", type=int, default=None, help="stop after so many entries")
        if name == "verify":
            action.add_argument("--remove", action="store_true", help="remove what is damaged")
        if name == "prune":
            action.add_argument("--to", type=_size, required=True, metavar="SIZE", help="bytes, or 500M, 20G")
        if name == "clear":
            action.add_argument("--namespace", default=None, help="a namespace fingerprint, as `ls` shows it")


def _run(arguments: argparse.Namespace) -> int:
    location: str = arguments.location
    if "://" not in location and not os.path.isdir(os.path.join(location, "objects")):
        print(f"mmcache store: {location} is no store", file=sys.stderr)  # opening it would make one
        return 2
    try:
        tier = open_tier(location)
    except ConfigError as error:
        print(f"mmcache store: {error}", file=sys.stderr)
        return 2
    try:
        status: int = arguments.function(tier, arguments)
    except MMCacheError as error:
        print(f"mmcache store: {error}", file=sys.stderr)
        return 1
    finally:
        tier.close()
    return status


def _ls(tier: Tier, arguments: argparse.Namespace) -> int:
    for page in _pages(islice(tier.scan(), arguments.limit)):
        entries = tier.get_many([stored.key for stored in page if stored.key is not None])
        for stored in page:
            entry = entries.get(stored.key) if stored.key is not None else None
            shape = "?"
            if entry is not None:
                try:
                    info = read_header(entry.header)
                    levels = f" in {info.levels} levels" if info.levels > 1 else ""
                    shape = f"{info.rows} x {info.width}{levels} {str(info.dtype).removeprefix('torch.')}"
                    shape = f"{info.key.modality} {shape}".strip()
                except DamagedEntryError as error:
                    shape = f"damaged: {error.reason}"
            key = f"{stored.key.namespace} {stored.key.identifier}" if stored.key is not None else "foreign"
            print(f"{stored.name[:16]}  {stored.nbytes:>12}  {_age(stored)}  {shape}  {key}")
    return 0


def _stat(tier: Tier, arguments: argparse.Namespace) -> int:
    usage = tier.usage()
    try:
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for stored in tier.scan():
            namespace = stored.key.namespace if stored.key is not None else "foreign"
            counts[namespace] += 1
            sizes[namespace] += stored.nbytes
        print(f"entries {counts.total()}  bytes {sizes.total()}")
        for namespace, size in sizes.most_common():
            print(f"  {namespace}  entries {counts[namespace]}  bytes {size}")
    except UnsupportedError as error:
        print(f"reachable; {error}")
    if usage.nbytes is not None and not isinstance(tier, DiskTier):
        print(f"server memory {usage.nbytes} of {usage.capacity_bytes or 'no limit'}")
    return 0


def _verify(tier: Tier, arguments: argparse.Namespace) -> int:
    whole = 0
    damaged: Counter[str] = Counter()
    for page in _pages(tier.scan()):
        bad: list[Key] = []
        for key, entry in tier.get_many([stored.key for stored in page if stored.key is not None]).items():
            try:
                decode_entry(key, entry)
                whole += 1
            except DamagedEntryError as error:
                damaged[error.reason] += 1
                bad.append(key)
                print(f"damaged: {error.reason}: {key.name} {key.namespace} {key.identifier}")
        if arguments.remove:
            tier.remove_many(bad)
    strays = tier.remove_strays(dry_run=not arguments.remove) if isinstance(tier, DiskTier | RedisTier) else 0
    print(f"whole {whole}  damaged {damaged.total()}  no entries at all {strays}")
    return 1 if damaged.total() or strays else 0


def _prune(tier: Tier, arguments: argparse.Namespace) -> int:
    if not isinstance(tier, DiskTier):
        raise UnsupportedError("servers evict by themselves; prune is for directories")
    print(f"removed {tier.prune(arguments.to)}")
    return 0


def _clear(tier: Tier, arguments: argparse.Namespace) -> int:
    print(f"removed {tier.clear(arguments.namespace)}")
    return 0


def _pages(entries: Iterator[StoredEntry]) -> Iterator[list[StoredEntry]]:
    while page := list(islice(entries, _PAGE)):
        yield page


def _age(stored: StoredEntry) -> str:
    return "-" if stored.last_used is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.last_used))


def _size(text: str) -> int:
    units: dict[str, Any] = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    unit = units.get(text[-1:].upper())
    try:
        size = int(float(text[:-1]) * unit) if unit else int(text)
    except ValueError:
        size = -1
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: bytes, or 500M, 20G")
    return size
