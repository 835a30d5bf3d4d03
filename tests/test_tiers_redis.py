"""Redis as it really fails: refused, hanging, killed under way, restarted empty, full, tampered with; and claims."""

import os
import shutil
import signal
import socketserver
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from tier_helpers import NAMESPACE, WEAK, key_of, read, rows_of, same_bits, until, write
from tier_outages import outage, traffic_while
from tier_servers import RedisServer, free_port, running

from mmcache.errors import ConfigError, DamagedEntryError, TierError
from mmcache.tiers import EncodeClaims, RedisTier, TieredStore, decode_entry, encode_entry

pytestmark = pytest.mark.server


@pytest.fixture
def redis_server():
    with running(RedisServer) as server:
        yield server


@contextmanager
def answering(answer):
    """A server that says the same to whatever it is sent; its port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            with suppress(OSError):
                while self.request.recv(1 << 16):
                    self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def raw(server):
    import redis

    return redis.Redis.from_url(server.url)


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

    @pytest.mark.parametrize("option", ["foo=x", "decode_responses=true", "decode_responses=1", "socket_timeout=x"])
    def test_options_that_cannot_work(self, option):
        for make in (RedisTier, EncodeClaims):
            with pytest.raises(ConfigError) as error:
                make(f"redis://:secret@127.0.0.1:1/0?{option}")
            assert error.value.field == "url"
            assert "secret" not in str(error.value)

    @pytest.mark.parametrize(
        "answer",
        [b"$abc\r\n", b"?\r\n", b"*2\r\n:1\r\n", b"*-7\r\n", b":x\r\n", b"\xff\xfe\r\n", b"+OK\r\n" * 9, b":7\r\n" * 9],
    )
    def test_answers_that_are_none_of_redis_s(self, answer):
        with answering(answer) as port:
            tier = RedisTier(f"redis://127.0.0.1:{port}", timeout=0.2)
            for operation in (
                lambda: tier.contains_many([key_of("a")]),
                lambda: [decode_entry(key_of("a"), entry) for entry in tier.get_many([key_of("a")]).values()],
                lambda: tier.remove_many([key_of("a")]),
                lambda: list(tier.scan()),
                tier.usage,
                tier.clear,
            ):
                with suppress(TierError, DamagedEntryError):
                    operation()
            tier.close()

    def test_a_namespace_to_clear_is_text(self, redis_server):
        tier = RedisTier(redis_server.url)
        (key,) = write(tier, "a")
        with pytest.raises(ConfigError):
            tier.clear(5)
        assert tier.contains_many([key])
        tier.close()

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
            traffic_while(store, [redis_server.kill, redis_server.start] * 3)

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

    def test_a_call_is_one_round_trip(self, redis_server, monkeypatch):
        from redis.client import Pipeline, Redis

        trips = []
        for kind, method in ((Pipeline, "execute"), (Redis, "execute_command")):
            real = getattr(kind, method)
            monkeypatch.setattr(
                kind, method, lambda *a, real=real, method=method, **k: trips.append(method) or real(*a, **k)
            )
        tier = RedisTier(redis_server.url)
        keys = [key_of(f"k{number}") for number in range(20)]
        for call in (
            lambda: tier.put_many({key: encode_entry(key, rows_of(key.identifier)) for key in keys}),
            lambda: tier.get_many(keys),
            lambda: tier.contains_many(keys),
            lambda: tier.remove_many(keys),
        ):
            trips.clear()
            call()
            assert trips == ["execute"]

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
