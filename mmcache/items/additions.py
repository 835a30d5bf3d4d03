"""What a request keeps of items that are added to it, so that a plan need not look at them again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mmcache.errors import RequestError
from mmcache.fields import ItemFields
from mmcache.items.checks import check_items
from mmcache.items.item import MultimodalItem

if TYPE_CHECKING:
    from mmcache.items.request import MultimodalRequest

__all__ = ["Additions", "SharedHomes", "SharedPayload", "read_items"]

# (field, keep_on_cpu, key of the value) of a shared value -> its number, the item its bytes count with.
SharedHomes: TypeAlias = dict[tuple[str, bool, Hashable], tuple[int, int]]
SharedPayload: TypeAlias = tuple[tuple[int, int, int], ...]  # of an item: number of the value, its home, its bytes


class Additions(NamedTuple):
    """New items, read.

    Attributes:
        rows: of each item its identifier, offset, number of rows, first row and end of rows (0 without rows); and up to
            and including it, one past the last row, payload bytes, and bytes of `keep_on_cpu` fields.
        max_end: end of all ranges so far.
        first_of: identifiers that are new, and their first item.
        given: items whose embeddings came from the client.
        homes: shared values that are new, and the item that the bytes of each count with.
        shared: item to its shared payload.
    """

    rows: list[tuple[str, int, int, int, int, int, int, int]]
    max_end: int
    first_of: dict[str, int]
    given: list[int]
    homes: SharedHomes
    shared: dict[int, SharedPayload]


def read_items(request: MultimodalRequest, items: Sequence[MultimodalItem], num_tokens: int) -> Additions:
    """What is kept of new items, which fit the request and each other; nothing has changed yet.

    Raises:
        RequestError, PlaceholderError: for the first item that does not fit.
    """
    first, first_of, max_end = len(request.items), request._first_of, request._max_end
    reach = request._reach[-1] if request._reach else 0
    payload, kept = request._payload_until[-1], request._kept_until[-1]
    fresh: dict[str, int] = {}
    homes: SharedHomes = {}
    shared: dict[int, SharedPayload] = {}
    given = []
    rows = []
    plain = True  # new contents, each behind the one before: what most conversations send
    for index, item in enumerate(items, first):
        if type(item) is not MultimodalItem and not isinstance(item, MultimodalItem):
            raise RequestError(
                "items are MultimodalItems", request_id=request.request_id, item=index, found=type(item).__name__
            )
        offset, end, first_row, end_row, num_rows = item._placeholder._places
        identifier, fields = item._identifier, item._fields
        if offset < max_end:
            plain = False
        if end > max_end:
            max_end = end
        if end_row > reach:
            reach = end_row
        fresh[identifier] = index
        if fields is not None:
            payload += fields.payload_bytes
            kept += fields.kept_bytes
            if fields.shared:
                moved, stayed = _count_shared(index, fields, request._shared_home, homes, shared)
                payload += moved
                kept += stayed
        if item._embeds is not None:
            given.append(index)
        rows.append((identifier, offset, num_rows, first_row, end_row, reach, payload, kept))
    # Once for all of them, what would cost more in the loop.
    if not plain or max_end > num_tokens or len(fresh) < len(rows) or not first_of.keys().isdisjoint(fresh.keys()):
        check_items(request, items, num_tokens)
        fresh = {row[0]: index for index, row in reversed([*enumerate(rows, first)]) if row[0] not in first_of}
    return Additions(rows, max_end, fresh, given, homes, shared)


def _count_shared(
    index: int,
    fields: ItemFields,
    known: SharedHomes,
    homes: SharedHomes,
    shared: dict[int, SharedPayload],
) -> tuple[int, int]:
    """Count each shared value with the first item that has it; the payload and kept bytes that count with this one.

    Args:
        index, fields: the item's.
        known: of the items before.
        homes: of the new ones; written.
        shared: item to its shared payload; written.
    """
    payload = kept = 0
    values = []
    for name, size, keep_on_cpu in fields.shared:
        key = (name, keep_on_cpu, fields.shared_value(name).key)
        number, home = known.get(key) or homes.setdefault(key, (len(known) + len(homes), index))
        mine = size if home == index else 0
        if keep_on_cpu:
            kept += mine
        else:
            payload += mine
            values.append((number, home, size))
    if values:
        shared[index] = tuple(values)
    return payload, kept
