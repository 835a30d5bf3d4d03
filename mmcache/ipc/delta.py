"""The sender's side of a request: what a worker has not acknowledged of it, as a message's header and buffers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcache import native
from mmcache.fields import FieldValue, ItemFields
from mmcache.ipc.messages import Column, Delta, FieldSpec
from mmcache.ipc.values import ALIGNMENT, Leaf, bytes_of, flatten, leaf_of
from mmcache.items import MultimodalItem, MultimodalRequest

__all__ = ["encode_delta", "field_spec"]

_FEW = 16


def encode_delta(
    request: MultimodalRequest,
    uid: int,
    start: tuple[int, int],
    end: tuple[int, int],
    buffers: list[bytes | memoryview],
) -> Delta:
    """The (tokens, items) of a request between two points; what is long is appended to the message's buffers.

    Raises:
        FieldError: a `keep_on_cpu` field cannot travel.
    """
    (tokens_from, items_from), (tokens_to, items_to) = start, end
    items = request.items[items_from:items_to]
    tokens = request._buffer[tokens_from:tokens_to]
    lengths = [item._placeholder._length for item in items]
    names = [item._modality for item in items]
    modalities = list(dict.fromkeys(names))
    run_counts, runs = ([], b"") if request._num_rows[items_from:items_to] == lengths else _runs(items)
    schemas, schema_of, members = _schemas(items)
    columns, metadata = _columns(schemas, members)
    number = len(buffers)
    buffers += (tokens.view(np.uint8).data if len(tokens) else b"", runs, metadata)
    return Delta(
        uid=uid,
        request_id=request.request_id,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        tokens_from=tokens_from,
        items_from=items_from,
        tokens=number,
        identifiers=request._identifiers[items_from:items_to],
        modalities=modalities,
        modality_of=[modalities.index(name) for name in names] if len(modalities) > 1 else [],
        offsets=request._offsets[items_from:items_to],
        lengths=lengths,
        run_counts=run_counts,
        runs=number + 1,
        schemas=schemas,
        schema_of=schema_of,
        columns=columns,
        metadata=number + 2,
    )


def _runs(items: Sequence[MultimodalItem]) -> tuple[list[int], bytes]:
    places = [item._placeholder for item in items]
    whole = [place._num_embeds == place._length for place in places]
    counts = [-1 if all_rows else len(place.runs) for place, all_rows in zip(places, whole)]
    runs = [run for place, all_rows in zip(places, whole) if not all_rows for run in place.runs]
    return counts, np.asarray(runs, np.int32).tobytes()


def _schemas(items: Sequence[MultimodalItem]) -> tuple[list[list[FieldSpec]], list[int], list[list[ItemFields]]]:
    """The distinct lists of field configs, which of them each item has (empty: all the first), and whose fields."""
    all_fields = [item._fields for item in items]
    have = [fields for fields in all_fields if fields is not None]
    if not have:
        return [], [-1] * len(items), []
    first, count = have[0], len(items)
    configs, listed = first._configs, first._listed
    if (
        # Items of one processor call share their configs, which are then equal at a glance.
        len(have) == count
        and [fields._configs for fields in have].count(configs) == count
        and [fields._listed for fields in have].count(listed) == count
    ):
        schema = [
            FieldSpec(name, config.layout, config.dim, config.keep_on_cpu, name in listed, config.batch_size)
            for name, config in configs.items()
        ]
        return [schema], [], [have]
    by_value: dict[tuple[object, ...], int] = {}
    schemas: list[list[FieldSpec]] = []
    members: list[list[ItemFields]] = []
    schema_of: list[int] = []
    for fields in all_fields:
        if fields is None:
            schema_of.append(-1)
            continue
        value = tuple(
            (name, config.layout, config.dim, config.keep_on_cpu, fields.listed(name), config.batch_size)
            for name, config in fields._configs.items()
        )
        number = by_value.setdefault(value, len(schemas))
        if number == len(schemas):
            schemas.append([field_spec(name, fields) for name in fields._configs])
            members.append([])
        schema_of.append(number)
        members[number].append(fields)
    return schemas, schema_of if any(schema_of) else [], members


def field_spec(name: str, fields: ItemFields) -> FieldSpec:
    """The config of a field, for a message."""
    config = fields.config(name)
    return FieldSpec(name, config.layout, config.dim, config.keep_on_cpu, fields.listed(name), config.batch_size)


def _columns(
    schemas: Sequence[Sequence[FieldSpec]], members: Sequence[Sequence[ItemFields]]
) -> tuple[list[Column], bytes | memoryview]:
    columns = []
    block = _Block()
    for number, (schema, fields) in enumerate(zip(schemas, members)):
        for position, spec in enumerate(schema):
            if spec.keep_on_cpu:
                name = spec.name
                values = [entry._data[name] for entry in fields]
                packed = None if spec.layout == "shared" else _packed(values, name)
                if packed is not None:
                    dtype, shape, raw = packed
                    columns.append(Column(number, position, (dtype, shape, block.add(raw)), [], []))
                else:
                    columns.append(_column(number, position, name, values, block))
    pieces = block.pieces
    return columns, pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Block:
    """The bytes of metadata, each tensor at a multiple of `ALIGNMENT`."""

    __slots__ = ("end", "laid_out", "pieces")

    def __init__(self) -> None:
        self.end = 0
        self.pieces: list[bytes | memoryview] = []
        self.laid_out: dict[int, tuple[list[int], list[Leaf]]] = {}  # values by identity, so that one is written once

    def add(self, raw: bytes | memoryview) -> int:
        """Write bytes at the next multiple of `ALIGNMENT`, and return that."""
        gap = -self.end % ALIGNMENT
        if gap:
            self.pieces.append(bytes(gap))
        offset = self.end + gap
        self.pieces.append(raw)
        self.end = offset + len(raw)
        return offset

    def place(self, value: FieldValue, field: str) -> tuple[list[int], list[Leaf]]:
        """Nest and leaves of a value, written if it is not there."""
        known = self.laid_out.get(id(value))
        if known is None:
            nest, leaves, tensors, _ = flatten(value, field, self.end)
            for tensor in tensors:
                self.add(bytes_of(tensor))
            known = self.laid_out[id(value)] = nest, leaves
        return known


def _column(schema: int, position: int, field: str, values: Sequence[FieldValue], block: _Block) -> Column:
    """The distinct values one by one. One that several items share stays one: it counts and joins as one over there."""
    column = Column(schema, position, None, [], [])
    numbers: dict[int, int] = {}
    for value in values:
        number = numbers.setdefault(id(value), len(column.values))
        if number == len(column.values):
            column.values.append(block.place(value, field))
        column.refs.append(number)
    return column


def _packed(values: Sequence[Any], field: str) -> tuple[str, tuple[int, ...], bytes | memoryview] | None:
    """Dtype, shape and bytes of all values as one tensor, where they are tensors of one dtype and shape."""
    gathered = native.gather(list(values)) if native.gather is not None else None
    if gathered is not None:
        (name, shape, _), _ = leaf_of(values[0], field, 0)
        return name, (len(values), *shape), gathered
    try:
        if len(set(map(_dtype, values))) > 1:
            return None
        first: Tensor = values[0]
        if first.dtype is torch.int64 and first.dim() == 1 and 0 < first.numel() <= _FEW:
            # A few whole numbers, as most metadata is: to read them is quicker than to stack tensors of any kind.
            rows = [value.tolist() for value in values]
            if set(map(len, rows)) == {len(rows[0])}:
                return "int64", (len(rows), len(rows[0])), array("q", chain.from_iterable(rows)).tobytes()
        stacked = torch.stack(values)  # type: ignore[arg-type]
        (name, shape, _), _ = leaf_of(stacked, field, 0)
        return name, shape, bytes_of(stacked)
    except (AttributeError, RuntimeError, TypeError):
        return None  # lists have no dtype; shapes differ, or the layout is not strided


_dtype = attrgetter("dtype")
