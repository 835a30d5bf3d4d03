"""Directories as tiers: their files, processes that are killed at them, and what has to be found afterwards."""

import os
import signal
import traceback
from pathlib import Path

from tier_helpers import key_of, rows_of, same_bits

from mmcache.tiers import DiskTier, decode_entry, encode_entry

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
