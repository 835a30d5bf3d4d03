"""The file of an arena: refused where it cannot be, never left behind, whoever is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ipc_helpers import KB, attach, block, content, epochs

from mmcache.errors import ArenaFullError, ConfigError, ReleasedError
from mmcache.ipc import Arena, ArenaReader, remove_abandoned


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * KB)
    yield arena
    arena.close()
    assert not Path(arena.path).exists()


def test_a_closed_arena_takes_nothing_and_is_not_attached_to(arena: Arena) -> None:
    arena.close()
    arena.close()
    with pytest.raises(ReleasedError):
        arena.hold("a", block())
    with pytest.raises(ConfigError):
        attach(arena)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, "1 GB", 1 << 62, 1 << 70])
def test_an_impossible_budget_is_refused(capacity: object) -> None:
    with pytest.raises(ConfigError):
        Arena(capacity)  # type: ignore[arg-type]


def test_a_directory_that_cannot_hold_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Arena(KB, directory=tmp_path / "nowhere")


def test_a_file_that_is_no_arena_is_not_attached_to(tmp_path: Path) -> None:
    for data in (b"", b"mmcarena", bytes(10_000)):
        path = tmp_path / "file"
        path.write_bytes(data)
        with pytest.raises(ConfigError):
            ArenaReader(str(path), 5)


def test_a_full_file_system_is_an_error_at_the_start_and_leaves_nothing() -> None:
    before = sorted(os.listdir("/dev/shm"))
    with pytest.raises(ArenaFullError) as error:
        Arena(1 << 50)
    assert "shm-size" in str(error.value)
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_a_small_file_system_never_ends_the_process_while_it_is_written(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount")
    try:
        with pytest.raises(ArenaFullError):
            Arena(512 * KB, directory=tmp_path)
        arena = Arena(200 * KB, directory=tmp_path)
        held = arena.hold("a", block(180 * KB, 3))
        assert content(attach(arena), held).eq(3).all()
        with pytest.raises(ArenaFullError):
            Arena(200 * KB, directory=tmp_path)
        arena.close()
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("call", ["fcntl.fcntl", "os.link", "mmap.mmap"])
def test_a_host_that_cannot_lock_link_or_map_is_refused_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = sorted(os.listdir("/dev/shm"))
    monkeypatch.setattr(f"mmcache.ipc.segment.{call}", fail)
    with pytest.raises(ConfigError, match="Operation not permitted"):
        Arena(KB)
    assert sorted(os.listdir("/dev/shm")) == before


def test_what_cannot_be_mapped_is_not_attached_to(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    epoch = next(epochs)
    monkeypatch.setattr("mmcache.ipc.segment.mmap.mmap", fail)
    with pytest.raises(ConfigError, match="Cannot allocate memory"):
        ArenaReader(arena.path, epoch)
    assert not arena.reader_lives(epoch)


def test_files_of_others_with_such_a_name_stay(tmp_path: Path) -> None:
    (tmp_path / "mmcache-arena-notes.txt").write_text("mine")
    (tmp_path / "mmcache-arena-folder").mkdir()
    assert remove_abandoned(tmp_path) == []
    assert len(os.listdir(tmp_path)) == 2


OWNER = """
import sys, time, torch
from mmcache.ipc import Arena
arena = Arena(1 << 16)
region = arena.hold("a", {"x": torch.full((1000,), 7, dtype=torch.uint8)})
print(arena.path, region.offset, region.nbytes, region.serial, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
"""


def start_owner(how: str) -> tuple[subprocess.Popen[str], list[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def test_a_killed_owner_leaves_nothing_past_the_next_start_and_its_readers_go_on() -> None:
    process, (path, *place) = start_owner("wait")
    reader = ArenaReader(path, next(epochs))
    assert path not in remove_abandoned()
    assert Path(path).exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Path(path).exists()
    arena = Arena(KB)
    assert not Path(path).exists()
    assert Path(arena.path).exists()
    assert reader.block(*map(int, place), lambda: None).eq(7).all()  # type: ignore[arg-type]
    arena.close()


def test_an_owner_that_ends_removes_its_file() -> None:
    process, (path, *_) = start_owner("end")
    process.wait()
    assert not Path(path).exists()


def test_two_owners_do_not_disturb_each_other() -> None:
    one, other = Arena(KB), Arena(KB)
    assert one.path != other.path
    assert Path(one.path).exists()
    one.close()
    assert Path(other.path).exists()
    other.close()


FORKER = """
import os, time
from mmcache.ipc import Arena
arena = Arena(1 << 16)
child = os.fork()
if child == 0:
    time.sleep(60)
print(arena.path, child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_neither_removes_the_file_nor_keeps_it_past_its_owner() -> None:
    arena = Arena(KB)
    child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert Path(arena.path).exists()
    arena.close()
    process = subprocess.Popen([sys.executable, "-c", FORKER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path, forked = process.stdout.readline().split()
    process.kill()
    process.wait()
    try:
        assert path in remove_abandoned()
    finally:
        os.kill(int(forked), signal.SIGKILL)


def read_until_killed(path: str, epoch: int, pipe: multiprocessing.connection.Connection) -> None:
    reader = ArenaReader(path, epoch)
    pipe.send(True)
    time.sleep(60)
    del reader


def test_a_killed_reader_stops_counting(arena: Arena) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    epoch = next(epochs)
    process = context.Process(target=read_until_killed, args=(arena.path, epoch, theirs))
    process.start()
    assert ours.recv()
    assert arena.reader_lives(epoch)
    process.kill()
    process.join()
    assert not arena.reader_lives(epoch)
