"""What carries messages: anything that keeps message boundaries."""

from __future__ import annotations

import select
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol, runtime_checkable

__all__ = ["Channel", "waiter"]


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
