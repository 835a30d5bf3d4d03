"""The field contract: how a processor's batch falls apart into items, and how items join into a batch again.

A *field* is a tensor (or a nested list of tensors, where shapes differ) that a multimodal processor made for a batch of
items. A `FieldConfig` says how the batch is laid out and whether the field may leave the CPU; `split_fields` cuts a
batch into one `ItemFields` an item, all views, and `join_fields` puts items back into the batch that a model expects.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mmcache.errors import FieldError

__all__ = ["FieldConfig", "FieldValue", "ItemFields", "join_fields", "split_fields", "value_bytes"]

FieldValue: TypeAlias = "Tensor | list[FieldValue]"
Layout: TypeAlias = Literal["batched", "flat", "shared"]
Slices: TypeAlias = "Sequence[slice | Sequence[slice]]"


@dataclass(frozen=True, slots=True)
class FieldConfig:
    """How one field of a batch is laid out over its items; made by one of the four constructors below.

    Attributes:
        modality: the modality whose items own the field ("image", "video", "audio", ...).
        layout: "batched" (entry i of the first dimension is item i), "flat" (item i is a slice) or "shared" (one value
            for the whole batch).
        keep_on_cpu: the model reads this field on the CPU; it is never dropped and never goes to the device. A promise
            about the consumer: prove it.
        dim: the dimension along which items of a flat field join.
        slices: of a flat field, one tuple of slices an item, outermost dimension first.
        total: of a flat field made from sizes, their sum, which must be the field's size along `dim`.
        batch_size: of a shared field, the number of items that share it.
    """

    modality: str
    layout: Layout
    keep_on_cpu: bool = False
    dim: int = 0
    slices: tuple[tuple[slice, ...], ...] | None = None
    batch_size: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.modality, str) or not self.modality:
            raise FieldError("a field's modality is a non-empty string", found=repr(self.modality))

    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool = False) -> FieldConfig:
        """Item i is `batch[i]`: a tensor without its first dimension, or entry i of a list."""
        return FieldConfig(modality, "batched", keep_on_cpu)

    @staticmethod
    def flat(modality: str, slices: Slices, dim: int = 0, *, keep_on_cpu: bool = False) -> FieldConfig:
        """Item i is the slice `slices[i]` along `dim` (or a tuple of slices, one a dimension from the first on).

        Raises:
            FieldError: a slice has a step, a negative bound, or is not a slice.
        """
        dim = _checked_dim(dim)
        cut = []
        for item, entry in enumerate(slices):
            parts = (slice(None),) * dim + (entry,) if isinstance(entry, slice) else tuple(entry)
            for part in parts:
                _check_slice(part, item)
            cut.append(parts)
        return FieldConfig(modality, "flat", keep_on_cpu, dim, tuple(cut))

    @staticmethod
    def flat_from_sizes(
        modality: str,
        size_per_item: Tensor | np.ndarray[Any, Any] | Sequence[int],
        dim: int = 0,
        *,
        keep_on_cpu: bool = False,
    ) -> FieldConfig:
        """Item i owns the next `size_per_item[i]` entries along `dim`; sizes are one-dimensional integers.

        Raises:
            FieldError: sizes are not one-dimensional, not integers, or negative.
        """
        sizes = size_per_item.tolist() if isinstance(size_per_item, (Tensor, np.ndarray)) else list(size_per_item)
        if not isinstance(sizes, list):
            raise FieldError("sizes of a flat field are one-dimensional", found=f"the scalar {sizes!r}")
        dim = _checked_dim(dim)
        cut = []
        start = 0
        for item, size in enumerate(sizes):
            try:
                size = operator.index(size)
            except TypeError:
                size = -1
            if size < 0 or isinstance(sizes[item], bool):
                raise FieldError(
                    "sizes of a flat field are a one-dimensional sequence of integers >= 0",
                    item=item,
                    found=repr(sizes[item]),
                )
            cut.append((slice(None),) * dim + (slice(start, start + size),))
            start += size
        return FieldConfig(modality, "flat", keep_on_cpu, dim, tuple(cut), total=start)

    @staticmethod
    def shared(modality: str, batch_size: int, *, keep_on_cpu: bool = False) -> FieldConfig:
        """Every one of the `batch_size` items has the whole value; its bytes count once in a request."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 0:
            raise FieldError("a shared field's batch size is an integer >= 0", found=repr(batch_size))
        return FieldConfig(modality, "shared", keep_on_cpu, 0, None, batch_size)


