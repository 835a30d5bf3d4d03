"""What the installed vLLM finds of the connector. `test_vllm_source.py` compares interfaces."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

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
