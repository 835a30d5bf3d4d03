"""Putting the scheduler's side together from vLLM's configuration."""

from __future__ import annotations

import hashlib
import logging
from importlib import import_module
from importlib.metadata import version
from typing import Any

from mmcache.engines.vllm.identity import engine_namespace
from mmcache.engines.vllm.keys import EmbeddingFields, Keyer
from mmcache.engines.vllm.region import Cell, SharedRegion
from mmcache.engines.vllm.scheduler import SchedulerSide
from mmcache.engines.vllm.settings import Settings, open_stores
from mmcache.engines.vllm.threads import Helper
from mmcache.engines.vllm.writeback import WriteBack
from mmcache.hashing import ContentHasher
from mmcache.namespaces import namespace_fingerprint
from mmcache.tiers import TieredStore

__all__ = ["OpenedScheduler", "open_scheduler_side", "region_name"]

_log = logging.getLogger("mmcache.vllm")
_CLOSE_SECONDS = 5.0
_NO_FIELDS = EmbeddingFields()


def region_name(config: Any) -> str:
    """A name for the shared memory that an engine's processes agree on, and no other engine uses."""
    transfer, parallel = config.ec_transfer_config, config.parallel_config
    # Engines of a dense model all have data-parallel rank 0; the index tells them apart
    where = f"{parallel.data_parallel_index}-{parallel.data_parallel_rank}"
    return f"{config.instance_id}-{transfer.engine_id}-{where}"


class OpenedScheduler:
    """The scheduler's side with everything that it owns."""

    def __init__(
        self, side: SchedulerSide, region: SharedRegion, workers: int, store: TieredStore | None, helper: Helper
    ) -> None:
        self.side = side
        self._region = region
        self._workers = workers
        self._store = store
        self._helper = helper
        self._resolver: Any = None
        self._closed = False

    def totals(self) -> dict[str, float]:
        """All counters, by flat name (see `counts.METRICS`)."""
        self.side.catch_up()
        cells = self._region.totals(self._workers)
        totals: dict[str, float] = dict(self.side.counts)
        totals |= {
            "loads": cells[Cell.LOADS],
            "load_bytes": cells[Cell.LOAD_BYTES],
            "load_seconds": cells[Cell.LOAD_NS] / 1e9,
            "saves": cells[Cell.SAVES],
            "save_bytes": cells[Cell.SAVE_BYTES],
            "save_seconds": cells[Cell.SAVE_NS] / 1e9,
            "refused.other_rows": cells[Cell.REFUSED],
            "memory_used_bytes": self.side.residents.used_bytes,
            "memory_evictions": self.side.residents.evicted,
        }
        if self._store is not None:
            for tier in self._store.stats().tiers:
                totals |= {
                    f"store_hits.{tier.name}": tier.hits,
                    f"store_misses.{tier.name}": tier.misses,
                    f"store_damaged.{tier.name}": tier.damaged,
                    f"store_errors.{tier.name}": tier.errors + tier.timeouts,
                    f"store_dropped.{tier.name}": tier.dropped,
                    f"store_bytes_read.{tier.name}": tier.bytes_read,
                    f"store_bytes_written.{tier.name}": tier.bytes_written,
                    f"store_up.{tier.name}": int(tier.closed),
                }
        return totals

    def describe(self, features: Any) -> dict[str, Any] | None:
        """What an encoder engine answers with: its items' identifiers and placeholder sizes, as vLLM defines them."""
        utils = import_module("vllm.distributed.ec_transfer.ec_connector.utils")
        return utils.collect_ec_item_metadata(features, self._resolver) or None

    def use_resolver(self, resolver: Any) -> None:
        """How `describe` finds a model's placeholder fields."""
        self._resolver = resolver

    def close(self) -> None:
        """Write what waits to be written, within seconds, and stop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.side.catch_up()
        if self._store is not None:
            self._store.close(_CLOSE_SECONDS)
        self._helper.close(1.0)
        self._region.unlink()


def open_scheduler_side(
    config: Any, settings: Settings, region: SharedRegion, *, consumes: bool, produces: bool
) -> OpenedScheduler:
    """The scheduler's side of an engine.

    Raises:
        ConfigError: see `Settings`, `open_stores` and `engine_namespace`.
    """
    region.claim()
    model, transfer, parallel = config.model_config, config.ec_transfer_config, config.parallel_config
    hasher = _hasher(settings.salt)
    namespace = engine_namespace(
        config,
        salt=settings.salt,
        weights_id=settings.weights_id,
        scheme=hasher.scheme,
        version=_vllm_version(),
    )
    tiers = open_stores(settings)
    store = None
    if tiers:
        store = TieredStore(
            tiers,
            namespace=namespace,
            deadline=settings.fetch_seconds,
            # What waits to be written is pinned in the shared memory, where there should be room for other things
            write_behind_bytes=max(1, min(256 << 20, settings.memory_bytes // 2)),
        )
    helper = Helper()
    fields = _embedding_fields(model)
    keyer = Keyer(
        namespace_fingerprint(namespace),
        trust=settings.trust_client_ids,
        adapters_encode=bool(getattr(config.lora_config, "enable_tower_connector_lora", False)),
        hasher=hasher,
        embedding_fields=lambda modality: fields.get(modality, _NO_FIELDS),
        hash_later=helper,
    )
    side = SchedulerSide(
        region,
        workers=parallel.world_size,
        keyer=keyer,
        store=store,
        write_back=WriteBack(region, store) if store is not None else None,
        helper=helper,
        consumes=consumes,
        produces=produces,
        width=transfer.mm_encoder_output_widths.get,
        dtype=model.dtype,
        window=config.scheduler_config.max_num_batched_tokens + config.num_speculative_tokens + 1,
        patience=settings.fetch_seconds,
    )
    opened = OpenedScheduler(side, region, parallel.world_size, store, helper)
    utils = import_module("vllm.distributed.ec_transfer.ec_connector.utils")
    opened.use_resolver(utils.PlaceholderMetadataResolver(model))
    return opened


def _hasher(salt: str | None) -> ContentHasher:
    if salt is None:
        return ContentHasher("blake3")
    return ContentHasher(
        "blake3", key=hashlib.sha256(b"mmcache-vllm-salt-1" + salt.encode("utf-8", "surrogatepass")).digest()
    )


def _vllm_version() -> str:
    return str(import_module("vllm").__version__) or version("vllm")


def _embedding_fields(model_config: Any) -> dict[str, EmbeddingFields]:
    """`EmbeddingFields` of a model by modality, as its data parser declares them. Slow: it loads the processor."""
    registry = import_module("vllm.multimodal").MULTIMODAL_REGISTRY
    try:
        declared = dict(registry.create_processor(model_config).info.data_parser.embedding_fields)
    except Exception:  # a model's own code; without its word every item counts as one with media
        _log.warning("the model does not say how its embeddings are given", exc_info=True)
        return {}
    fields = {}
    for modality, roles in declared.items():
        metadata = frozenset(name for name, role in roles.items() if role == "metadata")
        fields[modality] = EmbeddingFields(metadata, frozenset(roles) - metadata)
    return fields
