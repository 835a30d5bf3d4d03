"""mmcache inside a small engine over Hugging Face transformers.

It runs on a laptop: tiny real models with seeded weights, their real processors, chunked prefill, KV prefix reuse and
batches. Needs `pip install mmcache[transformers]`; importing this package does not import transformers.
"""

from mmcache.engines.transformers.accounting import BYTE_REASONS, TurnAccount
from mmcache.engines.transformers.adapter import Adapter, ItemTokens, processor_settings
from mmcache.engines.transformers.engine import Engine, Running, default_engine
from mmcache.engines.transformers.plain import Generation, run_plain
from mmcache.engines.transformers.tiny import FAMILIES, tiny_adapter

__all__ = [
    "BYTE_REASONS",
    "FAMILIES",
    "Adapter",
    "Engine",
    "Generation",
    "ItemTokens",
    "Running",
    "TurnAccount",
    "default_engine",
    "processor_settings",
    "run_plain",
    "tiny_adapter",
]
