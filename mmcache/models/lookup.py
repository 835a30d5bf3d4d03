"""From a model family and a processor's batch to the configs of its fields."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from mmcache.errors import ConfigError, FieldError, UnsupportedError
from mmcache.fields import FieldConfig
from mmcache.models.audio import AUDIO_FAMILIES
from mmcache.models.entries import Consumer, Family, FieldEntry, Table
from mmcache.models.mixed import MIXED_FAMILIES
from mmcache.models.qwen import QWEN_FAMILIES
from mmcache.models.vision import VISION_FAMILIES

__all__ = ["FAMILIES", "family", "field_configs", "field_table"]

FAMILIES: tuple[Family, ...] = (*QWEN_FAMILIES, *VISION_FAMILIES, *AUDIO_FAMILIES, *MIXED_FAMILIES)
"""Every family that is known, in the order of the table in the documentation."""

_BY_NAME = {name: entry for entry in FAMILIES for name in entry.names}
# What a processor makes of the text around the media: no fields.
_TEXT = frozenset(
    {
        "attention_mask",
        "input_ids",
        "labels",
        "mm_token_type_ids",
        "moe_mm_token_type_ids",
        "position_ids",
        "prompt_token_ids",
        "token_type_ids",
    }
)
_MAX_DEPTH = 8
# Their decoders read encoder outputs by cross-attention: there are no placeholder tokens to merge rows into.
_CROSS_ATTENTION = frozenset(
    {
        "BartForConditionalGeneration",
        "Florence2ForConditionalGeneration",
        "MllamaForConditionalGeneration",
        "WhisperForConditionalGeneration",
        "bart",
        "florence2",
        "mllama",
        "whisper",
    }
)


def family(model_type: str) -> Family:
    """The family that goes by a Hugging Face `model_type` or architecture.

    Raises:
        UnsupportedError: the model reads its media by cross-attention.
        ConfigError: none does.
    """
    if isinstance(model_type, str) and model_type in _CROSS_ATTENTION:
        raise UnsupportedError(
            "cross-attention encoder-decoder models have no placeholders to merge", found=repr(model_type)
        )
    found = _BY_NAME.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        known = ", ".join(entry.names[0] for entry in FAMILIES)
        raise ConfigError("no field configs for this model", found=repr(model_type), expected=f"one of {known}")
    return found


def field_table(model_type: str, consumer: Consumer = "transformers") -> Table:
    """The fields of a family as `consumer` takes them, with the evidence for their places.

    Raises:
        ConfigError: the family or the consumer is unknown.
    """
    tables = family(model_type).tables
    if consumer not in tables:
        raise ConfigError("no such consumer", found=repr(consumer), expected=f"one of {sorted(tables)}")
    return tables[consumer]


def field_configs(
    model_type: str, batch: Mapping[str, Any], consumer: Consumer = "transformers", strict: bool = False
) -> dict[str, FieldConfig]:
    """Configs for the fields of a batch that a family's processor made; hand them to `split_fields`.

    Args:
        model_type: a Hugging Face `model_type` ("qwen2_5_vl") or architecture ("Qwen2_5_VLForConditionalGeneration").
        batch: name to tensor, array or nested list; the sizes of flat fields are read from it. What belongs to the
            text (`input_ids`, `attention_mask`, ...) and None values are left out.
        consumer: what will read the fields: the model in "transformers", or the one in "vllm".
        strict: refuse a field that the family does not list. Otherwise such a field goes to the device, the safe side,
            with one warning a call that names them all.

    Raises:
        ConfigError: the model or the consumer is unknown.
        FieldError: sizes are missing or do not fit, or a field is not listed and `strict` is set.
    """
    table = field_table(model_type, consumer)
    listed = {entry.name: entry for entry in table.fields}
    present = {name: value for name, value in batch.items() if value is not None and name not in _TEXT}
    unlisted = [name for name in present if name not in listed]
    if strict and unlisted:
        raise FieldError(
            f"{model_type} lists no such field for {consumer}",
            field=unlisted[0],
            found=unlisted,
            expected=sorted(listed),
        )
    configs: dict[str, FieldConfig] = {}
    items: dict[str, int] = {}
    # Shared fields last: how many items share them is known from the others.
    for name in sorted((n for n in present if n in listed), key=lambda n: listed[n].layout == "shared"):
        entry = listed[name]
        configs[name] = config = _config(entry, batch, items)
        if config.layout != "shared":
            items.setdefault(entry.modality, _count(config, present[name]))
    guessed = [name for name in unlisted if _is_tensors(present[name])]
    for name in guessed:
        configs[name] = _guess(name, present[name], configs, items, table)
    surprises = [name for name in unlisted if table.others is None or name not in guessed]
    if surprises:
        left = [name for name in surprises if name not in guessed]
        warnings.warn(
            f"{model_type} lists no field {', '.join(map(repr, surprises))} for {consumer}: to the device, to be safe"
            + (f" ({', '.join(map(repr, left))}: no tensors, left out)" if left else ""),
            stacklevel=2,
        )
    return {name: configs[name] for name in present if name in configs}


def _config(entry: FieldEntry, batch: Mapping[str, Any], items: Mapping[str, int]) -> FieldConfig:
    if entry.layout == "shared":
        return FieldConfig.shared(entry.modality, items.get(entry.modality, 1), keep_on_cpu=entry.keep_on_cpu)
    sizes = None if entry.sizes is None else entry.sizes.read(batch, entry.name)
    if sizes is None:
        return FieldConfig.batched(entry.modality, keep_on_cpu=entry.keep_on_cpu)
    try:
        return FieldConfig.flat_from_sizes(entry.modality, sizes, entry.dim, keep_on_cpu=entry.keep_on_cpu)
    except FieldError as error:
        raise error.about(field=entry.name) from None


def _count(config: FieldConfig, value: Any) -> int:
    return len(config.slices) if config.slices is not None else len(value)


def _guess(
    name: str, value: Any, configs: Mapping[str, FieldConfig], items: Mapping[str, int], table: Table
) -> FieldConfig:
    """A layout for a field that nobody listed: batched or flat where its length fits, else shared; to the device."""
    modalities = sorted({entry.modality for entry in table.fields if entry.modality in items}) or ["image"]
    named = sorted((modality for modality in modalities if modality in name), key=len)
    modality = named[-1] if named else table.others or ("image" if "image" in modalities else modalities[0])
    length = len(value) if not isinstance(value, Tensor) or value.dim() else None
    count = items.get(modality)
    if count is None or length == count:
        return FieldConfig.batched(modality) if length is not None else FieldConfig.shared(modality, count or 1)
    for config in configs.values():
        if config.modality == modality and config.layout == "flat" and config.dim == 0 and config.total == length:
            return FieldConfig.flat(modality, config.slices or ())
    return FieldConfig.shared(modality, count)


def _is_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < _MAX_DEPTH and all(_is_tensors(entry, depth + 1) for entry in value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufc"
    return isinstance(value, (Tensor, bool, int, float))
