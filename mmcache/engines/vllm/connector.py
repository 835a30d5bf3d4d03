"""The class that vLLM makes twice: beside its scheduler and in every worker. It translates; `scheduler.py` decides."""

from __future__ import annotations

import logging
import multiprocessing.util
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (  # type: ignore[import-not-found,unused-ignore]
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from mmcache.engines.vllm.counts import Interval
from mmcache.engines.vllm.messages import StepPlan
from mmcache.engines.vllm.metrics import MMCacheMetrics, MMCacheStats
from mmcache.engines.vllm.plugin import version_note
from mmcache.engines.vllm.region import SharedRegion
from mmcache.engines.vllm.scheduler import SchedulerSide
from mmcache.engines.vllm.settings import Settings
from mmcache.engines.vllm.setup import OpenedScheduler, open_scheduler_side, region_name
from mmcache.engines.vllm.worker import WorkerSide
from mmcache.errors import ConfigError, UnsupportedError

__all__ = ["MMCacheConnector", "MMCacheConnectorMetadata"]

_log = logging.getLogger("mmcache.vllm")


@dataclass
class MMCacheConnectorMetadata(ECConnectorMetadata):  # type: ignore[misc,unused-ignore]
    """What vLLM carries from the scheduler's side to the workers with every step."""

    plan: StepPlan


class MMCacheConnector(ECConnectorBase):  # type: ignore[misc,unused-ignore]
    """mmcache as vLLM's encoder-cache connector. vLLM calls it; settings are those of `Settings`.

    Raises:
        ConfigError: a setting that cannot work, shared memory that is short, weights that cannot be identified.
        UnsupportedError: the engine is of a kind whose encoder cache no connector can serve.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = Settings.from_mapping(vllm_config.ec_transfer_config.ec_connector_extra_config)
        _check_supported(vllm_config)
        self._scheduler: OpenedScheduler | None = None
        self._worker: WorkerSide | None = None
        region = SharedRegion(region_name(vllm_config), settings.memory_bytes)
        if role == ECConnectorRole.WORKER:
            self._worker = _make_worker(vllm_config, region)
            return
        if (note := version_note()) is not None:
            _log.warning("%s", note)
        self._interval = Interval()
        self._scheduler = open_scheduler_side(
            vllm_config, settings, region, consumes=self.is_consumer, produces=self.is_producer
        )
        # Engine processes end in several ways; what waits to be written should still be written
        multiprocessing.util.Finalize(None, self._scheduler.close, exitpriority=10)

    def shutdown(self) -> None:
        """Write what waits to be written, and stop."""
        if self._scheduler is not None:
            self._scheduler.close()

    # -- scheduler side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request may be scheduled now; starts to fetch what it needs. Never waits."""
        return self._side.prepare(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item lies, verified, in the memory that the workers share. No I/O, no side effects."""
        return self._side.has_item(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The item got room in vLLM's encoder cache."""
        self._side.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> MMCacheConnectorMetadata:
        """What the workers have to do in this step."""
        return MMCacheConnectorMetadata(self._side.plan_step(scheduler_output.free_encoder_mm_hashes))

    def take_unavailable_requests(self) -> set[str]:
        """Requests that need an item which is neither stored nor can be encoded."""
        return self._side.take_unavailable()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. A producer's answer names its items, so that a consumer need not process their media."""
        self._side.finished(request.request_id)
        if not self.is_producer:
            return False, None
        return False, self._opened.describe(request.mm_features)

    def get_ec_connector_stats(self) -> MMCacheStats | None:
        """What was counted since the last call; workers count in the shared memory."""
        if self._scheduler is None:
            return None
        changed = self._interval.take(self._scheduler.totals())
        return MMCacheStats(data=changed) if changed else None

    @property
    def _opened(self) -> OpenedScheduler:
        if self._scheduler is None:
            raise UnsupportedError("this is a worker's connector; schedulers have one of their own")
        return self._scheduler

    @property
    def _side(self) -> SchedulerSide:
        return self._opened.side

    # -- worker side

    def bind_connector_metadata(self, connector_metadata: MMCacheConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.plan)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put the step's loads into the encoder cache."""
        if self._worker is not None:
            self._worker.load(encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Write what was encoded into the shared memory, if the scheduler's side wants it."""
        if self._worker is not None and self.is_producer:
            self._worker.save(encoder_cache, mm_hash)

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.end()

    # -- what vLLM asks the class

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> MMCacheStats:
        """Counters that came from another process."""
        return MMCacheStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MMCacheMetrics:
        """Prometheus metrics for the counters."""
        return MMCacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_supported(config: Any) -> None:
    if config.model_config.is_encoder_decoder:
        raise UnsupportedError("vLLM keeps no encoder cache for cross-attention encoder-decoder models")
    if getattr(config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "weights that change while the engine runs make stored rows foreign, and vLLM does not tell a connector",
            field="weight_transfer_config",
        )


def _make_worker(config: Any, region: SharedRegion) -> WorkerSide:
    groups = import_module("vllm.distributed.parallel_state")
    platform = import_module("vllm.platforms").current_platform
    loads = bool(groups.get_pp_group().is_first_rank)
    rank = int(config.parallel_config.rank)
    device = torch.device(platform.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    # Ranks of the first pipeline stage have the same rows; the engine's first worker is one of them
    return WorkerSide(
        region,
        rank=rank,
        loads=loads,
        saves=loads and rank == 0,
        dtype=config.model_config.dtype,
        device=device,
    )
