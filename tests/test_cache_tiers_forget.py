"""What lies in tiers and is not to be served any more: forgotten contents, and rows that are not the encoder's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, rows_of
from tier_caches import flush, learn, look, make, one_image, one_item, step
from tier_faults import LateTier
from tier_helpers import until

from mmcache.tiers import DiskTier, MemoryTier


class TestForgetting:
    """Rows of other weights are served to nobody who asks after `invalidate`, wherever they were when it was called."""

    def test_answers_that_are_under_way(self) -> None:
        near, far = MemoryTier(1 << 20, name="near"), LateTier(MemoryTier(1 << 20, name="far"))
        writer = make(far.inner)
        step(writer, one_image("r1"))
        flush(writer)
        cache = make(near, far, tier_deadline=600.0)
        look(cache, one_image("r2"))
        far.hang()
        lookup = cache.lookup(one_image("r3"), num_computed_tokens=0)
        assert lookup.in_flight == (0,)
        until(lambda: far.calls["read"])
        cache.invalidate()
        flush(cache)
        far.go_on()
        lookup.wait(20)
        assert lookup.missing == (0,)
        lookup.release()
        flush(cache)
        assert step(cache, one_image("r4")) == ["a"]
        cache.close()
        writer.close()

    def test_rows_that_an_insert_on_another_thread_is_about_to_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = MemoryTier(1 << 20)
        cache = make(memory)
        link = cache._tiers
        assert link is not None
        real_key = link.key

        def key(*arguments: Any) -> Any:
            made = real_key(*arguments)
            other = threading.Thread(target=cache.invalidate)
            other.start()
            other.join(20)
            flush(cache)
            return made

        req = one_image("r1")
        lookup = cache.lookup(req, num_computed_tokens=0)
        monkeypatch.setattr(link, "key", key)
        cache.insert(lookup, [rows_of("a", 4)])
        monkeypatch.undo()
        assert torch.equal(lookup.rows(0), rows_of("a", 4))  # its own lookup keeps them
        flush(cache)
        assert list(memory.scan()) == []
        cache.close()

    def test_loads_that_begin_while_the_ledger_forgets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = make(MemoryTier(1 << 20), rows=4)
        step(cache, one_image("r1", "a"))
        step(cache, one_image("r2", "b"))  # takes the room of "a", which is in the tier
        flush(cache)
        real = cache._ledger.invalidate
        statuses = []

        def invalidate(identifier: str | None = None) -> None:
            real(identifier)
            with cache.lookup(one_image("r3", "a"), num_computed_tokens=0) as lookup:
                statuses.append(lookup.missing)

        monkeypatch.setattr(cache._ledger, "invalidate", invalidate)
        cache.invalidate()
        assert statuses == [(0,)]
        cache.close()

    @pytest.mark.parametrize("identifier", [None, "a"])
    @pytest.mark.parametrize("where", [{}, {"salt": "tenant"}, {"salt": ""}, {"adapter": "x"}])
    def test_salts_and_adapters_that_this_process_has_not_seen(
        self, tmp_path: Path, identifier: str | None, where: dict[str, Any]
    ) -> None:
        settings = {"adapter_touches_encoder": True}
        first = make(DiskTier(tmp_path, 1 << 20), **settings)
        step(first, one_image("r1", **where))
        first.close()
        second = make(DiskTier(tmp_path, 1 << 20), **settings)
        second.invalidate(identifier=identifier)
        second.announce(one_image("r2", **where))
        flush(second)
        assert step(second, one_image("r2", **where)) == ["a"]
        flush(second)
        second.close()
        third = make(DiskTier(tmp_path, 1 << 20), **settings)  # what was encoded afterwards is stored and stays
        learn(third, one_image("r3", **where))
        until(lambda: third.stats().loads == 1)
        third.close()

    def test_modalities_that_this_process_has_not_seen(self, tmp_path: Path) -> None:
        settings = {"row_bytes": {"lidar": ROW_BYTES}}
        for name in ("stores", "forgets"):
            cache = make(DiskTier(tmp_path, 1 << 20), **settings)
            if name == "forgets":
                cache.invalidate(identifier="logo")
            req = one_item(name, "lidar")
            cache.announce(req)
            flush(cache)
            lookup = cache.lookup(req, num_computed_tokens=0)
            assert lookup.missing == (0,)
            cache.insert(lookup, [rows_of(name, 4)])
            cache.close()

    def test_other_contents_stay(self, tmp_path: Path) -> None:
        first = make(DiskTier(tmp_path, 1 << 20))
        step(first, one_image("r1", "b", salt="tenant"))
        first.close()
        second = make(DiskTier(tmp_path, 1 << 20))
        second.invalidate(identifier="a")
        learn(second, one_image("r2", "b", salt="tenant"))
        until(lambda: second.stats().loads == 1)
        second.close()


@pytest.mark.parametrize(
    ("wrong", "dtype_known"),
    [
        (torch.zeros(4, 2 * WIDTH), False),
        (torch.zeros(4, 2 * WIDTH), True),
        (torch.zeros(4, 2 * WIDTH, dtype=torch.float16), True),  # as many bytes as the right ones
    ],
)
def test_rows_of_another_width_or_dtype_are_replaced(tmp_path: Path, wrong: torch.Tensor, dtype_known: bool) -> None:
    """The number of rows is right, so nothing but the encoder's own rows tells."""
    first = make(DiskTier(tmp_path, 1 << 20), row_bytes={})
    with first.lookup(one_image("r1"), num_computed_tokens=0) as lookup:
        first.insert(lookup, [wrong])
    first.close()
    for encodes in (["a"], []):
        cache = make(DiskTier(tmp_path, 1 << 20))
        if dtype_known:
            step(cache, one_image("r2", "other"))
        req = one_image("r3")
        learn(cache, req)
        until(lambda cache=cache: cache.stats().failed_loads + cache.stats().loads == 1)
        assert step(cache, req) == encodes
        cache.close()
