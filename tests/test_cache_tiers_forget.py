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

from mmcache import MultimodalCache, MultimodalRequest
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


@pytest.fixture(params=[False, True], ids=["all remembered", "little remembered"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a cache remembers only the last few salts and contents that it has to do with."""
    if request.param:
        for name, number in (("_PLACES", 16), ("_CONTENTS", 3), ("_AT_ONCE", 4)):
            monkeypatch.setattr(f"mmcache.cache.forgotten.{name}", number)
    return bool(request.param)


class TestManySalts:
    """Nothing that was forgotten comes back for any salt, though memory has nothing of it any more."""

    SALTS = 40

    def stored(self, rows: int = 4) -> MultimodalCache:
        """Memory has room for one image; a tier has "a" and "b" of all salts."""
        cache = make(MemoryTier(1 << 20), rows=rows)
        for n in range(self.SALTS):
            for content in "ab":
                step(cache, one_image("r", content, salt=f"tenant {n}"))
        flush(cache)
        assert cache.stats().entries == 1
        return cache

    def encoded(self, cache: MultimodalCache, content: str) -> list[int]:
        """Salts for which a step encodes the content, though it waits for what a tier may have."""
        salts = []
        for n in range(self.SALTS):
            req = one_image("r", content, salt=f"tenant {n}")
            cache.announce(req)
            flush(cache)
            if step(cache, req):
                salts.append(n)
        flush(cache)
        return salts

    def test_they_are_loaded_else(self, memory: bool) -> None:
        cache = self.stored()
        assert self.encoded(cache, "a") == []
        cache.close()

    def test_everything_is_forgotten(self, memory: bool) -> None:
        cache = self.stored()
        cache.invalidate()
        for content in "ab":
            assert self.encoded(cache, content) == list(range(self.SALTS))
        if not memory:
            assert self.encoded(cache, "a") == []  # what was encoded since stays
        cache.close()

    def test_a_content_is_forgotten(self, memory: bool) -> None:
        cache = self.stored()
        cache.invalidate(identifier="a")
        assert self.encoded(cache, "a") == list(range(self.SALTS))
        if not memory:
            assert self.encoded(cache, "b") == []
            assert self.encoded(cache, "a") == []
        cache.close()

    def test_a_content_is_forgotten_before_many_others(self, memory: bool) -> None:
        cache = self.stored()
        for identifier in ("a", *(f"other {n}" for n in range(10))):
            cache.invalidate(identifier=identifier)
        assert self.encoded(cache, "a") == list(range(self.SALTS))
        cache.close()

    def test_again_and_again(self, memory: bool) -> None:
        cache = self.stored()
        for identifier in ("a", "b", None, "a"):
            cache.invalidate(identifier=identifier)
            assert self.encoded(cache, identifier or "b") == list(range(self.SALTS))
        cache.close()

    def test_a_salt_that_always_comes_by_keeps_what_is_good(self, memory: bool) -> None:
        """However many others do meanwhile."""
        cache = self.stored()
        cache.invalidate()
        busy = one_image("r", "b", salt="busy")
        step(cache, busy)
        flush(cache)
        for n in range(self.SALTS):
            step(cache, one_image("r", "a", salt=f"tenant {n}"))
            cache.announce(busy)
            assert step(cache, busy) == []
        cache.close()

    def test_another_modality_of_a_salt_comes_by(self) -> None:
        """It finds the salt empty, as images did: they keep what was stored since."""
        cache = make(MemoryTier(1 << 20), rows=4, row_bytes={"image": ROW_BYTES, "video": ROW_BYTES})
        cache.invalidate()
        picture, clip = (
            MultimodalRequest(name, range(6), one_item(name, modality, name).items, cache_salt="tenant")
            for name, modality in (("picture", "image"), ("clip", "video"))
        )
        for req in (picture, clip):
            assert step(cache, req) == [req.request_id]
            flush(cache)
        look(cache, picture)
        assert step(cache, picture) == []
        cache.close()

    def test_what_is_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, number in (("_PLACES", 64), ("_CONTENTS", 8), ("_AT_ONCE", 16)):
            monkeypatch.setattr(f"mmcache.cache.forgotten.{name}", number)
        cache = make(MemoryTier(1 << 12), rows=4)

        def pass_by(first: int, last: int) -> None:
            for n in range(first, last):
                req = one_image("r", f"content {n}", salt=f"tenant {n}")
                cache.lookup(req, num_computed_tokens=0).release()
                cache.finish(req)
                cache.invalidate(identifier=f"content {n}")

        pass_by(0, 400)
        flush(cache)
        forgotten = cache._tiers._forgotten if cache._tiers is not None else None
        assert forgotten is not None
        assert len(forgotten._young) + len(forgotten._old) <= 64 + 2 * 16
        assert len(forgotten._contents) <= 8
        cache.close()


@pytest.mark.parametrize("identifier", [None, "a"])
@pytest.mark.parametrize("moment", ["before it looks", "after it looked", "after it reserved"])
def test_a_load_that_a_forgetting_overtakes(
    identifier: str | None, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its salt is none of those from which things go at once: it gets nothing, and what it asked for is encoded."""
    monkeypatch.setattr("mmcache.cache.forgotten._AT_ONCE", 0)
    cache = make(MemoryTier(1 << 20), rows=4)
    first = one_image("r1", "a", salt="tenant")
    step(cache, first)
    step(cache, one_image("r2", "b", salt="tenant"))
    flush(cache)
    cache.invalidate(identifier="b")  # there is free room
    assert cache._tiers is not None
    tiers, loads = cache._tiers.tiers, cache._ledger.loads
    before = cache.stats().epoch

    def forget() -> None:
        if cache.stats().epoch == before:
            cache.invalidate(identifier=identifier)

    known, reserve = tiers.known, type(loads).reserve

    def known_and(keys: Any) -> Any:
        if moment == "before it looks":
            forget()
        found = known(keys)
        if moment == "after it looked":
            forget()
        return found

    def reserve_and(self: Any, req: Any, index: int) -> Any:
        entry = reserve(self, req, index)
        forget()
        return entry

    monkeypatch.setattr(tiers, "known", known_and)
    if moment == "after it reserved":
        monkeypatch.setattr(type(loads), "reserve", reserve_and)
    cache.announce(first)
    monkeypatch.setattr(tiers, "known", known)
    flush(cache)
    assert cache.stats().epoch == before + 1
    assert step(cache, first) == ["a"]
    assert cache.stats().loads == 0
    cache.close()


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
