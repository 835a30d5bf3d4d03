"""Waiting for another request's encode: threads and asyncio tasks, one encode for all, and no wait without an end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of

from mmcache import (
    CacheConfig,
    MultimodalCache,
    MultimodalRequest,
    ReleasedError,
    RequestError,
    SelfWaitError,
    WaitTimeoutError,
)


@pytest.fixture
def cache() -> MultimodalCache:
    return MultimodalCache(CacheConfig(capacity_bytes=100 * ROW_BYTES, row_bytes={"image": ROW_BYTES}))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits looks around every second all the same, which would hide that nobody wakes it."""
    monkeypatch.setattr("mmcache.cache.lookup._LOOK_AGAIN", 3600.0)


def one_image(name: str, identifier: str = "a") -> MultimodalRequest:
    return request(name, 6, images((1, 4), ids=[identifier]))


def test_eight_threads_ask_at_once_and_one_encodes(cache: MultimodalCache) -> None:
    barrier = threading.Barrier(8)
    encodes = []

    def run(number: int) -> torch.Tensor:
        req = one_image(f"r{number}")
        barrier.wait()
        with cache.lookup(req, num_computed_tokens=0) as lookup:
            while lookup.missing or lookup.in_flight:
                if lookup.missing:
                    encodes.append(number)
                    cache.insert(lookup, [rows_of("a", 4)])
                else:
                    lookup.wait(30)
            target = torch.zeros(6, WIDTH)
            lookup.merge_into(target)
        cache.finish(req)
        return target

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert len(encodes) == 1
    assert all(torch.equal(result[1:5], rows_of("a", 4)) for result in results)
    assert cache.stats().pinned_bytes == 0


def test_when_owners_fail_one_after_the_other_each_time_one_takes_over(cache: MultimodalCache) -> None:
    barrier = threading.Barrier(8)
    owners = []

    def run(number: int) -> bool:
        req = one_image(f"r{number}")
        lookup = cache.lookup(req, num_computed_tokens=0)
        barrier.wait()
        while lookup.in_flight:
            lookup.wait(30)
        mine = bool(lookup.missing)
        if mine:
            owners.append(number)
            if len(owners) == 3:
                cache.insert(lookup, [rows_of("a", 4)])
            else:
                cache.finish(req)  # the encoder failed, or the client went away
                return False
        return torch.equal(lookup.rows(0), rows_of("a", 4))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert len(owners) == 3
    assert results.count(True) == 6
    assert cache.stats().takeovers == 2


def test_waiting_for_oneself_is_an_error(cache: MultimodalCache) -> None:
    req = one_image("r")
    lookup = cache.lookup(req, num_computed_tokens=0)
    with pytest.raises(SelfWaitError, match="'r'"):
        lookup.wait()
    again = cache.lookup(req, num_computed_tokens=0)
    with pytest.raises(SelfWaitError):
        again.wait()
    with pytest.raises(SelfWaitError):
        asyncio.run(again.ready())


def test_with_nothing_to_wait_for_there_is_no_wait(cache: MultimodalCache) -> None:
    lookup = cache.lookup(request("text", 6), num_computed_tokens=0)
    assert not lookup.wait()
    assert not asyncio.run(lookup.ready())


def test_a_wait_ends_with_its_timeout(cache: MultimodalCache) -> None:
    owner = cache.lookup(one_image("r1"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2"), num_computed_tokens=0)
    with pytest.raises(WaitTimeoutError, match="'r2'"):
        waiter.wait(0.02)
    with pytest.raises(WaitTimeoutError):
        asyncio.run(waiter.ready(0.02))
    cache.insert(owner, [rows_of("a", 4)])
    assert waiter.wait(0).ready == (0,)


def test_a_wait_ends_with_the_lease_of_the_owner() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=100 * ROW_BYTES, lease_seconds=0.5))
    owner = cache.lookup(one_image("r1"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2"), num_computed_tokens=0)
    assert waiter.wait().mine == (0,)
    assert owner.missing == waiter.missing == (0,)


def test_a_new_request_takes_over_from_an_owner_beyond_its_lease() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=100 * ROW_BYTES, lease_seconds=1e-9))
    owner = cache.lookup(one_image("r0"), num_computed_tokens=0)
    assert cache.lookup(one_image("r1"), num_computed_tokens=0).missing == (0,)
    assert owner.missing == (0,)


