"""A directory as a tier: shared, within its budget, whole after a crash, and no more than slow when it fails."""

import logging
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tier_helpers import NAMESPACE, key_of, read, rows_of, same_bits, until, write

from mmcache.errors import ConfigError, DamagedEntryError, TierError
from mmcache.tiers import DiskTier, Key, TieredStore, decode_entry, encode_entry

SIZE = encode_entry(key_of("a"), rows_of("a")).nbytes


def files(directory):
    return sorted(path for path in (Path(directory) / "objects").rglob("*") if path.is_file())


def path_of(directory, key):
    return Path(directory) / "objects" / key.name[:2] / key.name


class Child:
    """A function in a process of its own; its status is 0 if it returns, 1 if it raises."""

    def __init__(self, function, *arguments):
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                function(*arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()


def check_whole(directory, budget):
    """What the next start finds: published entries, each whole, and nothing else, within the budget."""
    tier = DiskTier(directory, budget)
    try:
        stored = {entry.key: entry.nbytes for entry in tier.scan()}
        for key, entry in tier.get_many(list(stored)).items():
            assert same_bits(decode_entry(key, entry), rows_of(key.identifier))
        assert {path.name for path in files(directory)} == {key.name for key in stored}
        assert sum(path.stat().st_size for path in files(directory)) == sum(stored.values())
        usage = tier.usage()
        assert (usage.entries, usage.nbytes) == (len(stored), sum(stored.values()))
        assert usage.nbytes <= budget
        assert list((Path(directory) / "writing").iterdir()) == []
        assert len(list((Path(directory) / "owners").iterdir())) == 1
        return set(stored)
    finally:
        tier.close()


class TestFiles:
    def test_names_are_digests_and_nothing_else(self, tmp_path):
        tier = DiskTier(tmp_path / "s", 1 << 20)
        write(tier, "../escaped", "/absolute", "nul\0l", "x" * 4096, "A", "a")
        tier.close()
        assert len(files(tmp_path / "s")) == 6
        for path in files(tmp_path / "s"):
            assert re.fullmatch(r"[0-9a-f]{64}", path.name)
        assert [path.name for path in tmp_path.iterdir()] == ["s"]

    def test_nobody_else_may_read_them(self, tmp_path):
        tier = DiskTier(tmp_path / "s", 1 << 20)
        write(tier, "a")
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
        assert files(tmp_path / "s")[0].stat().st_mode & 0o077 == 0
        tier.close()

    def test_entries_outlive_the_process(self, tmp_path):
        tier = DiskTier(tmp_path, 1 << 20)
        keys = write(tier, "a", "b")
        tier.close()
        assert set(read(DiskTier(tmp_path, 1 << 20), *keys)) == {"a", "b"}

    @pytest.mark.parametrize("cut", [0, 10, 100, 200, SIZE - 1])
    def test_a_file_cut_short_is_damaged_and_is_written_again_after_its_removal(self, tmp_path, cut):
        tier = DiskTier(tmp_path, 1 << 20)
        (key,) = write(tier, "a")
        os.truncate(path_of(tmp_path, key), cut)
        with pytest.raises(DamagedEntryError):
            read(tier, key)
        tier.remove_many([key])
        write(tier, "a")
        assert same_bits(read(tier, key)["a"], rows_of("a"))

    def test_a_file_that_has_grown_beyond_the_budget_is_not_read_whole(self, tmp_path):
        tier = DiskTier(tmp_path, 10 * SIZE)
        (key,) = write(tier, "a")
        os.truncate(path_of(tmp_path, key), 1 << 40)
        assert tier.get_many([key])[key].nbytes <= 10 * SIZE
        with pytest.raises(DamagedEntryError):
            read(tier, key)

    def test_a_file_that_has_grown_beyond_all_memory_harms_no_other(self, tmp_path):
        with TieredStore([DiskTier(tmp_path, 1 << 62)], namespace=NAMESPACE) as store:
            keys = [store.key(name) for name in "abc"]
            for key in keys:
                store.put(key, rows_of(key.identifier))
            assert store.flush(10)
            os.truncate(path_of(tmp_path, keys[0]), 1 << 42)
            for _ in range(4):
                assert set(store.fetch(keys)) == set(keys[1:])
                assert store.flush(10)
            assert store.stats().tiers[0].damaged == 1
            assert store.stats().tiers[0].errors == 0

    def test_a_large_entry_is_read_whole(self, tmp_path):
        tier = DiskTier(tmp_path, 1 << 30)
        key = key_of("large")
        rows = torch.arange(18 << 20, dtype=torch.float32).view(-1, 1024)
        tier.put_many({key: encode_entry(key, rows)})
        assert same_bits(read(tier, key)["large"], rows)
        os.truncate(path_of(tmp_path, key), 65 << 20)
        with pytest.raises(DamagedEntryError):
            read(tier, key)
        tier.close()

    def test_a_file_that_is_gone_is_a_miss_and_is_written_again(self, tmp_path):
        tier = DiskTier(tmp_path, 1 << 20)
        (key,) = write(tier, "a")
        path_of(tmp_path, key).unlink()
        assert tier.get_many([key]) == {}
        write(tier, "a")
        assert tier.get_many([key])

    @pytest.mark.parametrize(("mode", "shared"), [(0o700, False), (0o755, False), (0o770, True), (0o777, True)])
    def test_a_directory_that_others_may_write_to_asks_for_trust(self, tmp_path, mode, shared):
        (tmp_path / "s").mkdir()
        (tmp_path / "s").chmod(mode)
        for trusted in (False, True):
            tier = DiskTier(tmp_path / "s", 1 << 20, one_trust_domain=trusted)
            assert tier.shared == (shared and not trusted)
            tier.close()

    def test_a_budget_must_be_positive(self, tmp_path):
        with pytest.raises(ConfigError):
            DiskTier(tmp_path, 0)


class TestSharing:
    def test_two_tiers_on_one_directory_share_entries_and_budget(self, tmp_path):
        one, two = DiskTier(tmp_path, 4 * SIZE), DiskTier(tmp_path, 4 * SIZE)
        a, b = write(one, "a", "b")
        assert set(read(two, a, b)) == {"a", "b"}
        c, d = write(two, "c", "d")
        one.get_many([a])
        one.put_many({})
        (e,) = write(one, "e")  # one's own uses count right away, so b was used least recently
        assert set(read(two, a, b, c, d, e)) == {"a", "c", "d", "e"}
        assert one.usage() == two.usage()
        one.close()
        two.close()

    def test_a_smaller_budget_at_the_next_start_holds(self, tmp_path):
        tier = DiskTier(tmp_path, 10 * SIZE)
        keys = write(tier, *"abcdefghij")
        tier.get_many(keys[:2])
        tier.close()
        tier = DiskTier(tmp_path, 3 * SIZE)
        assert len(files(tmp_path)) == 3
        assert set(read(tier, *keys)) >= {"a", "b"}

    def test_prune_evicts_to_a_size(self, tmp_path):
        tier = DiskTier(tmp_path, 10 * SIZE)
        write(tier, *"abcdef")
        assert tier.prune(2 * SIZE) == 4
        assert len(files(tmp_path)) == 2

    def test_processes_that_write_at_once_stay_within_the_budget(self, tmp_path):
        budget = 20 * SIZE

        def work(number):
            tier = DiskTier(tmp_path, budget)
            for step in range(60):
                write(tier, *(f"p{(number * 11 + step + i) % 40}" for i in range(4)))
                read(tier, *(key_of(f"p{i}") for i in range(0, 40, 7)))
                assert tier.usage().nbytes <= budget
            tier.close()

        children = [Child(work, number) for number in range(3)]
        tier = DiskTier(tmp_path, budget)
        for _ in range(50):
            assert tier.usage().nbytes <= budget
            time.sleep(0.005)
        assert [child.wait() for child in children] == [0, 0, 0]
        tier.close()
        assert check_whole(tmp_path, budget)

    def test_a_forked_child_opens_its_own(self, tmp_path):
        tier = DiskTier(tmp_path, 1 << 20)
        (key,) = write(tier, "a")

        def work():
            with pytest.raises(TierError, match="fork"):
                tier.get_many([key])
            assert read(DiskTier(tmp_path, 1 << 20), key)

        assert Child(work).wait() == 0
        assert read(tier, key)
        tier.close()


CRASHES = {
    "before the reservation": (sqlite3, "connect", 1, None, False),
    "half written": (os, "writev", 1, lambda fd, parts: os.write(fd, parts[0]), False),
    "the second half written": (os, "writev", 2, lambda fd, parts: os.write(fd, parts[0]), False),
    "before the rename": (os, "rename", 1, None, False),
    "after the rename": (os, "rename", 1, None, True),
    "after all renames": (os, "rename", 2, None, True),
    "while evicting": (os, "unlink", 1, None, False),
    "after an eviction's first file": (os, "unlink", 1, None, True),
}


def die_at(module, name, count, before, after):
    """Kill this process at the `count`-th call of a function."""
    real, calls = getattr(module, name), []

    def killer(*arguments, **options):
        calls.append(1)
        if len(calls) < count:
            return real(*arguments, **options)
        if before is not None:
            before(*arguments)
        if after:
            real(*arguments, **options)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, killer)


