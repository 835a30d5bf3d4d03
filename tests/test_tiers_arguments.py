"""What callers hand in: a wrong kind of argument is a typed error at once, names itself, and changes nothing."""

import math
import threading

import pytest
import torch
from tier_helpers import NAMESPACE, key_of, rows_of, same_bits

from mmcache.errors import ConfigError, EmbeddingError, MMCacheError
from mmcache.tiers import (
    DiskTier,
    Entry,
    Expected,
    Key,
    MemoryTier,
    MooncakeTier,
    RedisTier,
    TieredStore,
    decode_entry,
    encode_entry,
    open_tier,
    read_header,
)

A = key_of("a")
NO_KEYS = [None, 3, "a", A, ["a"], [A, None], [("namespace", "identifier")], [[]]]
ENTRY = encode_entry(A, rows_of("a"))
NO_PAYLOADS = [
    None,
    b"bytes",
    ENTRY.payload.view(torch.float32),
    ENTRY.payload.view(4, -1),
    ENTRY.payload.float().requires_grad_(),
    torch.nested.nested_tensor([torch.zeros(4), torch.zeros(4)]),
]


@pytest.fixture
def store():
    with TieredStore([MemoryTier(1 << 20)], namespace=NAMESPACE) as made:
        made.put(A, rows_of("a"))
        assert made.flush(10)
        yield made


@pytest.fixture(params=["memory", "disk"])
def tier(request, tmp_path):
    made = MemoryTier(1 << 20) if request.param == "memory" else DiskTier(tmp_path / "s", 1 << 20)
    made.put_many({A: ENTRY})
    yield made
    made.close()


class TestStore:
    @pytest.mark.parametrize("keys", NO_KEYS)
    @pytest.mark.parametrize("method", ["known", "learn", "prefetch", "remove", "fetch"])
    def test_keys_that_are_none(self, store, method, keys):
        before = store.stats()
        with pytest.raises(ConfigError) as caught:
            getattr(store, method)(keys)
        assert caught.value.field == "keys"
        assert store.stats() == before
        assert same_bits(store.fetch([A])[A], rows_of("a"))

    @pytest.mark.parametrize("expected", [4, "4", (4, 16), {"rows": 4}, Expected])
    @pytest.mark.parametrize("method", ["prefetch", "fetch"])
    def test_what_is_expected_of_rows_is_an_expected_or_none(self, store, method, expected):
        before = store.stats()
        with pytest.raises(ConfigError, match=r"'a'.*Expected"):
            getattr(store, method)({key_of("b"): None, A: expected})
        assert store.stats() == before
        assert set(store.fetch({A: Expected(rows=4), key_of("b"): None})) == {A}

    def test_any_collection_of_keys_will_do(self, store):
        for keys in ([A], (A, A), {A}, iter([A]), {A: None}, {A: None}.keys()):
            assert set(store.fetch(keys)) == {A}
        store.learn(iter([A]))
        assert store.known(iter([A])) == {A}
        assert store.stats().lookups == 6

    @pytest.mark.parametrize("timeout", ["1", True, math.nan, [1]])
    def test_times_that_are_none(self, store, timeout):
        for call in (lambda: store.fetch([A], timeout), lambda: store.flush(timeout), lambda: store.close(timeout)):
            with pytest.raises(ConfigError) as caught:
                call()
            assert caught.value.field == "timeout"
        assert store.fetch([A])

    @pytest.mark.parametrize("timeout", [0, -1, -math.inf, 1e-9, 10, 1e300, math.inf, None])
    def test_a_time_that_is_over_or_without_end_is_no_error(self, store, timeout):
        assert set(store.fetch([A], timeout)) <= {A}
        store.flush(timeout)
        assert store.fetch([A])

    @pytest.mark.parametrize("timeout", ["1", True, math.nan, [1]])
    def test_times_to_wait_for_a_fetch_that_are_none(self, store, timeout):
        with pytest.raises(ConfigError) as error:
            store.prefetch([A]).wait(timeout)
        assert error.value.field == "timeout"

    @pytest.mark.parametrize("timeout", [1e300, math.inf, -1, None])
    def test_a_fetch_is_waited_for_without_end(self, store, timeout):
        assert store.prefetch([key_of("missing")]).wait(timeout) == {}

    def test_nested_rows_are_refused_and_counted(self, store):
        store.put(A, torch.nested.nested_tensor([torch.zeros(4), torch.zeros(4)]))
        store.put(A, torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(1, 4)]))
        assert store.stats().refused == 2

    @pytest.mark.parametrize("rows", [None, [[1.0, 2.0]], torch.zeros(1, 2).numpy(), "rows"])
    def test_rows_that_are_no_tensor(self, store, rows):
        before = store.stats()
        with pytest.raises(EmbeddingError, match="tensor"):
            store.put(A, rows)
        assert store.stats() == before

    @pytest.mark.parametrize(
        "rows",
        [
            torch.zeros(2, 2).to_sparse(),
            torch.zeros(2, 2, dtype=torch.complex64),
            torch.zeros(2, 2, dtype=torch.bool),
            torch.tensor(1.0),
        ],
    )
    def test_tensors_that_cannot_be_stored_are_refused_and_counted(self, store, rows):
        store.put(key_of("b"), rows)
        assert (store.stats().puts, store.stats().refused) == (2, 1)
        assert store.fetch([key_of("b")]) == {}

    def test_one_of_them_in_a_batch_harms_no_other(self, store):
        odd = torch.empty(2, 2, device="meta")  # passes for rows until somebody wants its bytes
        store.put(key_of("odd"), odd)
        store.put(key_of("b"), rows_of("b"))
        assert store.flush(10)
        assert set(store.fetch([key_of("odd"), key_of("b")])) == {key_of("b")}
        assert store.stats().tiers[0].dropped == 1

    @pytest.mark.parametrize("key", [None, "a", ("n", "a")])
    def test_a_put_under_no_key(self, store, key):
        with pytest.raises(ConfigError):
            store.put(key, rows_of("a"))

    @pytest.mark.parametrize("levels", [0, -1, "2", 1.0, None, True])
    def test_levels_that_are_none(self, store, levels):
        with pytest.raises(ConfigError) as caught:
            store.put(key_of("b"), rows_of("b"), levels=levels)
        assert caught.value.field == "levels"

    @pytest.mark.parametrize("fingerprint", [None, "", "tiny-vl", "A" * 64, 3, NAMESPACE])
    def test_a_namespace_to_clear_is_a_fingerprint(self, store, fingerprint):
        with pytest.raises(ConfigError):
            store.clear(fingerprint)
        assert store.fetch([A])

    @pytest.mark.parametrize("identifier", [None, 3, b"a", ""])
    def test_identifiers_that_are_none(self, store, identifier):
        with pytest.raises(ConfigError) as caught:
            store.key(identifier, "image")
        assert caught.value.field == "identifier"
        with pytest.raises(ConfigError):
            store.key("a", "image", salt=3)

    def test_a_callback_that_cannot_be_called(self, store):
        with pytest.raises(ConfigError, match="on_done"):
            store.prefetch([A], on_done="later")

    @pytest.mark.parametrize(
        ("wrong", "field"),
        [
            ({"tiers": None}, "tiers"),
            ({"tiers": "disk"}, "tiers"),
            ({"tiers": ["disk"]}, "tiers"),
            ({"tiers": MemoryTier(1)}, "tiers"),
            ({"deadline": "1"}, "deadline"),
            ({"deadline": math.nan}, "deadline"),
            ({"deadline": math.inf}, "deadline"),
            ({"deadline": True}, "deadline"),
            ({"write_behind_bytes": 1.5}, "write_behind_bytes"),
            ({"write_behind_bytes": None}, "write_behind_bytes"),
            ({"on_event": "listener"}, "on_event"),
        ],
    )
    def test_settings_that_cannot_work_are_named_and_leave_no_threads(self, wrong, field):
        before = threading.active_count()
        with pytest.raises(ConfigError) as caught:
            TieredStore(**{"tiers": [MemoryTier(1)], "namespace": NAMESPACE} | wrong)
        assert caught.value.field == field
        assert threading.active_count() == before


