"""What a match of a request with the index found, and holds."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from mmcache.prefix.ids import Ids
from mmcache.prefix.tree import Node

if TYPE_CHECKING:
    from mmcache.prefix.index import PrefixIndex

__all__ = ["PrefixMatch"]


class PrefixMatch:
    """The blocks that a request can reuse. Pinned until `release`.

    Attributes:
        num_tokens: tokens whose KV exists, at most all tokens of the request but the last. A multiple of the block size
            unless that last token caps it; the last block is then used in part and its last token computed again.
    """

    # Filled in by the index: a constructor in Python would be the dearest part of a match that is remembered.
    __slots__ = ("_blocks", "_index", "_node", "_released", "num_tokens")

    num_tokens: int
    _index: PrefixIndex
    _node: Node | None  # in which its last block lies, or lay when it was made
    _blocks: int
    _released: bool

    @property
    def block_ids(self) -> list[int]:
        """Ids of the blocks that hold these tokens, in order, one for each begun block.

        Raises:
            ReleasedError: after `release` they may stand for other tokens at any time.
        """
        return self._index._ids_of(self)

    def release(self) -> None:
        """Let the blocks be evicted. Idempotent."""
        index = self._index
        evicted: Ids = []
        index._lock.acquire()
        try:
            if self._released:
                return
            self._released = True
            if self._node is not None:
                index._forest.unpin(self._node, self._blocks, evicted)
                if evicted:
                    index._given.difference_update(*evicted)
        finally:
            index._lock.release()
        if evicted:
            index._announce(evicted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # May run in a thread that holds the index's lock: leave it to the next operation.
        if not self._released and self._node is not None:
            self._index._forgotten.append((self._node, self._blocks))

    def __repr__(self) -> str:
        return f"PrefixMatch({self.num_tokens} tokens, {self._blocks} blocks{', released' if self._released else ''})"