class TestCrashes:
    @pytest.mark.parametrize("where", CRASHES)
    def test_killed_at_a_chosen_moment(self, tmp_path, where):
        budget = 3 * SIZE

        def work():
            tier = DiskTier(tmp_path, budget)
            write(tier, "a")
            write(tier, "b")
            die_at(*CRASHES[where])
            thread = threading.Thread(target=write, args=(tier, "c", "d"))  # a new thread connects anew
            thread.start()
            thread.join()

        assert Child(work).wait() == -signal.SIGKILL
        assert key_of("b") in check_whole(tmp_path, budget)
        tier = DiskTier(tmp_path, budget)
        write(tier, "c", "d")
        assert set(read(tier, key_of("c"), key_of("d"))) == {"c", "d"}
        tier.close()

    @pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=pytest.mark.slow)])
    def test_killed_at_any_moment(self, tmp_path, rounds):
        budget = 12 * SIZE

        begun, began = os.pipe()

        def work(start):
            tier = DiskTier(tmp_path, budget)
            for step in range(start, 10**9):
                write(tier, *(f"k{(step * 3 + i) % 50}" for i in range(3)))
                tier.remove_many([key_of(f"k{step % 50}")])
                if step == start:
                    os.write(began, b".")

        seen = set()
        for round_ in range(rounds):
            child = Child(work, round_)
            os.read(begun, 1)
            time.sleep(0.02 + 0.0137 * (round_ % 9))
            assert child.kill() == -signal.SIGKILL
            seen |= check_whole(tmp_path, budget)
        assert seen

    def test_the_dead_do_not_keep_room_from_the_living(self, tmp_path):
        budget = 2 * SIZE
        living = DiskTier(tmp_path, budget)

        def work():
            tier = DiskTier(tmp_path, budget)
            die_at(os, "writev", 1, None, False)
            write(tier, "a", "b")

        assert Child(work).wait() == -signal.SIGKILL
        write(living, "a", "c")  # one that the dead process had reserved, and one that needs its room
        assert set(read(living, key_of("a"), key_of("c"))) == {"a", "c"}
        living.close()
        check_whole(tmp_path, budget)

    @pytest.mark.parametrize("damage", ["garbage", "truncated", "empty file"])
    def test_a_damaged_index_starts_anew(self, tmp_path, damage, caplog):
        tier = DiskTier(tmp_path, 1 << 20)
        write(tier, *(f"i{n}" for n in range(50)))
        tier.close()
        index = tmp_path / "index.sqlite3"
        for extra in tmp_path.glob("index.sqlite3-*"):
            extra.unlink()
        content = index.read_bytes()
        index.write_bytes({"garbage": b"\xff" * len(content), "truncated": content[:5000], "empty file": b""}[damage])
        with caplog.at_level(logging.WARNING):
            tier = DiskTier(tmp_path, 1 << 20)
        (key,) = write(tier, "new")
        assert read(tier, key)
        tier.close()
        assert check_whole(tmp_path, 1 << 20) == {key}

    def test_an_index_damaged_under_way_costs_a_few_operations(self, tmp_path):
        with TieredStore([DiskTier(tmp_path, 1 << 20)], namespace=NAMESPACE) as store:
            keys = [store.key(f"i{n}") for n in range(30)]
            for key in keys[:10]:
                store.put(key, rows_of(key.identifier))
            store.flush(10)
            content = (tmp_path / "index.sqlite3").stat().st_size
            os.truncate(tmp_path / "index.sqlite3-wal", 0)
            with open(tmp_path / "index.sqlite3", "r+b") as file:
                file.write(b"\xff" * content)

            def stored_again():
                store.put(keys[20], rows_of(keys[20].identifier))
                store.flush(10)
                return store.fetch([keys[20]])

            until(stored_again)
            for key, rows in store.fetch(keys).items():
                assert same_bits(rows, rows_of(key.identifier))


