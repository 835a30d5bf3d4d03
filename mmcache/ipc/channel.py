"""What carries messages: anything that keeps message boundaries."""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol, runtime_checkable

__all__ = ["Channel", "listener", "speaker", "waiter"]

# What a `Connection` puts in front of a message: its length, or -1 and its length.
_LENGTH, _LONG = struct.Struct("!i"), struct.Struct("!Q")
_SMALL, _CHUNK = 4096, 1 << 20


@runtime_checkable
class Channel(Protocol):
    """Two-way transport of whole messages between one sender and one receiver.

    `multiprocessing.Pipe()` gives two of them. Messages may arrive out of order or twice; one that is lost for good has
    to show as a broken channel (EOFError or OSError), after which the worker joins again.
    """

    def send_bytes(self, buf: bytes, /) -> None:
        """Send one message."""

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """Whether a message can be received, waiting for one at most so many seconds (None: for ever)."""

    def recv_bytes(self) -> bytes:
        """Receive one message."""


def waiter(channel: Channel) -> Callable[[float | None], bool]:
    """The channel's `poll`; of a `Connection`, whose own makes a selector each time, in one system call."""
    if type(channel) is not Connection:
        return channel.poll
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)

    def wait(timeout: float | None) -> bool:
        if channel.closed:
            raise OSError("the channel is closed")
        if timeout is None:
            return True  # to receive waits itself
        return bool(poller.poll(timeout * 1000))

    return wait


def speaker(channel: Channel) -> Callable[[bytes], None]:
    """The channel's `send_bytes`; of a `Connection`, small messages in one system call and little else."""
    if type(channel) is not Connection:
        return channel.send_bytes

    descriptor = channel.fileno()

    def speak(message: bytes) -> None:
        length = len(message)
        if length > _SMALL or channel.closed:
            channel.send_bytes(message)
            return
        data = _LENGTH.pack(length) + message
        written = os.write(descriptor, data)
        while written < len(data):  # a signal came in between
            written += os.write(descriptor, data[written:])

    return speak


def listener(channel: Channel) -> Callable[[], bytes | bytearray]:
    """The channel's `recv_bytes`; of a `Connection`, small messages in two system calls and little else."""
    if type(channel) is not Connection:
        return channel.recv_bytes
    descriptor = channel.fileno()

    def read(size: int) -> bytes | bytearray:
        data = os.read(descriptor, min(size, _CHUNK))
        if len(data) == size:
            return data
        whole = bytearray(data)
        while len(whole) < size:
            if not data:
                raise EOFError("the channel ended")
            data = os.read(descriptor, min(size - len(whole), _CHUNK))
            whole += data
        return whole

    def listen() -> bytes | bytearray:
        if channel.closed:
            raise OSError("the channel is closed")
        (length,) = _LENGTH.unpack(read(_LENGTH.size))
        if length < 0:
            (length,) = _LONG.unpack(read(_LONG.size))
        return read(length)

    return listen
