"""`tier`: one of every kind, for the tests that all of them pass; `make_store`: stores that end with the test.

A plugin of the modules that use them.
"""

import pytest
from tier_faults import FaultyTier
from tier_helpers import NAMESPACE
from tier_kinds import SERVERS, WITH_A_BUDGET, make_tier
from tier_servers import MooncakeCluster, RedisServer, running

from mmcache.tiers import MemoryTier, MooncakeTier, RedisTier, TieredStore

NEVER = 60.0  # a deadline that no test means to reach


@pytest.fixture(scope="module")
def redis_server():
    with running(RedisServer) as server:
        yield server


@pytest.fixture(scope="module")
def mooncake_tier():
    """One for a module: setting up a client takes a while."""
    with running(MooncakeCluster) as cluster:
        made = MooncakeTier(cluster.address)
        yield made
        made.close()


@pytest.fixture(params=[*WITH_A_BUDGET, *SERVERS])
def tier(request, tmp_path):
    if request.param == "mooncake":
        made = request.getfixturevalue("mooncake_tier")
        made.clear()
        yield made
        return
    if request.param == "redis":
        made = RedisTier(request.getfixturevalue("redis_server").url)
        made.clear()
    else:
        made = make_tier(request.param, 64 << 20, tmp_path)
    yield made
    made.close()


@pytest.fixture
def make_store():
    made = []

    def build(*tiers, **options):
        store = TieredStore(
            list(tiers) or [MemoryTier(1 << 24)], **{"namespace": NAMESPACE, "deadline": NEVER} | options
        )
        made.append((store, tiers))
        return store

    yield build
    for store, tiers in made:
        for tier in tiers:
            if isinstance(tier, FaultyTier):
                tier.go_on()
        store.close()
