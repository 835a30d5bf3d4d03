"""A device's memory as a tier among others: its budget, promotion to it, its streams, and what no request waits for."""

import threading
from types import SimpleNamespace

import pytest
import torch
from tier_devices import device_tier, lies_on
from tier_faults import FaultyTier
from tier_helpers import NAMESPACE, key_of, rows_of, same_bits, until, write
from tier_kinds import GPU

from mmcache.errors import ConfigError, TierError
from mmcache.testing import SimulatedDevice
from mmcache.tiers import DiskTier, Entry, MemoryTier, TieredStore, decode_entry, encode_entry

SIZE = encode_entry(key_of("a"), rows_of("a")).nbytes
DEVICES = pytest.mark.parametrize("kind", ["simulated device", GPU])


@DEVICES
class TestAboveOthers:
    def test_a_hit_below_is_promoted_to_the_device_and_found_there(self, kind, tmp_path):
        with TieredStore([DiskTier(tmp_path, 1 << 20)], namespace=NAMESPACE) as before:
            keys = [before.key(name, "image") for name in "abc"]
            for key in keys:
                before.put(key, rows_of(key.identifier))
            assert before.flush(10)
        device = device_tier(kind, 1 << 20, name="device")
        tiers = [device, MemoryTier(1 << 20, name="host"), DiskTier(tmp_path, 1 << 20)]
        with TieredStore(tiers, namespace=NAMESPACE) as store:
            for found in store.fetch(keys).values():
                assert lies_on(device, found) == "cpu"
            assert store.flush(10)
            for _ in range(2):
                found = store.fetch(keys)
                for key in keys:
                    assert lies_on(device, found[key]) == "cuda"
                    assert same_bits(found[key].cpu(), rows_of(key.identifier))
            hits = {tier.name: tier.hits for tier in store.stats().tiers}
            assert hits == {"device": 6, "host": 0, "disk": 3}
            assert [tier.promoted for tier in store.stats().tiers] == [3, 3, 0]

    def test_what_the_device_had_to_drop_is_found_below(self, kind):
        device, host = device_tier(kind, 2 * SIZE, name="device"), MemoryTier(1 << 20, name="host")
        events = []
        with TieredStore([device, host], namespace=NAMESPACE, on_event=lambda *event: events.append(event)) as store:
            keys = [store.key(name, "image") for name in "abc"]
            for key in keys:
                store.put(key, rows_of(key.identifier))
                assert store.flush(10)
            assert device.usage().nbytes == 2 * SIZE
            found = store.fetch(keys)
            for key in keys:
                assert same_bits(found[key].cpu(), rows_of(key.identifier))
            assert [tier.hits for tier in store.stats().tiers] == [2, 1]
            until(lambda: ("removed", "device", keys[0].namespace, "a") in events)

    def test_a_device_may_stand_behind_the_host(self, kind, tmp_path):
        device = device_tier(kind, 1 << 20, name="device")
        keys = write(device, "a", "b")
        host, disk = MemoryTier(1 << 20, name="host"), DiskTier(tmp_path, 1 << 20)
        with TieredStore([host, disk, device], namespace=NAMESPACE) as store:
            assert set(store.fetch(keys)) == set(keys)
            assert store.flush(10)
            for tier in (host, disk):
                for key, entry in tier.get_many(keys).items():
                    assert entry.payload.is_cpu
                    assert same_bits(decode_entry(key, entry), rows_of(key.identifier))

    def test_rows_that_are_put_from_the_device_reach_every_tier(self, kind, tmp_path):
        device = device_tier(kind, 1 << 20, name="device")
        rows = rows_of("a").cuda() if kind == "gpu" else device.sim.to_device(rows_of("a"))
        tiers = [device, MemoryTier(1 << 20, name="host"), DiskTier(tmp_path, 1 << 20)]
        with TieredStore(tiers, namespace=NAMESPACE) as store:
            key = store.key("a", "image")
            store.put(key, rows)
            assert store.flush(10)
            for tier in tiers:
                entry = tier.get_many([key])[key]
                assert same_bits(decode_entry(key, entry).cpu(), rows_of("a"))
                assert lies_on(device, entry.payload) == "cuda" if tier is device else entry.payload.is_cpu


