"""The way from host memory to a device: a bounded ring of pinned memory, and the order of the device's streams.

Whatever is copied to a device asynchronously is first written to a region of the ring, in one pass that also joins and
converts. A region is used again only after an event that follows the copy out of it; nothing here ever waits for one.
Where the ring is full, or memory cannot be pinned, the copy goes from pageable memory: slower, and just as right.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache import native
from mmcache.errors import ConfigError
from mmcache.integers import as_int

__all__ = [
    "BITS",
    "DEFAULT_PINNED_BYTES",
    "Bits",
    "Event",
    "PinnedRing",
    "Region",
    "Staging",
    "Streams",
    "as_bits",
    "fill",
    "staging_for",
    "streams_for",
]

DEFAULT_PINNED_BYTES = 256 << 20

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Bits: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
# The integer type of a dtype's size. Complex tensors may be conjugated lazily, quantised ones are more than their bits.
_KINDS = {
    dtype: BITS[dtype.itemsize]
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and dtype.itemsize in BITS and not dtype.is_complex and not name.startswith("q")
}
_ALIGNMENT = 512
# Bytes from which on addresses are worth being asked for.
_LARGE = 1 << 20


def as_bits(tensor: Tensor) -> Bits | None:
    """The tensor as a numpy array of integers over the same memory, or None where autograd or its kind forbids it."""
    kind = _KINDS.get(tensor.dtype)
    if kind is None or (type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter):
        return None
    if tensor.is_neg():
        return None
    if tensor.requires_grad:
        if torch.is_grad_enabled():
            return None
        tensor = tensor.detach()
    return tensor.view(kind).numpy()


def fill(target: Tensor, source: Tensor) -> None:
    """Copy `source` into the host tensor `target` of the same shape: one pass, converting if need be."""
    if source.dtype is target.dtype and source.is_cpu:
        target_bits, source_bits = as_bits(target), as_bits(source)
        if target_bits is not None and source_bits is not None:
            if source_bits.nbytes >= _LARGE and source_bits.flags.c_contiguous and target_bits.flags.c_contiguous:
                native.copy(target_bits.ctypes.data, source_bits.ctypes.data, source_bits.nbytes)
            else:
                target_bits[...] = source_bits
            return
    # Between dtypes PyTorch 2.13 may forget that a number is negated lazily.
    target.copy_(source.detach().resolve_neg().resolve_conj())


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it; does not wait."""


class Streams(Protocol):
    """The order of work on one device."""

    def side(self) -> AbstractContextManager[Any]:
        """Work enqueued inside the block goes to a stream beside the current one."""

    def record(self) -> Event:
        """A point after all work enqueued on the current stream so far."""

    def wait(self, event: Event) -> None:
        """Work enqueued on the current stream from now on comes after the event; the host does not wait."""

    def used(self, tensor: Tensor) -> None:
        """The current stream reads `tensor`: its memory is not given to others before that."""


class _Passed:
    def query(self) -> bool:
        return True


class InOrder:
    """A device without streams of its own: whatever was enqueued is done."""

    def side(self) -> AbstractContextManager[Any]:
        """The current and only stream."""
        return nullcontext()

    def record(self) -> Event:
        """A point that is passed."""
        return _Passed()

    def wait(self, event: Event) -> None:
        """Nothing to wait for."""

    def used(self, tensor: Tensor) -> None:
        """Nothing to remember."""


class DeviceStreams:
    """Streams of a real accelerator, through its `torch` module (`torch.cuda`, `torch.xpu` ...)."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._side = self._module.Stream(device=device)

    def side(self) -> AbstractContextManager[Any]:
        """The side stream, one for all transfers to the device."""
        return self._module.stream(self._side)  # type: ignore[no-any-return]

    def record(self) -> Event:
        """An event without timing, on the device's current stream."""
        event: Event = self._current().record_event(self._module.Event())
        return event

    def wait(self, event: Event) -> None:
        """Order the device's current stream behind the event."""
        self._current().wait_event(event)

    def used(self, tensor: Tensor) -> None:
        """Tell the caching allocator that the current stream reads the tensor."""
        tensor.record_stream(self._current())

    def _current(self) -> Any:
        return self._module.current_stream(self._device)


