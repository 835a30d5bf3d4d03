"""Rows in a device's memory: their order with its streams, and copies between it and the host.

Copies wait until they are done, so they are for the threads of tiers. A request's thread only ever records an event,
or has its current stream wait for one; the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmcache.errors import ConfigError
from mmcache.staging import Event, staging_for

__all__ = ["Apart", "handed_out", "on_host", "usable_device", "written_by_now"]


def usable_device(device: torch.device | str) -> torch.device:
    """The device, with its index.

    Raises:
        ConfigError: it is none of torch's, holds no values, or is not to be had here.
    """
    try:
        found = torch.empty(0, dtype=torch.uint8, device=torch.device(device)).device
    except (RuntimeError, TypeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise ConfigError(
            f"the device cannot be used: {error}", field="device", found=repr(device), expected="one that is here"
        ) from None
    if found.type == "meta":
        raise ConfigError("holds no values", field="device", found=repr(device), expected="a device with memory")
    return found


def written_by_now(rows: Tensor) -> Event | None:
    """The point behind which rows are written that were computed on the current stream; None on the CPU."""
    return None if rows.is_cpu else staging_for(rows.device).streams.record()


def handed_out(rows: Tensor, written: Event | None) -> Tensor:
    """The rows, for the current stream: it waits until they are written, and their memory waits for it."""
    if not rows.is_cpu:
        streams = staging_for(rows.device).streams
        if written is not None:
            streams.wait(written)
        streams.used(rows)
    return rows


def on_host(tensor: Tensor, after: Event | None = None) -> Tensor:
    """The tensor, if it is on the CPU; else a copy there, made behind `after`. Waits for it.

    Args:
        tensor: on any device.
        after: the point behind which it is written; None if it is.
    """
    if tensor.is_cpu:
        return tensor
    apart = Apart(tensor.device)
    with apart.work(after):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=apart.has_streams)
        host.copy_(tensor, non_blocking=apart.has_streams)
    return host


class Apart:
    """A stream of a device for copies beside the engine's own work, which is neither held up nor waited for."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None if device.type == "cpu" else _accelerator(device)
        self._stream = None if self._module is None else self._module.Stream(device=device)

    @property
    def has_streams(self) -> bool:
        """False for the CPU and for devices whose work is in order."""
        return self._stream is not None

    @contextmanager
    def work(self, after: Event | None = None) -> Iterator[None]:
        """What is enqueued and allocated inside belongs to the stream, comes after `after`, and is done at the end."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with self._module.stream(self._stream):
            yield
        self._stream.synchronize()


def _accelerator(device: torch.device) -> Any:
    try:
        module = torch.get_device_module(device)
        return module if module.is_available() else None
    except (RuntimeError, AttributeError):
        return None
