"""Requests as an engine's scheduler sees them: tokens and items, growing turn by turn.

A request validates what it is given once, when it is made or extended, and keeps the few running sums and maxima by
which a plan later costs what is new and not what is already covered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from mmcache.errors import FieldError, PlaceholderError, RequestError, UnsupportedError
from mmcache.fields import ItemFields
from mmcache.items.item import MultimodalItem

__all__ = ["MultimodalRequest", "TokenIds"]

TokenIds: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | Tensor | memoryview"
Int32Array: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"


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
        kept_bytes: bytes of all `keep_on_cpu` fields.
    """

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_embeds_given",
        "_end_rows",
        "_first_of",
        "_first_rows",
        "_identifiers",
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
        "kept_bytes",
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
        self.kept_bytes = 0
        self._buffer: Int32Array = np.empty(0, np.int32)
        # What a plan needs of the items before some point, so that it need not look at them:
        self._identifiers: list[str] = []
        self._offsets: list[int] = []
        self._num_rows: list[int] = []
        self._first_rows: list[int] = []
        self._end_rows: list[int] = []  # one past the last row of item i; 0 where it has none
        self._reach: list[int] = []  # one past the last row of the items up to and including i
        self._payload_until: list[int] = [0]  # payload bytes of the items before i
        self._max_end = 0  # end of the ranges so far
        self._first_of: dict[str, int] = {}  # identifier -> its first item
        self._last_use: dict[str, int] = {}  # identifier -> one past the last row of its last occurrence
        self._zero_rows: list[int] = []  # items without rows
        self._embeds_given: set[int] = set()  # items whose embeddings came from the client
        self._shared_home: dict[int, int] = {}  # id of a shared value -> the item that its bytes count with
        self._shared: dict[
            int, tuple[tuple[int, int, int], ...]
        ] = {}  # item -> (value id, home, bytes) of shared payload
        self._metadata: dict[str, tuple[int, list[Tensor]]] = {}
        self._schemas: list[tuple[tuple[str, bool], ...]] = []
        self._schema_of: list[int] = []
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
        new = _as_tokens(token_ids, self.request_id)
        if not isinstance(items, (list, tuple)):
            # Items are gone through more than once: an iterator would be empty the second time.
            try:
                items = list(items)
            except TypeError:
                raise RequestError(
                    "items are a sequence of MultimodalItems", request_id=self.request_id, found=type(items).__name__
                ) from None
        total = self.num_tokens + len(new)
        if items:
            self._check(items, total)
        if total > len(self._buffer):
            # Doubling: a conversation of n tokens copies O(n) in all, however many turns it has.
            grown = np.empty(total if not self.num_tokens else max(total, 2 * len(self._buffer)), np.int32)
            grown[: self.num_tokens] = self._buffer[: self.num_tokens]
            self._buffer = grown
        self._buffer[self.num_tokens : total] = new
        self.num_tokens = total
        if items:
            self._append(items)

    def metadata(self, field: str) -> list[Tensor]:
        """The `keep_on_cpu` field of every item that has it, in order, on the CPU.

        Raises:
            FieldError: items exist, but none has the field, or it is not marked `keep_on_cpu`.
        """
        done, values = self._metadata.get(field, (0, []))
        if done < len(self.items):
            values = list(values)  # another thread may be reading, and an error below must leave things as they were
            for index in range(done, len(self.items)):
                fields = self.items[index].fields
                if fields is not None and field in fields:
                    if not fields.config(field).keep_on_cpu:
                        raise FieldError(
                            "the field is not marked keep_on_cpu", request_id=self.request_id, item=index, field=field
                        )
                    values.append(fields[field])  # type: ignore[arg-type]
            if not values:
                raise FieldError("no item of the request has the field", request_id=self.request_id, field=field)
            self._metadata[field] = (len(self.items), values)
        return list(values)

    def schemas(self) -> tuple[list[tuple[tuple[str, bool], ...]], list[int]]:
        """The distinct lists of (field, keep_on_cpu) among the items, and for each item which one it has."""
        for index in range(len(self._schema_of), len(self.items)):
            fields = self.items[index].fields
            schema = () if fields is None else tuple((name, fields.config(name).keep_on_cpu) for name in fields)
            if schema not in self._schemas:
                self._schemas.append(schema)
            self._schema_of.append(self._schemas.index(schema))
        return self._schemas, self._schema_of

    def __repr__(self) -> str:
        return f"MultimodalRequest({self.request_id!r}, {self.num_tokens} tokens, {len(self.items)} items)"

    def _check(self, items: Iterable[MultimodalItem], num_tokens: int) -> None:
        """Raise for the first of the new items that does not fit the request and those before it."""
        known: dict[str, tuple[int, MultimodalItem]] = {}
        last = self.items[-1].placeholder.offset if self.items else 0
        max_end = self._max_end
        open_items: list[tuple[int, MultimodalItem]] | None = None
        for index, item in enumerate(items, len(self.items)):
            if type(item) is not MultimodalItem:
                raise RequestError(
                    "items are MultimodalItems", request_id=self.request_id, item=index, found=type(item).__name__
                )
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

    def _append(self, items: Sequence[MultimodalItem]) -> None:
        identifiers, offsets, num_rows = self._identifiers, self._offsets, self._num_rows
        first_rows, end_rows, reaches, payload_until = (
            self._first_rows,
            self._end_rows,
            self._reach,
            self._payload_until,
        )
        first_of, last_use = self._first_of, self._last_use
        index = len(self.items)
        reach = reaches[-1] if reaches else 0
        payload = payload_until[-1]
        max_end = self._max_end
        for item in items:
            place, identifier, fields = item._placeholder, item._identifier, item._fields
            offset, rows, end_row = place._offset, place._num_embeds, place._end_row
            identifiers.append(identifier)
            offsets.append(offset)
            num_rows.append(rows)
            first_rows.append(place._first_row)
            if not rows:
                self._zero_rows.append(index)
                end_rows.append(0)
            else:
                end_rows.append(end_row)
                if end_row > reach:
                    reach = end_row
            reaches.append(reach)
            if offset + place._length > max_end:
                max_end = offset + place._length
            if identifier not in first_of:
                first_of[identifier] = index
                last_use[identifier] = end_row
            elif end_row > last_use[identifier]:
                last_use[identifier] = end_row
            if item._embeds is not None:
                self._embeds_given.add(index)
            if fields is not None:
                payload += fields.payload_bytes
                self.kept_bytes += fields.kept_bytes
                if fields.shared:
                    payload += self._append_shared(index, fields)
            payload_until.append(payload)
            index += 1
        self._max_end = max_end
        self.items.extend(items)

    def _append_shared(self, index: int, fields: ItemFields) -> int:
        """Count each shared value with the first item that has it; return the payload bytes that count here."""
        mine = 0
        homes = []
        for name, size, keep_on_cpu in fields.shared:
            home = self._shared_home.setdefault(id(fields[name]), index)
            if keep_on_cpu:
                self.kept_bytes += size if home == index else 0
                continue
            mine += size if home == index else 0
            homes.append((id(fields[name]), home, size))
        if homes:
            self._shared[index] = tuple(homes)
        return mine


_INT32 = np.iinfo(np.int32)


def _as_tokens(token_ids: TokenIds, request_id: str) -> Int32Array:
    """The ids as one int32 array; a view of an int32 buffer, a conversion of anything else that holds integers."""
    if isinstance(token_ids, Tensor):
        if token_ids.is_floating_point() and token_ids.dim() >= 2:
            raise UnsupportedError("prompt embeddings are out of scope", request_id=request_id, expected="token ids")
        token_ids = token_ids.detach().cpu().numpy()
    try:
        array = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError("token ids are a sequence of integers", request_id=request_id, found=str(error)) from None
    if array.size == 0 and array.ndim <= 1:
        return np.empty(0, np.int32)
    if array.ndim >= 2 and array.dtype.kind == "f":
        raise UnsupportedError("prompt embeddings are out of scope", request_id=request_id, expected="token ids")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(
            "token ids are one-dimensional integers",
            request_id=request_id,
            found=f"dtype {array.dtype}, shape {array.shape}",
        )
    if array.dtype != np.int32:
        if array.min() < _INT32.min or array.max() > _INT32.max:
            raise RequestError("token ids fit 32 bits", request_id=request_id, found=f"{array.min()} to {array.max()}")
        array = array.astype(np.int32)
    return array
