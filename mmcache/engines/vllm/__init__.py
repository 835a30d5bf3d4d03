"""A connector that puts mmcache's tiers behind vLLM's encoder cache, as a plug-in.

`register` is the entry point of the group `vllm.general_plugins`; with it `--ec-transfer-config` takes
`{"ec_connector": "MMCacheConnector", ...}` without a module path. Importing this package does not import vLLM.

    scheduler process                                       worker processes
    connector ─ SchedulerSide ─ Residents, Keyer            connector ─ WorkerSide
                    │ fetch, put       │ slots                   │ copies rows in and out
                TieredStore            └────── SharedRegion ─────┘
"""

from mmcache.engines.vllm.plugin import CONNECTOR_NAME, TESTED_VERSIONS, register
from mmcache.engines.vllm.settings import Settings

__all__ = ["CONNECTOR_NAME", "TESTED_VERSIONS", "Settings", "register"]