def test_a_wait_ends_with_the_waiter(cache: MultimodalCache) -> None:
    owner = cache.lookup(one_image("r1"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2"), num_computed_tokens=0)
    timer = threading.Timer(0.05, cache.finish, args=(waiter.request,))
    timer.start()
    with pytest.raises(ReleasedError):
        waiter.wait(30)
    timer.join()
    owner.release()


def test_tasks_wait_without_blocking_their_loop(cache: MultimodalCache) -> None:
    encodes = []

    async def run(number: int) -> bool:
        with cache.lookup(one_image(f"r{number}"), num_computed_tokens=0) as lookup:
            while lookup.in_flight or lookup.missing:
                if lookup.missing:
                    encodes.append(number)
                    await asyncio.sleep(0.01)  # the encoder runs
                    if number == 0:
                        break  # it fails
                    cache.insert(lookup, [rows_of("a", 4)])
                else:
                    await lookup.ready(30)
            return bool(lookup.stored)

    async def main() -> list[bool]:
        return list(await asyncio.gather(*(run(number) for number in range(8))))

    assert asyncio.run(main()) == [False] + [True] * 7
    assert encodes == [0, 1]


def test_a_task_is_woken_by_a_thread(cache: MultimodalCache) -> None:
    owner = cache.lookup(one_image("r1"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2"), num_computed_tokens=0)

    async def main() -> tuple[int, ...]:
        timer = threading.Timer(0.05, cache.insert, args=(owner, [rows_of("a", 4)]))
        timer.start()
        return (await waiter.ready(30)).ready

    assert asyncio.run(main()) == (0,)


def test_a_cancelled_wait_leaves_the_lookup_as_it_was(cache: MultimodalCache) -> None:
    owner = cache.lookup(one_image("r1"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2"), num_computed_tokens=0)

    async def main() -> None:
        task = asyncio.create_task(waiter.ready(30))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    cache.insert(owner, [rows_of("a", 4)])
    assert waiter.poll().ready == (0,)


def test_a_forgotten_lookup_is_released_and_counted(cache: MultimodalCache) -> None:
    forgotten = cache.lookup(one_image("r1"), num_computed_tokens=0)
    waiter = cache.lookup(one_image("r2"), num_computed_tokens=0)
    del forgotten
    gc.collect()
    assert waiter.poll().mine == (0,)
    assert cache.stats().forgotten_lookups == 1


def test_an_abort_while_the_encoder_runs_leaves_nothing_behind(cache: MultimodalCache) -> None:
    """The request ends in another thread between the check of the rows and their storing."""
    rows = rows_of("a", 4)
    for _ in range(50):
        req = one_image("r")
        lookup = cache.lookup(req, num_computed_tokens=0)
        thread = threading.Thread(target=cache.finish, args=(req,))
        thread.start()
        with contextlib.suppress(ReleasedError):
            cache.insert(lookup, [rows])
        thread.join()
        cache.finish(req)
        cache._ledger.check()
        assert cache._store.nbytes == cache.stats().used_bytes
        cache.clear()


@pytest.mark.slow
def test_eight_threads_on_a_tiny_budget_for_thirty_seconds() -> None:
    """No deadlock, no wrong row, no lost entry, no negative count."""
    cache = MultimodalCache(CacheConfig(capacity_bytes=10 * ROW_BYTES, lease_seconds=0.5))
    contents = {name: 1 + number % 6 for number, name in enumerate("abcdefgh")}
    stop = threading.Event()
    failures: list[BaseException] = []

    def run(number: int) -> int:
        generator = torch.Generator().manual_seed(number)
        turns = 0

        def below(limit: int) -> int:
            return int(torch.randint(limit, (1,), generator=generator))

        try:
            while not stop.is_set():
                turns += 1
                names = [sorted(contents)[below(8)] for _ in range(1 + below(3))]
                spans, position = [], 0
                for name in names:
                    spans.append((position, contents[name]))
                    position += contents[name] + 1
                req = request(f"{number}-{turns}", position, images(*spans, ids=names))
                if not below(4):
                    cache.announce(req)
                with cache.lookup(req, num_computed_tokens=0) as lookup:
                    while lookup.missing or lookup.in_flight:
                        if lookup.missing:
                            if not below(8):
                                break  # the encoder fails
                            first = lookup.missing[0]
                            cache.insert(lookup, {first: rows_of(names[first], contents[names[first]])})
                        else:
                            lookup.wait(20)
                    for index in lookup.stored:
                        assert torch.equal(lookup.rows(index), rows_of(names[index], contents[names[index]]))
                    if not below(10):
                        cache.invalidate()
                if below(2):
                    cache.commit(req, position)
                cache.finish(req)
        except BaseException as error:
            failures.append(error)
            stop.set()
        return turns

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(run, number) for number in range(8)]
        stop.wait(30)
        stop.set()
        turns = [future.result(60) for future in futures]
    if failures:
        raise failures[0]
    assert min(turns) > 10
    cache._ledger.check()
    assert cache.stats().pinned_bytes == 0
    assert cache._store.nbytes == cache.stats().used_bytes


@pytest.mark.parametrize("moment", ["before the rows are taken", "while they are copied"])
def test_an_abort_during_an_insert_leaves_nothing_behind(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, row_bytes={"image": ROW_BYTES}))
    req = request("r", 20, images((0, 4), (10, 4)))
    lookup = cache.lookup(req, num_computed_tokens=0)
    rows = [rows_of("a", 4), rows_of("b", 4)]
    step = "numel" if moment.startswith("before") else "clone"
    original = getattr(torch.Tensor, step)

    def interrupted(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
        other = threading.Thread(target=cache.finish, args=(req,))
        other.start()
        other.join()
        return original(tensor, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, step, interrupted)
        cache.insert(lookup, rows)
    stats = cache.stats()
    assert (stats.entries, stats.used_bytes, stats.pinned_bytes) == (0, 0, 0)
    assert cache._store.nbytes == 0  # nothing that no plan names any more
    assert cache.lookup(req, num_computed_tokens=0).missing == (0, 1)


@pytest.mark.parametrize("timeout", ["x", "1", True, float("nan"), [1], 1j])
def test_a_timeout_is_a_number_of_seconds(cache: MultimodalCache, timeout: Any) -> None:
    owner, waiter = (cache.lookup(one_image(name), num_computed_tokens=0) for name in "ow")
    with pytest.raises(RequestError, match=r"'w'.*timeout"):
        waiter.wait(timeout)
    with pytest.raises(RequestError, match=r"'w'.*timeout"):
        asyncio.run(waiter.ready(timeout))
    cache.insert(owner, [rows_of("a", 4)])
    assert waiter.wait(float("inf")).ready == (0,)
