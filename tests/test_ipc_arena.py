"""The shared-memory arena: written once, never over budget, never torn, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmcache.errors import ArenaFullError, ConfigError, FieldError, MessageError, ReleasedError
from mmcache.ipc import Arena, ArenaReader, Region, remove_abandoned

KB = 1024


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * KB)
    yield arena
    arena.close()
    assert not Path(arena.path).exists()


def block(size: int = KB, value: int = 1) -> dict[str, Tensor]:
    return {"pixels": torch.full((size,), value, dtype=torch.uint8)}


def content(reader: ArenaReader, region: Region) -> Tensor:
    return reader.block(region.offset, region.nbytes, region.serial, lambda: None).clone()


_epoch = iter(range(1 << 40, 1 << 41))


def attach(arena: Arena) -> ArenaReader:
    return ArenaReader(arena.path, next(_epoch))


def test_content_is_written_once_and_read_without_a_copy(arena: Arena) -> None:
    values = {"pixels": torch.randn(3, 5), "grid": [torch.ones(2, dtype=torch.bfloat16), [torch.zeros(0, 3)]]}
    first = arena.hold("a", values)
    second = arena.hold("a", values)
    assert second is first
    stats = arena.stats()
    assert (stats.written, stats.writes, stats.reuses) == (3 * 5 * 4 + 2 * 2, 1, 1)
    bytes_read = content(attach(arena), first)
    assert torch.equal(bytes_read[:60].view(torch.float32).view(3, 5), values["pixels"])


def test_equal_content_of_another_object_is_not_written_again(arena: Arena) -> None:
    first = arena.hold("a", block(value=7))
    assert arena.hold("a", block(value=7)) is first
    assert arena.stats().writes == 1


def test_fresh_content_beats_what_lies_under_its_key_and_holders_keep_the_old(arena: Arena) -> None:
    old = arena.hold("a", block(value=1))
    for fresh in (block(value=2), block(2 * KB, 2), {"pixels": block()["pixels"].to(torch.int8)}):
        new = arena.hold("a", fresh)
        assert new is not old
        assert arena.hold("a", fresh) is new
    reader = attach(arena)
    assert content(reader, old).eq(1).all()
    assert arena.stats().regions == 4 - 2 + 2  # nothing that is held was given up


def test_a_source_that_was_written_to_is_noticed(arena: Arena) -> None:
    fields = block(value=1)
    old = arena.hold("a", fields)
    fields["pixels"][5] = 9
    new = arena.hold("a", fields)
    assert new is not old
    assert content(attach(arena), new)[5] == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64])
def test_any_stride_and_dtype_is_written_in_logical_order(arena: Arena, dtype: torch.dtype) -> None:
    base = torch.arange(24).remainder(5).reshape(4, 6).to(dtype)
    for tensor in (base.t(), base[:, ::2], base[1:], base.reshape(-1)[3], base[:1].expand(3, 6)):
        region = arena.hold(object(), {"x": tensor})
        read = content(attach(arena), region)
        assert torch.equal(read, tensor.contiguous().reshape(-1).view(torch.uint8))
    assert torch.equal(
        content(attach(arena), arena.hold("conj", {"x": torch.tensor([1 + 2j]).conj()})).view(torch.complex64),
        torch.tensor([1 - 2j]),
    )


def test_parameters_and_nan_payloads_travel_bit_for_bit(arena: Arena) -> None:
    bits = torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32)
    parameter = torch.nn.Parameter(bits.view(torch.float32))
    assert torch.equal(content(attach(arena), arena.hold("a", {"x": parameter})).view(torch.int32), bits)


def test_what_cannot_travel_is_an_error_that_names_the_field(arena: Arena) -> None:
    nested = torch.zeros(1)
    for _ in range(40):
        nested = [nested]
    for value in (torch.zeros(3, 3).to_sparse(), nested):
        with pytest.raises(FieldError) as error:
            arena.hold("a", {"x": value})
        assert error.value.field == "x"
    assert arena.stats().regions == 0


def test_unreferenced_content_goes_in_the_order_of_its_last_use(arena: Arena) -> None:
    for name in "abc":
        arena.release(arena.hold(name, block(16 * KB)))
    arena.release(arena.hold("a", block(16 * KB)))
    held = arena.hold("d", block(30 * KB))
    assert arena.find("b") is None
    assert arena.find("a") is not None
    assert arena.stats().used <= arena.capacity_bytes
    arena.release(held)


def test_what_is_held_never_goes(arena: Arena) -> None:
    first, second = arena.hold("a", block(30 * KB, 3)), arena.hold("b", block(30 * KB, 4))
    with pytest.raises(ArenaFullError, match="in use"):
        arena.hold("c", block(8 * KB))
    assert content(attach(arena), first).eq(3).all()
    arena.release(second)
    assert arena.hold("c", block(8 * KB)).refs == 1


def test_content_larger_than_the_arena_is_refused_at_once(arena: Arena) -> None:
    arena.release(arena.hold("a", block(30 * KB)))
    with pytest.raises(ArenaFullError, match="larger than the arena"):
        arena.hold("b", block(65 * KB))
    assert arena.find("a") is not None


def test_freed_pieces_join(arena: Arena) -> None:
    held = [arena.hold(number, block(15 * KB)) for number in range(4)]
    for region in (held[1], held[3], held[0], held[2]):
        arena.release(region)
    assert arena.hold("all", block(63 * KB)).nbytes == 63 * KB


def test_giving_back_more_than_was_held_is_an_error(arena: Arena) -> None:
    region = arena.hold("a", block())
    arena.release(region)
    with pytest.raises(ReleasedError):
        arena.release(region)
    assert arena.stats().referenced == 0


def test_discarded_content_is_not_found_and_stays_for_its_holders(arena: Arena) -> None:
    region = arena.hold("a", block(value=5))
    arena.discard("a")
    assert arena.find("a") is None
    assert content(attach(arena), region).eq(5).all()
    arena.release(region)
    assert arena.stats().regions == 0
    arena.release(arena.hold("b", block()))
    arena.clear()
    assert arena.stats().used == 0


def test_content_of_another_kind_or_size_is_not_found(arena: Arena) -> None:
    held = arena.hold("a", block(), kind=("image", 3), note="how to read it")
    assert arena.find("a", kind=("image", 4)) is None
    assert arena.find("a") is None
    found = arena.find("a", kind=("image", 3))
    assert found is held
    assert found.note == "how to read it"


def test_a_failing_copy_leaves_nothing(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr("mmcache.ipc.arena.write_tensor", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        arena.hold("a", block())
    assert arena.stats().used == 0


def test_a_reader_never_takes_one_content_for_another(arena: Arena) -> None:
    reader = attach(arena)
    region = arena.hold("a", block())
    stale = (region.offset, region.nbytes, region.serial)
    arena.release(region)
    arena.discard("a")
    for place in (stale, (0, 10, 1), (1 << 40, 10, 1), (64, -1, 1)):
        with pytest.raises(MessageError):
            reader.view(*place)
    arena.hold("b", block(value=2))  # in the same place
    with pytest.raises(MessageError):
        reader.block(*stale, lambda: None)


def test_the_last_tensor_of_a_region_is_told_once_whatever_was_made_of_it(arena: Arena) -> None:
    region = arena.hold("a", block())
    told: list[int] = []
    tensor = attach(arena).block(region.offset, region.nbytes, region.serial, lambda: told.append(1))
    view = tensor.view(torch.int16)[3:9].unbind(0)[2]
    del tensor
    assert not told
    del view
    assert told == [1]


def test_a_reader_counts_as_alive_as_long_as_a_tensor_of_it_is(arena: Arena) -> None:
    region = arena.hold("a", block(value=6))
    epoch = next(_epoch)
    reader = ArenaReader(arena.path, epoch)
    assert arena.reader_lives(epoch)
    assert not arena.reader_lives(epoch + 1)
    tensor = reader.block(region.offset, region.nbytes, region.serial, lambda: None)[10:20]
    del reader
    assert arena.reader_lives(epoch)
    arena.close()
    assert tensor.eq(6).all()
    del tensor
    assert not arena.reader_lives(epoch)


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

    epoch = next(_epoch)
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
    reader = ArenaReader(path, next(_epoch))
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
    epoch = next(_epoch)
    process = context.Process(target=read_until_killed, args=(arena.path, epoch, theirs))
    process.start()
    assert ours.recv()
    assert arena.reader_lives(epoch)
    process.kill()
    process.join()
    assert not arena.reader_lives(epoch)


@pytest.mark.parametrize("threads", [1, 8])
def test_any_number_of_threads_find_their_own_bytes_and_a_sound_account(threads: int) -> None:
    arena = Arena(64 * KB)
    reader = attach(arena)
    failures: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            size, value = rng.choice([100, 1000, 7000]), rng.randrange(4)
            try:
                region = arena.hold((size, value), block(size, value))
            except ArenaFullError:
                continue
            if not content(reader, region).eq(value).all():
                failures.append((size, value))
            if rng.random() < 0.1:
                arena.discard((size, value))
            arena.release(region)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert arena.stats().referenced == 0
    arena.clear()
    assert arena.stats().used == 0
    assert arena.hold("all", block(60 * KB)).nbytes == 60 * KB
    arena.close()