def streams_for(device: torch.device) -> Streams:
    """Streams of `device`; where there is no such accelerator (a simulated one, say) work is in order."""
    try:
        available = torch.get_device_module(device).is_available()
    except (RuntimeError, AttributeError):
        available = False
    return DeviceStreams(device) if available and device.type != "cpu" else InOrder()


class Region:
    """A part of the ring, from `take` until `release`."""

    __slots__ = ("_event", "_released", "buffer", "end", "start")

    def __init__(self, buffer: Tensor, start: int, end: int) -> None:
        self.buffer = buffer
        self.start = start
        self.end = end
        self._event: Event | None = None
        self._released = False

    def release(self, event: Event | None = None) -> None:
        """Give the region back: after `event`, or at once if no copy out of it was enqueued."""
        self._event = event
        self._released = True

    @property
    def done(self) -> bool:
        """Whether the region may be used again."""
        return self._released and (self._event is None or self._event.query())


class PinnedRing:
    """Pinned memory of a fixed size, handed out in order and taken back in order. Thread-safe.

    Attributes:
        limit_bytes: size of the ring; memory is pinned when the first region is taken.
    """

    def __init__(self, limit_bytes: int = DEFAULT_PINNED_BYTES) -> None:
        limit = as_int(limit_bytes)
        if limit is None or limit < 0:
            raise ConfigError("a pinned ring's size is an integer >= 0", found=repr(limit_bytes))
        self.limit_bytes = limit
        self._slab: Tensor | None = None
        self._regions: deque[Region] = deque()
        self._head = 0
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes in regions that are taken, or whose copy is not known to be done."""
        with self._lock:
            self._reclaim()
            return sum(region.end - region.start for region in self._regions)

    def take(self, nbytes: int) -> Region | None:
        """A region with a uint8 buffer `[nbytes]`; None where the ring has no room now or memory cannot be pinned."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > self.limit_bytes or not nbytes:
            return None
        slab = self._pinned_slab()
        if slab is None:
            return None
        with self._lock:
            if slab is not self._slab:
                return None
            self._reclaim()
            start = self._place(size)
            if start is None:
                return None
            region = Region(slab[start : start + nbytes], start, start + size)
            self._regions.append(region)
            self._head = start + size
            return region

    def _reclaim(self) -> None:
        while self._regions and self._regions[0].done:
            self._regions.popleft()

    def _place(self, size: int) -> int | None:
        if not self._regions:
            return 0
        tail, head = self._regions[0].start, self._head
        if head > tail:
            if head + size <= self.limit_bytes:
                return head
            return 0 if size <= tail else None
        return head if head + size <= tail else None

    def _pinned_slab(self) -> Tensor | None:
        seen = slab = self._slab
        # Memory that was pinned in a simulation is not pinned outside it.
        if slab is not None and slab.is_pinned():
            return slab
        try:
            # Whoever is first, others will write to it, and inference mode's tensors take no writes outside it.
            with torch.inference_mode(False):
                slab = torch.empty(self.limit_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return None
        with self._lock:
            if self._slab is not seen:  # another thread was faster
                return self._slab
            self._slab = slab
            self._regions.clear()
            self._head = 0
        return slab


class Staging:
    """The ring and the streams that lead to one device."""

    def __init__(self, device: torch.device, ring: PinnedRing | None = None, streams: Streams | None = None) -> None:
        self.device = device
        self.ring = PinnedRing() if ring is None else ring
        self.streams = streams_for(device) if streams is None else streams

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Region | None]:
        """An uninitialised contiguous host tensor, pinned if it comes with a region (to be released), else pageable."""
        count = 1
        for size in shape:
            count *= size
        region = self.ring.take(count * dtype.itemsize)
        if region is None:
            return torch.empty(shape, dtype=dtype), None
        return region.buffer.view(dtype).view(shape), region


_stagings: dict[torch.device, Staging] = {}
_stagings_lock = Lock()


def staging_for(device: torch.device) -> Staging:
    """The process's staging towards `device`, made at first use."""
    staging = _stagings.get(device)
    if staging is None:
        with _stagings_lock:
            staging = _stagings.setdefault(device, Staging(device))
    return staging
