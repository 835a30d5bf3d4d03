"""Redis and Mooncake as they really fail: refused, hanging, killed under way, restarted empty, full, tampered with."""

import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
import torch
from tier_helpers import NAMESPACE, WEAK, key_of, read, rows_of, same_bits, until, write
from tier_servers import MooncakeCluster, RedisServer, free_port, running

from mmcache.errors import ConfigError, DamagedEntryError, TierError
from mmcache.tiers import EncodeClaims, MooncakeTier, RedisTier, TieredStore, decode_entry, encode_entry

pytestmark = pytest.mark.server


@pytest.fixture
def redis_server():
    with running(RedisServer) as server:
        yield server


@pytest.fixture
def cluster():
    with running(MooncakeCluster) as cluster:
        yield cluster


def raw(server):
    import redis

    return redis.Redis.from_url(server.url)


def outage(store, breaks, mends, seconds=30.0):
    """Look-ups before, during and after an outage: never an error, never wrong rows; the tier comes back by itself."""
    keys = [store.key(f"k{n}", "image") for n in range(12)]
    for key in keys[:4]:
        store.put(key, rows_of(key.identifier))
    assert store.flush(20)
    assert len(store.fetch(keys)) == 4
    breaks()
    for key in keys:
        store.put(key, rows_of(key.identifier))
        for found, rows in store.fetch([key]).items():
            assert same_bits(rows, rows_of(found.identifier))
    mends()

    def works():
        store.put(keys[11], rows_of("k11"))
        return store.flush(5) and store.stats().tiers[0].closed and store.fetch([keys[11]])

    until(works, seconds)
    for found, rows in store.fetch(keys).items():
        assert same_bits(rows, rows_of(found.identifier))


