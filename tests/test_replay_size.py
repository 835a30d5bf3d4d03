"""Sizing: the exact curve of LRU, its knee, and tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.cli import main
from mmcache.replay.costs import EngineModel, TierModel
from mmcache.replay.curves import CurvePoint, knee_of
from mmcache.replay.generate import generate
from mmcache.replay.simulate import simulate
from mmcache.replay.size import size_workload
from mmcache.replay.stack import LruStack

SIZES = {name: 10 * (place + 1) for place, name in enumerate("abcdefgh")}


def lru_hits(requests: Sequence[Sequence[Hashable]], sizes: dict[str, int], capacity: int) -> list[list[bool]]:
    """Plain LRU that looks all contents of a request up before it makes room for any."""
    held: OrderedDict[Hashable, int] = OrderedDict()
    hits = []
    for contents in requests:
        hits.append([content in held for content in contents])
        for content in contents:
            held[content] = sizes[content]  # type: ignore[index]
            held.move_to_end(content)
        while sum(held.values()) > capacity:
            held.popitem(last=False)
    return hits


@given(
    st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True), max_size=60),
    st.integers(240, 400),
)
def test_a_distance_is_the_smallest_capacity_that_hits(requests: list[list[str]], capacity: int) -> None:
    stack, forgetful = LruStack(), LruStack(capacity)
    for contents, hits in zip(requests, lru_hits(requests, SIZES, capacity)):
        used = {content: SIZES[content] for content in contents}
        assert [d is not None and d <= capacity for d in stack.use(used)] == hits
        assert [d is not None and d <= capacity for d in forgetful.use(used)] == hits


def test_distances_survive_many_renumberings_and_memory_stays_bounded() -> None:
    stack = LruStack(100 * 7)
    for i in range(20_000):
        (found,) = stack.use({i % 90: 7})
        assert found == (90 * 7 if i >= 90 else None)
    for i in range(20_000):
        stack.use({f"new {i}": 7})
    assert len(stack) <= 101


def test_the_curve_is_that_of_simulated_lru() -> None:
    """Requests far apart, of one item each: nothing overlaps, and nothing of a request's own order matters."""
    turns = [turn for turn in generate("catalogue", 2000, rate=0.001) if len(turn.clips) == 1]
    engine = EngineModel(policy="lru", prefix_blocks=0)
    capacities = [50_000_000, 200_000_000, 800_000_000]
    sizing = size_workload(lambda: turns, engine, policies=["lru"], capacities=capacities)
    exact = {point.capacity_bytes: point for point in sizing.lru}
    assert sizing.requests == sizing.needed == len(turns)
    for point in sizing.simulated["lru"]:
        assert exact[point.capacity_bytes].hit_ratio == pytest.approx(point.hit_ratio, abs=1e-12)
        assert exact[point.capacity_bytes].bytes_saved == point.bytes_saved
        assert exact[point.capacity_bytes].seconds_saved == pytest.approx(point.seconds_saved)


def test_more_room_never_saves_less_and_what_a_prefix_covers_needs_none() -> None:
    engine = EngineModel()
    for name in ("rolling", "agent", "catalogue"):
        sizing = size_workload(lambda name=name: generate(name, 400), engine)  # type: ignore[misc]
        ratios = [point.hit_ratio for point in sizing.lru]
        assert ratios == sorted(ratios)
        assert ratios[-1] > 0
        assert sizing.lru[-1].capacity_bytes >= sizing.working_set_bytes
        assert sizing.knee_bytes in [point.capacity_bytes for point in sizing.lru]
    growing = size_workload(lambda: generate("growing", 400), EngineModel(prefix_blocks=1 << 20))
    assert growing.covered_seconds > 0
    assert growing.lru[-1].hit_ratio == 0
    assert growing.knee_bytes is None


def test_the_target_is_the_least_capacity_that_reaches_it() -> None:
    engine = EngineModel(prefix_blocks=0)
    sizing = size_workload(lambda: generate("rolling", 400), engine, target=0.5)
    assert sizing.target_bytes is not None
    for point in sizing.lru:
        assert (point.hit_ratio >= 0.5) == (point.capacity_bytes >= sizing.target_bytes)
    assert size_workload(lambda: generate("rolling", 400), engine, target=0.999).target_bytes is None


