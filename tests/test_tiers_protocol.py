"""What every tier does, run on each: host and device memory, disk, a real Redis server, a real Mooncake cluster."""

import threading

import pytest
import torch
from tier_devices import device_tier, lies_on
from tier_helpers import key_of, read, rows_of, same_bits, write
from tier_kinds import GPU, OF_THIS_PROCESS, WITH_A_BUDGET, make_tier

from mmcache.errors import ConfigError, TierError, UnsupportedError
from mmcache.tiers import DiskTier, Entry, MemoryTier, MooncakeTier, RedisTier, Tier, decode_entry, encode_entry

pytest_plugins = ["tier_fixtures"]


def test_it_is_a_tier(tier):
    assert isinstance(tier, Tier)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rows_come_back_bit_for_bit(tier, dtype):
    keys = write(tier, "a", "b", rows=5, width=24, dtype=dtype)
    found = read(tier, *keys)
    for name in ("a", "b"):
        assert same_bits(found[name], rows_of(name, 5, 24, dtype))


def test_large_and_empty_rows(tier):
    big, empty = key_of("big"), key_of("empty")
    rows = torch.randn(1024, 1024)
    outcome = tier.put_many({big: encode_entry(big, rows), empty: encode_entry(empty, rows[:0])})
    assert outcome.stored == {big, empty}
    assert same_bits(read(tier, big)["big"], rows)
    assert same_bits(read(tier, empty)["empty"], rows[:0])


def test_every_entry_owns_its_memory(tier):
    keys = write(tier, "a", "b", "c")
    for entry in tier.get_many(keys).values():
        assert entry.payload.untyped_storage().nbytes() == entry.payload.numel()


def test_what_is_not_there_is_left_out(tier):
    keys = write(tier, "a", "b")
    asked = [keys[0], key_of("missing"), keys[1], key_of("a", salt="s")]
    assert set(tier.get_many(asked)) == set(keys)
    assert set(tier.contains_many(asked)) == set(keys)
    assert tier.get_many([]) == {}
    assert tier.contains_many([]) == {}
    assert tier.put_many({}).stored == frozenset()


def test_sizes_are_those_of_the_entries(tier):
    (key,) = write(tier, "a")
    assert tier.contains_many([key]) == {key: encode_entry(key, rows_of("a")).nbytes}


def test_the_same_content_under_another_salt_does_not_hit_and_under_the_same_does(tier):
    mine, other, none = (key_of("logo", salt=salt) for salt in ("mine", "", None))
    tier.put_many({mine: encode_entry(mine, rows_of("logo"))})
    assert set(tier.get_many([mine, other, none])) == {mine}
    assert same_bits(read(tier, key_of("logo", salt="mine"))["logo"], rows_of("logo"))


def test_one_identifier_has_rows_of_its_own_in_every_modality(tier):
    image, video, unsaid = (key_of("logo", modality) for modality in ("image", "video", ""))
    tier.put_many({image: encode_entry(image, rows_of("as image"))})
    assert set(tier.get_many([image, video, unsaid])) == {image}
    assert set(tier.contains_many([image, video, unsaid])) == {image}
    tier.put_many({video: encode_entry(video, rows_of("as video"))})
    assert set(tier.get_many([image, video, unsaid])) == {image, video}
    for key, rows in ((image, rows_of("as image")), (video, rows_of("as video"))):
        assert same_bits(decode_entry(key, tier.get_many([key])[key]), rows)
    tier.remove_many([image])
    assert set(tier.get_many([image, video])) == {video}


def test_removed_entries_are_gone_and_can_be_put_again(tier):
    keys = write(tier, "a", "b", "c")
    assert tier.remove_many([keys[0], keys[1], key_of("missing")]) == 2
    assert set(tier.get_many(keys)) == {keys[2]}
    assert set(tier.contains_many(keys)) == {keys[2]}
    write(tier, "a")
    assert set(tier.get_many(keys)) == {keys[0], keys[2]}


def test_putting_again_is_no_error_and_leaves_the_same_rows(tier):
    keys = write(tier, "a")
    outcome = tier.put_many({key: encode_entry(key, rows_of("a")) for key in keys})
    assert outcome.stored == set(keys)
    assert same_bits(read(tier, *keys)["a"], rows_of("a"))


def test_one_content_under_two_keys_in_one_put(tier):
    one, two = key_of("a"), key_of("a", salt="s")
    rows = rows_of("a")
    tier.put_many({one: encode_entry(one, rows), two: encode_entry(two, rows)})
    for key in (one, two):
        assert same_bits(read(tier, key)["a"], rows)


def test_awkward_identifiers(tier):
    identifiers = ["../escaped", "/absolute", "nul\0l", "a/b", "A", "a", "é" * 2000, "x" * 4096, "*", "space and\nline"]
    keys = write(tier, *identifiers)
    found = read(tier, *keys)
    assert set(found) == set(identifiers)
    for identifier in identifiers:
        assert same_bits(found[identifier], rows_of(identifier))


def test_clear_takes_one_namespace_or_everything(tier):
    here = write(tier, "a", "b")
    there = key_of("a", salt="there")
    tier.put_many({there: encode_entry(there, rows_of("a"))})
    assert tier.clear(here[0].namespace) == 2
    assert set(tier.get_many([*here, there])) == {there}
    assert tier.clear() == 1
    assert tier.get_many([there]) == {}


def test_the_inventory(tier):
    keys = write(tier, "a", "b")
    try:
        stored = {entry.key: entry for entry in tier.scan()}
    except UnsupportedError:
        assert isinstance(tier, MooncakeTier)
        return
    assert set(stored) == set(keys)
    for key in keys:
        assert stored[key].nbytes == encode_entry(key, rows_of("a")).nbytes
        assert stored[key].name.endswith(key.name)