class TestTiers:
    @pytest.mark.parametrize("keys", NO_KEYS)
    @pytest.mark.parametrize("method", ["contains_many", "get_many", "remove_many"])
    def test_keys_that_are_none(self, tier, method, keys):
        with pytest.raises(ConfigError) as caught:
            getattr(tier, method)(keys)
        assert caught.value.field == "keys"
        assert tier.get_many([A])

    @pytest.mark.parametrize(
        "entries", [None, [ENTRY], {"a": ENTRY}, {A: rows_of("a")}, {A: b"bytes"}, {A: None}, {A: Entry("x", None)}]
    )
    def test_entries_that_are_none(self, tier, entries):
        with pytest.raises(ConfigError):
            tier.put_many(entries)
        assert tier.get_many([A])

    @pytest.mark.parametrize("payload", [*NO_PAYLOADS, ENTRY.payload[::2], ENTRY.payload.to_sparse()])
    def test_payloads_that_are_not_plain_bytes(self, tier, payload):
        before = tier.usage()
        with pytest.raises(ConfigError) as error:
            tier.put_many({key_of("new"): Entry(ENTRY.header, payload)})
        assert error.value.field == "entries"
        assert tier.usage() == before

    @pytest.mark.parametrize("namespace", [3, b"a", NAMESPACE])
    def test_a_namespace_to_clear_is_text(self, tier, namespace):
        tier.put_many({A: ENTRY})
        with pytest.raises(ConfigError) as error:
            tier.clear(namespace)
        assert error.value.field == "namespace"
        assert tier.contains_many([A])

    @pytest.mark.parametrize("capacity", [0, -1, 1.5, "1G", None, True, math.nan])
    def test_budgets_that_are_none(self, tmp_path, capacity):
        for make in (MemoryTier, lambda budget: DiskTier(tmp_path / "s", budget)):
            with pytest.raises(ConfigError) as caught:
                make(capacity)
            assert caught.value.field == "capacity_bytes"
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize("directory", [None, 3, "", b"", b"/tmp/x", "/tmp/x\0y"])
    def test_directories_that_are_none(self, directory):
        with pytest.raises(ConfigError) as caught:
            DiskTier(directory, 1 << 20)
        assert caught.value.field == "directory"

    @pytest.mark.parametrize(
        "options",
        [{"timeout": "1"}, {"timeout": math.nan}, {"ttl_seconds": math.inf}, {"largest_entry": 1.5}, {"name": ""}],
    )
    def test_settings_of_redis(self, options):
        with pytest.raises(ConfigError) as caught:
            RedisTier("redis://127.0.0.1:1", **options)
        assert caught.value.field == next(iter(options))

    @pytest.mark.parametrize("url", [None, 3, b"redis://127.0.0.1"])
    def test_urls_that_are_none(self, url):
        with pytest.raises(ConfigError):
            RedisTier(url)

    @pytest.mark.parametrize("master", [None, 50051, "host:0", "host:70000", "host:²"])
    def test_masters_that_are_none(self, master):
        with pytest.raises(ConfigError):
            MooncakeTier(master)

    @pytest.mark.parametrize("location", [None, 3, "", b"/tmp", "http://host", "redis://[::1", "mooncake://[::1"])
    def test_locations_that_are_none(self, location):
        with pytest.raises(ConfigError) as caught:
            open_tier(location)
        assert caught.value.field == "location"

    def test_a_location_may_be_a_path(self, tmp_path):
        made = open_tier(tmp_path / "s", capacity_bytes=1 << 20)
        made.put_many({A: ENTRY})
        assert made.get_many([A])
        made.close()


