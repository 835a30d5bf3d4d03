"""The files of a disk tier: written beside their place and renamed into it, read in one call."""

from __future__ import annotations

import os
from collections.abc import Set
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Lock

from mmcache.errors import DamagedEntryError
from mmcache.tiers.disk_index import NAME
from mmcache.tiers.entry import Entry, header_bytes, host_bytes, read_header, writable_view
from mmcache.tiers.keys import Key

__all__ = ["CondemnedFiles", "EntryFiles"]

_LARGE = 64 << 20


class EntryFiles:
    """The files below one directory, written by one owner.

    Args:
        directory: holds `objects/` and `writing/`.
        owner: prefix of this process's temporary files.
        largest: a file of more bytes than this is none of ours, and is not read whole.
        pinned: read into page-locked memory.

    Raises (everywhere): OSError.
    """

    def __init__(self, directory: Path, owner: str, *, largest: int, pinned: bool) -> None:
        self._objects = directory / "objects"
        self._writing = directory / "writing"
        self._owner = owner
        self._largest = largest
        self._pinned = pinned
        self._numbers = count()

    def path(self, name: str) -> str:
        """Where the entry of this name is."""
        return f"{self._objects}/{name[:2]}/{name}"

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name now."""
        return NAME.fullmatch(name) is not None and os.path.exists(self.path(name))

    def shards(self) -> list[str]:
        """The subdirectories that hold files."""
        return os.listdir(self._objects)

    def names(self, shard: str) -> list[str]:
        """Names of all files in a subdirectory."""
        return os.listdir(self._objects / shard)

    def unlink(self, name: str) -> bool:
        """Remove a file; False if there was none. A name that is none leads nowhere, whatever an index says."""
        if NAME.fullmatch(name) is None:
            return False
        try:
            os.unlink(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def write(self, name: str, entry: Entry) -> None:
        """Put a file in place, whole or not at all."""
        temporary = self._writing / f"{self._owner}-{next(self._numbers)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        try:
            fd = os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            _make(self._writing)  # removed while it was open; not if the whole directory is gone, perhaps a mount
            fd = os.open(temporary, flags, 0o600)
        try:
            try:
                _write_all(fd, [memoryview(entry.header), writable_view(entry.payload)])
            finally:
                os.close(fd)
            path = self.path(name)
            try:
                os.rename(temporary, path)
            except FileNotFoundError:
                _make(self._objects)
                _make(self._objects / name[:2])
                os.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def read(self, key: Key) -> Entry:
        """A file's bytes, whatever they are: one call, so that a file cut short is a short read and no signal.

        A large one, for which memory might not be had, is not read unless its header says that it is so large.
        """
        fd = os.open(self.path(key.name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size > _LARGE and not _says(os.pread(fd, header_bytes(key), 0), size):
                return Entry(b"", host_bytes(0))  # grown to any size, perhaps with holes: no memory is taken for it
            header = bytearray(min(size, header_bytes(key)))
            payload = host_bytes(max(0, min(size, self._largest) - len(header)), pinned=self._pinned)
            view = writable_view(payload)
            done = os.preadv(fd, [header, view], 0) - len(header)
            while 0 < done < len(view):  # the kernel gives at most 2 GiB a call
                more = os.preadv(fd, [view[done:]], len(header) + done)
                if not more:
                    break
                done += more
        finally:
            os.close(fd)
        return Entry(bytes(header), payload if done == len(view) else payload[: max(0, done)])


class CondemnedFiles:
    """Files that are to go. What cannot be removed is tried again whenever others are.

    Args:
        files: where they are.
    """

    def __init__(self, files: EntryFiles) -> None:
        self._files = files
        self._waiting: set[str] = set()
        self._lock = Lock()

    def remove(self, names: Set[str]) -> tuple[int, set[str], dict[str, OSError]]:
        """Remove these and those that wait: the number that were there, names of which there is no file now, and why
        others could not be removed."""
        with self._lock:
            condemned, self._waiting = names | self._waiting, set()  # nobody else's from here on
        there = 0
        failed: dict[str, OSError] = {}
        for name in condemned:
            try:
                there += self._files.unlink(name)
            except OSError as error:
                failed[name] = error
        with self._lock:
            self._waiting |= failed.keys()
        return there, condemned - failed.keys(), failed


def _make(directory: Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)


def _says(header: bytes, size: int) -> bool:
    try:
        return read_header(header).nbytes == size
    except DamagedEntryError:
        return False


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        done = os.writev(fd, parts)
        while parts and done >= len(parts[0]):
            done -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][done:]
