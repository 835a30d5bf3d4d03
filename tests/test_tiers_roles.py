"""Encoder, prefill and decode roles over one shared store: who asks for what, and what happens when it is not there."""

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of
from tier_faults import FaultyTier
from tier_helpers import NAMESPACE, same_bits

from mmcache import CacheConfig, Lookup, MissingContentError, MultimodalCache, MultimodalItem, encoder_inputs
from mmcache.tiers import DiskTier, Expected, MemoryTier, TieredStore

SPANS = [(2, 4), (8, 5), (15, 3)]
TOKENS = 20


class Engine:
    """One process: a cache and a view of the store, and an encoder that counts its runs."""

    def __init__(self, tier):
        self.tier = FaultyTier(tier)
        self.store = TieredStore([self.tier], namespace=NAMESPACE)
        self.cache = MultimodalCache(
            CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}, namespace=NAMESPACE)
        )
        self.encoded = []

    def key(self, req, index):
        item = req.items[index]
        return self.store.key(item.identifier, item.modality, salt=req.cache_salt, adapter=req.adapter)

    def fill(self, lookup: Lookup, req) -> None:
        """Take what is missing from the store, encode the rest and give it to the store."""
        keys = {self.key(req, index): index for index in lookup.missing}
        wanted = {key: Expected(req.items[i].placeholder.num_embeds, WIDTH) for key, i in keys.items()}
        found = self.store.fetch(wanted) if wanted else {}
        self.cache.insert(lookup, {keys[key]: rows for key, rows in found.items()})
        if not lookup.missing:
            return
        for batch in encoder_inputs([lookup], "cpu"):
            for _, index in batch.items:
                item = req.items[index]
                rows = rows_of(item.identifier, item.placeholder.num_embeds)
                self.encoded.append(item.identifier)
                self.cache.insert(lookup, {index: rows})
                self.store.put(self.key(req, index), rows)

    def prefill(self, req, computed=0, scheduled=None):
        with self.cache.lookup(req, num_computed_tokens=computed, num_scheduled_tokens=scheduled) as lookup:
            self.fill(lookup, req)
            merged = torch.zeros(TOKENS - computed if scheduled is None else scheduled, WIDTH)
            return lookup.merge_into(merged)


def without_fields(items):
    return [MultimodalItem(item.modality, None, item.placeholder, item.identifier) for item in items]


@pytest.fixture
def engines(tmp_path):
    made = []

    def make():
        engine = Engine(DiskTier(tmp_path / "shared", 1 << 24))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.store.close()


@pytest.fixture
def published(engines):
    """A store that an encode-only process has filled, and the rows that a prefill has to see."""
    encoder = engines()
    req = request("encode", TOKENS, images(*SPANS), salt="s")
    with encoder.cache.lookup(req, num_computed_tokens=0) as lookup:
        encoder.fill(lookup, req)
    encoder.cache.finish(req)
    assert encoder.encoded == ["a", "b", "c"]
    assert encoder.store.flush(10)
    whole = torch.zeros(TOKENS, WIDTH)
    for (offset, length), name in zip(SPANS, "abc", strict=True):
        whole[offset : offset + length] = rows_of(name, length)
    return whole


def test_a_prefill_process_takes_everything_from_the_store(engines, published):
    engine = engines()
    merged = engine.prefill(request("prefill", TOKENS, images(*SPANS), salt="s"))
    assert same_bits(merged, published)
    assert engine.encoded == []
    assert engine.tier.calls["get"] == 1


def test_it_asks_only_for_what_is_neither_covered_nor_held(engines, published):
    engine = engines()
    req = request("prefill", TOKENS, images(*SPANS), salt="s")
    assert same_bits(engine.prefill(req, computed=6), published[6:])
    assert engine.store.stats().lookups == 2
    again = request("again", TOKENS, images(*SPANS), salt="s")
    assert same_bits(engine.prefill(again), published)
    assert engine.store.stats().lookups == 3
    assert engine.encoded == []


