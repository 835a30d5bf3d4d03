"""The worker's side of a request: what the scheduler said of it so far.

Messages are checked as they come in and unpacked as they are used: a covered item costs a worker a few list entries,
and becomes a `MultimodalItem` when somebody asks for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import Any, cast

import numpy as np
from torch import Tensor

from mmcache.errors import FieldError, MessageError, MMCacheError
from mmcache.fields import FieldConfig, FieldValue, ItemFields
from mmcache.ipc.columns import StoredColumn
from mmcache.ipc.messages import Delta, FieldSpec
from mmcache.ipc.values import leaf_bytes
from mmcache.ipc.wire import Body
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange

__all__ = ["ItemPayload", "Mirror"]

_Runs = np.ndarray[Any, np.dtype[np.int32]]
_NOTHING: _Runs = np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class ItemPayload:
    """What a step brought of an item: the fields that its encoder reads, or the embeddings that the client gave."""

    fields: dict[str, FieldValue]
    specs: list[FieldSpec]
    embeds: Tensor | None = None


class Mirror:
    """A request as its scheduler sees it, growing by deltas.

    Attributes:
        request_id, cache_salt, adapter: as in the request.
        num_tokens, num_items: what is here.
        identifiers: of the items.
    """

    __slots__ = (
        "_buffer",
        "_configs",
        "_lengths",
        "_modalities",
        "_offsets",
        "_plan_schemas",
        "_request",
        "_runs",
        "_schema_of",
        "_schemas",
        "_stored",
        "adapter",
        "cache_salt",
        "identifiers",
        "num_tokens",
        "request_id",
    )

    def __init__(self, delta: Delta) -> None:
        self.request_id = delta.request_id
        self.cache_salt = delta.cache_salt
        self.adapter = delta.adapter
        self.num_tokens = 0
        self.identifiers: list[str] = []
        self._buffer: _Runs = np.empty(0, np.int32)
        self._modalities: list[str] = []
        self._offsets: list[int] = []
        self._lengths: list[int] = []
        self._runs: list[_Runs | None] = []
        self._schemas: list[list[FieldSpec]] = []
        self._configs: dict[tuple[int, str], dict[str, FieldConfig]] = {}
        self._schema_of: list[int] = []
        self._stored: list[StoredColumn] = []
        self._plan_schemas: tuple[tuple[Any, ...], tuple[int, ...]] = ((), ())
        self._request: MultimodalRequest | None = None

    @property
    def num_items(self) -> int:
        """Number of items."""
        return len(self.identifiers)

    def token_ids(self, num_tokens: int) -> _Runs:
        """The first so many tokens: int32 `[num_tokens]`, read-only."""
        view = self._buffer[:num_tokens]
        view.flags.writeable = False
        return view

    def extend(self, delta: Delta, body: Body) -> None:
        """Take what the delta adds; what is known already is skipped.

        Raises:
            MessageError: the delta contradicts itself or does not join what is here; nothing changes.
        """
        tokens = body.buffer(delta.tokens)
        if len(tokens) % 4:
            raise self._error("tokens are int32", found=f"{len(tokens)} bytes")
        num_tokens, num_items = self.num_tokens, len(self.identifiers)
        if delta.tokens_from > num_tokens or delta.items_from > num_items:
            raise self._error(
                "the message continues what is not here",
                expected=f"at most ({num_tokens}, {num_items})",
                found=(delta.tokens_from, delta.items_from),
            )
        total = delta.tokens_from + len(tokens) // 4
        total = total if total > num_tokens else num_tokens
        known = num_items - delta.items_from
        self._check_items(delta, total, known)
        runs = self._checked_runs(delta, body.buffer(delta.runs))
        stored = self._check_columns(delta, body.buffer(delta.metadata))
        self._grow(delta.tokens_from, np.frombuffer(tokens, np.int32), total)
        self._append(delta, known, runs, stored)

    def metadata(self, field: str, num_items: int) -> list[FieldValue]:
        """The `keep_on_cpu` field of every one of the first items that has it, in order; empty where none has it.

        Raises:
            FieldError: an item has the field, but it is not marked `keep_on_cpu`; or the name is none.
        """
        if not isinstance(field, str):
            raise FieldError("a field has a name", request_id=self.request_id, found=repr(field))
        for number, schema in enumerate(self._schemas):
            for spec in schema:
                if spec.name == field and not spec.keep_on_cpu and number in self._schema_of[:num_items]:
                    item = self._schema_of.index(number)
                    raise FieldError(
                        "the field is not marked keep_on_cpu", request_id=self.request_id, item=item, field=field
                    )
        columns = [stored for stored in self._stored if stored.name == field and stored.indices[0] < num_items]
        if not columns:
            return []
        if columns[-1].indices[-1] < num_items:
            if len(columns) == 1:
                return list(columns[0].unpack())
            if all(one.indices[-1] < other.indices[0] for one, other in pairwise(columns)):
                return [value for stored in columns for value in stored.unpack()]
        pairs = [pair for stored in columns for pair in zip(stored.indices, stored.unpack()) if pair[0] < num_items]
        return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]

    def request(self) -> MultimodalRequest:
        """The request with its items; their fields are the metadata alone.

        Raises:
            MMCacheError: the items do not make a request.
        """
        if self._request is None:
            self._request = MultimodalRequest(self.request_id, [], cache_salt=self.cache_salt, adapter=self.adapter)
        done_tokens, done_items = self._request.num_tokens, len(self._request.items)
        if done_tokens < self.num_tokens or done_items < self.num_items:
            items = [self._item(index) for index in range(done_items, self.num_items)]
            self._request.extend(self._buffer[done_tokens : self.num_tokens], items)
        return self._request

    def strip(self, indices: Iterable[int]) -> None:
        """Take the payload out of the request's items again, so that they keep no shared memory."""
        if self._request is not None:
            for index in indices:
                self._request.items[index] = self._item(index)

    def placeholder(self, index: int) -> PlaceholderRange:
        """The range of an item."""
        length, runs = self._lengths[index], self._runs[index]
        if runs is None:
            return PlaceholderRange(self._offsets[index], length)
        mask = np.zeros(length, np.bool_)
        for start, count in runs.tolist():
            mask[start : start + count] = True
        return PlaceholderRange(self._offsets[index], length, mask)

    def num_rows(self, index: int) -> int:
        """Embedding rows of an item."""
        runs = self._runs[index]
        return self._lengths[index] if runs is None else int(runs[:, 1].sum())

    def modality(self, index: int) -> str:
        """Modality of an item."""
        return self._modalities[index]

    def fields(self, index: int, payload: ItemPayload | None) -> ItemFields | None:
        """An item's fields: its metadata, and the payload given; None where there is neither."""
        number = self._schema_of[index]
        if number < 0 and payload is None:
            return None
        modality = self._modalities[index]
        schema = self._schemas[number] if number >= 0 else []
        configs = self._configs_of(number, modality) if number >= 0 else {}
        data: dict[str, FieldValue] = {}
        for stored in self._stored:
            if stored.indices[0] <= index <= stored.indices[-1]:
                at = bisect_left(stored.indices, index)
                if stored.indices[at] == index:
                    data[stored.name] = stored.unpack()[at]
        listed = {spec.name for spec in schema if spec.listed and spec.name in data}
        if payload is not None:
            data.update(payload.fields)
            listed |= {spec.name for spec in payload.specs if spec.listed}
            configs = {**configs, **{spec.name: _config(spec, modality) for spec in payload.specs}}
        names = dict.fromkeys([*(spec.name for spec in schema if spec.name in data), *data])
        return ItemFields({name: data[name] for name in names}, configs, listed=frozenset(listed))

    def plan_schemas(self, num_items: int) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """The distinct ((field, keep_on_cpu), ...) of the items, and which of them each of the first so many has."""
        new = self._schema_of[len(self._plan_schemas[1]) :]
        if new:
            schemas = list(self._plan_schemas[0])
            numbers: dict[int, int] = {}
            for number in dict.fromkeys(new):
                schema = () if number < 0 else tuple([(spec.name, spec.keep_on_cpu) for spec in self._schemas[number]])
                if schema not in schemas:
                    schemas.append(schema)
                numbers[number] = schemas.index(schema)
            more = (*numbers.values(),) * len(new) if len(numbers) == 1 else tuple(map(numbers.__getitem__, new))
            self._plan_schemas = tuple(schemas), self._plan_schemas[1] + more
        schemas_now, schema_of = self._plan_schemas
        return schemas_now, schema_of if num_items == len(schema_of) else schema_of[:num_items]

    def _item(self, index: int) -> MultimodalItem:
        fields = self.fields(index, None)
        return MultimodalItem(self._modalities[index], fields, self.placeholder(index), self.identifiers[index])

    def _grow(self, start: int, tokens: _Runs, total: int) -> None:
        if not self.num_tokens:
            self._buffer = tokens.copy()
        else:
            if total > len(self._buffer):
                grown = np.empty(max(total, 2 * len(self._buffer)), np.int32)
                grown[: self.num_tokens] = self._buffer[: self.num_tokens]
                self._buffer = grown
            new = tokens[self.num_tokens - start :]
            self._buffer[total - len(new) : total] = new
        self.num_tokens = total

    def _append(self, delta: Delta, known: int, runs: _Runs, stored: list[StoredColumn]) -> None:
        first = len(self._schemas)
        new = len(delta.identifiers) - known
        self._schemas += delta.schemas
        self.identifiers += delta.identifiers[known:]
        if delta.modality_of:
            self._modalities += [delta.modalities[number] for number in delta.modality_of[known:]]
        else:
            self._modalities += delta.modalities[:1] * new
        self._offsets += delta.offsets[known:]
        self._lengths += delta.lengths[known:]
        if delta.schema_of:
            self._schema_of += [number if number < 0 else first + number for number in delta.schema_of[known:]]
        else:
            self._schema_of += [first] * new
        if not delta.run_counts:
            self._runs += [None] * new
        else:
            ends = list(accumulate(max(count, 0) for count in delta.run_counts))
            self._runs += [
                None if count < 0 else runs[end - count : end]
                for count, end in zip(delta.run_counts[known:], ends[known:])
            ]
        for column in stored:
            if known > 0:
                # Said before and not acknowledged then: the values that are here stay.
                keep = [i for i, index in enumerate(column.indices) if index >= delta.items_from + known]
                values = column.unpack() if keep else []
                column.indices, column.values = [column.indices[i] for i in keep], [values[i] for i in keep]
            if column.indices:
                self._stored.append(column)

    def _check_items(self, delta: Delta, num_tokens: int, known: int) -> None:
        count = len(delta.identifiers)
        counts = [
            len(delta.offsets),
            len(delta.lengths),
            len(delta.modality_of) or count,  # empty ones stand for what all items have
            len(delta.schema_of) or count,
            len(delta.run_counts) or count,
        ]
        if counts.count(count) != len(counts):
            raise self._error("columns have one entry an item", expected=count, found=counts)
        if not count:
            return
        if max(delta.modality_of, default=0) >= len(delta.modalities):
            raise self._error("an item has a modality of the message", found=max(delta.modality_of, default=0))
        if max(delta.schema_of, default=0) >= len(delta.schemas):
            raise self._error("an item has a schema of the message", found=max(delta.schema_of, default=0))
        offsets = delta.offsets
        if max(map(add, offsets, delta.lengths)) > num_tokens or offsets != sorted(offsets):
            raise self._error("items are sorted and lie within the tokens", expected=f"at most {num_tokens}")
        if known < count and self._offsets and offsets[known] < self._offsets[-1]:
            raise self._error("items are sorted by offset", found=offsets[known])

    def _checked_runs(self, delta: Delta, buffer: memoryview) -> _Runs:
        total = sum([count for count in delta.run_counts if count > 0])
        if len(buffer) != 8 * total:
            raise self._error("runs are pairs of int32", expected=8 * total, found=len(buffer))
        if not total:
            return _NOTHING
        runs = np.frombuffer(buffer, np.int32).reshape(-1, 2).copy()
        start = 0
        for count, length in zip(delta.run_counts, delta.lengths):
            if count > 0:
                own = runs[start : start + count].astype(np.int64)
                ends = own[:, 0] + own[:, 1]
                if own[0, 0] < 0 or ends[-1] > length or (own[:, 1] <= 0).any() or (own[1:, 0] < ends[:-1]).any():
                    raise self._error("runs are sorted and lie within their range", found=own[:4].tolist())
                start += count
        return runs

    def _check_columns(self, delta: Delta, block: memoryview) -> list[StoredColumn]:
        limit = len(block)
        start = delta.items_from
        members: dict[int, Sequence[int]] = {}
        if not delta.schema_of:
            members[0] = range(start, start + len(delta.identifiers))
        for index, number in enumerate(delta.schema_of, start):
            members.setdefault(number, []).append(index)  # type: ignore[attr-defined]
        expected = [
            (number, position)
            for number, schema in enumerate(delta.schemas)
            for position, spec in enumerate(schema)
            if spec.keep_on_cpu
        ]
        if [(column.schema, column.field) for column in delta.columns] != expected:
            raise self._error("there is one column for each keep_on_cpu field")
        own = bytearray(block)
        unpacked: dict[object, FieldValue] = {}
        stored = []
        for column in delta.columns:
            indices = members.get(column.schema, ())
            if column.stacked is not None:
                leaf_bytes(column.stacked, limit)
                count = column.stacked[1][0] if column.stacked[1] else -1
            else:
                for _, leaves in column.values:
                    for leaf in leaves:
                        leaf_bytes(leaf, limit)
                count = len(column.refs)
                if count and max(column.refs) >= len(column.values):
                    raise self._error("an item has a value of its column", found=max(column.refs))
            if count != len(indices):
                raise self._error("a column has one value an item", expected=len(indices), found=count)
            if indices:
                name = delta.schemas[column.schema][column.field].name
                stored.append(StoredColumn(name, indices, column, own, unpacked))
        return stored

    def _configs_of(self, number: int, modality: str) -> dict[str, FieldConfig]:
        configs = self._configs.get((number, modality))
        if configs is None:
            configs = self._configs[number, modality] = {
                spec.name: FieldConfig(
                    modality, cast(Any, spec.layout), spec.keep_on_cpu, spec.dim, None, spec.batch_size
                )
                for spec in self._schemas[number]
            }
        return configs

    def _error(self, message: str, **where: Any) -> MMCacheError:
        return MessageError(message, request_id=self.request_id, **where)


def _config(spec: FieldSpec, modality: str) -> FieldConfig:
    return FieldConfig(modality, cast(Any, spec.layout), spec.keep_on_cpu, spec.dim, None, spec.batch_size)
