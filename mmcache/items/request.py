"""Requests as an engine's scheduler sees them: tokens and items, growing turn by turn.

A request validates what it is given once, when it is made or extended, and keeps the few running sums and maxima by
which a plan later costs what is new and not what is already covered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import le
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from mmcache.errors import FieldError, PlaceholderError, RequestError
from mmcache.fields import ItemFields
from mmcache.items.item import MultimodalItem
from mmcache.items.placeholders import PlaceholderRange
from mmcache.items.tokens import Int32Array, TokenIds, as_tokens

__all__ = ["MultimodalRequest", "Schema"]

Schema: TypeAlias = tuple[tuple[str, bool], ...]  # (field, keep_on_cpu) of each field of an item


class MultimodalRequest:
    """Tokens and items of one request, growing by `extend`.

    Items are sorted by offset; ranges may overlap or nest, rows may not. Items of one identifier stand for one content
    and have equal rows and fields.

    Attributes:
        request_id: the engine's name for it.
        items: the items, in order. Do not change the list; use `extend`.
        num_tokens: number of tokens.
        cache_salt: requests of different salts share nothing. None is a salt of its own, different from "".
        adapter: the adapter (LoRA) that the request runs with, or None.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_embeds_given",
        "_end_rows",
        "_first_of",
        "_first_rows",
        "_identifiers",
        "_kept_until",
        "_last_use",
        "_max_end",
        "_metadata",
        "_num_rows",
        "_offsets",
        "_payload_until",
        "_reach",
        "_schema_of",
        "_schemas",
        "_shared",
        "_shared_home",
        "_zero_rows",
        "adapter",
        "cache_salt",
        "items",
        "num_tokens",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: TokenIds,
        items: Sequence[MultimodalItem] = (),
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Make a request; `token_ids` is copied (an int32 buffer at the speed of memory, other integers converted).

        Raises:
            RequestError: malformed tokens or items; names the request and the item.
            PlaceholderError: an item's range lies outside the tokens.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError("a request id is a non-empty string", found=repr(request_id))
        for name, value in (("cache_salt", cache_salt), ("adapter", adapter)):
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{name} is a string or None", request_id=request_id, found=repr(value))
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.items: list[MultimodalItem] = []
        self.num_tokens = 0
        self._buffer: Int32Array = np.empty(0, np.int32)
        # What a plan needs of the items before some point, so that it need not look at them:
        self._identifiers: list[str] = []
        self._offsets: list[int] = []
        self._num_rows: list[int] = []
        self._first_rows: list[int] = []
        self._end_rows: list[int] = []  # one past the last row of item i; 0 where it has none
        self._reach: list[int] = []  # one past the last row of the items up to and including i
        self._payload_until: list[int] = [0]  # payload bytes of the items before i
        self._kept_until: list[int] = [0]  # bytes of their `keep_on_cpu` fields
        self._max_end = 0  # end of the ranges so far
        self._first_of: dict[str, int] = {}  # identifier -> its first item
        self._last_use: dict[str, int] = {}  # identifier -> one past the last row of its last occurrence
        self._zero_rows: list[int] = []  # items without rows
        self._embeds_given: set[int] = set()  # items whose embeddings came from the client
        self._shared_home: dict[int, int] = {}  # id of a shared value -> the item that its bytes count with
        self._shared: dict[
            int, tuple[tuple[int, int, int], ...]
        ] = {}  # item -> its shared payload: value id, home, bytes
        self._metadata: dict[str, tuple[int, list[int], list[Tensor]]] = {}  # items seen; those that have it; values
        self._schemas: tuple[Schema, ...] = ()
        self._schema_of: tuple[int, ...] = ()
        self.extend(token_ids, items)

    @property
    def token_ids(self) -> Int32Array:
        """The tokens: int32 `[num_tokens]`, a read-only view that later `extend` calls do not change."""
        view = self._buffer[: self.num_tokens]
        view.flags.writeable = False
        return view

    def extend(self, token_ids: TokenIds, items: Sequence[MultimodalItem] = ()) -> None:
        """Append tokens (decoded ones, or the next turn) and their items; costs what is new.

        Item offsets count from the start of the request. Nothing changes when it raises.

        Raises:
            RequestError, PlaceholderError: as the constructor.
        """
        new = as_tokens(token_ids, self.request_id)
        if not isinstance(items, (list, tuple)):
            # Items are gone through more than once: an iterator would be empty the second time.
            try:
                items = list(items)
            except TypeError:
                raise RequestError(
                    "items are a sequence of MultimodalItems", request_id=self.request_id, found=type(items).__name__
                ) from None
        total = self.num_tokens + len(new)
        places = self._checked(items, total) if items else []
        if total > len(self._buffer):
            # Doubling: a conversation of n tokens copies O(n) in all, however many turns it has.
            grown = np.empty(total if not self.num_tokens else max(total, 2 * len(self._buffer)), np.int32)
            grown[: self.num_tokens] = self._buffer[: self.num_tokens]
            self._buffer = grown
        self._buffer[self.num_tokens : total] = new
        self.num_tokens = total
        if items:
            self._append(items, places)

    def metadata(self, field: str) -> list[Tensor]:
        """The `keep_on_cpu` field of every item that has it, in order, on the CPU.

        Raises:
            FieldError: items exist, but none has the field (a misspelt name would otherwise be an empty answer, and
                positions wrong), or it is not marked `keep_on_cpu`.
        """
        return self._metadata_until(field, len(self.items))

    def _metadata_until(self, field: str, num_items: int) -> list[Tensor]:
        """The field of the first so many items."""
        done, owners, values = self._metadata.get(field, (0, [], []))
        if done < num_items:
            # Another thread may be reading, and an error below must leave things as they were.
            owners, values = list(owners), list(values)
            for index in range(done, num_items):
                fields = self.items[index].fields
                if fields is not None and field in fields:
                    if not fields.config(field).keep_on_cpu:
                        raise FieldError(
                            "the field is not marked keep_on_cpu", request_id=self.request_id, item=index, field=field
                        )
                    owners.append(index)
                    values.append(fields[field])  # type: ignore[arg-type]
            self._metadata[field] = (num_items, owners, values)
        found = values[: bisect_left(owners, num_items)]
        if num_items and not found:
            raise FieldError("no item of the request has the field", request_id=self.request_id, field=field)
        return found

    def schemas(self, num_items: int) -> tuple[tuple[Schema, ...], tuple[int, ...]]:
        """The distinct schemas among the items, and which of them each of the first so many items has."""
        known, numbers = self._schemas, self._schema_of
        if len(numbers) < num_items:
            schemas, more = list(known), list(numbers)
            for item in self.items[len(more) : num_items]:
                fields = item.fields
                schema = () if fields is None else tuple((name, fields.config(name).keep_on_cpu) for name in fields)
                if schema not in schemas:
                    schemas.append(schema)
                more.append(schemas.index(schema))
            known, numbers = self._schemas, self._schema_of = tuple(schemas), tuple(more)
        return known, numbers if len(numbers) == num_items else numbers[:num_items]

    def __repr__(self) -> str:
        return f"MultimodalRequest({self.request_id!r}, {self.num_tokens} tokens, {len(self.items)} items)"

    def _checked(self, items: Sequence[MultimodalItem], num_tokens: int) -> list[PlaceholderRange]:
        """The ranges of the new items, which fit the request and each other.

        Raises:
            RequestError, PlaceholderError: for the first one that does not.
        """
        if set(map(type, items)) != {MultimodalItem}:
            for index, item in enumerate(items, len(self.items)):
                if not isinstance(item, MultimodalItem):
                    raise RequestError(
                        "items are MultimodalItems", request_id=self.request_id, item=index, found=type(item).__name__
                    )
        places = [item._placeholder for item in items]
        offsets = [place._offset for place in places]
        ends = [place._offset + place._length for place in places]
        identifiers = {item._identifier for item in items}
        if not (
            # New contents, each behind the one before: what most conversations send. The rest is looked at closely.
            offsets[0] >= self._max_end
            and ends[-1] <= num_tokens
            and len(identifiers) == len(items)
            and self._first_of.keys().isdisjoint(identifiers)
            and all(map(le, ends, offsets[1:]))
        ):
            self._check_closely(items, num_tokens)
        return places

    def _check_closely(self, items: Iterable[MultimodalItem], num_tokens: int) -> None:
        known: dict[str, tuple[int, MultimodalItem]] = {}
        last = self.items[-1].placeholder.offset if self.items else 0
        max_end = self._max_end
        open_items: list[tuple[int, MultimodalItem]] | None = None
        for index, item in enumerate(items, len(self.items)):
            place = item._placeholder
            offset = place._offset
            end = offset + place._length
            if offset < last:
                raise RequestError(
                    "items are sorted by offset",
                    request_id=self.request_id,
                    item=index,
                    expected=f">= {last}",
                    found=offset,
                )
            if end > num_tokens:
                raise PlaceholderError(
                    "the placeholder range lies outside the tokens",
                    request_id=self.request_id,
                    item=index,
                    expected=f"at most {num_tokens}",
                    found=f"[{offset}, {end})",
                )
            if offset < max_end:
                # Only now look at the items before: a conversation that just grows never does.
                candidates = enumerate(self.items) if open_items is None else open_items
                open_items = [(i, o) for i, o in candidates if o.placeholder.end_row > offset]
                for other_index, other in open_items:
                    position = place.common_row(other.placeholder)
                    if position is not None:
                        raise RequestError(
                            f"two items claim the row at token {position}",
                            request_id=self.request_id,
                            item=index,
                            found=f"item {other_index} claims it too",
                        )
            else:
                open_items = []
            open_items.append((index, item))
            last, max_end = offset, end if end > max_end else max_end
            identifier = item._identifier
            first = self._first_of.get(identifier)
            if first is not None:
                self._check_same(index, item, first, self.items[first])
            elif identifier in known:
                self._check_same(index, item, *known[identifier])
            else:
                known[identifier] = (index, item)

    def _check_same(self, index: int, item: MultimodalItem, first: int, other: MultimodalItem) -> None:
        """Items of one identifier stand for one content: unequal ones would be given each other's embeddings."""
        where: dict[str, Any] = {"request_id": self.request_id, "item": index}
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

    def _append(self, items: Sequence[MultimodalItem], places: Sequence[PlaceholderRange]) -> None:
        first = len(self.items)
        identifiers = [item._identifier for item in items]
        num_rows = [place._num_embeds for place in places]
        end_rows = [place._end_row if place._num_embeds else 0 for place in places]
        self._max_end = max(self._max_end, max(place._offset + place._length for place in places))
        self._identifiers += identifiers
        self._offsets += [place._offset for place in places]
        self._num_rows += num_rows
        self._first_rows += [place._first_row for place in places]
        self._end_rows += end_rows
        self._reach += list(accumulate(end_rows, max, initial=self._reach[-1] if first else 0))[1:]
        if 0 in num_rows:
            self._zero_rows += [first + i for i, rows in enumerate(num_rows) if not rows]
        first_of, last_use = self._first_of, self._last_use
        for index, identifier in enumerate(identifiers, first):
            if identifier not in first_of:
                first_of[identifier] = index
        for identifier, end_row in zip(identifiers, end_rows):
            if end_row > last_use.get(identifier, 0):
                last_use[identifier] = end_row
        self._append_bytes(items, first)
        self.items += items  # last: a thread that reads the request meanwhile goes by their number

    def _append_bytes(self, items: Iterable[MultimodalItem], first: int) -> None:
        payload_until, kept_until = self._payload_until, self._kept_until
        payload, kept = payload_until[-1], kept_until[-1]
        for index, item in enumerate(items, first):
            fields = item._fields
            if fields is not None:
                payload += fields.payload_bytes
                kept += fields.kept_bytes
                if fields.shared:
                    moved, stayed = self._append_shared(index, fields)
                    payload += moved
                    kept += stayed
            payload_until.append(payload)
            kept_until.append(kept)
            if item._embeds is not None:
                self._embeds_given.add(index)

    def _append_shared(self, index: int, fields: ItemFields) -> tuple[int, int]:
        """Count each shared value with the first item that has it; return payload and kept bytes that count here."""
        payload = kept = 0
        homes = []
        for name, size, keep_on_cpu in fields.shared:
            home = self._shared_home.setdefault(id(fields[name]), index)
            mine = size if home == index else 0
            if keep_on_cpu:
                kept += mine
            else:
                payload += mine
                homes.append((id(fields[name]), home, size))
        if homes:
            self._shared[index] = tuple(homes)
        return payload, kept