class TestRequests:
    def test_no_request_waits_for_the_device(self, tmp_path):
        with SimulatedDevice("cuda:0") as sim:
            tier = FaultyTier(MemoryTier(1 << 20))
            store = TieredStore([tier], namespace=NAMESPACE)
            rows = sim.to_device(rows_of("a"))
            key, other = store.key("a", "image"), store.key("b", "image")
            sim.clear()
            tier.hang()
            store.put(key, rows)
            store.learn([key, other])
            assert store.known([key, other]) == {key}
            fetch = store.prefetch([key, other])
            (found,) = fetch.poll().values()
            assert found.device == sim.device
            fetch.cancel()
            assert sim.host_reads == []
            assert sim.moves == []
            tier.go_on()
            store.close()

    def test_a_reader_s_stream_waits_for_the_writer_s_and_the_host_for_none(self, monkeypatch):
        """And memory is marked as read by each stream, so that it is given back only after the last of them."""
        log = []
        streams = SimpleNamespace(
            current="main",
            record=lambda: log.append(f"{streams.current} records") or f"what {streams.current} did",
            wait=lambda event: log.append(f"{streams.current} waits for {event}"),
            used=lambda tensor: log.append(f"{streams.current} reads"),
        )
        monkeypatch.setattr("mmcache.tiers.devices.staging_for", lambda device: SimpleNamespace(streams=streams))
        device = device_tier("simulated device", 1 << 20)
        tier = FaultyTier(device)
        with device.sim:
            store = TieredStore([tier], namespace=NAMESPACE)
            key = store.key("a", "image")
            tier.hang()
            streams.current = "encoder"
            store.put(key, device.sim.to_device(rows_of("a")))
            streams.current = "main"
            store.prefetch([key]).poll()  # while it waits to be written
            streams.current = "other"
            store.fetch([key])
            assert log == [
                "encoder records",
                "main waits for what encoder did",
                "main reads",
                "other waits for what encoder did",
                "other reads",
            ]
            log.clear()
            tier.go_on()
            assert store.flush(10)
            store.fetch([key])  # from the tier, whose entries are whole
            assert log == ["other reads"]
            store.close()

    def test_a_callback_gets_rows_for_its_own_thread_s_stream(self, monkeypatch):
        readers, callers = [], []

        def handed_out(rows, written):
            readers.append(threading.get_ident())
            return rows

        monkeypatch.setattr("mmcache.tiers.fetch.handed_out", handed_out)
        with TieredStore([MemoryTier(1 << 20)], namespace=NAMESPACE) as store:
            key = store.key("a", "image")
            store.put(key, rows_of("a"))
            store.prefetch([key], lambda found: callers.append(threading.get_ident()))
            until(lambda: callers)
        assert callers == readers
        assert callers != [threading.get_ident()]


