"""Processed features by content: kept once, owned, bounded, and never the wrong ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mmcache import (
    CacheConfig,
    ConfigError,
    FeatureCache,
    FieldConfig,
    FieldError,
    ItemFields,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
    SelfWaitError,
    encoder_inputs,
    join_fields,
    split_fields,
)

CONFIGS = {"x": FieldConfig.batched("image"), "grid": FieldConfig.batched("image", keep_on_cpu=True)}


def fields(value: float, size: int = 4) -> ItemFields:
    return ItemFields({"x": torch.full((size,), value), "grid": torch.tensor([size])}, CONFIGS)


SIZE = 4 * 4 + 8


def test_a_content_is_processed_once() -> None:
    cache = FeatureCache(10 * SIZE)
    calls = []
    for _ in range(3):
        assert cache.get_or_process("a", lambda: calls.append(1) or fields(1.0))["x"][0] == 1  # type: ignore[func-returns-value]
    assert len(calls) == 1
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries, stats.nbytes) == (2, 1, 1, SIZE)


def test_the_least_recently_used_goes_first_and_the_budget_holds() -> None:
    cache = FeatureCache(2 * SIZE)
    held = cache.put("a", fields(1.0))
    cache.put("b", fields(2.0))
    cache.get("a")
    cache.put("c", fields(3.0))
    assert cache.get("b") is None
    assert cache.stats().nbytes <= 2 * SIZE
    cache.put("d", fields(4.0))
    cache.put("e", fields(5.0))
    assert cache.get("a") is None
    assert held["x"].tolist() == [1.0] * 4  # what was handed out outlives its eviction


def test_a_fresh_payload_replaces_what_was_held() -> None:
    cache = FeatureCache(10 * SIZE)
    cache.put("a", fields(1.0))
    cache.put("a", fields(9.0, size=9))
    found = cache.get("a")
    assert found is not None
    assert found["x"].tolist() == [9.0] * 9
    assert cache.stats().entries == 1


def test_what_is_larger_than_the_cache_is_served_and_evicts_nothing() -> None:
    cache = FeatureCache(SIZE)
    cache.put("a", fields(1.0))
    assert cache.get_or_process("big", lambda: fields(2.0, size=99))["x"].shape == (99,)
    assert cache.get("big") is None
    assert cache.get("a") is not None
    assert cache.stats().oversized == 1


def test_an_entry_keeps_no_batch_alive() -> None:
    batch = torch.arange(1000.0)
    cache = FeatureCache(10 * SIZE)
    kept = cache.put("a", ItemFields({"x": batch[4:8]}, CONFIGS))
    batch.zero_()
    assert kept["x"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert kept["x"].untyped_storage().nbytes() == 16


def test_an_entry_keeps_no_array_of_numpy_alive() -> None:
    """A tensor over a view of an array looks whole, and holds all of the array."""
    array = np.arange(1000, dtype=np.float32)
    cache = FeatureCache(10 * SIZE)
    given = ItemFields({"x": torch.from_numpy(array[4:8])}, CONFIGS)
    assert given["x"].untyped_storage().nbytes() == 16
    kept = cache.put("a", given)
    array[:] = 0
    assert kept["x"].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_an_entry_keeps_no_graph_alive() -> None:
    kept = FeatureCache(10 * SIZE).put("a", ItemFields({"x": torch.ones(4, requires_grad=True) * 2}, CONFIGS))
    assert not kept["x"].requires_grad


def test_a_whole_tensor_is_not_copied() -> None:
    given = fields(1.0)
    assert FeatureCache(10 * SIZE).put("a", given)["x"].data_ptr() == given["x"].data_ptr()


def test_of_many_who_ask_at_once_one_processes() -> None:
    cache = FeatureCache(10 * SIZE)
    calls, started = [], threading.Barrier(8)

    def process() -> ItemFields:
        calls.append(1)
        threading.Event().wait(0.05)
        return fields(1.0)

    def ask(_: int) -> float:
        started.wait()
        return float(cache.get_or_process("a", process)["x"][0])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [1.0] * 8
    assert len(calls) == 1
    assert cache.stats().joins + cache.stats().hits == 7


def test_when_processing_fails_its_caller_hears_of_it_and_another_tries() -> None:
    cache = FeatureCache(10 * SIZE)
    calls, lock, begun = [], threading.Lock(), threading.Event()

    def process() -> ItemFields:
        with lock:
            calls.append(1)
            first = len(calls) == 1
        if first:
            begun.set()
            threading.Event().wait(0.05)
            raise OSError("the picture is broken")
        return fields(1.0)

    def ask(number: int) -> str:
        if number:
            begun.wait()
        try:
            return str(float(cache.get_or_process("a", process)["x"][0]))
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, range(4)))
    assert results == ["the picture is broken", "1.0", "1.0", "1.0"]
    assert len(calls) == 2


@pytest.mark.parametrize("verify", [0.0, 1.0])
def test_processing_that_asks_for_its_own_content_is_told_at_once(verify: float) -> None:
    cache = FeatureCache(10 * SIZE, verify=verify)

    def process() -> ItemFields:
        return cache.get_or_process("a", process)

    with pytest.raises(SelfWaitError, match="'a'"):
        cache.get_or_process("a", process)
    cache.put("a", fields(1.0))
    if verify:  # a hit is processed as well
        with pytest.raises(SelfWaitError):
            cache.get_or_process("a", process)
    assert cache.get_or_process("a", lambda: fields(1.0))["x"][0] == 1


def test_processing_may_ask_for_other_contents() -> None:
    cache = FeatureCache(10 * SIZE)

    def process() -> ItemFields:
        return fields(float(cache.get_or_process("part", lambda: fields(2.0))["x"][0]))

    assert cache.get_or_process("whole", process)["x"][0] == 2


def test_two_that_process_each_other_s_content_do_not_wait_for_ever() -> None:
    cache = FeatureCache(10 * SIZE)
    both = threading.Barrier(2)

    def ask(mine: str, other: str) -> str:
        def process() -> ItemFields:
            both.wait()
            return cache.get_or_process(other, lambda: fields(1.0))

        try:
            cache.get_or_process(mine, process)
        except SelfWaitError:
            return "refused"
        return "served"

    with ThreadPoolExecutor(2) as pool:
        results = [future.result(20) for future in (pool.submit(ask, "a", "b"), pool.submit(ask, "b", "a"))]
    assert sorted(results) == ["refused", "served"]


LARGE = np.arange(4000, dtype=np.float32)


@pytest.mark.parametrize("value", [LARGE, torch.arange(8000.0)[:4000], [LARGE, torch.arange(9.0)[:3]]])
def test_a_value_that_items_share_stays_one(value: object) -> None:
    """A view, or another library's memory, is copied when it comes in: once for all who share it."""
    configs = {"x": FieldConfig.batched("image"), "s": FieldConfig.shared("image", 2)}
    cache = FeatureCache(1 << 20)
    split = split_fields({"x": torch.zeros(2, 3), "s": value}, configs)["image"]
    one, other = (cache.put(name, fields) for name, fields in zip("ab", split))
    assert one["s"] is other["s"] is not split[0]["s"]
    assert join_fields([one, other])["s"] is one["s"]
    again = split_fields({"x": torch.ones(2, 3), "s": value}, configs)["image"][0]
    items = [
        MultimodalItem("image", fields, PlaceholderRange(4 * i, 2), "abc"[i])
        for i, fields in enumerate((one, other, cache.put("c", again)))
    ]
    request = MultimodalRequest("r", [1] * 12, items)
    with MultimodalCache(CacheConfig(capacity_bytes=1 << 10)).lookup(request, num_computed_tokens=0) as lookup:
        [batch] = encoder_inputs([lookup], "cpu")
        sent = [batch.kwargs["x"], *(batch.kwargs["s"] if isinstance(value, list) else [batch.kwargs["s"]])]
        assert lookup.bytes.transfer == sum(tensor.nbytes for tensor in sent)  # type: ignore[union-attr]


def test_bad_input() -> None:
    for capacity in (-1, 1.5, True):
        with pytest.raises(ConfigError):
            FeatureCache(capacity)  # type: ignore[arg-type]
    with pytest.raises(FieldError):
        FeatureCache(1).put("a", {"x": torch.ones(1)})  # type: ignore[arg-type]
    cache = FeatureCache(SIZE)
    cache.put("a", fields(1.0))
    cache.discard("a")
    cache.discard("a")
    assert cache.get("a") is None
