"""Each kind of fault, in each kind of tier, while it is read and while it is written."""

import time

import pytest
from tier_faults import FAULTS, FaultyTier
from tier_helpers import NAMESPACE, balanced, rows_of, same_bits, until

from mmcache.tiers import MemoryTier, TieredStore

pytest_plugins = ["tier_fixtures"]

DEADLINE = 0.3
NAMES = ["a", "b", "c"]
WRITING = ("refused", "timeout", "raises", "restarted", "not stored", "flipped", "truncated", "header")
DAMAGE = {  # how a reader tells it
    "flipped": {"checksum"},
    "header": {"checksum", "foreign", "version", "truncated"},
    "truncated": {"truncated"},
    "empty": {"truncated"},
    "version": {"version"},
    "foreign": {"foreign"},
    "swapped": {"identifier"},
}


@pytest.fixture
def faulty(tier):
    made = FaultyTier(tier, delay=3 * DEADLINE)
    made.close = lambda: None  # others go on with it
    return made


def right(found):
    """The names that were found; what was found is bit for bit what was stored."""
    for key, rows in found.items():
        assert same_bits(rows.cpu(), rows_of(key.identifier))
    return {key.identifier for key in found}


def serves_again(store, keys):
    def whole():
        for key in keys:
            store.put(key, rows_of(key.identifier))
        store.flush(10)
        return right(store.fetch(keys)) == set(NAMES)

    until(whole)


def injected(faulty, fault):
    return faulty.injected[fault] == 1


@pytest.mark.parametrize("fault", FAULTS[:-1])
def test_while_it_is_read(faulty, fault):
    with TieredStore([faulty], namespace=NAMESPACE, deadline=DEADLINE) as store:
        keys = [store.key(name, "image") for name in NAMES]
        for key in keys:
            store.put(key, rows_of(key.identifier))
        assert store.flush(10)
        faulty.next = [fault]
        start = time.monotonic()
        found = right(store.fetch(keys))
        assert time.monotonic() - start < DEADLINE + 5  # not a speed, but an end
        assert injected(faulty, fault)
        assert found < set(NAMES)
        assert store.flush(10)
        reasons = balanced(store).tiers[0].reasons
        assert reasons.keys() <= DAMAGE.get(fault, set())
        assert bool(reasons) == (fault in DAMAGE)
        serves_again(store, keys)
        balanced(store)


@pytest.mark.parametrize("fault", WRITING)
def test_while_it_is_written(faulty, fault):
    with TieredStore([faulty], namespace=NAMESPACE, deadline=DEADLINE) as store:
        keys = [store.key(name, "image") for name in NAMES]
        faulty.next = [fault]
        start = time.monotonic()
        for key in keys:
            store.put(key, rows_of(key.identifier))
        assert time.monotonic() - start < 5
        assert store.flush(20)
        assert injected(faulty, fault)
        right(store.fetch(keys))
        assert balanced(store).tiers[0].reasons.keys() <= DAMAGE.get(fault, set())
        serves_again(store, keys)
        balanced(store)


def test_a_full_queue_drops_writes_and_nothing_waits(faulty):
    size = rows_of("a").nbytes
    store = TieredStore([faulty], namespace=NAMESPACE, deadline=DEADLINE, write_behind_bytes=2 * size)
    try:
        keys = [store.key(f"k{n}", "image") for n in range(12)]
        faulty.hang()
        for key in keys:
            store.put(key, rows_of(key.identifier))
        assert store.stats().tiers[0].dropped == 10
        assert right(store.fetch(keys)) == {"k0", "k1"}  # from the queue, or after the deadline
        faulty.go_on()
        assert store.flush(10)
        until(lambda: right(store.fetch(keys)) == {"k0", "k1"})
        until(lambda: balanced(store).tiers[0].queued_bytes == 0)
    finally:
        faulty.go_on()
        store.close()


def test_the_tier_behind_it_serves_what_it_cannot(faulty):
    behind = MemoryTier(1 << 20, name="behind")
    with TieredStore([faulty, behind], namespace=NAMESPACE, deadline=DEADLINE) as store:
        keys = [store.key(name, "image") for name in NAMES]
        for key in keys:
            store.put(key, rows_of(key.identifier))
        assert store.flush(10)
        for fault in ("refused", "raises", "timeout", "flipped", "lost"):
            until(lambda: store.stats().tiers[0].closed)
            faulty.next = [fault]
            assert right(store.fetch(keys)) == set(NAMES)
            assert injected(faulty, fault)
            assert store.flush(10)
        assert balanced(store).tiers[0].hits < store.stats().lookups
