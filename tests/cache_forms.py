"""A cache in both its forms, one process and a scheduler's ledger with two workers' stores, and whole steps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import ROW_BYTES, WIDTH, images, request, rows_of
from split_engine import SplitEngine

from mmcache import CacheConfig, ItemStatus, MultimodalCache, MultimodalRequest

COVERED, STORED, IN_FLIGHT, MISSING, LATER = (
    ItemStatus.COVERED,
    ItemStatus.STORED,
    ItemStatus.IN_FLIGHT,
    ItemStatus.MISSING,
    ItemStatus.LATER,
)


class OneProcess(MultimodalCache):
    def held_bytes(self) -> int:
        """Bytes in the store."""
        return self._store.nbytes


def build(form: str) -> Callable[..., Any]:
    """Makes caches of a form; `rows` is the budget in rows."""

    def make(rows: int = 1000, **settings: Any) -> Any:
        settings.setdefault("row_bytes", {"image": ROW_BYTES})
        config = CacheConfig(capacity_bytes=rows * ROW_BYTES, **settings)
        return OneProcess(config) if form == "one process" else SplitEngine(config)

    return make


both_forms = pytest.mark.parametrize("make", [build("one process"), build("split")], ids=["one process", "split"])


def fill(cache: Any, lookup: Any) -> list[str]:
    """Encode what is missing; returns the contents."""
    items = [lookup.request.items[i] for i in lookup.missing]
    cache.insert(lookup, {i: rows_of(it.identifier, it.placeholder.num_embeds) for i, it in zip(lookup.missing, items)})
    return [item.identifier for item in items]


def step(cache: Any, req: MultimodalRequest, start: int = 0, scheduled: int | None = None) -> list[str]:
    """One whole step; returns the contents that it encoded. What it merges is checked."""
    lookup = cache.lookup(req, num_computed_tokens=start, num_scheduled_tokens=scheduled)
    encoded = fill(cache, lookup)
    check_merge(lookup)
    end = lookup.window[1]
    lookup.release()
    cache.commit(req, end)
    return encoded


def check_merge(lookup: Any) -> None:
    start, end = lookup.window
    target = torch.zeros(end - start, WIDTH)
    lookup.merge_into(target)
    for item in lookup.request.items:
        place = item.placeholder
        rows = rows_of(item.identifier, place.num_embeds)
        first, last = max(start, place.offset), min(end, place.offset + place.length)
        if first < last:
            row, row_end = place.embed_rows(first - place.offset, last - place.offset)
            if place.num_embeds == place.length:
                assert torch.equal(target[first - start : last - start], rows[row:row_end])


def one_image(name: str, identifier: str, length: int = 4, **kwargs: Any) -> MultimodalRequest:
    return request(name, length + 2, images((1, length), ids=[identifier]), **kwargs)
