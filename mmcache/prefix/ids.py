"""The ids of blocks: numbers of the index's own, or those that an engine gives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

from mmcache.errors import RequestError
from mmcache.items import MultimodalRequest

__all__ = ["MOST_PIECES", "BlockIds", "Ids", "check_ids", "cut_ids", "join_ids", "split_ids"]

BlockIds: TypeAlias = "Sequence[int] | Any"  # or a numpy array or tensor of integers

Ids: TypeAlias = "list[range | array[int]]"
"""Ids of the blocks of a node, in pieces: ranges where they are the index's own, which cost next to nothing to make."""

MOST_PIECES = 32
"""Of a node; more are joined."""


def join_ids(ids: Ids) -> None:
    """Make one piece of those of a node."""
    first, last = ids[0], ids[-1]
    if isinstance(first, range) and isinstance(last, range) and last.stop - first.start == sum(map(len, ids)):
        ids[:] = [range(first.start, last.stop)]  # numbers only grow: there is no gap
        return
    whole = first if isinstance(first, array) else array("q", first)
    for piece in ids[1:]:
        whole.extend(piece)
    ids[:] = [whole]


def split_ids(ids: Ids, count: int) -> tuple[Ids, Ids]:
    """The first `count` ids and the others."""
    for index, piece in enumerate(ids):
        if count < len(piece):
            before = [*ids[:index], piece[:count]] if count else ids[:index]
            return before, [piece[count:], *ids[index + 1 :]]
        count -= len(piece)
    return ids, []


def cut_ids(ids: Ids, count: int) -> Ids:
    """Drop the last `count` ids and return them, the last one first."""
    dropped: Ids = []
    while count > 0:
        piece = ids.pop()
        keep = max(len(piece) - count, 0)
        count -= len(piece)
        dropped.append(piece[keep:][::-1])
        if not keep:
            continue
        if isinstance(piece, array):
            del piece[keep:]  # in place: an array is not to be copied for each block that goes
        else:
            piece = piece[:keep]
        ids.append(piece)
    return dropped


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