class TestEntries:
    @pytest.mark.parametrize(
        ("namespace", "identifier"), [(None, "a"), (3, "a"), (b"0" * 64, "a"), (A.namespace, b"a")]
    )
    def test_a_key_is_made_of_text(self, namespace, identifier):
        with pytest.raises(ConfigError):
            Key(namespace, identifier)

    @pytest.mark.parametrize(
        ("wrong", "field"),
        [
            ({"rows": -1}, "rows"),
            ({"rows": "4"}, "rows"),
            ({"width": 1.0}, "width"),
            ({"width": True}, "width"),
            ({"dtype": "float32"}, "dtype"),
        ],
    )
    def test_what_rows_cannot_be(self, wrong, field):
        with pytest.raises(ConfigError) as caught:
            Expected(**wrong)
        assert caught.value.field == field

    @pytest.mark.parametrize("rows", [None, [[1.0]], torch.zeros(2, 2).to_sparse()])
    def test_rows_that_are_no_dense_tensor(self, rows):
        with pytest.raises(EmbeddingError):
            encode_entry(A, rows)

    def test_no_key_and_no_levels(self):
        with pytest.raises(MMCacheError):
            encode_entry("a", rows_of("a"))
        with pytest.raises(MMCacheError):
            encode_entry(A, rows_of("a"), levels="2")

    def test_nested_rows(self):
        with pytest.raises(EmbeddingError):
            encode_entry(A, torch.nested.nested_tensor([torch.zeros(4), torch.zeros(4)]))

    @pytest.mark.parametrize("rows", [rows_of("a"), rows_of("a").T, rows_of("a").half()])
    def test_rows_that_are_negated_lazily(self, rows):
        assert same_bits(decode_entry(A, encode_entry(A, torch._neg_view(rows))), -rows)

    @pytest.mark.parametrize("wrong", [None, "a", 3, ENTRY.header])
    def test_what_is_decoded_is_a_key_s_entry(self, wrong):
        for arguments in ((wrong, ENTRY), (A, wrong), (A, ENTRY, wrong or 3)):
            with pytest.raises(ConfigError):
                decode_entry(*arguments)

    @pytest.mark.parametrize("header", [None, 3, "MMCEMBED" * 20, torch.zeros(200, dtype=torch.uint8)])
    def test_a_header_is_bytes(self, header):
        with pytest.raises(ConfigError):
            read_header(header)
        with pytest.raises(ConfigError):
            decode_entry(A, Entry(header, ENTRY.payload))

    @pytest.mark.parametrize("payload", NO_PAYLOADS)
    def test_a_payload_is_plain_bytes(self, payload):
        with pytest.raises(ConfigError):
            decode_entry(A, Entry(ENTRY.header, payload))

    @pytest.mark.parametrize("offset", [1, 2, 3])
    @pytest.mark.parametrize("step", [1, 2])
    def test_a_payload_may_lie_anywhere(self, offset, step):
        buffer = torch.zeros(offset + step * ENTRY.payload.numel(), dtype=torch.uint8)
        payload = buffer[offset::step]
        payload.copy_(ENTRY.payload)
        assert same_bits(decode_entry(A, Entry(ENTRY.header, payload)), rows_of("a"))

    def test_bytes_are_counted_whatever_they_are_called(self):
        assert Entry(b"", torch.zeros(5)).nbytes == 20
