"""A close look at new items: for those that do not simply follow each other with contents of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mmcache.errors import PlaceholderError, RequestError
from mmcache.items.item import MultimodalItem

if TYPE_CHECKING:
    from mmcache.items.request import MultimodalRequest

__all__ = ["check_items"]


def check_items(request: MultimodalRequest, items: Iterable[MultimodalItem], num_tokens: int) -> None:
    """Raise for the first of the new items that does not fit the request and those before it.

    Raises:
        RequestError, PlaceholderError: it names the item.
    """
    known: dict[str, tuple[int, MultimodalItem]] = {}
    last = request.items[-1].placeholder.offset if request.items else 0
    max_end = request._max_end
    open_items: list[tuple[int, MultimodalItem]] | None = None
    for index, item in enumerate(items, len(request.items)):
        place = item._placeholder
        offset = place._offset
        end = offset + place._length
        if offset < last:
            raise RequestError(
                "items are sorted by offset",
                request_id=request.request_id,
                item=index,
                expected=f">= {last}",
                found=offset,
            )
        if end > num_tokens:
            raise PlaceholderError(
                "the placeholder range lies outside the tokens",
                request_id=request.request_id,
                item=index,
                expected=f"within [0, {num_tokens})",
                found=f"[{offset}, {end})",
            )
        if offset < max_end:
            # Only now look at the items before: a conversation that just grows never does.
            candidates = enumerate(request.items) if open_items is None else open_items
            open_items = [(i, o) for i, o in candidates if o.placeholder.end_row > offset]
            for other_index, other in open_items:
                position = place.common_row(other.placeholder)
                if position is not None:
                    raise RequestError(
                        f"two items claim the row at token {position}",
                        request_id=request.request_id,
                        item=index,
                        found=f"item {other_index} claims it too",
                    )
        else:
            open_items = []
        open_items.append((index, item))
        last, max_end = offset, end if end > max_end else max_end
        identifier = item._identifier
        first = request._first_of.get(identifier)
        if first is not None:
            _check_same(request.request_id, index, item, first, request.items[first])
        elif identifier in known:
            _check_same(request.request_id, index, item, *known[identifier])
        else:
            known[identifier] = (index, item)


def _check_same(request_id: str, index: int, item: MultimodalItem, first: int, other: MultimodalItem) -> None:
    """Items of one identifier stand for one content: unequal ones would be given each other's embeddings."""
    where: dict[str, Any] = {"request_id": request_id, "item": index}
    if item.placeholder.num_embeds != other.placeholder.num_embeds:
        raise RequestError(
            f"the item has the identifier of item {first} but another number of rows",
            expected=other.placeholder.num_embeds,
            found=item.placeholder.num_embeds,
            **where,
        )
    if item.modality != other.modality or (item.embeds is None) != (other.embeds is None):
        raise RequestError(f"the item has the identifier of item {first} but is of another kind", **where)
    if (item.fields is None) != (other.fields is None) or (
        item.fields is not None
        and item.fields is not other.fields
        and other.fields is not None
        and not item.fields.resembles(other.fields)
    ):
        raise RequestError(
            f"the item has the identifier of item {first} but other fields",
            expected=repr(other.fields),
            found=repr(item.fields),
            **where,
        )