class TestRedis:
    @pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", "redis://host:port"])
    def test_a_url_that_cannot_be_read_is_an_error_that_does_not_repeat_it(self, url):
        with pytest.raises(ConfigError) as caught:
            RedisTier(url.replace("://", "://user:secret@"))
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("options", [{"ttl_seconds": 0}, {"timeout": -1}, {"largest_entry": 0}])
    def test_numbers_must_be_positive(self, options):
        with pytest.raises(ConfigError):
            RedisTier("redis://127.0.0.1:1", **options)

    def test_nobody_listens(self):
        tier = RedisTier(f"redis://127.0.0.1:{free_port()}")
        for call in (tier.get_many, tier.contains_many, tier.remove_many):
            with pytest.raises(TierError):
                call([key_of("a")])
        with pytest.raises(TierError):
            write(tier, "a")
        with pytest.raises(TierError):
            tier.usage()

    def test_weak_digests_are_refused_unless_all_trust_each_other(self, redis_server):
        with pytest.raises(ConfigError):
            TieredStore([RedisTier(redis_server.url)], namespace=WEAK)
        TieredStore([RedisTier(redis_server.url, one_trust_domain=True)], namespace=WEAK).close()

    def test_killed_and_restarted_empty(self, redis_server):
        with TieredStore([RedisTier(redis_server.url, timeout=0.3)], namespace=NAMESPACE, deadline=0.5) as store:
            outage(store, redis_server.kill, redis_server.start)

    def test_hanging(self, redis_server):
        with TieredStore([RedisTier(redis_server.url, timeout=0.3)], namespace=NAMESPACE, deadline=0.5) as store:
            outage(store, redis_server.stop, redis_server.go_on)

    def test_killed_during_gets_and_puts(self, redis_server):
        with TieredStore([RedisTier(redis_server.url, timeout=0.3)], namespace=NAMESPACE, deadline=0.5) as store:
            stop = threading.Event()
            wrong, failed = [], []

            def work(number):
                step = 0
                while not stop.is_set():
                    step += 1
                    names = [f"w{(number * 5 + step + i) % 30}" for i in range(4)]
                    try:
                        for name in names:
                            store.put(store.key(name, "image"), rows_of(name, 64, 256))
                        for key, rows in store.fetch([store.key(name, "image") for name in names]).items():
                            if not same_bits(rows, rows_of(key.identifier, 64, 256)):
                                wrong.append(key)
                    except Exception as error:
                        failed.append(error)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(3):
                time.sleep(0.15)
                redis_server.kill()
                time.sleep(0.1)
                redis_server.start()
            stop.set()
            for thread in threads:
                thread.join()
            assert (wrong, failed) == ([], [])

    def test_a_half_written_a_tampered_and_a_foreign_value(self, redis_server):
        client = raw(redis_server)
        tier = RedisTier(redis_server.url)
        with TieredStore([tier], namespace=NAMESPACE) as store:
            damages = {
                "half": lambda name, value: client.set(name, value[: len(value) // 2]),
                "flipped": lambda name, value: client.set(name, value[:-1] + bytes([value[-1] ^ 1])),
                "pickle": lambda name, value: client.set(name, b"\x80\x04cposix\nsystem\n(S'false'\ntR." * 20),
                "another type": lambda name, value: client.delete(name) and client.lpush(name, b"x"),
                "gone": lambda name, value: client.delete(name),
            }
            for damage, apply in damages.items():
                key = store.key(damage, "image")
                store.put(key, rows_of(damage))
                assert store.flush(10)
                (name,) = client.keys(f"*{key.name}")
                apply(name, client.get(name))
                assert store.fetch([key]) == {}
                assert store.flush(10)
                assert not client.exists(name)
                store.put(key, rows_of(damage))
                assert store.flush(10)
                assert same_bits(store.fetch([key])[key], rows_of(damage))
            assert store.stats().tiers[0].damaged == 4

    def test_a_value_that_is_too_large_is_not_read_whole(self, redis_server):
        tier = RedisTier(redis_server.url, largest_entry=10_000)
        (key,) = write(tier, "a")
        client = raw(redis_server)
        (name,) = client.keys("*")
        client.append(name, b"x" * (1 << 20))
        assert tier.get_many([key])[key].nbytes <= 10_001
        big = key_of("big")
        assert tier.put_many({big: encode_entry(big, torch.zeros(100, 100))}).stored == frozenset()

    def test_entries_expire_after_their_last_use(self, redis_server):
        tier = RedisTier(redis_server.url, ttl_seconds=1000)
        (key,) = write(tier, "a")
        client = raw(redis_server)
        (name,) = client.keys("*")
        assert 990_000 < client.pttl(name) <= 1_000_000
        client.pexpire(name, 50_000)
        tier.get_many([key])
        assert client.pttl(name) > 990_000
        client.pexpire(name, 1)
        until(lambda: tier.contains_many([key]) == {})
        assert tier.get_many([key]) == {}

    def test_eviction_by_the_server_is_a_miss(self):
        with (
            running(RedisServer, "--maxmemory", "8mb") as server,
            TieredStore([RedisTier(server.url)], namespace=NAMESPACE) as store,
        ):
            keys = [store.key(f"e{n}", "image") for n in range(40)]
            for key in keys:
                store.put(key, rows_of(key.identifier, 256, 256))
            assert store.flush(30)
            found = store.fetch(keys)
            assert 0 < len(found) < 40
            for key, rows in found.items():
                assert same_bits(rows, rows_of(key.identifier, 256, 256))
            assert store.known(keys) == set(found)

    def test_a_server_that_takes_no_more_is_a_slower_cache(self):
        with (
            running(RedisServer, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server,
            TieredStore([RedisTier(server.url)], namespace=NAMESPACE) as store,
        ):
            keys = [store.key(f"e{n}", "image") for n in range(40)]
            for key in keys:
                store.put(key, rows_of(key.identifier, 256, 256))
            assert store.flush(30)
            assert store.stats().tiers[0].dropped
            for key, rows in store.fetch(keys).items():
                assert same_bits(rows, rows_of(key.identifier, 256, 256))

    def test_a_password(self):
        with running(RedisServer, "--requirepass", "open sesame") as server:
            good = RedisTier(server.url.replace("//", "//:open%20sesame@"))
            (key,) = write(good, "a")
            assert read(good, key)
            for url in (server.url, server.url.replace("//", "//:wrong@")):
                with pytest.raises(TierError) as caught:
                    RedisTier(url).get_many([key])
                assert "wrong" not in str(caught.value).lower().replace("wrongpass", "")

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
    def test_tls(self, tmp_path):
        if why := RedisServer.why_not():
            pytest.skip(why)
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        subprocess.run([*make, *names, *files], check=True, capture_output=True)
        port = free_port()
        options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
        for option, file in (("--tls-cert-file", "cert"), ("--tls-key-file", "key"), ("--tls-ca-cert-file", "cert")):
            options += [option, str(tmp_path / f"{file}.pem")]
        try:
            server = RedisServer(*options)
        except RuntimeError:
            pytest.skip("this redis-server knows no TLS")
        try:
            trusting = RedisTier(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'cert.pem'}")
            (key,) = write(trusting, "a")
            assert same_bits(read(trusting, key)["a"], rows_of("a"))
            with pytest.raises(TierError):  # a certificate that nobody vouches for
                RedisTier(f"rediss://127.0.0.1:{port}/0").get_many([key])
        finally:
            server.kill()

    def test_two_processes_share_what_one_has_encoded(self, redis_server):
        with (
            TieredStore([RedisTier(redis_server.url)], namespace=NAMESPACE) as encoder,
            TieredStore([RedisTier(redis_server.url)], namespace=NAMESPACE) as consumer,
        ):
            key = encoder.key("image", "image", salt="tenant")
            encoder.put(key, rows_of("image"))
            assert encoder.flush(10)
            consumer.learn([key])
            until(lambda: consumer.known([key]))
            assert same_bits(consumer.fetch([key])[key], rows_of("image"))
            assert consumer.fetch([consumer.key("image", "image", salt="other tenant")]) == {}


class TestClaims:
    def test_one_of_two_gets_a_claim_until_it_is_released(self, redis_server):
        one, two = EncodeClaims(redis_server.url), EncodeClaims(redis_server.url)
        a, b, c = key_of("a"), key_of("b"), key_of("c")
        assert one.claim([a, b]) == {a, b}
        assert one.claim([a]) == {a}
        assert two.claim([a, b, c]) == {c}
        one.release([a, c])
        assert two.claim([a, b]) == {a}
        one.close()
        assert two.claim([b]) == {b}
        two.close()

    def test_it_is_renewed_as_long_as_its_holder_lives(self, redis_server):
        one, two = EncodeClaims(redis_server.url, lease_seconds=0.3), EncodeClaims(redis_server.url)
        assert one.claim([key_of("a")])
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert two.claim([key_of("a")]) == set()
            time.sleep(0.05)
        one.close()
        two.close()

    def test_another_takes_over_when_the_holder_dies(self, redis_server):
        key = key_of("a")
        pid = os.fork()
        if pid == 0:
            EncodeClaims(redis_server.url, lease_seconds=0.3).claim([key])
            signal.pause()
        others = [EncodeClaims(redis_server.url) for _ in range(2)]
        client = raw(redis_server)
        until(lambda: client.keys("*claim*"))
        assert [other.claim([key]) for other in others] == [set(), set()]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        granted = []
        until(lambda: granted.extend(i for i, other in enumerate(others) if other.claim([key])) or granted)
        assert len(set(granted)) == 1
        for other in others:
            other.close()

    def test_without_a_server_everybody_encodes(self, redis_server):
        claims, other = EncodeClaims(redis_server.url, timeout=0.2), EncodeClaims(redis_server.url)
        redis_server.kill()
        for name in "abcdef":
            assert claims.claim([key_of(name)]) == {key_of(name)}
        claims.release([key_of("a")])
        redis_server.start()

        def asks_again():
            claims.release([key_of("g")])
            claims.claim([key_of("g")])
            taken = other.claim([key_of("g")])
            other.release(taken)
            return not taken

        until(asks_again)
        claims.close()
        other.close()

    def test_what_is_claimed_is_no_entry(self, redis_server):
        claims = EncodeClaims(redis_server.url)
        claims.claim([key_of("a")])
        tier = RedisTier(redis_server.url)
        assert list(tier.scan()) == []
        assert tier.clear() == 0
        claims.close()


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
