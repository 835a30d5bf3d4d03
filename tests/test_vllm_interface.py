"""The connector against the interface of the vLLM that is installed."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_vllm_finds_the_connector_through_its_entry_point_and_twice_is_harmless() -> None:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.plugins import load_general_plugins

    import mmcache.engines.vllm as plugin

    load_general_plugins()
    plugin.register()
    config = SimpleNamespace(ec_connector=plugin.CONNECTOR_NAME, ec_connector_module_path=None)
    assert ECConnectorFactory.get_connector_class(config).__name__ == plugin.CONNECTOR_NAME


def test_every_method_takes_what_the_interface_gives() -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    from mmcache.engines.vllm.connector import MMCacheConnector

    assert not inspect.isabstract(MMCacheConnector)
    for name, base in inspect.getmembers(ECConnectorBase, inspect.isfunction):
        ours = inspect.signature(getattr(MMCacheConnector, name))
        theirs = inspect.signature(base)
        assert list(ours.parameters) == list(theirs.parameters), name


def test_what_is_read_of_vllms_objects_is_there() -> None:
    from vllm.config import ECTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.sched.output import SchedulerOutput

    def names(cls: Any) -> set[str]:
        return set(dir(cls)) | set(getattr(cls, "__dataclass_fields__", {}))

    assert {"mm_encoder_output_widths", "ec_connector_extra_config", "engine_id"} <= names(ECTransferConfig)
    assert {"model", "revision", "dtype", "quantization", "multimodal_config", "hf_config"} <= names(ModelConfig)
    assert {"rank", "world_size", "data_parallel_rank", "data_parallel_index"} <= names(ParallelConfig)
    assert {"max_num_batched_tokens"} <= names(SchedulerConfig)
    assert {"instance_id", "lora_config", "load_config", "num_speculative_tokens"} <= names(VllmConfig)
    assert {"identifier", "modality", "data", "mm_position"} <= names(MultiModalFeatureSpec)
    assert {"offset", "length", "get_num_embeds"} <= names(PlaceholderRange)
    assert "free_encoder_mm_hashes" in names(SchedulerOutput)


def test_metrics_reach_prometheus_with_vllms_labels() -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from mmcache.engines.vllm.connector import MMCacheConnector

    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(ec_transfer_config=None)
    metrics = MMCacheConnector.build_prom_metrics(config, types, ["model", "engine"], {0: ["m", "0"]})
    stats = MMCacheConnector.build_ec_connector_stats({"hits.redis": 2, "loads": 2, "store_up.redis": 1})
    assert not stats.is_empty()
    both = stats.aggregate(MMCacheConnector.build_ec_connector_stats({"hits.redis": 1, "store_up.redis": 0}))
    assert both.reduce() == {"hits.redis": 3, "loads": 2, "store_up.redis": 0}
    metrics.observe(both.data)
    labels = {"model": "m", "engine": "0", "tier": "redis"}
    assert registry.get_sample_value("vllm:mmcache_hits_total", labels) == 3
    assert registry.get_sample_value("vllm:mmcache_store_up", labels) == 0
