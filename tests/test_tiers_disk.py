"""A directory as a tier: shared, and within its budget."""

import hashlib
import os
import re
import sqlite3
import time

import numpy as np
import pytest
import torch
from tier_disks import SIZE, Child, check_whole, files, path_of
from tier_helpers import NAMESPACE, key_of, read, rows_of, same_bits, write

from mmcache.cli import main
from mmcache.errors import ConfigError, DamagedEntryError, TierError
from mmcache.tiers import DiskTier, Key, TieredStore, encode_entry

NAMESPACE_OF_TESTS = key_of("a").namespace


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

    def test_a_read_is_one_call_into_the_memory_that_is_returned(self, tmp_path, monkeypatch):
        tier = DiskTier(tmp_path, 1 << 20)
        keys = write(tier, "a", "b")
        reads = []

        def preadv(fd, buffers, offset, real=os.preadv):
            reads.append([np.asarray(buffer).__array_interface__["data"][0] for buffer in buffers][-1])
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        for name in ("read", "pread", "readv"):
            monkeypatch.setattr(os, name, None)
        found = tier.get_many(keys)
        assert reads == [entry.payload.data_ptr() for entry in found.values()]
        tier.close()

    def test_a_file_that_has_grown_beyond_the_budget_is_not_read_whole(self, tmp_path):
        tier = DiskTier(tmp_path, 10 * SIZE)
        (key,) = write(tier, "a")
        os.truncate(path_of(tmp_path, key), 1 << 40)
        assert tier.get_many([key])[key].nbytes <= 10 * SIZE
        with pytest.raises(DamagedEntryError):
            read(tier, key)

    def test_a_file_that_has_grown_beyond_all_memory_harms_no_other(self, tmp_path):
        with TieredStore([DiskTier(tmp_path, 1 << 62)], namespace=NAMESPACE) as store:
            keys = [store.key(name, "image") for name in "abc"]
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


OLD_INDEX = """
CREATE TABLE entries (
    name TEXT PRIMARY KEY, namespace TEXT NOT NULL, identifier BLOB NOT NULL,
    bytes INTEGER NOT NULL, used INTEGER NOT NULL, owner TEXT
) WITHOUT ROWID;
CREATE INDEX by_use ON entries (used) WHERE owner IS NULL;
CREATE INDEX by_owner ON entries (owner) WHERE owner IS NOT NULL;
CREATE TABLE totals (id INTEGER PRIMARY KEY CHECK (id = 0), entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0, 0);
CREATE TRIGGER added AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - OLD.bytes;
END;
"""
"""The index of the first entry format, which had no modality."""


def old_entries(directory, *identifiers):
    """What a process of the first format stored, and how it goes on."""
    db = sqlite3.connect(directory / "index.sqlite3")
    for number, identifier in enumerate(identifiers):
        name = hashlib.sha256(b"mmcache-entry-1\0" + bytes.fromhex(NAMESPACE_OF_TESTS) + identifier).hexdigest()
        (directory / "objects" / name[:2]).mkdir(exist_ok=True)
        (directory / "objects" / name[:2] / name).write_bytes(b"MMCEMBED\1\0" + bytes(SIZE - 10))
        db.execute(
            "INSERT INTO entries (name, namespace, identifier, bytes, used, owner) VALUES (?, ?, ?, ?, ?, NULL)",
            (name, NAMESPACE_OF_TESTS, identifier, SIZE, number),
        )
    db.commit()
    db.close()


class TestTheFirstFormat:
    @pytest.fixture
    def directory(self, tmp_path):
        for part in ("objects", "owners", "writing"):
            (tmp_path / part).mkdir()
        db = sqlite3.connect(tmp_path / "index.sqlite3")
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(OLD_INDEX)
        db.close()
        old_entries(tmp_path, b"a", b"b", b"c")
        return tmp_path

    def test_its_entries_are_misses_and_go_first(self, directory):
        tier = DiskTier(directory, 4 * SIZE)
        keys = [key_of(name) for name in "abc"]
        assert tier.get_many(keys) == {}
        assert tier.contains_many(keys) == {}
        assert tier.usage().nbytes == 3 * SIZE
        assert [entry.key for entry in tier.scan()] == [None] * 3
        outcome = tier.put_many({key: encode_entry(key, rows_of(key.identifier)) for key in keys})
        assert outcome.stored == set(keys)
        assert outcome.evicted == ()  # nobody knew of them
        assert set(read(tier, *keys)) == set("abc")
        assert tier.usage().nbytes == 4 * SIZE
        tier.close()

    def test_its_processes_go_on_beside_this_one_s(self, directory):
        tier = DiskTier(directory, 10 * SIZE)
        write(tier, "a")
        old_entries(directory, b"d")
        assert tier.usage().entries == 5
        assert tier.clear(NAMESPACE_OF_TESTS) == 5
        assert tier.usage().nbytes == 0
        assert files(directory) == []
        tier.close()

    def test_operators_see_them_as_foreign(self, directory, capsys):
        assert main(["store", "ls", str(directory)]) == 0
        assert capsys.readouterr().out.count("foreign") == 3
        assert main(["store", "verify", str(directory)]) == 0
        assert main(["store", "stat", str(directory)]) == 0


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

    @pytest.mark.parametrize("entries", [100, 3000])
    def test_what_evicting_costs_does_not_depend_on_what_is_held(self, tmp_path, monkeypatch, entries):
        steps = []
        connect = sqlite3.connect

        def watched(*arguments, **options):
            db = connect(*arguments, **options)
            db.set_progress_handler(lambda: steps.append(1) and None, 10)  # of SQLite's virtual machine
            return db

        monkeypatch.setattr(sqlite3, "connect", watched)
        tier = DiskTier(tmp_path, entries * SIZE)
        write(tier, *(f"k{n:04}" for n in range(entries)))
        listed = []
        monkeypatch.setattr(os, "listdir", listed.append)
        steps.clear()
        (key,) = write(tier, "one more")
        assert tier.get_many([key])
        assert tier.usage().entries == entries
        assert 0 < len(steps) < 150  # tens for each row that is looked at
        assert listed == []
        monkeypatch.undo()
        tier.close()

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
