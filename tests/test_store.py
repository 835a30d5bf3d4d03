"""Where a worker keeps rows: under handles, in memory of their own, in the order of the device's streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, images, request, rows_of

from mmcache import (
    CacheConfig,
    ConfigError,
    EmbeddingError,
    EmbeddingStore,
    MultimodalCache,
    RequestError,
    UnresolvedItemError,
)
from mmcache.testing import SimulatedDevice


class Streams:
    """One current stream at a time; writes down what is asked of it."""

    def __init__(self) -> None:
        self.current = "main"
        self.log: list[tuple[str, ...]] = []

    def record(self) -> str:
        self.log.append((self.current, "records"))
        return f"what {self.current} did"

    def wait(self, event: str) -> None:
        self.log.append((self.current, "waits for", event))

    def used(self, tensor: torch.Tensor) -> None:
        self.log.append((self.current, "reads"))


def test_a_reader_s_stream_waits_for_the_writer_s_and_the_host_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And memory is marked as read by each stream, so that it is given back only after the last of them."""
    streams = Streams()
    monkeypatch.setattr("mmcache.store.staging_for", lambda device: SimpleNamespace(streams=streams))
    with SimulatedDevice("cuda:0") as device:
        cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20, device="cuda:0"))
        lookup = cache.lookup(request("r", 6, images((1, 4))), num_computed_tokens=0)
        rows = device.to_device(rows_of("a", 4))
        device.clear()
        streams.current = "encoder"
        cache.insert(lookup, [rows])
        for reader in ("main", "other"):
            streams.current = reader
            lookup.rows(0)
        assert device.host_reads == []
        assert not [move for move in device.moves if move.blocks]
    assert streams.log == [
        ("encoder", "records"),
        ("main", "waits for", "what encoder did"),
        ("main", "reads"),
        ("other", "waits for", "what encoder did"),
        ("other", "reads"),
    ]


def test_a_handle_is_replaced_dropped_and_counted() -> None:
    store = EmbeddingStore()
    assert store.put(1, rows_of("a", 4)) == 4 * ROW_BYTES
    assert store.put(1, rows_of("b", 9)) == store.nbytes == 9 * ROW_BYTES
    assert torch.equal(store.get(1), rows_of("b", 9))  # type: ignore[arg-type]
    store.drop([1, 1, 7])
    assert (len(store), store.nbytes, store.get(1)) == (0, 0, None)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        lambda batch: batch[1:5],
        lambda batch: batch[:4],
        lambda batch: batch[::2][:4],
        lambda batch: batch.t()[:4],
        lambda batch: batch[:1].expand(4, -1),
        lambda batch: torch.from_numpy(batch.numpy()[1:5]),
        lambda batch: torch.frombuffer(bytearray(64), dtype=torch.float32).view(4, 4),
    ],
)
def test_what_is_kept_keeps_nothing_else_alive(view: Any, copy: bool) -> None:
    given = view(rows_of("a", 100))
    store = EmbeddingStore()
    held = store.put(1, given, copy=copy)
    rows = store.get(1)
    assert rows is not None
    assert torch.equal(rows, given)
    assert rows.untyped_storage().nbytes() == held == given.numel() * 4
    assert rows.data_ptr() != given.data_ptr()


def test_what_a_plan_does_not_ask_for_is_not_kept() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    plan = cache.lookup(request("r", 20, images((1, 4), (8, 4))), num_computed_tokens=0).plan
    store = EmbeddingStore()
    for bad in ({2: rows_of("a", 4)}, {0: rows_of("a", 4), 1: rows_of("b", 5)}, {True: rows_of("b", 4)}):
        with pytest.raises(EmbeddingError, match="'r'"):
            store.put_planned(plan, bad)
        assert len(store) == 0
    with pytest.raises(UnresolvedItemError, match="item 0"):
        store.rows(plan, 0)
    assert store.put_planned(plan, {0: rows_of("a", 4)}) == {0: 4 * ROW_BYTES}
    assert torch.equal(store.rows(plan, 0), rows_of("a", 4))


def test_rows_come_by_item_or_in_the_order_of_what_is_missing() -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    plan = cache.lookup(request("r", 20, images((1, 4), (8, 4))), num_computed_tokens=0).plan
    rows = [rows_of("a", 4), rows_of("b", 4)]
    for given in (rows, tuple(rows), torch.stack(rows), dict(enumerate(rows))):
        store = EmbeddingStore()
        assert store.put_planned(plan, given) == {0: 4 * ROW_BYTES, 1: 4 * ROW_BYTES}
        assert all(torch.equal(store.rows(plan, index), rows[index]) for index in (0, 1))


@pytest.mark.parametrize(
    "given",
    [[], [torch.ones(4, 4)], [torch.ones(4, 4)] * 3, torch.ones(4, 4), torch.tensor(1.0), "ab", None, {1, 2}],
    ids=range(8),
)
def test_a_sequence_that_is_not_one_of_what_is_missing_is_refused(given: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    plan = cache.lookup(request("r", 20, images((1, 4), (8, 4))), num_computed_tokens=0).plan
    store = EmbeddingStore()
    with pytest.raises(EmbeddingError, match="'r'"):
        store.put_planned(plan, given)
    assert len(store) == 0


@pytest.mark.parametrize("index", [True, "x", -1, 2, 1.0, None], ids=range(6))
def test_rows_are_those_of_an_item(index: Any) -> None:
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    plan = cache.lookup(request("r", 20, images((1, 4), (8, 4))), num_computed_tokens=0).plan
    store = EmbeddingStore()
    store.put_planned(plan, [rows_of("a", 4), rows_of("b", 4)])
    with pytest.raises(RequestError, match="'r'"):
        store.rows(plan, index)
    assert torch.equal(store.rows(plan, torch.tensor(1)), rows_of("b", 4))  # type: ignore[arg-type]


def test_a_device_holds_values() -> None:
    with pytest.raises(ConfigError, match="meta"):
        EmbeddingStore("meta")


@pytest.mark.parametrize("rows", ["x", None, [[1.0]], 7])
def test_what_is_kept_is_a_tensor(rows: Any) -> None:
    store = EmbeddingStore()
    with pytest.raises(EmbeddingError, match="Tensor"):
        store.put(1, rows)
    assert len(store) == 0


@pytest.mark.parametrize("plan", [None, "r", {}])
def test_a_store_obeys_plans_alone(plan: Any) -> None:
    store = EmbeddingStore()
    store.put(1, rows_of("a", 4))
    for use in (store.apply, lambda plan: store.put_planned(plan, {}), lambda plan: store.rows(plan, 0)):
        with pytest.raises(RequestError, match="StepPlan"):
            use(plan)
    assert store.handles() == (1,)