def test_a_consumer_that_has_the_kv_asks_for_nothing(engines, published):
    engine = engines()
    merged = engine.prefill(request("decode", TOKENS, images(*SPANS), salt="s"), computed=TOKENS - 1)
    assert same_bits(merged, published[TOKENS - 1 :])
    assert engine.store.stats().lookups == 0
    assert sum(engine.tier.calls.values()) == 0


def test_metadata_alone_is_enough_when_the_rows_are_stored(engines, published):
    engine = engines()
    req = request("metadata", TOKENS, without_fields(images(*SPANS)), salt="s")
    assert same_bits(engine.prefill(req), published)


def test_metadata_alone_and_no_rows_is_a_typed_error_for_that_request(engines, published):
    engine = engines()
    req = request("metadata", TOKENS, without_fields(images(*SPANS)), salt="other")
    with pytest.raises(MissingContentError) as caught:
        engine.prefill(req)
    assert caught.value.request_id == "metadata"
    assert caught.value.items == (0, 1, 2)
    engine.cache.finish(req)
    assert engine.prefill(request("next", TOKENS, images(*SPANS), salt="s")).shape == (TOKENS, WIDTH)


def test_where_the_features_can_be_fetched_a_miss_is_a_local_encode(engines, published):
    """The error names what has to be fetched, and nothing else; the same request goes on with it."""
    encoder = engines()
    encoder.store.remove([encoder.key(request("r", TOKENS, images(*SPANS), salt="s"), 1)])
    assert encoder.store.flush(10)
    engine = engines()
    req = request("metadata", TOKENS, without_fields(images(*SPANS)), salt="s")
    with pytest.raises(MissingContentError) as caught:
        engine.prefill(req)
    assert caught.value.items == (1,)
    engine.cache.finish(req)
    whole = images(*SPANS)
    items = [whole[index] if index in caught.value.items else item for index, item in enumerate(req.items)]
    merged = engine.prefill(request("metadata", TOKENS, items, salt="s"))
    assert same_bits(merged, published)
    assert engine.encoded == ["b"]


def test_another_tenant_encodes_its_own(engines, published):
    engine = engines()
    merged = engine.prefill(request("tenant", TOKENS, images(*SPANS), salt="t"))
    assert same_bits(merged, published)
    assert engine.encoded == ["a", "b", "c"]


def test_a_store_that_says_yes_and_does_not_deliver_is_a_local_encode(engines, published):
    engine = engines()
    req = request("prefill", TOKENS, images(*SPANS), salt="s")
    keys = [engine.store.key(name, "image", salt="s") for name in "abc"]
    engine.store.fetch(keys)
    assert engine.store.known(keys) == set(keys)
    engine.tier.next = ["lost"]
    assert same_bits(engine.prefill(req), published)
    assert sorted(engine.encoded) == ["a", "b", "c"]


@pytest.mark.parametrize("fault", ["refused", "raises", "truncated", "flipped", "foreign"])
def test_a_failing_store_never_fails_a_request(engines, published, fault):
    engine = engines()
    engine.tier.always = fault
    for number in range(5):
        req = request(f"r{number}", TOKENS, images(*SPANS, ids=[f"{number}{name}" for name in "abc"]))
        merged = engine.prefill(req)
        engine.cache.finish(req)
        for (offset, length), name in zip(SPANS, "abc", strict=True):
            assert same_bits(merged[offset : offset + length], rows_of(f"{number}{name}", length))


def test_memory_as_the_only_tier_serves_what_the_device_had_to_drop():
    engine = Engine(MemoryTier(1 << 20))
    engine.cache = MultimodalCache(CacheConfig(capacity_bytes=6 * ROW_BYTES, row_bytes={"image": ROW_BYTES}))
    for _ in range(2):
        for name in "abc":
            req = request(f"r{name}", 8, images((2, 5), ids=[name]))
            with engine.cache.lookup(req, num_computed_tokens=0) as lookup:
                engine.fill(lookup, req)
            engine.cache.finish(req)
    assert engine.encoded == ["a", "b", "c"]
    engine.store.close()
