"""A directory that vanishes, fills up, or may not be read or written to: a slower cache, with one warning."""

import logging
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tier_disks import Child, check_whole, path_of
from tier_helpers import NAMESPACE, key_of, rows_of, same_bits, until, write

from mmcache.errors import TierError
from mmcache.tiers import DiskTier, TieredStore, encode_entry


def degrades(store, caplog, breaks, mends):
    """Look-ups and puts go on while `breaks` has broken the directory, with one warning each, and recover."""
    keys = [store.key(f"k{n}", "image") for n in range(20)]
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
        key = store.key("a", "image")
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
                    store.put(store.key(f"k{n}", "image"), rows_of(f"k{n}"))
                    store.flush(5)
                assert store.fetch([store.key("a", "image")])  # what is there can still be read
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
            new = store.key("new", "image")
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
            keys = [store.key(name, "image") for name in "abc"]
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
