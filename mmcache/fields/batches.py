"""A processor's batch falls apart into items, and items join into a batch again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmcache.errors import FieldError
from mmcache.fields.config import FieldConfig
from mmcache.fields.item import ItemFields
from mmcache.fields.shared import SharedValue
from mmcache.fields.values import FieldValue, as_value

__all__ = ["join_fields", "join_tensors", "split_fields"]


def split_fields(batch: Mapping[str, Any], configs: Mapping[str, FieldConfig]) -> dict[str, list[ItemFields]]:
    """Cut a processor's output into items.

    Args:
        batch: name to tensor, numpy array, number, or nested list of these; names without a config are ignored
            (`input_ids`), and so are None values.
        configs: name to config; names that the batch lacks are ignored (optional fields).

    Returns:
        modality to its items, in order. Tensors are views of the batch; `keep_on_cpu` fields are on the CPU.

    Raises:
        FieldError: a field does not fit its config, or the fields of a modality differ in the number of items.
    """
    for mapping in (batch, configs):
        if not isinstance(mapping, Mapping):
            raise FieldError("a batch and its configs are mappings", found=type(mapping).__name__)
    parts: dict[str, dict[str, Sequence[FieldValue | SharedValue]]] = {}
    listed: dict[str, set[str]] = {}
    for name, config in configs.items():
        if not isinstance(config, FieldConfig):
            raise FieldError("a config is a FieldConfig", field=name, found=type(config).__name__)
        raw = batch.get(name)
        if raw is None:
            continue
        value = as_value(raw, name, config.keep_on_cpu)
        parts.setdefault(config.modality, {})[name] = _split_value(value, name, config)
        if config.layout == "batched" and isinstance(value, list):
            listed.setdefault(config.modality, set()).add(name)
    result: dict[str, list[ItemFields]] = {}
    for modality, fields in parts.items():
        counts = {name: len(values) for name, values in fields.items()}
        if len(set(counts.values())) > 1:
            raise FieldError(f"the fields of modality {modality!r} differ in their number of items", found=counts)
        of_list = frozenset(listed.get(modality, ()))
        result[modality] = [
            ItemFields({name: values[i] for name, values in fields.items()}, configs, listed=of_list)
            for i in range(next(iter(counts.values())))
        ]
    return result


def join_fields(items: Sequence[ItemFields]) -> dict[str, FieldValue]:
    """Join items into a batch: batched fields are stacked, flat ones concatenated along their `dim`, shared ones kept.

    Batched fields of unequal shape, or that came as a list, join to a list; flat ones whose other sizes differ too.
    Items that lie one behind the other in one tensor join without a copy, so the result may share memory with them.

    Raises:
        FieldError: items of one modality have different fields, a field differs in layout or dtype, or a shared field
            has different values (on a device: is not one tensor, since nothing here waits for its bits).
    """
    groups: dict[str, list[tuple[int, ItemFields]]] = {}
    names_of: dict[str, tuple[int, ItemFields]] = {}
    for index, item in enumerate(items):
        if not isinstance(item, ItemFields):
            raise FieldError("what joins are ItemFields", item=index, found=type(item).__name__)
        modality = next((config.modality for config in item._configs.values()), "")
        first = names_of.setdefault(modality, (index, item))
        if item._data.keys() != first[1]._data.keys():
            raise FieldError(
                f"items of modality {modality!r} have different fields and do not join",
                item=index,
                expected=f"{sorted(first[1])} as in item {first[0]}",
                found=sorted(item),
            )
        for name in item:
            groups.setdefault(name, []).append((index, item))
    return {name: _join_values(name, members) for name, members in groups.items()}


def _split_value(value: FieldValue, name: str, config: FieldConfig) -> Sequence[FieldValue | SharedValue]:
    if config.layout == "shared":
        return [SharedValue(value)] * (config.batch_size or 0)
    if config.layout == "batched":
        if isinstance(value, list):
            return list(value)
        if value.dim() == 0:
            raise FieldError("a batched field has a first dimension", field=name, found="a scalar")
        return list(value.unbind(0))
    slices = config.slices or ()
    _check_cuts(value, name, config)
    if isinstance(value, list):
        return [value[cut[0]] for cut in slices]
    return [value[cut] for cut in slices]


def _check_cuts(value: FieldValue, name: str, config: FieldConfig) -> None:
    shape: Sequence[int] = (len(value),) if isinstance(value, list) else value.shape
    for item, cut in enumerate(config.slices or ()):
        if len(cut) > len(shape):
            raise FieldError(
                "the slices reach into more dimensions than the field has",
                field=name,
                item=item,
                expected=f"at most {len(shape)}",
                found=len(cut),
            )
        for dim, part in enumerate(cut):
            start, stop = part.start or 0, shape[dim] if part.stop is None else part.stop
            if start > stop or stop > shape[dim]:
                raise FieldError(
                    f"a slice lies outside dimension {dim}",
                    field=name,
                    item=item,
                    expected=f"within 0:{shape[dim]}",
                    found=f"{start}:{stop}",
                )
    # Sizes that do not add up to the batch are the commonest way of giving one item the rows of another.
    if config.total is not None and (len(shape) <= config.dim or shape[config.dim] != config.total):
        raise FieldError(
            f"the sizes of the items do not add up to dimension {config.dim}",
            field=name,
            expected=f"a sum of {shape[config.dim] if config.dim < len(shape) else None}",
            found=config.total,
        )


def _join_values(name: str, members: list[tuple[int, ItemFields]]) -> FieldValue:
    first_index, first_item = members[0]
    config, value = first_item._configs[name], first_item._data[name]
    for index, item in members[1:]:
        other = item._configs[name]
        if (other.layout, other.dim, other.keep_on_cpu) != (config.layout, config.dim, config.keep_on_cpu):
            raise FieldError(
                f"the field's config differs from item {first_index}'s and does not join",
                field=name,
                item=index,
                expected=f"{config.layout}, dim {config.dim}, keep_on_cpu {config.keep_on_cpu}",
                found=f"{other.layout}, dim {other.dim}, keep_on_cpu {other.keep_on_cpu}",
            )
    values = [item._data[name] for _, item in members]
    if config.layout == "shared":
        common = first_item._shared[name]
        for index, item in members[1:]:
            if item._data[name] is not value and item._shared[name].key != common.key:
                raise FieldError(f"a shared field differs from item {first_index}'s", field=name, item=index)
        return value
    if config.layout == "flat" and all(isinstance(v, list) for v in values):
        return [entry for v in values for entry in v]
    if any(isinstance(v, list) for v in values) or any(name in item._listed for _, item in members):
        return values
    tensors = [v for v in values if isinstance(v, Tensor)]
    for (index, _), tensor in zip(members, tensors):
        if tensor.dtype != tensors[0].dtype:
            raise FieldError(
                f"the field's dtype differs from item {first_index}'s",
                field=name,
                item=index,
                expected=tensors[0].dtype,
                found=tensor.dtype,
            )
    if config.layout == "batched":
        if any(t.shape != tensors[0].shape for t in tensors):
            return list(tensors)
        return join_tensors([t.unsqueeze(0) for t in tensors], 0)
    rest = {t.shape[: config.dim] + t.shape[config.dim + 1 :] for t in tensors}
    return join_tensors(tensors, config.dim) if len(rest) == 1 else list(tensors)


def join_tensors(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, but a view where the tensors already lie one behind the other in one storage."""
    if len(tensors) == 1:
        return tensors[0]
    view = _adjacent(tensors, dim)
    return torch.cat(list(tensors), dim) if view is None else view


def _adjacent(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    first = tensors[0]
    if type(first) is not Tensor or first.device.type != "cpu" or first.requires_grad or not first.dim():
        return None
    storage, strides, step = first.untyped_storage().data_ptr(), first.stride(), first.stride(dim)
    offset, size = first.storage_offset(), 0
    for tensor in tensors:
        if (
            type(tensor) is not Tensor
            or tensor.stride() != strides
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != offset + size * step
        ):
            return None
        size += tensor.shape[dim]
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return first.as_strided(shape, strides)