def degrades(store, caplog, breaks, mends):
    """Look-ups and puts go on while `breaks` has broken the directory, with one warning each, and recover."""
    keys = [store.key(f"k{n}") for n in range(20)]
    store.put(keys[0], rows_of("k0"))
    assert store.flush(10)
    breaks()
    with caplog.at_level(logging.WARNING, "mmcache.tiers"):
        for key in keys[1:]:
            store.put(key, rows_of(key.identifier))
            store.flush(10)
            for found, rows in store.fetch(keys).items():
                assert same_bits(rows, rows_of(found.identifier))
    assert len([record for record in caplog.records if "takes no writes" in record.message]) == 1
    assert len([record for record in caplog.records if "counts as missing" in record.message]) <= 1
    assert store.stats().tiers[0].dropped
    mends()

    def works():
        store.put(keys[1], rows_of("k1"))
        store.flush(10)
        return keys[1] in store.fetch([keys[1]]) and not store.stats().tiers[0].queued_bytes

    until(works)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class TestDegraded:
    def test_a_directory_that_vanishes_and_comes_back(self, tmp_path, caplog):
        directory = tmp_path / "mount"
        with TieredStore([DiskTier(directory, 1 << 20)], namespace=NAMESPACE) as store:
            degrades(store, caplog, lambda: directory.rename(tmp_path / "away"), directory.mkdir)
            assert not (directory / "trash").exists()

    def test_a_directory_that_vanishes_is_not_made_anew(self, tmp_path):
        tier = DiskTier(tmp_path / "mount", 1 << 20)
        write(tier, "a")
        shutil.rmtree(tmp_path / "mount")
        assert tier.get_many([key_of("a")]) == {}
        with pytest.raises(TierError):
            write(tier, "a")
        assert not (tmp_path / "mount").exists()

    def test_a_directory_that_is_a_file(self, tmp_path, caplog):
        (tmp_path / "s").write_text("not a directory")
        with caplog.at_level(logging.WARNING):
            store = TieredStore([DiskTier(tmp_path / "s", 1 << 20)], namespace=NAMESPACE)
        key = store.key("a")
        store.put(key, rows_of("a"))
        store.flush(10)
        assert store.fetch([key]) == {}
        assert len([record for record in caplog.records if "cannot be used now" in record.message]) == 1
        (tmp_path / "s").unlink()

        def works():
            store.put(key, rows_of("a"))
            store.flush(10)
            return store.fetch([key])

        until(works)
        store.close()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_a_directory_that_may_not_be_written_to(self):
        with tempfile.TemporaryDirectory() as directory:
            tier = DiskTier(directory, 1 << 20)
            write(tier, "a")
            tier.close()
            for path in [Path(directory), *Path(directory).rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
            records = []

            def work():
                handler = logging.Handler()
                handler.emit = records.append
                logging.getLogger("mmcache.tiers").addHandler(handler)
                os.setuid(65534)
                store = TieredStore([DiskTier(directory, 1 << 20)], namespace=NAMESPACE)
                for n in range(10):
                    store.put(store.key(f"k{n}"), rows_of(f"k{n}"))
                    store.flush(5)
                assert store.fetch([store.key("a")])  # what is there can still be read
                assert store.stats().tiers[0].stored == 0
                assert len(records) == 2, records  # at the start, and at the first write
                store.close()

            assert Child(work).wait() == 0

    def test_a_file_system_without_room(self, small_disk, caplog):
        filler = small_disk / "somebody else's"

        def fills():
            with open(filler, "wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))

        with TieredStore([DiskTier(small_disk / "s", 1 << 20)], namespace=NAMESPACE) as store:
            degrades(store, caplog, fills, filler.unlink)
        check_whole(small_disk / "s", 1 << 20)

    def test_a_file_system_that_is_read_only(self, small_disk, caplog):
        def remount(mode):
            subprocess.run(["mount", "-o", f"remount,{mode}", str(small_disk)], check=True)

        tier = DiskTier(small_disk / "s", 1 << 20)
        (here,) = write(tier, "here")
        tier.close()
        remount("ro")
        with (
            caplog.at_level(logging.WARNING, "mmcache.tiers"),
            TieredStore([DiskTier(small_disk / "s", 1 << 20)], namespace=NAMESPACE) as store,
        ):
            new = store.key("new")
            for _ in range(5):
                store.put(new, rows_of("new"))
                store.flush(10)
                assert set(store.fetch([here, new])) == {here}
            assert len(caplog.records) == 2, caplog.records  # at the start, and at the first write
            remount("rw")

            def works():
                store.put(new, rows_of("new"))
                store.flush(10)
                return set(store.fetch([here, new])) == {here, new} and not store.stats().tiers[0].queued_bytes

            until(works)
        assert check_whole(small_disk / "s", 1 << 20) == {here, new}

    def test_one_file_that_cannot_be_read_or_removed_harms_no_other(self, tmp_path, caplog):
        with TieredStore([DiskTier(tmp_path, 1 << 20)], namespace=NAMESPACE) as store:
            keys = [store.key(name) for name in "abc"]
            for key in keys[:2]:
                store.put(key, rows_of(key.identifier))
            assert store.flush(10)
            path = path_of(tmp_path, keys[0])
            path.unlink()
            path.mkdir()
            with caplog.at_level(logging.WARNING, "mmcache.tiers"):
                for _ in range(5):
                    assert set(store.fetch(keys[:2])) == {keys[1]}
            store.put(keys[2], rows_of("c"))
            until(lambda: tuple(store.known(keys[2:])) and not store.stats().tiers[0].queued_bytes)
            assert set(store.fetch(keys)) == {keys[1], keys[2]}
            assert len([record for record in caplog.records if "takes no removals" in record.message]) == 1
            path.rmdir()
            assert store.flush(10)
            store.put(keys[0], rows_of("a"))
            assert store.flush(10)
            assert set(store.fetch(keys)) == set(keys)

    def test_a_full_disk(self, tmp_path, caplog):
        # A limit on the size of files stands for a device without room: writes stop in the middle
        def work():
            tier = DiskTier(tmp_path, 64 << 20)
            write(tier, "a")
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            small, big = key_of("b"), key_of("big")
            entries = {small: encode_entry(small, rows_of("b")), big: encode_entry(big, torch.zeros(1024, 1024))}
            with pytest.raises(TierError):
                tier.put_many(entries)
            assert tier.get_many([big]) == {}
            assert not os.listdir(tmp_path / "writing")
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            write(tier, "c")
            tier.close()

        assert Child(work).wait() == 0
        assert check_whole(tmp_path, 64 << 20) == {key_of("a"), key_of("b"), key_of("c")}


def test_strays_are_found_and_removed(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20)
    (key,) = write(tier, "a")
    stray = Key(key.namespace, "stray")
    path_of(tmp_path, stray).parent.mkdir(exist_ok=True)
    path_of(tmp_path, stray).write_bytes(b"left by a damaged index")
    assert tier.remove_strays(dry_run=True) == 1
    assert tier.remove_strays() == 1
    assert tier.remove_strays() == 0
    assert set(read(tier, key)) == {"a"}
    assert torch.equal(read(tier, key)["a"], rows_of("a"))
