"""Every decision equals that of a brute-force oracle, for random requests and windows, and its bytes add up."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expect, positions

from mmcache import (
    CacheConfig,
    FieldConfig,
    ItemFields,
    Lookup,
    MultimodalCache,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderRange,
    join_fields,
    split_fields,
)

WIDTH = 3
FIELDS = {
    "image": {"pixel_values": 40, "grid": -8},
    "audio": {"features": 24, "extra": 4, "lengths": -8, "mask": -3},
    "video": {},
}


@st.composite
def placeholders(draw: st.DrawFn, num_tokens: int) -> list[tuple[str, PlaceholderRange]]:
    """Ranges that overlap and nest as they like, with rows that do not."""
    owner = [
        draw(st.integers(-1, 4)) if draw(st.booleans()) else None for _ in range(num_tokens)
    ]  # which of five "layers" a token's row belongs to, in runs
    for i in range(1, num_tokens):
        if owner[i] is None:
            owner[i] = owner[i - 1]
    ranges: list[tuple[str, PlaceholderRange]] = []
    for layer in range(5):
        mine = [i for i in range(num_tokens) if owner[i] == layer]
        if not mine:
            continue
        cuts = sorted(draw(st.sets(st.sampled_from(mine), max_size=2)))
        for part in _cut(mine, cuts):
            first = max(0, part[0] - draw(st.integers(0, 2)))
            last = min(num_tokens - 1, part[-1] + draw(st.integers(0, 2)))
            mask = [first + i in part for i in range(last - first + 1)]
            ranges.append((("image", "audio", "video")[layer % 3], PlaceholderRange(first, len(mask), mask)))
    if draw(st.booleans()):
        ranges.append(("image", PlaceholderRange(draw(st.integers(0, num_tokens - 1)), 1, [False])))
    return sorted(ranges, key=lambda pair: pair[1].offset)


def _cut(values: list[int], cuts: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for value in values:
        if value in cuts and parts[-1]:
            parts.append([])
        parts[-1].append(value)
    return parts


@st.composite
def requests(draw: st.DrawFn, name: str = "r") -> MultimodalRequest:
    num_tokens = draw(st.integers(1, 40))
    ranges = draw(placeholders(num_tokens))
    token = torch.tensor([7], dtype=torch.int64)
    weights = torch.ones(draw(st.integers(1, 3)))
    shared = {"image": draw(st.booleans()), "audio": draw(st.booleans()), "video": False}
    items = []
    for modality, place in ranges:
        spec = FIELDS[modality]
        fields = {key: torch.zeros(abs(size), dtype=torch.uint8) for key, size in spec.items()}
        configs = {key: FieldConfig.batched(modality, keep_on_cpu=size < 0) for key, size in spec.items()}
        if shared[modality]:
            fields |= {"token": token, "weights": weights}
            configs["token"] = FieldConfig.shared(modality, 2, keep_on_cpu=True)
            configs["weights"] = FieldConfig.shared(modality, 2)
        bare = draw(st.integers(0, 9)) == 0
        # The identifier fixes modality and rows, since equal identifiers mean equal content.
        number = draw(st.integers(0, 2))
        identifier = f"{modality}-{place.num_embeds}-{number}-{'bare' if bare else 'full'}"
        items.append(MultimodalItem(modality, None if bare else ItemFields(fields, configs), place, identifier))
    return MultimodalRequest(name, list(range(num_tokens)), items)


@st.composite
def windows(draw: st.DrawFn, num_tokens: int) -> dict[str, int | None]:
    return {
        "num_computed_tokens": draw(st.integers(0, num_tokens)),
        "num_scheduled_tokens": draw(st.none() | st.integers(0, num_tokens + 3)),
        "needed_from": draw(st.none() | st.integers(0, num_tokens)),
        "lookahead": draw(st.sampled_from([0, 0, 1, 5])),
    }


def rows_for(request: MultimodalRequest, index: int) -> torch.Tensor:
    item = request.items[index]
    seed = sum(ord(c) * 131**i for i, c in enumerate(item.identifier)) % 2**31
    return torch.randn(item.placeholder.num_embeds, WIDTH, generator=torch.Generator().manual_seed(seed))


def check(lookup: Lookup, window: dict[str, int | None], resident: dict[str, str]) -> None:
    request = lookup.request
    start = window["num_computed_tokens"]
    assert start is not None
    scheduled = window["num_scheduled_tokens"]
    end = request.num_tokens if scheduled is None else min(request.num_tokens, start + scheduled)
    needed_from = start if window["needed_from"] is None else window["needed_from"]
    expected = expect(request, start, end, needed_from, window["lookahead"] or 0, resident)
    assert lookup.window == (start, end)
    for view in (lookup, lookup.plan, pickle.loads(pickle.dumps(lookup.plan))):
        assert [view.status(i).value for i in range(len(request.items))] == expected.status
        assert list(view.missing) == expected.missing
        for kind in ("stored", "in_flight"):
            assert list(getattr(view, kind)) == [i for i, s in enumerate(expected.status) if s == kind]
        assert {key: view.action(*key).value for key in expected.action} == expected.action
        found = view.bytes
        assert {name: getattr(found, name) for name in expected.bytes} == expected.bytes
        assert found.total == sum(expected.bytes.values())
    return expected


@settings(max_examples=300)
@given(st.data())
def test_decisions_equal_the_oracle(data: st.DataObject) -> None:
    """Statuses, actions, bytes and merged rows, with some contents stored and some in flight elsewhere."""
    request = data.draw(requests())
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    window = data.draw(windows(request.num_tokens))
    contents = sorted({item.identifier for item in request.items if item.placeholder.num_embeds})
    resident = {c: data.draw(st.sampled_from(["stored", "in_flight", "missing"])) for c in contents}
    resident = {c: kind for c, kind in resident.items() if kind != "missing"}
    others = []
    for number, (content, kind) in enumerate(resident.items()):
        index = next(i for i, item in enumerate(request.items) if item.identifier == content)
        item = request.items[index]
        other = MultimodalRequest(f"other-{number}", list(range(40)), [item])
        held = cache.lookup(other, num_computed_tokens=0)
        if kind == "stored":
            cache.insert(held, [rows_for(request, index)])
            held.release()
            cache.finish(other)
        else:
            others.append(held)
    lookup = cache.lookup(request, **window)
    expected = check(lookup, window, resident)
    cache.insert(lookup, {i: rows_for(request, i) for i in expected.missing})
    for held in others:
        cache.insert(held, {0: rows_for(held.request, 0)})
    after = dict.fromkeys(contents, "stored")
    check_live = expect(
        request,
        *lookup.window,
        lookup.num_computed_tokens if window["needed_from"] is None else window["needed_from"],
        window["lookahead"] or 0,
        after,
    )
    assert [lookup.status(i).value for i in range(len(request.items))] == check_live.status
    assert lookup.missing == ()
    start, end = lookup.window
    destination = torch.full((end - start, WIDTH), -1.0)
    lookup.merge_into(destination)
    for position in range(start, end):
        if position in expected.merged:
            index, row = expected.merged[position]
            assert torch.equal(destination[position - start], rows_for(request, index)[row])
        else:
            assert (destination[position - start] == -1).all()
    lookup.release()
    for held in others:
        held.release()
        cache.finish(held.request)
    cache.finish(request)
    assert cache.stats().pinned_bytes == 0


@settings(max_examples=100)
@given(st.data())
def test_chunks_concatenate_to_the_whole(data: st.DataObject) -> None:
    """Windows that begin and end anywhere give, one after the other, what one window gives; each content once."""
    request = data.draw(requests())
    chunk = data.draw(st.integers(1, 9))
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    encoded: list[str] = []
    result = torch.full((request.num_tokens, WIDTH), -1.0)
    for start in range(0, request.num_tokens, chunk):
        with cache.lookup(request, num_computed_tokens=start, num_scheduled_tokens=chunk) as lookup:
            encoded += [request.items[i].identifier for i in lookup.missing]
            cache.insert(lookup, [rows_for(request, i) for i in lookup.missing])
            lookup.merge_into(result[start : start + chunk])
            end = lookup.window[1]
        cache.commit(request, end)
    whole = torch.full((request.num_tokens, WIDTH), -1.0)
    for index in range(len(request.items)):
        for row, position in enumerate(positions(request, index)):
            whole[position] = rows_for(request, index)[row]
    assert torch.equal(result, whole)
    assert sorted(encoded) == sorted({item.identifier for item in request.items if item.placeholder.num_embeds})
    assert cache.stats().pinned_bytes == 0


@settings(max_examples=100)
@given(st.data())
def test_a_shrunk_lookup_is_the_lookup_for_the_shorter_window(data: st.DataObject) -> None:
    request = data.draw(requests())
    window = data.draw(windows(request.num_tokens))
    cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
    lookup = cache.lookup(request, **window)
    start, end = lookup.window
    window["num_scheduled_tokens"] = data.draw(st.integers(0, end - start))
    lookup.shrink(window["num_scheduled_tokens"])
    check(lookup, window, {})
    reserved = cache.stats().entries
    assert reserved == len(lookup.missing)
    lookup.release()
    cache.finish(request)
    assert cache.stats().entries == 0


@settings(max_examples=60)
@given(st.data())
def test_growing_a_request_is_like_making_it_at_once(data: st.DataObject) -> None:
    whole = data.draw(requests("whole"))
    cut = data.draw(st.integers(0, len(whole.items)))
    first_items, rest = whole.items[:cut], whole.items[cut:]
    middle = max((i.placeholder.offset + i.placeholder.length for i in first_items), default=0)
    grown = MultimodalRequest("grown", whole.token_ids[:middle], first_items)
    grown.metadata("grid") if any("grid" in (i.fields or ()) for i in first_items) else None
    grown.extend(whole.token_ids[middle:], rest)
    assert grown.token_ids.tolist() == whole.token_ids.tolist()
    window = data.draw(windows(whole.num_tokens))
    for request in (whole, grown):
        cache = MultimodalCache(CacheConfig(capacity_bytes=1 << 20))
        check(cache.lookup(request, **window), window, {})


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 2))
def test_bytes_of_a_split_batch_add_up(sizes: list[int], dim: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = sum(sizes)
    batch = {"x": torch.zeros(shape), "n": torch.tensor(sizes, dtype=torch.int64)}
    configs = {
        "x": FieldConfig.flat_from_sizes("image", sizes, dim),
        "n": FieldConfig.batched("image", keep_on_cpu=True),
    }
    items = split_fields(batch, configs)["image"]
    assert sum(item.payload_bytes for item in items) == batch["x"].numel() * 4
    assert sum(item.kept_bytes for item in items) == batch["n"].numel() * 8
    if items:
        joined = join_fields(items)
        assert torch.equal(joined["x"], batch["x"])
        assert torch.equal(joined["n"], batch["n"])