def test_a_stored_lie_is_handed_out_and_does_not_decode(tier):
    key, other = key_of("a"), key_of("b")
    tier.put_many({key: encode_entry(other, rows_of("b"))})
    with pytest.raises(ValueError, match="identifier"):
        decode_entry(key, tier.get_many([key])[key])


def test_entries_without_a_whole_header_are_handed_out_as_they_are(tier):
    key = key_of("a")
    tier.put_many({key: Entry(b"short", torch.zeros(0, dtype=torch.uint8))})
    with pytest.raises(ValueError, match="header"):
        decode_entry(key, tier.get_many([key])[key])


def test_many_threads_at_once(tier):
    errors = []

    def work(number):
        try:
            for step in range(8):
                names = [f"t{(number + step) % 3}-{i}" for i in range(3)]
                write(tier, *names)
                for name, rows in read(tier, *map(key_of, names)).items():
                    assert same_bits(rows, rows_of(name))
                if step % 3 == number % 3 and not isinstance(tier, MooncakeTier):
                    tier.remove_many([key_of(names[0])])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("kind", WITH_A_BUDGET)
def test_a_budget_holds_and_the_least_recently_used_goes_first(kind, tmp_path):
    size = encode_entry(key_of("a"), rows_of("a")).nbytes
    budget = 3 * size + size // 2
    tier = make_tier(kind, budget, tmp_path)
    a, b, c = (write(tier, name)[0] for name in "abc")
    tier.get_many([a])
    outcome = tier.put_many({key_of("d"): encode_entry(key_of("d"), rows_of("d"))})
    assert outcome.evicted == (b,)
    assert outcome.stored == {key_of("d")}
    assert set(tier.get_many([a, b, c, key_of("d")])) == {a, c, key_of("d")}
    assert tier.usage().nbytes <= budget
    assert tier.usage().entries == 3
    too_big = key_of("e")
    outcome = tier.put_many({too_big: encode_entry(too_big, torch.zeros(1000, 1000))})
    assert outcome.stored == frozenset()
    assert outcome.evicted == ()
    assert len(tier.get_many([a, c, key_of("d")])) == 3
    tier.close()


@pytest.mark.parametrize("kind", WITH_A_BUDGET)
def test_a_batch_larger_than_the_budget_stays_within_it(kind, tmp_path):
    size = encode_entry(key_of("a"), rows_of("a")).nbytes
    tier = make_tier(kind, 5 * size, tmp_path)
    write(tier, *(f"i{n}" for n in range(20)))
    assert tier.usage().nbytes <= 5 * size
    assert tier.usage().entries == 5
    tier.close()


@pytest.mark.parametrize("kind", WITH_A_BUDGET)
def test_what_a_put_evicts_and_stores_again_is_stored(kind, tmp_path):
    tier = make_tier(kind, 3 * encode_entry(key_of("a"), rows_of("a")).nbytes, tmp_path)
    write(tier, "a")
    write(tier, "b")
    write(tier, "c")
    keys = [key_of(name) for name in "dea"]
    outcome = tier.put_many({key: encode_entry(key, rows_of(key.identifier)) for key in keys})
    held = set(tier.get_many([key_of(name) for name in "abcde"]))
    assert outcome.stored == held & set(keys)
    assert not held & set(outcome.evicted)
    assert tier.usage().entries == len(held) == 3
    tier.close()


@pytest.mark.parametrize("kind", WITH_A_BUDGET)
def test_a_closed_tier_says_so(kind, tmp_path):
    tier = make_tier(kind, 1000, tmp_path)
    tier.close()
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.get_many([key_of("a")])
    with pytest.raises(TierError, match="closed"):
        tier.put_many({key_of("a"): encode_entry(key_of("a"), rows_of("a"))})


@pytest.mark.parametrize("kind", OF_THIS_PROCESS)
def test_slices_of_a_batch_do_not_keep_the_batch_alive_in_memory(kind, tmp_path):
    tier = make_tier(kind, 1 << 20, tmp_path)
    batch = torch.randn(1000, 16)
    key = key_of("a")
    tier.put_many({key: encode_entry(key, batch[10:12])})
    assert tier.get_many([key])[key].payload.untyped_storage().nbytes() == 2 * 16 * 4


@pytest.mark.parametrize("kind", OF_THIS_PROCESS)
def test_a_write_to_rows_that_were_handed_out_is_found(kind, tmp_path):
    tier = make_tier(kind, 1 << 20, tmp_path)
    (key,) = write(tier, "a")
    decode_entry(key, tier.get_many([key])[key])[0, 0] += 1
    with pytest.raises(ValueError, match="damaged"):
        decode_entry(key, tier.get_many([key])[key])


@pytest.mark.parametrize("kind", ["simulated device", GPU])
def test_a_device_s_entries_lie_on_the_device_and_nowhere_else(kind):
    tier = device_tier(kind, 1 << 20)
    keys = write(tier, "a", "b")
    for entry in tier.get_many(keys).values():
        assert lies_on(tier, entry.payload) == "cuda"
    tier.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory is to be had here")
def test_page_locked_memory_without_a_gpu_is_an_error_at_once(tmp_path):
    for make in (
        lambda: MemoryTier(1 << 20, pinned=True),
        lambda: DiskTier(tmp_path / "s", 1 << 20, pinned=True),
        lambda: RedisTier("redis://127.0.0.1", pinned=True),
    ):
        with pytest.raises(ConfigError, match="GPU"):
            make()
