"""A directory whose processes are killed at any moment: whole at the next start, within the budget, and soon."""

import logging
import os
import signal
import sqlite3
import threading
import time

import pytest
from tier_disks import SIZE, Child, check_whole, die_at, path_of
from tier_helpers import NAMESPACE, key_of, read, rows_of, same_bits, until, write

from mmcache.tiers import DiskTier, TieredStore

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

    @pytest.mark.parametrize("removes", ["remove_many", "clear", "prune", "opening with a smaller budget"])
    @pytest.mark.parametrize("after", [False, True])
    def test_killed_while_it_removes(self, tmp_path, removes, after):
        def work():
            tier = DiskTier(tmp_path, 9 * SIZE)
            keys = write(tier, *"abcdef")
            if removes == "opening with a smaller budget":
                tier.close()
            die_at(os, "unlink", 3, None, after)
            if removes == "remove_many":
                tier.remove_many(keys[:5])
            elif removes == "clear":
                tier.clear(keys[0].namespace)
            elif removes == "prune":
                tier.prune(SIZE)
            else:
                DiskTier(tmp_path, SIZE)

        assert Child(work).wait() == -signal.SIGKILL
        assert len(check_whole(tmp_path, 9 * SIZE)) <= 1  # what was to go is gone, half removed as it was
        tier = DiskTier(tmp_path, 9 * SIZE)
        keys = write(tier, *"abcdef")
        assert set(read(tier, *keys)) == set("abcdef")
        tier.close()

    def test_the_start_after_a_kill_looks_at_what_the_dead_left_and_at_nothing_else(self, tmp_path, monkeypatch):
        def work():
            tier = DiskTier(tmp_path, 300 * SIZE)
            write(tier, *(f"k{n}" for n in range(300)))
            die_at(os, "unlink", 2, None, True)
            write(tier, "new", "newer")

        assert Child(work).wait() == -signal.SIGKILL
        looked_at = []
        for name in ("listdir", "scandir", "stat"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, real=real, **k: looked_at.append(str(a[0])) or real(*a, **k))
        DiskTier(tmp_path, 300 * SIZE).close()
        assert looked_at
        assert not [place for place in looked_at if "objects/" in place]
        monkeypatch.undo()
        assert len(check_whole(tmp_path, 300 * SIZE)) == 298

    def test_after_a_power_cut_files_and_index_are_compared(self, tmp_path):
        def work():
            tier = DiskTier(tmp_path, 9 * SIZE)
            write(tier, *"abc")
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(work).wait() == -signal.SIGKILL
        (owner,) = (tmp_path / "owners").iterdir()
        owner.write_text("another run of the machine")
        lost, stray = path_of(tmp_path, key_of("a")), path_of(tmp_path, key_of("stray"))
        stray.parent.mkdir(exist_ok=True)
        lost.rename(stray)  # the index has lost a transaction, or the file system a file
        assert check_whole(tmp_path, 9 * SIZE) == {key_of("b"), key_of("c")}

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
            keys = [store.key(f"i{n}", "image") for n in range(30)]
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
