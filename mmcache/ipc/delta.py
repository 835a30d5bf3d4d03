"""The sender's side of a request: what a worker has not acknowledged of it, as a message's header and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache.fields import FieldValue, ItemFields
from mmcache.ipc.messages import Column, Delta, FieldSpec
from mmcache.ipc.values import Leaf, aligned, flatten, write_tensor
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
    tokens = request.token_ids[tokens_from:]
    lengths = [item._placeholder._length for item in items]
    modality_names = [item._modality for item in items]
    modalities = list(dict.fromkeys(modality_names))
    if len(modalities) < 2:
        modality_of = [0] * len(items)
    else:
        modality_of = [modalities.index(name) for name in modality_names]
    run_counts, runs = [-1] * len(items), b""
    if request._num_rows[items_from:] != lengths:
        run_counts, runs = _runs(items)
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
        modality_of=modality_of,
        offsets=request._offsets[items_from:],
        lengths=lengths,
        run_counts=run_counts,
        runs=add_buffer(runs),
        schemas=schemas,
        schema_of=schema_of,
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
    by_value: dict[tuple[object, ...], int] = {}
    schemas: list[list[FieldSpec]] = []
    members: list[list[ItemFields]] = []
    schema_of: list[int] = []
    last: ItemFields | None = None
    number = -1
    for item in items:
        fields = item._fields
        if fields is None:
            schema_of.append(-1)
            continue
        configs = fields._configs
        # Items of one processor call share their configs, which are then equal at a glance.
        if last is None or configs != last._configs or fields._listed != last._listed:
            last = fields
            value = tuple(
                (name, config.layout, config.dim, config.keep_on_cpu, fields.listed(name), config.batch_size)
                for name, config in configs.items()
            )
            number = by_value.setdefault(value, len(schemas))
            if number == len(schemas):
                schemas.append([field_spec(name, fields) for name, config in configs.items()])
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
    writes: list[tuple[int, Tensor]] = []
    laid_out: dict[int, tuple[list[int], list[Leaf]]] = {}
    end = 0
    for number, (schema, fields) in enumerate(zip(schemas, members)):
        for position, spec in enumerate(schema):
            if spec.keep_on_cpu:
                values = [entry._data[spec.name] for entry in fields]
                column, end = _column(number, position, spec, values, writes, laid_out, end)
                columns.append(column)
    if not end:
        return columns, b""
    if len(writes) == 1 and writes[0][1].is_contiguous():
        return columns, writes[0][1].reshape(-1).view(torch.uint8).numpy().data
    block = torch.zeros(aligned(end), dtype=torch.uint8)
    address = block.data_ptr()
    for offset, tensor in writes:
        write_tensor(address, block, offset, tensor)
    return columns, block.numpy().data


def _column(
    schema: int,
    position: int,
    spec: FieldSpec,
    values: Sequence[FieldValue],
    writes: list[tuple[int, Tensor]],
    laid_out: dict[int, tuple[list[int], list[Leaf]]],
    end: int,
) -> tuple[Column, int]:
    column = Column(schema=schema, field=position, stacked=None, values=[], refs=[])
    if spec.layout != "shared":
        stacked = _stack(values)
        if stacked is not None:
            _, leaves, tensors, end = flatten(stacked, spec.name, end)
            writes.append((leaves[0][2], tensors[0]))
            column.stacked = leaves[0]
            return column, end
    # One value that several items share stays one value, so that it counts and joins as one on the other side.
    numbers: dict[int, int] = {}
    for value in values:
        number = numbers.setdefault(id(value), len(column.values))
        if number == len(column.values):
            if id(value) not in laid_out:
                nest, leaves, tensors, end = flatten(value, spec.name, end)
                writes += zip((offset for _, _, offset in leaves), tensors)
                laid_out[id(value)] = (nest, leaves)
            column.values.append(laid_out[id(value)])
        column.refs.append(number)
    return column, end


def _stack(values: Sequence[FieldValue]) -> Tensor | None:
    """All values as one tensor, where they are tensors of one dtype and shape."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values) or len({tensor.dtype for tensor in tensors}) > 1:
        return None
    try:
        return torch.stack(tensors)
    except RuntimeError:
        return None  # shapes differ, or the layout is not strided
