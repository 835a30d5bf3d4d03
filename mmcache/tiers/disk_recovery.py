"""Who is alive on a disk tier's directory, and what those who are not have left behind."""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import shutil
import sqlite3
import uuid
from contextlib import suppress
from pathlib import Path

from mmcache.tiers.disk_files import EntryFiles
from mmcache.tiers.disk_index import DiskIndex

__all__ = ["announce_owner", "drop_dead_reservations", "recount", "recover", "start_anew"]

_log = logging.getLogger("mmcache.tiers")
_FEW = 4096
"""Rows that are counted at every opening."""


def announce_owner(directory: Path, owner: str) -> int:
    """Make and lock `owners/<owner>`; the descriptor holds the lock until it is closed or the process ends.

    The file says in which run of the machine that is.
    """
    path = directory / "owners" / owner
    hidden = path.with_suffix(".new")
    fd = os.open(hidden, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Locked before it has its name, so that nobody takes it for a dead process's in between
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, _boot())
        os.rename(hidden, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def drop_dead_reservations(directory: Path, index: DiskIndex, db: sqlite3.Connection, files: EntryFiles) -> None:
    """Within a transaction: remove the reservations whose owners are no more, and the files in their place, which the
    budget does not count any more, or not yet."""
    for owner in index.owners(db):
        if not _is_alive(directory / "owners" / owner):
            names = index.reserved_by(db, owner)
            for name in names:
                files.unlink(name)
            index.delete(db, names)
            for path in (directory / "writing").glob(f"{glob.escape(owner)}-*"):
                path.unlink(missing_ok=True)


def recover(directory: Path, index: DiskIndex, files: EntryFiles, capacity: int, owner: str) -> None:
    """Remove what processes left that are no more, and come within the budget."""
    dead = {path for path in (directory / "owners").iterdir() if not path.suffix and not _is_alive(path)}
    with index.transaction() as db:
        drop_dead_reservations(directory, index, db, files)
        clean = all(map(_of_this_boot, dead))
        if not clean or index.totals()[0] <= _FEW or not index.plausible(db, capacity):
            recount(directory, index, db)
        if not clean or not index.totals()[0]:
            _reconcile(index, db, files)
        evicted = [row.name for row in index.evict(db, capacity, owner)]
    if evicted:
        for name in evicted:
            files.unlink(name)
        with index.transaction() as db:
            index.drop(db, evicted, owner)
    for path in (directory / "writing").iterdir():
        if not _is_alive(directory / "owners" / path.name.split("-")[0]):
            with suppress(OSError):  # not a file, say: nobody's
                path.unlink()
    for path in dead:  # last: as long as the name is there, somebody will come back for the rest
        with suppress(OSError):
            path.unlink()
    for trash in directory.glob("trash-*"):
        shutil.rmtree(trash, ignore_errors=True)


def recount(directory: Path, index: DiskIndex, db: sqlite3.Connection) -> None:
    """Within a transaction: make sure of the totals, which a damaged index may have wrong."""
    if index.recount(db):
        _log.warning("disk tier %s: the index had wrong totals, they were counted again", directory)


def _reconcile(index: DiskIndex, db: sqlite3.Connection, files: EntryFiles) -> None:
    # The index is kept without syncs, so that a machine that loses power may lose its last transactions, but not the
    # files that they were about. Rows do not change meanwhile: a file without one is nobody's.
    there = {name for shard in files.shards() for name in files.names(shard)}
    rows, reserved = index.names(db)
    index.delete(db, list(rows - reserved - there))
    for name in there - rows:
        files.unlink(name)


def _boot() -> bytes:
    """What tells this run of the machine from others; nothing where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def _of_this_boot(owner: Path) -> bool:
    try:
        return bool(_boot()) and owner.read_bytes() == _boot()
    except (FileNotFoundError, IsADirectoryError):
        return True  # somebody else has dealt with it just now, or it is nobody's mark


def start_anew(directory: Path) -> None:
    """Put index and entries aside, for `recover` to remove, when the index is damaged beyond use."""
    trash = directory / f"trash-{uuid.uuid4().hex}"
    trash.mkdir(mode=0o700)
    for path in (*directory.glob("index.sqlite3*"), directory / "objects"):
        with suppress(FileNotFoundError):
            os.rename(path, trash / path.name)
    (directory / "objects").mkdir(mode=0o700, exist_ok=True)


def _is_alive(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, IsADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)
