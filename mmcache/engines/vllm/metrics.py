"""The connector's counters in vLLM's log lines and on its `/metrics` page. Imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (  # type: ignore[import-not-found,unused-ignore]
    Counter as PromCounter,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import (  # type: ignore[import-not-found,unused-ignore]
    ECConnectorPromMetrics,
    ECConnectorStats,
    Gauge,
)

from mmcache.engines.vllm.counts import METRICS, merge

__all__ = ["MMCacheMetrics", "MMCacheStats"]


class MMCacheStats(ECConnectorStats):  # type: ignore[misc,unused-ignore]
    """What was counted since the last look, by flat name (`hits.memory`)."""

    def reset(self) -> None:
        """Count from zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        """This interval and a later one."""
        self.data = merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: round(value, 6) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Nothing was counted."""
        return not self.data


class MMCacheMetrics(ECConnectorPromMetrics):  # type: ignore[misc,unused-ignore]
    """The same as Prometheus metrics, `vllm:mmcache_...`, with vLLM's labels for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[PromCounter], metric_types[Gauge]
        self._metrics = {
            metric.name: (
                metric,
                (gauge if metric.gauge else counter)(
                    name=f"vllm:mmcache_{metric.name}",
                    documentation=metric.help,
                    labelnames=labelnames + ([metric.label] if metric.label else []),
                ),
            )
            for metric in METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's numbers."""
        values = self.per_engine_labelvalues[engine_idx]
        for flat, value in transfer_stats_data.items():
            name, _, label = flat.partition(".")
            found = self._metrics.get(name)
            if found is None:
                continue
            metric, prom = found
            child = prom.labels(*values, label) if metric.label else prom.labels(*values)
            if metric.gauge:
                child.set(value)
            else:
                child.inc(value)