class ItemFields(Mapping[str, FieldValue]):
    """The fields of one item: a read-only mapping from name to tensor (or nested list of tensors).

    Tensors are views of the batch they came from. A `keep_on_cpu` field that arrives on a device is copied to the CPU
    here, once.

    Attributes:
        payload_bytes: bytes of the fields that go to the device when the item is encoded, shared ones left out.
        kept_bytes: bytes of the `keep_on_cpu` fields, shared ones left out.
        shared: (name, bytes, keep_on_cpu) of each shared field.
    """

    __slots__ = ("_configs", "_data", "_listed", "_signature", "kept_bytes", "payload_bytes", "shared")

    def __init__(
        self, data: Mapping[str, Any], configs: Mapping[str, FieldConfig], *, listed: frozenset[str] = frozenset()
    ) -> None:
        """Take `data` as one item's fields; every name needs a config.

        Args:
            data: name to tensor, array, number, or nested list of these.
            configs: name to config; all of one modality.
            listed: names of batched fields that the processor gave as a list, and that join to a list again.
        """
        self._data: dict[str, FieldValue] = {}
        self._configs: dict[str, FieldConfig] = {}
        self._listed = listed
        self._signature: tuple[Any, ...] | None = None
        payload = kept = 0
        shared = []
        modality = None
        for name, raw in data.items():
            config = configs.get(name)
            if config is None:
                raise FieldError("the field has no config", field=name, expected=f"one of {sorted(configs)}")
            if modality is None:
                modality = config.modality
            elif config.modality != modality:
                raise FieldError(
                    "the fields of an item have one modality", field=name, expected=modality, found=config.modality
                )
            value = _as_value(raw, name, config.keep_on_cpu)
            self._data[name] = value
            self._configs[name] = config
            size = value_bytes(value)
            if config.layout == "shared":
                shared.append((name, size, config.keep_on_cpu))
            elif config.keep_on_cpu:
                kept += size
            else:
                payload += size
        self.payload_bytes = payload
        self.kept_bytes = kept
        self.shared = tuple(shared)

    def __getitem__(self, name: str) -> FieldValue:
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, name: object) -> bool:
        return name in self._data

    def __repr__(self) -> str:
        return f"ItemFields({', '.join(f'{n}: {_describe(v)}' for n, v in self._data.items())})"

    # A mapping compares by value, and the truth of `tensor == tensor` is not one value: items compare by identity.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def config(self, name: str) -> FieldConfig:
        """The config of field `name`.

        Raises:
            FieldError: the item has no such field.
        """
        config = self._configs.get(name)
        if config is None:
            raise FieldError("the item has no such field", field=name, expected=f"one of {sorted(self._configs)}")
        return config

    def listed(self, name: str) -> bool:
        """Whether the processor gave this batched field as a list, so that the model takes a list."""
        return name in self._listed

    @property
    def signature(self) -> tuple[Any, ...]:
        """Names, layouts, dtypes and shapes: equal for two items that can stand for the same content."""
        if self._signature is None:
            self._signature = tuple(
                (name, self._configs[name].layout, self._configs[name].keep_on_cpu, _shape_of(value))
                for name, value in sorted(self._data.items())
            )
        return self._signature

    def join_key(self, *, payload_only: bool = False) -> tuple[Any, ...]:
        """Equal for items that `join_fields` puts into one batch whose layout a model accepts.

        Shapes have to agree except where items are concatenated (a flat field's `dim`) or where the processor itself
        gave a list; a shared field has to be the same value.
        """
        key: list[Any] = []
        for name, value in sorted(self._data.items()):
            config = self._configs[name]
            if payload_only and config.keep_on_cpu:
                continue
            key.append((name, config.modality, config.layout, config.dim, config.keep_on_cpu))
            if config.layout == "shared":
                key.append(_content_of(value))
            elif isinstance(value, list) or name in self._listed:
                key.append("list")
            elif config.layout == "flat":
                key.append((value.dtype, value.shape[: config.dim], value.shape[config.dim + 1 :]))
            else:
                key.append((value.dtype, value.shape))
        return tuple(key)


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
    parts: dict[str, dict[str, list[FieldValue]]] = {}
    listed: dict[str, set[str]] = {}
    for name, config in configs.items():
        if not isinstance(config, FieldConfig):
            raise FieldError("a config is a FieldConfig", field=name, found=type(config).__name__)
        raw = batch.get(name)
        if raw is None:
            continue
        value = _as_value(raw, name, config.keep_on_cpu)
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

    Batched fields of unequal shape, or that came as a list, join to a list; flat ones whose other dimensions differ too.
    Items that lie one behind the other in one tensor join without a copy, so the result may share memory with them.

    Raises:
        FieldError: items of one modality have different fields, a field differs in layout or dtype, or a shared field
            has different values.
    """
    groups: dict[str, list[tuple[int, ItemFields]]] = {}
    names_of: dict[str, tuple[int, ItemFields]] = {}
    for index, item in enumerate(items):
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


def value_bytes(value: FieldValue) -> int:
    """Bytes of a field's elements (of a view: of what it shows)."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(value_bytes, value))


