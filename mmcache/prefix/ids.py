"""The ids of blocks: numbers of the index's own, or those that an engine gives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

import numpy as np

from mmcache.errors import RequestError
from mmcache.items import MultimodalRequest

__all__ = ["BlockIds", "Numbers", "check_ids"]

BlockIds: TypeAlias = "Sequence[int] | Any"  # or a numpy array or tensor of integers

_AHEAD = 1 << 12  # numbers made at once, beyond those that are asked for


class Numbers:
    """The numbers from 0 on, each once."""

    def __init__(self) -> None:
        self._first = 0  # the number at index 0 of those that are made
        self._next = 0  # index of the next one
        self._made = self._make(0)

    def take(self, count: int) -> array[int]:
        """The next `count` numbers."""
        first = self._next
        last = first + count
        if last > len(self._made):
            self._first += first
            self._made = self._make(count)
            first, last = 0, count
        self._next = last
        return self._made[first:last]

    def _make(self, count: int) -> array[int]:
        return array("q", np.arange(self._first, self._first + count + _AHEAD, dtype=np.int64).tobytes())


def check_ids(
    block_ids: BlockIds, first: int, stop: int, taken: AbstractSet[int], request: MultimodalRequest
) -> array[int]:
    """The ids that an engine gives to the blocks `[first, stop)` of a request.

    Raises:
        RequestError: too few, not integers of 64 bits, or one of them occurs twice or is in `taken`.
    """
    try:
        count = len(block_ids)
        given = block_ids[first:stop]
        numbers = given.tolist() if hasattr(given, "tolist") else list(given)
        ids = array("q", numbers)
    except (TypeError, OverflowError, LookupError) as error:
        raise RequestError(
            "block ids are a sequence of integers of 64 bits",
            request_id=request.request_id,
            found=f"{type(block_ids).__name__}: {error}",
        ) from None
    if count < stop:
        raise RequestError(
            "there is one id for each whole block", request_id=request.request_id, expected=stop, found=count
        )
    if not taken.isdisjoint(numbers) or len(set(numbers)) < len(numbers):
        seen = set(taken)
        twice = next(number for number in numbers if number in seen or seen.add(number))  # type: ignore[func-returns-value]
        raise RequestError(
            "a block id stands for two blocks", request_id=request.request_id, found=f"{twice} is in use"
        )
    return ids
