"""What happens to tiers when their process ends or forks: nothing is lost, nobody is hurt, and nothing stays behind."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from test_tiers_disk import Child, check_whole
from tier_exits import SCENARIOS
from tier_helpers import NAMESPACE, key_of, read, rows_of, same_bits, write
from tier_servers import RedisServer, running

from mmcache.errors import TierError
from mmcache.tiers import DiskTier, EncodeClaims, MemoryTier, TieredStore

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def exits(tmp_path_factory):
    """How programs end that close nothing, and the directory they wrote to."""
    directory = tmp_path_factory.mktemp("exits")
    names = [scenario.__name__ for scenario in SCENARIOS]
    run = subprocess.run(
        [sys.executable, str(HERE / "tier_exits.py"), str(directory), *names],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    ended = {name: status for name, status, _ in map(json.loads, run.stdout.splitlines())}
    return ended, run.stderr, directory


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_a_program_that_closes_nothing_ends_as_if_it_had(exits, name):
    ended, said, _ = exits
    assert ended[name] == 0, said


@pytest.mark.parametrize(("name", "contents"), [("written", "abc"), ("child", "a")])
def test_what_waited_to_be_written_is_written(exits, name, contents):
    with TieredStore([DiskTier(exits[2] / name, 64 << 20)], namespace=NAMESPACE) as store:
        found = store.fetch([store.key(content, "image") for content in contents])
    assert {key.identifier for key in found} == set(contents)
    for key, rows in found.items():
        assert same_bits(rows, rows_of(key.identifier, 512, 1024))


def test_what_a_cache_had_not_written_yet_is_written(exits):
    with TieredStore([DiskTier(exits[2] / "cache", 1 << 20)], namespace=NAMESPACE) as store:
        (rows,) = store.fetch([store.key("picture", "image")]).values()
    assert same_bits(rows, rows_of("picture"))


def test_a_closed_store_is_kept_by_nobody():
    store = TieredStore([MemoryTier(1 << 20)], namespace=NAMESPACE, on_event=lambda *event: None)
    key = store.key("a", "image")
    store.put(key, rows_of("a"))
    store.flush(10)
    store.fetch([key])
    alive = weakref.ref(store)
    store.close()
    del store
    gc.collect()
    assert alive() is None


class TestFork:
    def test_a_childs_copy_of_a_store_is_closed_and_never_waits(self):
        store = TieredStore([MemoryTier(1 << 20)], namespace=NAMESPACE)
        a, b = store.key("a", "image"), store.key("b", "image")
        store.put(a, rows_of("a"))
        assert store.flush(10)

        def work():
            signal.alarm(20)
            answers = []
            assert store.fetch([a]) == {}
            store.prefetch([a], answers.append)
            assert answers == [{}]
            store.put(b, rows_of("b"))
            store.learn([a])
            store.remove([a])
            assert store.flush()
            assert store.stats().refused == 1
            store.close()

        assert Child(work).wait() == 0
        assert set(store.fetch([a, b])) == {a}
        store.close()

    def test_whatever_the_parents_threads_hold_while_it_forks(self):
        store = TieredStore([MemoryTier(1 << 20), MemoryTier(1 << 20, name="far")], namespace=NAMESPACE)
        keys = [store.key(f"k{n}", "image") for n in range(50)]

        def work():
            signal.alarm(20)
            assert store.fetch(keys) == {}
            store.put(keys[0], rows_of("k0"))
            store.close()

        for number in range(20):
            for key in keys:
                store.put(store.key(f"{key.identifier}-{number}", "image"), rows_of("a"))
                store.prefetch(keys)
            assert Child(work).wait() == 0
        store.close()

    def test_a_child_that_closes_its_copy_takes_nothing_from_the_parent(self, tmp_path):
        tier = DiskTier(tmp_path, 1 << 20)
        write(tier, "a")
        assert Child(tier.close).wait() == 0
        (owner,) = (tmp_path / "owners").iterdir()
        other = DiskTier(tmp_path, 1 << 20)  # looks for owners that are no more
        assert owner.exists()
        other.close()
        write(tier, "b")
        tier.close()
        assert check_whole(tmp_path, 1 << 20) == {key_of("a"), key_of("b")}

    def test_a_child_that_outlives_its_parent_does_not_keep_it_alive(self, tmp_path):
        report, told = os.pipe()

        def parent():
            tier = DiskTier(tmp_path, 1 << 20)
            write(tier, "a")
            pid = os.fork()
            if pid == 0:
                signal.pause()
            os.write(told, str(pid).encode())
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(parent).wait() == -signal.SIGKILL
        grandchild = int(os.read(report, 20))
        try:
            assert check_whole(tmp_path, 1 << 20) == {key_of("a")}  # which looks for the marks of the dead
        finally:
            os.kill(grandchild, signal.SIGKILL)

    def test_a_tier_says_why_a_child_cannot_use_it(self, tmp_path):
        tier = DiskTier(tmp_path, 1 << 20)
        (key,) = write(tier, "a")

        def work():
            for call in (tier.get_many, tier.contains_many, tier.remove_many):
                with pytest.raises(TierError, match="fork"):
                    call([key])
            own = DiskTier(tmp_path, 1 << 20)
            assert read(own, key)
            own.close()

        assert Child(work).wait() == 0
        assert read(tier, key)
        tier.close()

    @pytest.mark.server
    def test_claims_stay_with_the_process_that_made_them(self):
        with running(RedisServer) as server:
            mine = EncodeClaims(server.url, lease_seconds=0.5)
            a, b = key_of("a"), key_of("b")
            assert mine.claim([a]) == {a}

            def work():
                assert mine.claim([a, b]) == {b}
                time.sleep(1.0)  # two leases
                assert mine.claim([b]) == {b}
                mine.close()

            assert Child(work).wait() == 0
            other = EncodeClaims(server.url)
            assert other.claim([a, b]) == {b}
            mine.close()
            assert other.claim([a]) == {a}
            assert mine.claim([a]) == {a}  # nobody can be asked any more
            other.close()
