"""How a cache is set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mmcache.errors import ConfigError
from mmcache.ledger.checks import check_least, check_period, check_row_bytes
from mmcache.namespaces import Namespace
from mmcache.policies import EvictionPolicy, as_policy

__all__ = ["CacheConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Settings of a `MultimodalCache`.

    Attributes:
        capacity_bytes: budget for embeddings.
        namespace: what must be equal for two embeddings of one content to be interchangeable; a name or a `Namespace`.
        policy: eviction order: "queue-aware", "gdsf", "lru", or an `EvictionPolicy` of your own, for one cache alone.
        row_bytes: bytes of one embedding row (width times element size) by modality. What is not given is learned from
            the first rows; until then room is taken when they come, not before the encoder runs.
        device: where embeddings are held.
        block_size: tokens of a block of the cache's own prefix index; the engine's KV block size.
        prefix_blocks: capacity of that index, used where `lookup` is not told `num_computed_tokens`; 0 leaves
            it out.
        lease_seconds: after this time a waiter takes over from an owner that has not delivered.
        tier_deadline: seconds that each tier has to answer a look-up, after which it counts as a miss.
        write_behind_bytes: bytes that may wait to be written to a tier; what does not fit is not written, and counted.
        adapter_touches_encoder: whether requests of different adapters have different embeddings.
    """

    capacity_bytes: int
    namespace: str | Namespace = ""
    policy: str | EvictionPolicy = "queue-aware"
    row_bytes: Mapping[str, int] = field(default_factory=dict)
    device: torch.device | str = "cpu"
    block_size: int = 16
    prefix_blocks: int = 65536
    lease_seconds: float = 120.0
    tier_deadline: float = 1.0
    write_behind_bytes: int = 256 << 20
    adapter_touches_encoder: bool = True

    def __post_init__(self) -> None:
        for name, least in (("capacity_bytes", 0), ("block_size", 1), ("prefix_blocks", 0), ("write_behind_bytes", 0)):
            object.__setattr__(self, name, check_least(least, getattr(self, name), name))
        object.__setattr__(self, "row_bytes", check_row_bytes(self.row_bytes))
        as_policy(self.policy)  # raises where it is none
        if not isinstance(self.namespace, (str, Namespace)):
            raise ConfigError(
                "a namespace is a name or a Namespace", field="namespace", found=type(self.namespace).__name__
            )
        for name in ("lease_seconds", "tier_deadline"):
            check_period(getattr(self, name), name)
        try:
            object.__setattr__(self, "device", torch.device(self.device))
        except (RuntimeError, TypeError):
            raise ConfigError("no device of torch's", field="device", found=repr(self.device)) from None
