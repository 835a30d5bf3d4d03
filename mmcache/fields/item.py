"""The fields of one item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmcache.errors import FieldError
from mmcache.fields.config import FieldConfig
from mmcache.fields.shared import SharedValue
from mmcache.fields.values import FieldValue, as_value, content_of, describe, shape_of, value_bytes

__all__ = ["ItemFields"]


class ItemFields(Mapping[str, FieldValue]):
    """The fields of one item: a read-only mapping from name to tensor (or nested list of tensors).

    Tensors are views of the batch they came from. A `keep_on_cpu` field that arrives on a device is copied to the CPU
    here, once.

    Attributes:
        modality: the modality of its configs, or None where there are no fields.
        payload_bytes: bytes of the fields that go to the device when the item is encoded, shared ones left out.
        kept_bytes: bytes of the `keep_on_cpu` fields, shared ones left out.
        shared: (name, bytes, keep_on_cpu) of each shared field.
        embeds: embeddings that the client gave, as processors name them: the field `image_embeds` (`video_embeds`, ...
            by modality); None where there is none.
    """

    __slots__ = (
        "_configs",
        "_data",
        "_listed",
        "_shared",
        "embeds",
        "kept_bytes",
        "modality",
        "payload_bytes",
        "shared",
    )

    def __init__(
        self, data: Mapping[str, Any], configs: Mapping[str, FieldConfig], *, listed: frozenset[str] = frozenset()
    ) -> None:
        """Take `data` as one item's fields; every name needs a config.

        Args:
            data: name to tensor, array, number, or nested list of these; or to the `SharedValue` of other items.
            configs: name to config; all of one modality.
            listed: names of batched fields that the processor gave as a list, and that join to a list again.
        """
        self._data: dict[str, FieldValue] = {}
        self._configs: dict[str, FieldConfig] = {}
        self._shared: dict[str, SharedValue] = {}
        self._listed = listed
        payload = kept = 0
        shared = []
        modality: str | None = None
        if not isinstance(data, Mapping) or not isinstance(configs, Mapping):
            raise FieldError("an item's fields and their configs are mappings", found=type(data).__name__)
        for name, raw in data.items():
            config = configs.get(name)
            if not isinstance(config, FieldConfig):
                raise FieldError("the field has no config", field=name, expected=f"one of {sorted(configs)}")
            if modality is None:
                modality = config.modality
            elif config.modality != modality:
                raise FieldError(
                    "the fields of an item have one modality", field=name, expected=modality, found=config.modality
                )
            common = raw if isinstance(raw, SharedValue) else None
            value = as_value(raw if common is None else common.value, name, config.keep_on_cpu)
            self._data[name] = value
            self._configs[name] = config
            size = value_bytes(value)
            if config.layout == "shared":
                shared.append((name, size, config.keep_on_cpu))
                self._shared[name] = SharedValue(value) if common is None or common.value is not value else common
            elif config.keep_on_cpu:
                kept += size
            else:
                payload += size
        self.modality: str | None = modality
        self.payload_bytes = payload
        self.kept_bytes = kept
        self.shared = tuple(shared)
        self.embeds = self._data.get(f"{modality}_embeds")

    def __getitem__(self, name: str) -> FieldValue:
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, name: object) -> bool:
        return name in self._data

    def __repr__(self) -> str:
        return f"ItemFields({', '.join(f'{n}: {describe(v)}' for n, v in self._data.items())})"

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

    def shared_value(self, name: str) -> SharedValue:
        """The value of shared field `name`, by whose key other items with the same one are found.

        Raises:
            FieldError: the item has no such shared field.
        """
        found = self._shared.get(name)
        if found is None:
            raise FieldError("the item has no such shared field", field=name, expected=f"one of {sorted(self._shared)}")
        return found

    def resembles(self, other: ItemFields) -> bool:
        """Whether both can be the fields of one content: equal names, layouts, dtypes, shapes and CPU metadata.

        The payload's values are not compared: that is what the content digest is for.
        """
        return self._data.keys() == other._data.keys() and all(
            self._configs[name].layout == other._configs[name].layout
            and self._configs[name].keep_on_cpu == other._configs[name].keep_on_cpu
            and shape_of(value) == shape_of(other._data[name])
            and (
                value is other._data[name]
                or not self._configs[name].keep_on_cpu
                or content_of(value) == content_of(other._data[name])
            )
            for name, value in self._data.items()
        )

    def join_key(self, *, payload_only: bool = False) -> tuple[Any, ...]:
        """Equal for items that `join_fields` puts into one batch whose layout a model accepts.

        Shapes have to agree except where items are concatenated (a flat field's `dim`) or where the processor itself
        gave a list; a shared field has to have the same value.
        """
        key: list[Any] = []
        for name, value in sorted(self._data.items()):
            config = self._configs[name]
            if payload_only and config.keep_on_cpu:
                continue
            key.append((name, config.modality, config.layout, config.dim, config.keep_on_cpu))
            if config.layout == "shared":
                key.append(self._shared[name].key)
            elif isinstance(value, list) or name in self._listed:
                key.append("list")
            elif config.layout == "flat":
                key.append((value.dtype, value.shape[: config.dim], value.shape[config.dim + 1 :]))
            else:
                key.append((value.dtype, value.shape))
        return tuple(key)
