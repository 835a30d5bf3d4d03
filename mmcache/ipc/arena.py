"""Payload in shared memory: written once, by content, and mapped by every worker of the host.

The owner alone decides. A region is written before anything names it, is never written again while it is referenced,
and carries a serial number in front of its bytes, by which a reader tells it from what lay there before or after.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from mmcache.errors import ArenaFullError, ConfigError, FieldError, ReleasedError
from mmcache.fields import FieldValue
from mmcache.ipc.extents import Extents
from mmcache.ipc.reader import GUARD
from mmcache.ipc.regions import ArenaStats, Region, StoredField
from mmcache.ipc.segment import DEFAULT_DIRECTORY, Segment, remove_abandoned
from mmcache.ipc.values import ALIGNMENT, aligned, flatten, same_bytes, write_tensor

__all__ = ["Arena"]

_BYTES = {bytes, bytearray, memoryview}


class Arena:
    """A byte budget of shared memory that this process owns and any process of the host can read.

    Content is found again by key, and kept after its last reference is gone until room is needed (the least recently
    used goes first). Thread-safe; no lock is held over a copy.

    Attributes:
        path: the file; `ArenaReader` attaches by it.
        capacity_bytes: the budget.
    """

    def __init__(self, capacity_bytes: int, *, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> None:
        """Reserve the budget; arenas in the same directory whose owner was killed are removed first.

        Args:
            capacity_bytes: bytes, all reserved now.
            directory: a tmpfs (or hugetlbfs) that the workers see under the same path.

        Raises:
            ConfigError: the budget is no positive integer, or the directory cannot hold it.
            ArenaFullError: the file system has no room for the budget.
        """
        if type(capacity_bytes) is not int or not 0 < capacity_bytes < 1 << 62:
            raise ConfigError("an arena's budget is a positive integer, in bytes", found=repr(capacity_bytes))
        if not isinstance(directory, (str, os.PathLike)):
            raise ConfigError("an arena's directory is a path", field="directory", found=repr(directory))
        remove_abandoned(directory)
        capacity = aligned(capacity_bytes)
        self._segment = Segment(capacity, directory)
        self.path = self._segment.path
        self.capacity_bytes = capacity
        self._address = self._segment.address
        self._view = self._segment.view
        self._lock = threading.Lock()
        self._room = Extents(capacity)
        self._index: dict[Hashable, Region] = {}
        self._idle: OrderedDict[Region, None] = OrderedDict()  # unreferenced, in the order of their last use
        self._serial = 0
        self._closed = False
        self._used = self._referenced = self._written = 0
        self._regions = self._writes = self._reuses = self._evictions = 0

    def hold(
        self, key: Hashable, fields: Mapping[str, FieldValue], *, kind: Hashable = None, note: object = None
    ) -> Region:
        """The content in the arena, written if it is not there, with one reference for the caller.

        What lies under the key already is used if it has the same layout and the same bits; otherwise the content given
        here replaces it for all who come later, and those who hold the old one keep it.

        Args:
            key: names the content, e.g. the tenant and the content digest.
            fields: name to value; tensors of any stride, dtype and device.
            kind: what it is; content of another kind is other content.
            note: kept with it for whoever finds it.

        Raises:
            ArenaFullError: no room even when all that is unreferenced goes, or more than the whole budget (then nothing
                goes).
            FieldError: a value cannot travel.
            ConfigError: key or kind cannot be hashed.
        """
        region = self.reserve(key, fields, kind=kind, note=note)
        try:
            self.write(region)
        except BaseException:
            self.release(region)
            raise
        return region

    def reserve(
        self, key: Hashable, fields: Mapping[str, FieldValue], *, kind: Hashable = None, note: object = None
    ) -> Region:
        """As `hold`, but content that is not there only gets its place: nobody finds it before `write` has filled it.

        Whoever is told of the place before may prepare to read it.
        """
        if not isinstance(fields, Mapping):
            raise FieldError("content is fields by name", found=type(fields).__name__)
        if not isinstance(key, Hashable) or not isinstance(kind, Hashable):
            raise ConfigError("content is found by a key that can be hashed", found=type(key).__name__)
        stored: list[StoredField] = []
        tensors: list[Tensor] = []
        end = 0
        for name, value in fields.items():
            nest, leaves, parts, end = flatten(value, name, end)
            stored.append((name, tuple(nest), tuple(leaves)))
            tensors += parts
        layout = tuple(stored)
        sources = [leaf for value in fields.values() for leaf in _leaves_of(value)]
        found = self._find_same(key, layout, sources, tensors, (kind, note))
        if found is not None:
            return found
        offsets = [offset for _, _, leaves in layout for _, _, offset in leaves]
        region = self._allocate(end)
        GUARD.pack_into(self._view, region.offset - ALIGNMENT, 0, 0)  # whatever lay there: it is not written
        region.key, region.fields, region.kind, region.note = key, layout, kind, note
        region.unwritten = list(zip(offsets, tensors, sources))
        return region

    def write(self, region: Region) -> None:
        """Write what `reserve` gave a place, for all to find; nothing where it is written. The caller holds it.

        Raises:
            ReleasedError: nobody holds it, or the region is another arena's.
        """
        self._check_own(region)
        _check_held(region)
        unwritten = region.unwritten
        if unwritten is None:
            return
        written = 0
        # As they are now: a source that is written to meanwhile is another one when it comes again.
        sources = _identities([source for _, _, source in unwritten])
        for offset, tensor, _ in unwritten:
            written += tensor.numel() * tensor.element_size()
            write_tensor(self._address + region.offset + offset, tensor)
        region.sources = sources
        region.unwritten = None
        self._seal(region)
        with self._lock:
            self._writes += 1
            self._written += written
            self._drop(region.key)
            self._index[region.key] = region

    def hold_bytes(self, parts: Sequence[bytes | memoryview]) -> Region:
        """Bytes that nobody else will ask for (a message), with one reference for the caller.

        Raises:
            ArenaFullError: as `hold`.
            ConfigError: a piece is no bytes.
        """
        if not _BYTES.issuperset(map(type, parts)):
            raise ConfigError("a message is made of pieces of bytes", found=[type(part).__name__ for part in parts])
        region = self._allocate(sum(map(len, parts)))
        start = region.offset
        try:
            for part in parts:
                end = start + len(part)
                self._view[start:end] = part
                start = end
        except ValueError as error:  # a view of other things than bytes
            self.release(region)
            raise ConfigError(f"a message is made of pieces of bytes: {error}") from None
        self._seal(region)
        return region

    def find(self, key: Hashable, *, kind: Hashable = None) -> Region | None:
        """The content under a key, if it is there and of that kind, with one reference for the caller."""
        with self._lock:
            region = self._index.get(key)
            if region is None or region.kind != kind:
                return None
            self._reuses += 1
            self._retain(region)
            return region

    def pin(self, key: Hashable) -> Region | None:
        """What lies under a key, whatever it is, with one reference: no room is made of it."""
        with self._lock:
            region = self._index.get(key)
            if region is not None:
                self._retain(region)
            return region

    def retain(self, region: Region, times: int = 1) -> None:
        """One more reference, or several, to a region that the caller holds.

        Raises:
            ReleasedError: nobody holds it, or it is another arena's; nothing changes.
        """
        self._check_own(region)
        with self._lock:
            _check_held(region)
            self._retain(region, times)

    def release(self, region: Region) -> None:
        """Give back one reference.

        Raises:
            ReleasedError: there are none, or the region is another arena's; nothing changes.
        """
        self._check_own(region)
        with self._lock:
            _check_held(region)
            region.refs -= 1
            if region.refs:
                return
            self._referenced -= _footprint(region.nbytes)
            if self._index.get(region.key) is region:
                self._idle[region] = None
            else:
                self._free(region)

    def read(self, region: Region) -> memoryview:
        """The bytes of a region that the caller holds, without a copy."""
        return self._view[region.offset : region.offset + region.nbytes]

    def discard(self, key: Hashable) -> None:
        """Let nobody find the content under a key any more; those who hold it keep it."""
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        """Discard all content."""
        with self._lock:
            for key in list(self._index):
                self._drop(key)

    def reader_lives(self, epoch: int) -> bool:
        """Whether a process still has the arena attached under this epoch; a killed one has not."""
        return self._segment.reader_lives(epoch)

    def stats(self) -> ArenaStats:
        """A consistent copy of the counters."""
        with self._lock:
            return ArenaStats(
                capacity=self.capacity_bytes,
                used=self._used,
                referenced=self._referenced,
                written=self._written,
                regions=self._regions,
                writes=self._writes,
                reuses=self._reuses,
                evictions=self._evictions,
            )

    def close(self) -> None:
        """Remove the file; readers that are attached keep what they read. Idempotent, and done at exit."""
        with self._lock:
            self._closed = True
        self._segment.close()

    def _find_same(
        self,
        key: Hashable,
        layout: tuple[StoredField, ...],
        sources: Sequence[Tensor],
        tensors: Sequence[Tensor],
        kind_and_note: tuple[Hashable, object],
    ) -> Region | None:
        with self._lock:
            region = self._index.get(key)
            if region is None or region.fields != layout or (region.kind, region.note) != kind_and_note:
                return None
            self._retain(region)
            if _are(region.sources, sources):
                self._reuses += 1
                return region
        # Other tensors under a known digest: usually the same bits, made again. The digest is not taken at its word,
        # since ids that clients give may be wrong, and comparing costs less than writing.
        offsets = [offset for _, _, leaves in layout for _, _, offset in leaves]
        address = self._address + region.offset
        identities = _identities(sources)
        if all(same_bytes(address, offset, tensor) for offset, tensor in zip(offsets, tensors)):
            with self._lock:
                self._reuses += 1
                region.sources = identities
            return region
        self.release(region)
        return None

    def _seal(self, region: Region) -> None:
        GUARD.pack_into(self._view, region.offset - ALIGNMENT, region.serial, region.nbytes)

    def _drop(self, key: Hashable) -> None:
        region = self._index.pop(key, None)
        if region is not None and not region.refs:
            del self._idle[region]
            self._free(region)

    def _retain(self, region: Region, times: int = 1) -> None:
        if not region.refs:
            self._idle.pop(region, None)
            self._referenced += _footprint(region.nbytes)
        region.refs += times

    def _allocate(self, nbytes: int) -> Region:
        size = _footprint(nbytes)
        with self._lock:
            if self._closed:
                raise ReleasedError("the arena is closed")
            if size > self.capacity_bytes:
                raise ArenaFullError(
                    "the content is larger than the arena", expected=f"at most {self.capacity_bytes}", found=size
                )
            offset = self._room.take(size)
            while offset is None and self._idle:
                region, _ = self._idle.popitem(last=False)
                del self._index[region.key]
                self._free(region)
                self._evictions += 1
                offset = self._room.take(size)
            if offset is None:
                raise ArenaFullError(
                    "what the arena holds is in use",
                    expected=f"{size} bytes in one piece",
                    found=self._room.largest,
                )
            self._serial += 1
            self._regions += 1
            self._used += size
            self._referenced += size
            return Region(offset + ALIGNMENT, nbytes, self._serial, self.path)

    def _check_own(self, region: Region) -> None:
        if not isinstance(region, Region):
            raise ConfigError("not a region of an arena", found=type(region).__name__)
        if region.path != self.path:
            raise ReleasedError("a region is held and given back in its arena", expected=self.path, found=region.path)

    def _free(self, region: Region) -> None:
        GUARD.pack_into(self._view, region.offset - ALIGNMENT, 0, 0)  # no reader takes it for what it was
        size = _footprint(region.nbytes)
        self._room.give(region.offset - ALIGNMENT, size)
        self._regions -= 1
        self._used -= size
        region.sources = ()
        region.unwritten = None


def _check_held(region: Region) -> None:
    if region.refs <= 0:
        raise ReleasedError("a region is given back as often as it was held", found=f"serial {region.serial}")


def _footprint(nbytes: int) -> int:
    """Bytes of a region with its guard, up to the next multiple of `ALIGNMENT`."""
    return ALIGNMENT + nbytes + -nbytes % ALIGNMENT


def _leaves_of(value: FieldValue) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for entry in value for leaf in _leaves_of(entry)]


def _version(tensor: Tensor) -> int:
    """What changes when the tensor is written to; -1 where it can be written to unseen."""
    # Inference tensors count no writes, and who lent memory (numpy, a buffer) may write to it past the tensor.
    return -1 if tensor.is_inference() or not tensor.untyped_storage().resizable() else tensor._version


def _identities(sources: Sequence[Tensor]) -> tuple[tuple[weakref.ref[Tensor], int], ...]:
    return tuple((weakref.ref(tensor), _version(tensor)) for tensor in sources)


def _are(known: Sequence[tuple[weakref.ref[Tensor], int]], sources: Sequence[Tensor]) -> bool:
    """Whether the region was written from these very tensors, unchanged since."""
    return len(known) == len(sources) and all(
        reference() is tensor and version == _version(tensor) >= 0
        for (reference, version), tensor in zip(known, sources)
    )