def _checked_dim(dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise FieldError("a flat field's dim is an integer >= 0", found=repr(dim))
    return dim


def _check_slice(part: object, item: int) -> None:
    if not isinstance(part, slice):
        raise FieldError("a flat field is cut by slices or tuples of slices", item=item, found=repr(part))
    for bound in (part.start, part.stop):
        if bound is not None and (isinstance(bound, bool) or not hasattr(bound, "__index__") or bound < 0):
            raise FieldError("a slice has bounds >= 0", item=item, found=repr(part))
    if part.step not in (None, 1):
        raise FieldError("a slice has no step", item=item, found=repr(part))


def _split_value(value: FieldValue, name: str, config: FieldConfig) -> list[FieldValue]:
    if config.layout == "shared":
        return [value] * (config.batch_size or 0)
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
        for (index, _), other_value in zip(members, values):
            if other_value is not value and _content_of(other_value) != _content_of(value):
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


def _as_value(raw: Any, name: str, keep_on_cpu: bool) -> FieldValue:
    if isinstance(raw, Tensor):
        return raw.cpu() if keep_on_cpu and raw.device.type != "cpu" else raw
    if isinstance(raw, np.ndarray):
        return _from_numpy(raw, name)
    if isinstance(raw, (bool, int, float, complex, np.generic)):
        return _from_numpy(np.asarray(raw), name) if isinstance(raw, np.generic) else torch.tensor(raw)
    if isinstance(raw, (list, tuple)):
        if raw and all(isinstance(entry, (bool, int, float)) for entry in raw):
            return torch.tensor(raw)
        return [_as_value(entry, name, keep_on_cpu) for entry in raw]
    raise FieldError(
        "a field holds tensors, arrays, numbers, or nested lists of these", field=name, found=type(raw).__name__
    )


def _from_numpy(array: np.ndarray[Any, Any], name: str) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise FieldError("a field's array holds numbers", field=name, found=f"dtype {array.dtype}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides) or not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)


def _describe(value: FieldValue) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"list of {len(value)}"


def _shape_of(value: FieldValue) -> Any:
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else tuple(map(_shape_of, value))


def _content_of(value: FieldValue) -> Any:
    """A shared value as something comparable: small metadata by value, a large or device tensor by identity."""
    if isinstance(value, list):
        return tuple(map(_content_of, value))
    if value.device.type != "cpu" or value_bytes(value) > 4096:
        return (value.dtype, tuple(value.shape), id(value))
    return (value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
