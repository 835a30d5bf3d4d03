"""Mooncake as it really fails: refused, master or holder killed, restarted empty, full; and what a call is."""

import pytest
import torch
from tier_helpers import NAMESPACE, WEAK, key_of, rows_of, same_bits, until, write
from tier_outages import outage, traffic_while
from tier_servers import MooncakeCluster, free_port, running

from mmcache.errors import ConfigError, DamagedEntryError, TierError
from mmcache.tiers import MooncakeTier, TieredStore, decode_entry, encode_entry

pytestmark = pytest.mark.server


@pytest.fixture
def cluster():
    with running(MooncakeCluster) as cluster:
        yield cluster


class TestMooncake:
    @pytest.mark.parametrize("master", ["", "host", "host:port", ":50051"])
    def test_an_address_that_cannot_be_read_is_an_error(self, master):
        with pytest.raises(ConfigError):
            MooncakeTier(master)

    def test_nobody_listens(self):
        if why := MooncakeCluster.why_not():
            pytest.skip(why)
        tier = MooncakeTier(f"127.0.0.1:{free_port()}", timeout=0.2)
        with pytest.raises(TierError):
            tier.get_many([key_of("a")])
        with pytest.raises(TierError):
            write(tier, "a")
        tier.close()

    def test_weak_digests_are_refused_unless_all_trust_each_other(self, cluster):
        with pytest.raises(ConfigError):
            TieredStore([MooncakeTier(cluster.address)], namespace=WEAK)

    @pytest.mark.slow
    def test_a_holder_that_dies_takes_its_objects_along(self, cluster):
        with TieredStore([MooncakeTier(cluster.address)], namespace=NAMESPACE, deadline=3.0) as store:
            keys = [store.key(f"k{n}", "image") for n in range(3)]
            for key in keys:
                store.put(key, rows_of(key.identifier))
            assert store.flush(10)
            assert len(store.fetch(keys)) == 3
            cluster.kill_holder()
            assert store.fetch(keys) == {}  # though the master still lists them
            assert store.known(keys) == set()
            assert store.stats().tiers[0].errors == 0
            cluster.start_holder()

            def stored_again():
                for key in keys:
                    store.put(key, rows_of(key.identifier))
                store.flush(5)
                return len(store.fetch(keys)) == 3

            until(stored_again, 40)

    @pytest.mark.slow
    def test_a_master_that_is_killed_and_restarted_empty(self, cluster):
        with TieredStore([MooncakeTier(cluster.address)], namespace=NAMESPACE, deadline=0.5) as store:

            def mends():
                cluster.start_master()
                cluster.kill_holder()
                cluster.start_holder()

            outage(store, cluster.kill_master, mends, 60)

    @pytest.mark.slow
    def test_killed_during_gets_and_puts(self, cluster):
        kills = [cluster.kill_holder, cluster.start_holder, cluster.kill_master, cluster.start_master]
        with TieredStore([MooncakeTier(cluster.address)], namespace=NAMESPACE, deadline=0.5) as store:
            traffic_while(store, kills)

    def test_a_call_is_a_few_requests_straight_from_and_into_the_entries_own_memory(self, cluster, monkeypatch):
        from mooncake.store import MooncakeDistributedStore

        calls, pointers = [], set()

        class Watched(MooncakeDistributedStore):
            def __getattribute__(self, name):
                function = super().__getattribute__(name)

                def call(*arguments):
                    calls.append(name)
                    if name == "register_buffer":
                        pointers.add(arguments[0])
                    return function(*arguments)

                return call if callable(function) and not name.startswith("_") else function

        monkeypatch.setattr("mooncake.store.MooncakeDistributedStore", Watched)
        tier = MooncakeTier(cluster.address)
        keys = [key_of(f"k{number}") for number in range(8)]
        entries = {key: encode_entry(key, rows_of(key.identifier)) for key in keys}
        tier.put_many({keys[0]: entries[keys[0]]})  # sets the client up
        calls.clear()
        pointers.clear()
        tier.put_many(entries)
        requests = [name for name in calls if "buffer" not in name or name.startswith("batch")]
        assert requests == ["batch_put_from_multi_buffers"]
        assert {entry.payload.data_ptr() for entry in entries.values()} <= pointers
        calls.clear()
        pointers.clear()
        found = tier.get_many(keys)
        requests = [name for name in calls if "buffer" not in name or name.startswith("batch")]
        assert requests == ["batch_get_replica_desc", "batch_get_into_multi_buffers"]
        assert {entry.payload.data_ptr() for entry in found.values()} <= pointers
        calls.clear()
        assert set(tier.contains_many(keys)) == set(keys)
        assert calls == ["batch_get_replica_desc"]
        tier.close()

    def test_a_store_without_room_is_a_slower_cache(self):
        with (
            running(MooncakeCluster, 16 << 20) as cluster,
            TieredStore([MooncakeTier(cluster.address)], namespace=NAMESPACE) as store,
        ):
            keys = [store.key(f"e{n}", "image") for n in range(40)]
            for key in keys:
                store.put(key, rows_of(key.identifier, 1024, 256))
            assert store.flush(60)
            for key, rows in store.fetch(keys).items():
                assert same_bits(rows, rows_of(key.identifier, 1024, 256))
            stats = store.stats().tiers[0]
            assert stats.stored + stats.dropped == 40

    def test_a_damaged_object_is_replaced_although_puts_do_not_replace(self, cluster):
        tier = MooncakeTier(cluster.address)
        key = key_of("a")
        tier.put_many({key: encode_entry(key, rows_of("b"))})
        write(tier, "a")
        good = encode_entry(key, rows_of("a"))
        assert torch.equal(tier.get_many([key])[key].payload, encode_entry(key, rows_of("b")).payload)
        tier.remove_many([key])  # though a reader's lease is fresh
        write(tier, "a")
        assert torch.equal(tier.get_many([key])[key].payload, good.payload)
        tier.close()

    def test_an_object_that_is_too_large_is_not_fetched(self, cluster):
        tier = MooncakeTier(cluster.address)
        big = key_of("big")
        tier.put_many({big: encode_entry(big, torch.zeros(100, 100))})
        tier.close()
        small = MooncakeTier(cluster.address, largest_entry=1000)
        (entry,) = small.get_many([big]).values()
        assert entry.nbytes == 0
        with pytest.raises(DamagedEntryError):
            decode_entry(big, entry)
        small.close()
