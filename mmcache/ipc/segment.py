"""A shared-memory file that cannot leak and cannot be overcommitted.

Who lives is told by locks on the file that the kernel drops when their process ends, however it ends: the owner locks
byte 0, every attached reader the byte that its epoch names (bytes far beyond the end of the file can be locked too).
So an owner that was killed is found at the next start, and a reader that was killed stops counting at once, without a
helper process, without process ids (which containers do not share) and without lock files. All pages are reserved when
the file is made: later a write cannot hit a full file system, which would be a fatal signal and not an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import struct
import sys
import weakref
from pathlib import Path

import numpy as np

from mmcache.errors import ArenaFullError, ConfigError

__all__ = ["DEFAULT_DIRECTORY", "HEADER_BYTES", "ReadSegment", "Segment", "remove_abandoned"]

DEFAULT_DIRECTORY = "/dev/shm"
HEADER_BYTES = 4096
_PREFIX = "mmcache-arena-"
_MAGIC = b"mmcarena"
_VERSION = 1
_HEADER = struct.Struct("<8sIxxxxQ")
_LOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux
_OFD_GETLK, _OFD_SETLK = 36, 37


class Segment:
    """A file of `HEADER_BYTES + capacity_bytes` that this process made, owns and may write.

    Attributes:
        path: the file; others attach by it.
        capacity_bytes: bytes behind the header.
        address, view: of the bytes behind the header, in this process.
    """

    def __init__(self, capacity_bytes: int, directory: str | os.PathLike[str]) -> None:
        """Make the file and reserve every page of it.

        Raises:
            ArenaFullError: the file system has no room for it.
            ConfigError: the directory does not exist or cannot hold such a file, or this is not 64-bit Linux.
        """
        if sys.platform != "linux" or struct.calcsize("P") != 8:
            raise ConfigError("shared-memory arenas need 64-bit Linux", found=sys.platform)
        self.capacity_bytes = capacity_bytes
        self._fd, self.path = _make(HEADER_BYTES + capacity_bytes, Path(directory))
        self._pid = os.getpid()
        self._close = weakref.finalize(self, _close_owned, self._fd, self.path, self._pid)
        try:
            # Mapped through another open file: a mapping keeps its file's locks, and a forked child inherits it.
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(fd, HEADER_BYTES + capacity_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                os.close(fd)
        except OSError as error:
            self._close()
            raise ConfigError("the arena cannot be mapped", found=f"{capacity_bytes} bytes: {error.strerror}") from None
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data) + HEADER_BYTES
        self.view = memoryview(self._map)[HEADER_BYTES:]
        _OWNED.add(self)

    def reader_lives(self, epoch: int) -> bool:
        """Whether some process still has the file attached under this epoch."""
        answer = fcntl.fcntl(self._fd, _OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, epoch, 1, 0))
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Remove the file; memory goes back when the last process has unmapped it. Idempotent."""
        if os.getpid() == self._pid:
            _unlink(self.path)

    def _forget_in_child(self) -> None:
        # A forked child shares the open file and would keep the owner's lock alive past the owner.
        if self._close.detach() is not None:
            os.close(self._fd)


class ReadSegment:
    """Another process's file, attached read-only under an epoch. Closed when the last tensor in it is gone."""

    def __init__(self, path: str, epoch: int) -> None:
        """Attach; from here on the owner sees the epoch as alive.

        Raises:
            ConfigError: there is no such file, or it is not an arena of this version.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError("no arena can be attached here", found=f"{path}: {error.strerror}") from None
        try:
            header = os.pread(fd, _HEADER.size, 0)
            size = os.fstat(fd).st_size
            magic, version, capacity = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0)
            # A size that does not fit would be a fatal signal at the first read beyond the end.
            if magic != _MAGIC or version != _VERSION or size != HEADER_BYTES + capacity:
                raise ConfigError("the file is no arena of this version", found=path)
            _lock(fd, epoch, fcntl.F_RDLCK)
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        except OSError as error:
            os.close(fd)
            raise ConfigError("the arena cannot be attached", found=f"{path}: {error.strerror}") from None
        except ConfigError:
            os.close(fd)
            raise
        self.capacity_bytes: int = capacity
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data) + HEADER_BYTES
        self.view = memoryview(self._map)[HEADER_BYTES:]
        weakref.finalize(self, os.close, fd)


def remove_abandoned(directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> list[str]:
    """Remove the arenas of processes that ended without removing theirs; every new arena does so first.

    Returns:
        The paths removed. Processes that have such a file attached keep what they read.
    """
    removed = []
    for path in sorted(Path(directory).glob(_PREFIX + "*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or removed since
        try:
            if os.pread(fd, len(_MAGIC), 0) == _MAGIC:
                _lock(fd, 0, fcntl.F_WRLCK)
                path.unlink()
                removed.append(str(path))
        except OSError:
            pass  # its owner lives, or another process removes it
        finally:
            os.close(fd)
    return removed


def _make(size: int, directory: Path) -> tuple[int, str]:
    try:
        # The file gets its name only when it is locked and complete: nobody can take it for an abandoned one before.
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            "no shared-memory file can be made here", found=f"{directory}: {error.strerror}", expected="a tmpfs"
        ) from None
    try:
        _lock(fd, 0, fcntl.F_WRLCK)
        os.posix_fallocate(fd, 0, size)
        os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, size - HEADER_BYTES), 0)
        path = str(directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        # With a directory given it is linkat(2) that is called, which alone follows the link to an unnamed file.
        where = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=where, follow_symlinks=True)
        finally:
            os.close(where)
    except OSError as error:
        os.close(fd)
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM):
            raise ConfigError("no shared memory here", found=f"{directory}: {error.strerror}") from None
        raise ArenaFullError(
            f"{directory} has no room for the arena (containers often get 64 MB: see --shm-size)",
            expected=f"{size} bytes",
            found=f"{_free_bytes(directory)} bytes free",
        ) from None
    return fd, path


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _lock(fd: int, byte: int, kind: int) -> None:
    """Lock one byte for as long as the open file lives; OSError if another has it."""
    fcntl.fcntl(fd, _OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def _close_owned(fd: int, path: str, pid: int) -> None:
    if os.getpid() == pid:
        _unlink(path)
    os.close(fd)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _forget_in_child() -> None:
    for segment in list(_OWNED):
        segment._forget_in_child()
    _OWNED.clear()


_OWNED: weakref.WeakSet[Segment] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