class TestOnTheDevice:
    def test_entries_are_read_and_written_with_copies_and_nothing_else(self):
        with SimulatedDevice("cuda:0") as sim:
            tier = MemoryTier(1 << 20, device="cuda")
            assert tier.device == sim.device
            (key,) = write(tier, "a")
            entry = tier.get_many([key])[key]
            assert entry.payload.device == sim.device
            assert [move.target for move in sim.moves] == [sim.device]
            rows = decode_entry(key, entry)
            assert rows.device == sim.device
            assert [move.op for move in sim.moves if move.target.type == "cpu"] == ["copy_"]  # for the checksum
            assert sim.mixes == []
            assert same_bits(rows.cpu(), rows_of("a"))

    def test_a_payload_that_lies_there_already_is_not_copied_unless_it_is_part_of_more(self):
        with SimulatedDevice("cuda:0") as sim:
            tier, key = MemoryTier(1 << 20, device="cuda"), key_of("a")
            entry = encode_entry(key, rows_of("a"))
            whole = sim.to_device(entry.payload)
            tier.put_many({key: Entry(entry.header, whole)})
            assert tier.get_many([key])[key].payload.data_ptr() == whole.data_ptr()
            part = sim.to_device(torch.cat([entry.payload, entry.payload]))[: entry.payload.numel()]
            tier.put_many({key: Entry(entry.header, part)})
            assert tier.get_many([key])[key].payload.untyped_storage().nbytes() == part.numel()

    def test_a_host_tier_takes_a_device_s_entry_and_other_tiers_say_so(self, tmp_path):
        with SimulatedDevice("cuda:0") as sim:
            key = key_of("a")
            entry = encode_entry(key, rows_of("a"))
            entry = Entry(entry.header, sim.to_device(entry.payload))
            host = MemoryTier(1 << 20)
            host.put_many({key: entry})
            assert host.get_many([key])[key].payload.is_cpu
            disk = DiskTier(tmp_path, 1 << 20)
            with pytest.raises(ConfigError, match="payload on a device"):
                disk.put_many({key: entry})
            disk.close()

    def test_what_has_to_go_goes_before_room_is_taken(self, monkeypatch):
        device = device_tier("simulated device", 3 * SIZE)
        write(device, *"abc")
        seen = []
        real = torch.empty

        def empty(*arguments, **options):
            if options.get("device") == device.sim.device:
                seen.append(device.usage().nbytes)
            return real(*arguments, **options)

        monkeypatch.setattr(torch, "empty", empty)
        write(device, *"defgh")
        assert seen == [3 * SIZE] * 5  # the new entry included

    def test_a_device_without_memory_is_a_failure_of_the_tier_and_of_nothing_else(self, monkeypatch):
        device = device_tier("simulated device", 3 * SIZE, name="device")
        write(device, "a")

        def empty(*arguments, real=torch.empty, **options):
            if options.get("device") == device.sim.device:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*arguments, **options)

        monkeypatch.setattr(torch, "empty", empty)
        with pytest.raises(TierError, match="no memory"):
            write(device, "b")
        assert device.usage().nbytes == SIZE
        with TieredStore([device, MemoryTier(1 << 20, name="host")], namespace=NAMESPACE) as store:
            key = store.key("c", "image")
            store.put(key, rows_of("c"))
            assert store.flush(10)
            assert same_bits(store.fetch([key])[key], rows_of("c"))

    @pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99", None, 1.5, ["cuda"]])
    def test_a_device_that_cannot_be_had_is_an_error_at_once(self, device):
        with pytest.raises(ConfigError, match="device"):
            MemoryTier(1 << 20, device=device)

    def test_page_locked_memory_is_the_host_s(self):
        with SimulatedDevice("cuda:0"), pytest.raises(ConfigError, match="page-locked"):
            MemoryTier(1 << 20, device="cuda", pinned=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestStreams:
    """On a real GPU, behind kernels that take a while."""

    def test_rows_are_right_on_other_streams_and_nothing_synchronises(self):
        tiers = [MemoryTier(64 << 20, device="cuda", name="device"), MemoryTier(64 << 20, pinned=True, name="host")]
        store = TieredStore(tiers, namespace=NAMESPACE, deadline=60)
        encoder, reader = torch.cuda.Stream(), torch.cuda.Stream()
        rows, base = {}, torch.zeros(512, 1024, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(encoder):
            for number in range(16):
                key = store.key(f"k{number}", "image")
                torch.cuda._sleep(100_000_000)
                rows[key] = base + number
                store.put(key, rows[key])
            encoded = encoder.record_event()
        with torch.cuda.stream(reader):
            early = {key: found * 2 for key, found in store.prefetch(rows).poll().items()}
        assert not encoded.query()  # so nobody has waited for it
        assert store.flush(60)
        with torch.cuda.stream(reader):
            late = {key: found * 2 for key, found in store.fetch(rows).items()}
        torch.cuda.synchronize()
        assert set(late) == set(rows)
        for found in (early, late):
            for key, doubled in found.items():
                assert (doubled == 2.0 * int(key.identifier[1:])).all()
        store.close()

    def test_memory_of_an_evicted_entry_waits_for_its_readers(self):
        tier = MemoryTier(3 << 20, device="cuda")
        store = TieredStore([tier], namespace=NAMESPACE, deadline=60)
        reader = torch.cuda.Stream()
        doubled = []
        for number in range(32):  # each evicts the one before
            key = store.key(f"k{number}", "image")
            store.put(key, torch.full((512, 1024), float(number)))
            assert store.flush(60)
            with torch.cuda.stream(reader):
                torch.cuda._sleep(5_000_000)
                doubled.append(store.fetch([key])[key] * 2)
        torch.cuda.synchronize()
        for number, rows in enumerate(doubled):
            assert (rows == 2.0 * number).all()
        store.close()
