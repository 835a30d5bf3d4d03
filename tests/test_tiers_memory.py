"""What a memory tier keeps alive is what its budget counts."""

import gc
import weakref

import numpy as np
import pytest
import torch
from tier_faults import FaultyTier
from tier_helpers import key_of, same_bits

from mmcache.tiers import DiskTier, MemoryTier, decode_entry, encode_entry

pytest_plugins = ["tier_fixtures"]


def _alive(reference):
    gc.collect()
    return reference() is not None


def lent_by_numpy():
    """The first rows of a batch that numpy owns, and a function that says whether the batch is alive."""
    batch = np.ones((1000, 16), np.float32)
    alive = weakref.ref(batch)
    return torch.from_numpy(batch[:2]), lambda: _alive(alive)


def a_part_of_a_buffer():
    buffer = bytearray(np.ones((1000, 16), np.float32).tobytes())
    owner = np.frombuffer(buffer, np.float32)
    alive = weakref.ref(owner)
    rows = torch.from_numpy(owner.reshape(1000, 16)[:2])
    return rows, lambda: _alive(alive)


@pytest.mark.parametrize("make", [lent_by_numpy, a_part_of_a_buffer])
def test_a_batch_that_rows_were_a_part_of_is_not_kept(make):
    tier = MemoryTier(1 << 20)
    key = key_of("a")
    rows, alive = make()
    tier.put_many({key: encode_entry(key, rows)})
    assert alive()
    del rows
    assert not alive()
    assert same_bits(decode_entry(key, tier.get_many([key])[key]), torch.ones(2, 16))


def test_nor_is_it_while_rows_wait_to_be_written(make_store):
    tier = FaultyTier(MemoryTier(1 << 20))
    store = make_store(tier)
    tier.hang()
    rows, alive = lent_by_numpy()
    store.put(store.key("a", "image"), rows)
    store.put(store.key("b", "image"), rows)
    del rows
    assert not alive()
    tier.go_on()
    assert store.flush(20)
    assert len(store.fetch([store.key("a", "image"), store.key("b", "image")])) == 2


def test_rows_in_memory_of_their_own_are_not_copied():
    tier = MemoryTier(1 << 20)
    key, rows = key_of("a"), torch.ones(2, 16)
    tier.put_many({key: encode_entry(key, rows)})
    assert tier.get_many([key])[key].payload.data_ptr() == rows.data_ptr()
    part = torch.ones(1000, 16)[:2]
    tier.put_many({key: encode_entry(key, part)})
    assert tier.get_many([key])[key].payload.untyped_storage().nbytes() == part.nbytes


def test_rows_stay_in_memory_of_their_own_through_a_tier(tmp_path):
    """`resizable` is how torch says that nobody lent the memory."""
    for tier in (MemoryTier(1 << 20), DiskTier(tmp_path, 1 << 20)):
        key, rows = key_of("a"), torch.ones(2, 16)
        tier.put_many({key: encode_entry(key, rows)})
        found = decode_entry(key, tier.get_many([key])[key])
        assert rows.untyped_storage().resizable()
        assert found.untyped_storage().resizable()
        tier.close()
