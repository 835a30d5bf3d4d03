"""A directory whose index or folders are damaged, closed or open: some misses, one warning, and never another error."""

import logging
import os
import shutil
import signal
import sqlite3
from contextlib import suppress

import pytest
from tier_disks import SIZE, Child, check_whole, files
from tier_helpers import key_of, read, rows_of, same_bits, write

from mmcache.errors import TierError
from mmcache.tiers import DiskTier

BUDGET = 10 * SIZE
NAMES = tuple("abcdefgh")


def sql(statement):
    def harm(directory):
        db = sqlite3.connect(directory / "index.sqlite3")
        db.execute(statement)
        db.commit()
        db.close()

    return harm


def index_is_a_folder(directory):
    for path in directory.glob("index.sqlite3*"):
        path.unlink()
    (directory / "index.sqlite3").mkdir()


def junk(directory):
    (directory / "objects" / "junk").write_bytes(b"")
    (directory / "objects" / "zz" / "folder").mkdir(parents=True)
    (directory / "owners" / "folder").mkdir()
    (directory / "writing" / "folder").mkdir()
    (directory / "writing" / "junk").write_bytes(b"")


HARM = {
    "identifiers that are no UTF-8": sql("UPDATE entries SET identifier = x'ff'"),
    "identifiers that are text": sql("UPDATE entries SET identifier = 'a'"),
    "namespaces that are none": sql("UPDATE entries SET namespace = 'zz'"),
    "namespaces that are no UTF-8": sql("UPDATE entries SET namespace = CAST(x'ff' AS TEXT)"),
    "modalities that are too long": sql("UPDATE entries SET modality = zeroblob(300)"),
    "names that are paths": sql("UPDATE entries SET name = '../../x' || name"),
    "negative sizes": sql("UPDATE entries SET bytes = -5"),
    "sizes that are text": sql("UPDATE entries SET bytes = 'abc'"),
    "uses that are text": sql("UPDATE entries SET used = 'abc'"),
    "no totals": sql("DELETE FROM totals"),
    "totals too large": sql("UPDATE totals SET bytes = 1000000000"),
    "totals that are text": sql("UPDATE totals SET bytes = 'abc'"),
    "negative totals": sql("UPDATE totals SET bytes = -1000000000, entries = -7"),
    "no table of totals": sql("DROP TABLE totals"),
    "no table of entries": sql("DROP TABLE entries"),
    "an index that is a folder": index_is_a_folder,
    "no objects": lambda directory: shutil.rmtree(directory / "objects"),
    "no folder to write in": lambda directory: shutil.rmtree(directory / "writing"),
    "things that are nobody's": junk,
}


@pytest.fixture(params=[True, False], ids=["open", "closed"])
def harmed(request, tmp_path):
    """A function that harms a directory of eight entries while it is open, or closed, and returns the open tier."""
    made = []

    def harm(kind):
        tier = DiskTier(tmp_path, BUDGET)
        write(tier, *NAMES)
        if not request.param:
            tier.close()
        HARM[kind](tmp_path)
        made.append(tier if request.param else DiskTier(tmp_path, BUDGET))
        return made[0]

    yield harm
    made[0].close()


@pytest.mark.parametrize("kind", HARM)
def test_damage_costs_misses_and_is_mended(harmed, kind, tmp_path):
    tier = harmed(kind)
    for name in NAMES:
        for found, rows in read(tier, key_of(name)).items():
            assert same_bits(rows, rows_of(found))
    for operation in (lambda: list(tier.scan()), lambda: write(tier, *"ijklmnop"), tier.usage):
        with suppress(TierError):  # which is how a tier fails; whoever finds the damage may, and nobody after
            operation()
    for _ in range(2):
        list(tier.scan())
        keys = write(tier, *"qrstuvwx")
        assert set(read(tier, *keys)) == set("qrstuvwx")
    assert sum(path.stat().st_size for path in files(tmp_path) if len(path.name) == 64) <= BUDGET
    assert 8 * SIZE <= tier.usage().nbytes <= BUDGET
    assert {stored.key for stored in tier.scan()} >= set(keys)


@pytest.mark.parametrize("kind", ["no totals", "totals too large", "negative totals", "totals that are text"])
def test_wrong_totals_are_counted_again_with_one_warning_and_nothing_is_lost(harmed, kind, caplog):
    with caplog.at_level(logging.WARNING):
        tier = harmed(kind)
        keys = write(tier, *NAMES, "new")
    assert len(read(tier, *keys)) == 9
    assert (tier.usage().entries, tier.usage().nbytes) == (9, sum(entry.nbytes for entry in tier.scan()))
    assert sum("totals" in record.message for record in caplog.records) == 1


def test_totals_that_are_too_small_are_found_at_the_next_opening(tmp_path):
    tier = DiskTier(tmp_path, BUDGET)
    write(tier, *NAMES)
    tier.close()
    sql("UPDATE totals SET bytes = 0")(tmp_path)
    assert check_whole(tmp_path, BUDGET)


def test_a_put_never_raises_after_it_has_written(harmed):
    """What has to go for it has a damaged row, and so no key to tell of."""
    tier = harmed("identifiers that are no UTF-8")
    assert len(read(tier, *write(tier, *"0123456789"))) == 10
    assert tier.usage().entries == 10


def test_names_in_an_index_lead_nowhere_else(tmp_path):
    directory, other = tmp_path / "store", tmp_path / "precious"
    tier = DiskTier(directory, BUDGET)
    write(tier, *NAMES)
    other.write_bytes(b"not ours")
    for number, name in enumerate(("../precious", "../../precious", "..")):
        owner = "'dead'" if number < 2 else "NULL"  # what a dead process had reserved is removed
        real = files(directory)[number].name
        sql(f"UPDATE entries SET name = '{name}', owner = {owner} WHERE name = '{real}'")(directory)
    for operation in (lambda: write(tier, "new"), tier.clear, lambda: tier.prune(0)):
        with suppress(TierError):
            operation()
    tier.close()
    DiskTier(directory, BUDGET).close()
    assert other.read_bytes() == b"not ours"


class TestProcessesThatDie:
    @pytest.mark.parametrize("operation", ["prune", "clear", "put"])
    def test_files_that_one_was_about_to_remove_are_removed_by_the_living(self, tmp_path, operation):
        """Killed between condemning entries and removing their files: who goes on keeps the budget."""
        living = DiskTier(tmp_path, BUDGET)
        write(living, *"0123456789")

        def work():
            tier = DiskTier(tmp_path, BUDGET)
            tier._files.unlink = lambda name: os.kill(os.getpid(), signal.SIGKILL)
            {"prune": lambda: tier.prune(0), "clear": tier.clear, "put": lambda: write(tier, "x", "y")}[operation]()

        assert Child(work).wait() == -signal.SIGKILL
        for name in "abcdefghijkl":
            write(living, name)
            assert sum(path.stat().st_size for path in files(tmp_path)) <= BUDGET
        living.close()
        check_whole(tmp_path, BUDGET)

    def test_a_file_that_one_was_writing_goes_as_well(self, tmp_path):
        living = DiskTier(tmp_path, BUDGET)

        def work():
            tier = DiskTier(tmp_path, BUDGET)
            os.writev = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
            write(tier, "a")

        assert Child(work).wait() == -signal.SIGKILL
        assert len(list((tmp_path / "writing").iterdir())) == 1
        write(living, "b")
        assert list((tmp_path / "writing").iterdir()) == []
        assert living.usage().entries == 1
        living.close()
