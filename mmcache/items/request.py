"""Requests as an engine's scheduler sees them: tokens and items, growing turn by turn.

A request validates what it is given once, when it is made or extended, and keeps the few running sums and maxima by
which a plan later costs what is new and not what is already covered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from torch import Tensor

from mmcache.errors import FieldError, RequestError
from mmcache.items.additions import Additions, SharedHomes, SharedPayload, read_items
from mmcache.items.item import MultimodalItem
from mmcache.items.tokens import Int32Array, TokenIds, as_tokens

__all__ = ["MultimodalRequest", "Schema"]

_NO_TOKENS: Int32Array = np.empty(0, np.int32)

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
        if not (cache_salt is None is adapter):
            for name, value in (("cache_salt", cache_salt), ("adapter", adapter)):
                if value is not None and not isinstance(value, str):
                    raise RequestError(f"{name} is a string or None", request_id=request_id, found=repr(value))
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.items: list[MultimodalItem] = []
        self.num_tokens = 0
        self._buffer: Int32Array = _NO_TOKENS
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
        self._shared_home: SharedHomes = {}
        self._shared: dict[int, SharedPayload] = {}  # item -> its shared payload
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
        one = items[0] if len(items) == 1 and self._just_follows(items[0], total) else None
        added = read_items(self, items, total) if items and one is None else None
        if not self.num_tokens:
            self._buffer = new.copy()
        else:
            if total > len(self._buffer):
                # Doubling: a conversation of n tokens copies O(n) in all, however many turns it has.
                grown = np.empty(max(total, 2 * len(self._buffer)), np.int32)
                grown[: self.num_tokens] = self._buffer[: self.num_tokens]
                self._buffer = grown
            self._buffer[self.num_tokens : total] = new
        self.num_tokens = total
        if one is not None:
            self._append_one(one)
        elif added is not None:
            self._append(items, added)

    def metadata(self, field: str) -> list[Tensor]:
        """The `keep_on_cpu` field of every item that has it, in order, on the CPU; empty where none has it.

        Raises:
            FieldError: an item has the field, but it is not marked `keep_on_cpu`.
        """
        return self._metadata_until(field, len(self.items))

    def _metadata_until(self, field: str, num_items: int) -> list[Tensor]:
        """The field of the first so many items."""
        if not isinstance(field, str):
            raise FieldError("a field has a name", request_id=self.request_id, found=repr(field))
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
        return values[: bisect_left(owners, num_items)]

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

    def _just_follows(self, item: MultimodalItem, num_tokens: int) -> bool:
        """Whether an item is behind the others, of a content of its own, and has rows that an encoder makes."""
        if type(item) is not MultimodalItem or item._embeds is not None or item._identifier in self._first_of:
            return False
        offset, end, _, end_row, _ = item._placeholder._places
        fields = item._fields
        return self._max_end <= offset and end <= num_tokens and end_row > 0 and (fields is None or not fields.shared)

    def _append_one(self, item: MultimodalItem) -> None:
        """Append an item that just follows: what most turns of a conversation do, at half the price."""
        identifier, fields = item._identifier, item._fields
        offset, end, first_row, end_row, num_rows = item._placeholder._places
        self._max_end = end
        self._identifiers.append(identifier)
        self._offsets.append(offset)
        self._num_rows.append(num_rows)
        self._first_rows.append(first_row)
        self._end_rows.append(end_row)
        self._reach.append(end_row)
        payload, kept = self._payload_until, self._kept_until
        payload.append(payload[-1] + (0 if fields is None else fields.payload_bytes))
        kept.append(kept[-1] + (0 if fields is None else fields.kept_bytes))
        self._first_of[identifier] = len(self.items)
        self._last_use[identifier] = end_row
        self.items.append(item)  # last: a thread that reads the request meanwhile goes by their number

    def _append(self, items: Sequence[MultimodalItem], new: Additions) -> None:
        first = len(self.items)
        identifiers, offsets, num_rows, first_rows, end_rows, reaches, payload, kept = zip(*new.rows)
        self._max_end = new.max_end
        self._identifiers += identifiers
        self._offsets += offsets
        self._num_rows += num_rows
        self._first_rows += first_rows
        self._end_rows += end_rows
        self._reach += reaches
        self._payload_until += payload
        self._kept_until += kept
        if first:
            self._first_of.update(new.first_of)
        else:
            self._first_of = new.first_of
        if new.given:
            self._embeds_given.update(new.given)
        if new.homes:
            self._shared_home.update(new.homes)
        if new.shared:
            self._shared.update(new.shared)
        if 0 in end_rows:
            self._zero_rows += [index for index, end_row in enumerate(end_rows, first) if not end_row]
        last_use = self._last_use
        if len(new.first_of) == len(items):
            last_use.update(zip(identifiers, end_rows))
        else:
            for identifier, end_row in zip(identifiers, end_rows):
                if identifier not in last_use or end_row > last_use[identifier]:
                    last_use[identifier] = end_row
        self.items += items  # last: a thread that reads the request meanwhile goes by their number
