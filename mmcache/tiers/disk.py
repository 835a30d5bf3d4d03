"""Entries as files in a directory that several processes of one host share, under one byte budget.

    index.sqlite3         what there is (`disk_index`)
    objects/ab/abcdef...  one file an entry; the name is a digest
    owners/<id>           locked by the process that has this id, for as long as it lives
    writing/<id>-<n>      a file that is being written

A put reserves room in the index (condemning entries if need be), removes their files, writes a temporary file, renames
it into place and publishes the row. Killed anywhere in between it leaves reservations and files of an owner that is not
alive, and whoever opens the directory next removes both, at a cost that does not depend on the number of entries.
Nothing is synced to the device: after a power cut files and index are compared, and checksums decide.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from mmcache.errors import ConfigError, TierError
from mmcache.tiers.arguments import check_entries, check_name, check_namespace, check_whole, keys_of
from mmcache.tiers.disk_files import CondemnedFiles, EntryFiles
from mmcache.tiers.disk_index import DiskIndex, IndexRow, Notes, is_damage
from mmcache.tiers.disk_recovery import announce_owner, drop_dead_reservations, recount, recover, start_anew
from mmcache.tiers.entry import Entry, check_pinning, host_bytes
from mmcache.tiers.keys import Key, as_utf8
from mmcache.tiers.lifetime import forked_with
from mmcache.tiers.protocol import PutOutcome, StoredEntry, TierUsage

__all__ = ["DiskTier"]

_log = logging.getLogger("mmcache.tiers")
_GROUP_OR_OTHERS_WRITE = 0o022
_NOTES = 256
_PAGE = 512
_BUSY_SECONDS = 5.0


class DiskTier:
    """A directory on a local disk as a tier. Processes that share it share its budget and its entries.

    A directory that cannot be used now (read-only, full, gone) is no error here: operations raise `TierError` until it
    can be used again. One that vanishes while it is open is not made anew, since it may have been a mount.

    Args:
        directory: made with mode 0700 if it is missing. It must be on a local file system (locks, SQLite in WAL mode).
        capacity_bytes: budget for the files, headers included; the index comes on top (some 300 bytes an entry).
        pinned: read into page-locked memory, for fast copies to a GPU.
        one_trust_domain: all who may write to the directory trust each other. Only asked for where group or others may.
        name: name for counters and events.

    Raises:
        ConfigError: the budget is not positive, or memory cannot be page-locked.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        pinned: bool = False,
        one_trust_domain: bool = False,
        name: str = "disk",
    ) -> None:
        check_whole("capacity_bytes", capacity_bytes)
        check_name(name)
        check_pinning(pinned)
        path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError("not a directory", field="directory", found=repr(directory), expected="a path")
        self.name = name
        self.directory = Path(directory)
        self._capacity = capacity_bytes
        self._trusted = one_trust_domain
        self._owner = uuid.uuid4().hex
        self._files = EntryFiles(self.directory, self._owner, largest=capacity_bytes, pinned=pinned)
        self._lock = Lock()
        self._notes = Notes()
        self._condemned = CondemnedFiles(self._files)
        self._opening = Lock()
        self._index: DiskIndex | None = None
        self._owner_fd = -1
        self._opened_before = False
        self._closed = False
        self._forked = False
        forked_with(self)
        try:
            self._opened()
        except TierError as error:
            _log.warning("disk tier %s cannot be used now: %s", self.directory, error)

    @property
    def shared(self) -> bool:
        """Others than the owner of the directory may write to it, and were not declared to be trusted."""
        try:
            return not self._trusted and bool(self.directory.stat().st_mode & _GROUP_OR_OTHERS_WRITE)
        except OSError:
            return False

    def contains_many(self, keys: Sequence[Key]) -> dict[Key, int]:
        """See `Tier`. One `stat` a key; the index is not asked."""
        keys = keys_of(keys)
        self._check_open()
        found = {}
        for key in keys:
            with suppress(OSError):
                found[key] = os.stat(self._files.path(key.name)).st_size
        return found

    def get_many(self, keys: Sequence[Key]) -> dict[Key, Entry]:
        """See `Tier`. One read a key, straight into the buffer that is returned."""
        keys = keys_of(keys)
        self._check_open()
        found = {}
        lost = []
        for key in keys:
            try:
                found[key] = self._files.read(key)
            except (FileNotFoundError, NotADirectoryError):
                lost.append(key.name)
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EISDIR):
                    raise TierError(f"reading failed: {error}", field=self.name) from error
                found[key] = Entry(b"", host_bytes(0))  # this file, not the directory: it does not decode and goes
        now = time.time_ns()
        with self._lock:
            self._notes.used.update((key.name, now) for key in found)
            self._notes.lost.update(lost)
            full = len(self._notes) >= _NOTES
        if full:
            self._settle()
        return found

    def put_many(self, entries: Mapping[Key, Entry]) -> PutOutcome:
        """See `Tier`. Two transactions for all of them; entries that are there already are left as they are."""
        check_entries(entries)
        fitting = {key.name: key for key, entry in entries.items() if entry.nbytes <= self._capacity}
        if not fitting:
            return PutOutcome(frozenset())
        with self._changing() as (index, db):
            mine, present, evicted = self._reserve(index, db, fitting, entries)
        written = []
        try:
            self._unlink({row.name for row in evicted})
            for name in mine:
                self._files.write(name, entries[fitting[name]])
                written.append(name)
        except OSError as error:
            raise TierError(f"writing failed: {error}", field=self.name) from error
        finally:
            with self._lock:
                self._notes.written.update(written)
                self._notes.gone.update(name for name in mine if name not in written)
            self._settle()
        stored = frozenset(fitting[name] for name in (*present, *written))
        return PutOutcome(stored, tuple(key for row in evicted if (key := row.key) is not None))

    def remove_many(self, keys: Sequence[Key]) -> int:
        """See `Tier`."""
        return self._remove([key.name for key in keys_of(keys)])

    def clear(self, namespace: str | None = None) -> int:
        """See `Tier`."""
        check_namespace(namespace)
        with self._asking() as index:
            names = [row.name for row in index.published(namespace)]
        return sum(self._remove(names[start : start + _PAGE]) for start in range(0, len(names), _PAGE))

    def prune(self, target_bytes: int) -> int:
        """Evict entries, least recently used first, until all take at most `target_bytes`; the number evicted."""
        check_whole("target_bytes", target_bytes, least=0)
        with self._changing() as (index, db):
            evicted = index.evict(db, target_bytes, self._owner)
        with self._removing():
            self._unlink({row.name for row in evicted})
        return len(evicted)

    def remove_strays(self, *, dry_run: bool = False) -> int:
        """Files that the index does not know, which only a damaged index leaves; their number, and they are removed
        unless `dry_run`."""
        strays = 0
        with self._asking() as index:
            for shard in self._files.shards():
                names = self._files.names(shard)
                for start in range(0, len(names), _PAGE):
                    page = names[start : start + _PAGE]
                    known = index.rows(page)
                    for name in page:
                        if name not in known:
                            strays += 1 if dry_run else self._files.unlink(name)
        return strays

    def scan(self) -> Iterator[StoredEntry]:
        """See `Tier`."""
        with self._asking() as index:
            for row in index.published():
                yield StoredEntry(row.name, row.key, row.nbytes, row.used / 1e9)

    def usage(self) -> TierUsage:
        """See `Tier`. Reservations count."""
        with self._asking() as index:
            entries, nbytes = index.totals()
        return TierUsage(entries, nbytes, self._capacity)

    def close(self) -> None:
        """Give up the directory; entries stay."""
        if not self._closed and not self._forked:
            self._settle()
            with self._opening:
                self._let_go()
        self._closed = True

    def forked(self) -> None:
        """This is a forked child, to which neither SQLite's connections nor the owner's mark belong. Its copy of the
        descriptor goes: as long as it is open, the parent counts as alive."""
        self._forked = True
        if self._owner_fd >= 0:
            os.close(self._owner_fd)

    # -- opening

    def _opened(self) -> DiskIndex:
        self._check_open()
        index = self._index
        try:
            if index is not None and self._still_there(index):
                return index
            with self._opening:
                index = self._index
                if index is None or not self._still_there(index):
                    self._let_go()
                    index = self._index = self._open()
                return index
        except (OSError, sqlite3.Error) as error:
            raise TierError(f"the directory cannot be used: {error}", field=self.name) from error

    def _still_there(self, index: DiskIndex) -> bool:
        try:
            stat = os.stat(self.directory / "index.sqlite3")
        except FileNotFoundError:
            return False
        return (stat.st_dev, stat.st_ino) == index.identity

    def _open(self) -> DiskIndex:
        if not self._opened_before:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in ("objects", "owners", "writing"):
            (self.directory / part).mkdir(mode=0o700, exist_ok=True)
        path = self.directory / "index.sqlite3"
        self._condemned = CondemnedFiles(self._files)
        self._owner_fd = announce_owner(self.directory, self._owner)
        try:
            try:
                index = DiskIndex(path, timeout=_BUSY_SECONDS)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and not is_damage(error) and not path.is_dir():
                    raise  # locked, read-only or full: nothing is wrong with what is there
                _log.warning("disk tier %s: the index is unusable (%s), it starts anew", self.directory, error)
                start_anew(self.directory)
                index = DiskIndex(path, timeout=_BUSY_SECONDS)
            recover(self.directory, index, self._files, self._capacity, self._owner)
        except BaseException:
            self._let_go()
            raise
        self._opened_before = True
        return index

    def _let_go(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            index.close()
        fd, self._owner_fd = self._owner_fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.unlink(self.directory / "owners" / self._owner)
            os.close(fd)

    # -- one operation

    @contextmanager
    def _asking(self) -> Iterator[DiskIndex]:
        index = self._opened()
        try:
            yield index
        except (OSError, sqlite3.Error) as error:
            raise self._failed(index, error) from error

    @contextmanager
    def _changing(self) -> Iterator[tuple[DiskIndex, sqlite3.Connection]]:
        """A transaction that first takes in what readers and earlier writers noted."""
        index = self._opened()
        with self._lock:
            notes, self._notes = self._notes, Notes()
        try:
            with index.transaction() as db:
                if not index.plausible(db, self._capacity):
                    recount(self.directory, index, db)
                index.take_in(db, notes, self._owner, self._files.exists)
                yield index, db
        except (OSError, sqlite3.Error) as error:
            with self._lock:
                self._notes = notes.merged(self._notes)
            raise self._failed(index, error) from error

    def _failed(self, index: DiskIndex, error: Exception) -> TierError:
        """What to raise. A damaged index is put aside; the next operation makes a new one."""
        if is_damage(error):
            with self._opening, suppress(OSError):
                if self._still_there(index):
                    _log.warning("disk tier %s: the index is damaged (%s), it starts anew", self.directory, error)
                    start_anew(self.directory)
        return TierError(f"the directory failed: {error}", field=self.name)

    def _reserve(
        self, index: DiskIndex, db: sqlite3.Connection, keys: Mapping[str, Key], entries: Mapping[Key, Entry]
    ) -> tuple[list[str], list[str], list[IndexRow]]:
        """Names to write, names that are there, and rows that were evicted for them."""
        drop_dead_reservations(self.directory, index, db, self._files)
        held = index.rows(list(keys))
        present = [name for name, row in held.items() if row.owner is None and self._files.exists(name)]
        gone = [name for name, row in held.items() if row.owner is None and name not in present]
        index.delete(db, gone)
        now = time.time_ns()
        index.touch(db, [(name, now) for name in present])
        room = self._capacity
        mine = []
        for name in keys:
            if (name not in held or name in gone) and entries[keys[name]].nbytes <= room:
                room -= entries[keys[name]].nbytes
                mine.append(name)
        evicted = index.evict(db, room, self._owner)
        while mine and index.totals()[1] > room:  # what others are writing right now is in the way
            room += entries[keys[mine.pop()]].nbytes
        index.insert(db, [_reservation(keys[name], entries[keys[name]], now, self._owner) for name in mine])
        evicted_names = {row.name for row in evicted}
        return mine, [name for name in present if name not in evicted_names], evicted

    def _remove(self, names: Sequence[str]) -> int:
        with self._changing() as (index, db):
            published = {name for name, row in index.rows(names).items() if row.owner is None}
            index.condemn(db, list(published), self._owner)
        with self._removing():
            removed = self._unlink(published)
            # What has no row, or is somebody's reservation, has no file either, or is not to have one
            return removed + sum(self._files.unlink(name) for name in names if name not in published)

    @contextmanager
    def _removing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TierError(f"removing failed: {error}", field=self.name) from error
        finally:
            self._settle()

    def _unlink(self, names: Set[str]) -> int:
        """Remove the files of entries that were condemned just now; the number that were there."""
        there, gone, failed = self._condemned.remove(names)
        with self._lock:
            self._notes.gone.update(gone)
        for name in names & failed.keys():
            raise failed[name]
        return there

    def _settle(self) -> None:
        # A failure keeps the notes for the next transaction: rows that wait do not make a read or a write fail
        with suppress(TierError), self._changing():
            pass

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", field=self.name)
        if self._forked:
            raise TierError("the tier was opened in another process; open it after the fork", field=self.name)


def _reservation(key: Key, entry: Entry, now: int, owner: str) -> IndexRow:
    return IndexRow(
        key.name, key.namespace, as_utf8(key.identifier), entry.nbytes, now, owner, modality=as_utf8(key.modality)
    )