def test_a_tier_is_asked_for_what_the_device_does_not_have() -> None:
    engine = EngineModel(prefix_blocks=0, tiers=(TierModel("host", 10**12, 1e9),))
    sizing = size_workload(lambda: generate("catalogue", 1500), engine)
    assert sizing.knee_bytes is not None
    at_knee = next(point for point in sizing.lru if point.capacity_bytes == sizing.knee_bytes)
    (tier,) = sizing.tiers
    both = at_knee.seconds_saved + tier.points[-1].seconds_saved
    assert both == pytest.approx(sizing.lru[-1].seconds_saved), "with room for everything, nothing is encoded twice"


def test_each_tier_of_several_is_exact_at_its_own_capacity() -> None:
    """Requests far apart, of one item each; the device and two tiers behind it, each larger than the one before."""
    turns = [turn for turn in generate("catalogue", 3000, rate=0.001) if len(turn.clips) == 1]
    first = size_workload(lambda: turns, EngineModel(prefix_blocks=0))
    assert first.knee_bytes is not None
    tiers = (TierModel("host", int(1.3 * first.knee_bytes), 1e9), TierModel("disk", int(1.7 * first.knee_bytes), 1e9))
    engine = EngineModel(policy="lru", prefix_blocks=0, tiers=tiers)
    sizing = size_workload(lambda: turns, engine, policies=["lru"], capacities=[first.knee_bytes])
    run = simulate(turns, replace(engine, capacity_bytes=first.knee_bytes))
    (device,) = sizing.simulated["lru"]
    missed = len(turns) - run.items["stored"]
    for model, curve in zip(tiers, sizing.tiers):
        (point,) = [point for point in curve.points if point.capacity_bytes == model.capacity_bytes]
        assert run.tier_hits[model.name] > 10
        assert point.hit_ratio * missed == pytest.approx(run.tier_hits[model.name])
        assert point.seconds_saved == pytest.approx(run.tier_seconds[model.name])
        assert point.bytes_saved == run.tier_bytes[model.name]
        (simulated,) = sizing.simulated_tiers["lru"][model.name]
        assert simulated.bytes_saved == point.bytes_saved
        assert simulated.hit_ratio * run.needed == pytest.approx(run.tier_hits[model.name])
        missed -= run.tier_hits[model.name]
    assert missed == run.encodes
    assert device.hit_ratio * run.needed == pytest.approx(run.items["stored"])


def test_the_knee_is_where_more_begins_to_gain_little() -> None:
    def curve(*points: tuple[int, float]) -> list[CurvePoint]:
        return [CurvePoint(capacity, 0.0, saved, 0) for capacity, saved in points]

    assert knee_of(curve((1, 0), (2, 9), (10, 10))) == 2
    assert knee_of(curve((1, 5), (10, 5))) == 1
    assert knee_of(curve((1, 0), (2, 0))) is None
    assert knee_of([]) is None


def test_simulation_agrees_with_sizing_on_what_is_encoded_at_the_end_of_the_curve() -> None:
    engine = EngineModel(capacity_bytes=10**12, prefix_blocks=0)
    sizing = size_workload(lambda: generate("rolling", 300), engine)
    run = simulate(generate("rolling", 300), engine)
    assert run.hit_ratio == pytest.approx(sizing.lru[-1].hit_ratio)


def test_only_tiers_that_were_asked_for_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["size", "--generate", "catalogue", "--size", "300", "--requests", "300"]
    assert main(workload) == 0
    assert "behind" not in capsys.readouterr().out
    assert main([*workload, "--tier", "host:64GB:20GB"]) == 0
    assert "host, behind " in capsys.readouterr().out
    one_picture = ["size", "--generate", "catalogue", "--size", "1", "--requests", "5", "--prefix-blocks", "0"]
    assert main([*one_picture, "--tier", "host:64GB:20GB"]) == 0
    assert "host, behind 5.0 MB: saves nothing.\n" in capsys.readouterr().out


def test_the_demo_is_sized_where_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    assert main(["size"]) == 0
    assert capsys.readouterr().out.startswith("chat.jsonl: 26 requests need ")


def test_one_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{\n{"messages": [{"role": "user", "content": "Hello."}]}\n')
    assert main(["size", str(trace), "--skip-bad-lines"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("one.jsonl: 1 request needs 0 items ")
    assert printed.endswith("1 line was skipped.\n")
