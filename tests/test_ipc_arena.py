"""The shared-memory arena: written once, never over budget, never torn."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ipc_helpers import KB, attach, block, content, epochs

from mmcache.errors import ArenaFullError, FieldError, MessageError, ReleasedError
from mmcache.ipc import Arena, ArenaReader, values


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(64 * KB)
    yield arena
    arena.close()
    assert not Path(arena.path).exists()


def test_content_is_written_once_and_read_without_a_copy(arena: Arena) -> None:
    fields = {"pixels": torch.randn(3, 5), "grid": [torch.ones(2, dtype=torch.bfloat16), [torch.zeros(0, 3)]]}
    first = arena.hold("a", fields)
    second = arena.hold("a", fields)
    assert second is first
    stats = arena.stats()
    assert (stats.written, stats.writes, stats.reuses) == (3 * 5 * 4 + 2 * 2, 1, 1)
    bytes_read = content(attach(arena), first)
    assert torch.equal(bytes_read[:60].view(torch.float32).view(3, 5), fields["pixels"])


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


def test_a_source_that_is_written_to_while_it_is_copied_is_another_one(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = block(value=1)

    def copied_and_changed(address: int, tensor: torch.Tensor) -> None:
        values.write_tensor(address, tensor)
        fields["pixels"].fill_(9)

    with monkeypatch.context() as patch:
        patch.setattr("mmcache.ipc.arena.write_tensor", copied_and_changed)
        old = arena.hold("a", fields)
    new = arena.hold("a", fields)
    assert new is not old
    assert content(attach(arena), new).eq(9).all()


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
    epoch = next(epochs)
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
