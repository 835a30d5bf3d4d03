"""The field contract: how a processor's batch falls apart into items, and how items join into a batch again.

A *field* is a tensor (or a nested list of tensors, where shapes differ) that a multimodal processor made for a batch of
items. A `FieldConfig` says how the batch is laid out and whether the field may leave the CPU; `split_fields` cuts a
batch into one `ItemFields` an item, all views, and `join_fields` puts items back into the batch that a model expects.
"""

from mmcache.fields.batches import join_fields, join_tensors, split_fields
from mmcache.fields.config import FieldConfig
from mmcache.fields.item import ItemFields
from mmcache.fields.shared import SharedValue
from mmcache.fields.values import FieldValue, owned_value, owns_memory, value_bytes

__all__ = [
    "FieldConfig",
    "FieldValue",
    "ItemFields",
    "SharedValue",
    "join_fields",
    "join_tensors",
    "owned_value",
    "owns_memory",
    "split_fields",
    "value_bytes",
]
