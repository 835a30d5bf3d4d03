"""Field configs of real model families, each with the evidence for where its fields belong.

`field_configs(model_type, batch)` gives the configs that `split_fields` takes. What is known of a family is plain data
(`FAMILIES`); the sizes of flat fields are read from the batch itself.
"""

from mmcache.models.entries import Consumer, Evidence, Family, FieldEntry, Table
from mmcache.models.lookup import FAMILIES, family, field_configs, field_table
from mmcache.models.placement import OnDevice

__all__ = [
    "FAMILIES",
    "Consumer",
    "Evidence",
    "Family",
    "FieldEntry",
    "OnDevice",
    "Table",
    "family",
    "field_configs",
    "field_table",
]
