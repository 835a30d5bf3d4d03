"""The two moments in which threads and files cannot be left to themselves: a process that ends, and one that forks."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Protocol
from weakref import WeakSet

__all__ = ["call_at_exit", "forked_with"]


class Forked(Protocol):
    """What has to know that it is a copy in a forked child."""

    def forked(self) -> None:
        """The process was forked and this is the child: no thread of the parent's is here, and no lock may be taken
        that one of them may have held."""


_owners: WeakSet[Forked] = WeakSet()


def forked_with(owner: Forked) -> None:
    """Have `owner.forked()` called in every child that this process forks."""
    _owners.add(owner)


def _tell_child() -> None:
    for owner in tuple(_owners):
        owner.forked()


os.register_at_fork(after_in_child=_tell_child)


def call_at_exit(function: Callable[[], object]) -> Callable[[], object]:
    """Call `function` when this process ends, unless the function returned here is called before.

    A daemon thread that is in torch's code when the interpreter ends takes the process down with it, and what waits to
    be written would be lost. Unlike `atexit` this also happens at the end of a process that `multiprocessing` started,
    and not in a child that was forked.
    """
    return Finalize(None, function, exitpriority=0).cancel
