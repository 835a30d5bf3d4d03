"""The sender's side of a request: what a worker has not acknowledged of it, as a message's header and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache.fields import FieldValue, ItemFields
from mmcache.ipc.messages import Column, Delta, FieldSpec
from mmcache.ipc.values import Leaf, bytes_of, flatten, leaf_of
from mmcache.items import MultimodalItem, MultimodalRequest

__all__ = ["AddBuffer", "encode_delta", "field_spec"]

AddBuffer: TypeAlias = Callable[[bytes | memoryview], int]
"""Adds a buffer to the message and returns its number."""


def encode_delta(
    request: MultimodalRequest, uid: int, tokens_from: int, items_from: int, add_buffer: AddBuffer
) -> Delta:
    """The tokens and items of a request from some point on.

    Raises:
        FieldError: a `keep_on_cpu` field cannot travel.
    """
    items = request.items[items_from:] if items_from else request.items
    tokens = request._buffer[tokens_from : request.num_tokens]
    lengths = [item._placeholder._length for item in items]
    names = [item._modality for item in items]
    modalities = list(dict.fromkeys(names))
    run_counts, runs = ([], b"") if request._num_rows[items_from:] == lengths else _runs(items)
    schemas, schema_of, members = _schemas(items)
    columns, metadata = _columns(schemas, members)
    return Delta(
        uid=uid,
        request_id=request.request_id,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        tokens_from=tokens_from,
        items_from=items_from,
        tokens=add_buffer(tokens.view(np.uint8).data if len(tokens) else b""),
        identifiers=request._identifiers[items_from:],
        modalities=modalities,
        modality_of=[modalities.index(name) for name in names] if len(modalities) > 1 else [],
        offsets=request._offsets[items_from:],
        lengths=lengths,
        run_counts=run_counts,
        runs=add_buffer(runs),
        schemas=schemas,
        schema_of=schema_of if any(schema_of) else [],
        columns=columns,
        metadata=add_buffer(metadata),
    )


def _runs(items: Sequence[MultimodalItem]) -> tuple[list[int], bytes]:
    places = [item._placeholder for item in items]
    whole = [place._num_embeds == place._length for place in places]
    counts = [-1 if all_rows else len(place._runs) for place, all_rows in zip(places, whole)]
    runs = [run for place, all_rows in zip(places, whole) if not all_rows for run in place._runs]
    return counts, np.asarray(runs, np.int32).tobytes()


def _schemas(items: Sequence[MultimodalItem]) -> tuple[list[list[FieldSpec]], list[int], list[list[ItemFields]]]:
    """The distinct lists of field configs, which of them each item has, and the fields of the items of each."""
    all_fields = [item._fields for item in items]
    have = [fields for fields in all_fields if fields is not None]
    if have and len(have) == len(items):
        # Items of one processor call share their configs, which are then equal at a glance.
        first = have[0]
        if [fields._configs for fields in have].count(first._configs) == len(have) and len(set(map(_listed, have))) < 2:
            return [[field_spec(name, first) for name in first._configs]], [0] * len(have), [have]
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
    return schemas, schema_of, members


def field_spec(name: str, fields: ItemFields) -> FieldSpec:
    """The config of a field, for a message."""
    config = fields.config(name)
    return FieldSpec(
        name=name,
        layout=config.layout,
        dim=config.dim,
        keep_on_cpu=config.keep_on_cpu,
        listed=fields.listed(name),
        batch_size=config.batch_size,
    )


def _columns(
    schemas: Sequence[Sequence[FieldSpec]], members: Sequence[Sequence[ItemFields]]
) -> tuple[list[Column], bytes | memoryview]:
    columns = []
    block = _Block()
    for number, (schema, fields) in enumerate(zip(schemas, members)):
        for position, spec in enumerate(schema):
            if spec.keep_on_cpu:
                values = [entry._data[spec.name] for entry in fields]
                columns.append(_column(number, position, spec, values, block))
    return columns, block.joined()


class _Block:
    """The bytes of metadata, each tensor at a multiple of `ALIGNMENT`."""

    __slots__ = ("end", "laid_out", "pieces")

    def __init__(self) -> None:
        self.end = 0
        self.pieces: list[bytes | memoryview] = []
        self.laid_out: dict[int, tuple[list[int], list[Leaf]]] = {}  # values by identity, so that one is written once

    def write(self, leaf: Leaf, tensor: Tensor) -> None:
        """Write a tensor at its leaf's offset."""
        raw = bytes_of(tensor)
        if leaf[2] > self.end:
            self.pieces.append(bytes(leaf[2] - self.end))
        self.pieces.append(raw)
        self.end = leaf[2] + len(raw)

    def place(self, value: FieldValue, field: str) -> tuple[list[int], list[Leaf]]:
        """Nest and leaves of a value, written if it is not there."""
        known = self.laid_out.get(id(value))
        if known is None:
            nest, leaves, tensors, _ = flatten(value, field, self.end)
            for leaf, tensor in zip(leaves, tensors):
                self.write(leaf, tensor)
            known = self.laid_out[id(value)] = nest, leaves
        return known

    def joined(self) -> bytes | memoryview:
        """All of it."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


def _column(schema: int, position: int, spec: FieldSpec, values: Sequence[FieldValue], block: _Block) -> Column:
    column = Column(schema=schema, field=position, stacked=None, values=[], refs=[])
    if spec.layout != "shared":
        stacked = _stack(values)
        if stacked is not None:
            column.stacked, _ = leaf_of(stacked, spec.name, block.end)
            block.write(column.stacked, stacked)
            return column
    # One value that several items share stays one value, so that it counts and joins as one on the other side.
    numbers: dict[int, int] = {}
    for value in values:
        number = numbers.setdefault(id(value), len(column.values))
        if number == len(column.values):
            column.values.append(block.place(value, spec.name))
        column.refs.append(number)
    return column


def _stack(values: Sequence[FieldValue]) -> Tensor | None:
    """All values as one tensor, where they are tensors of one dtype and shape."""
    try:
        if len(set(map(_dtype, values))) > 1:
            return None
        return torch.stack(values)  # type: ignore[arg-type]
    except (AttributeError, RuntimeError):
        return None  # lists have no dtype; shapes differ, or the layout is not strided


_dtype, _listed = attrgetter("dtype"), attrgetter("_listed")
