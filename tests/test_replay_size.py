"""Sizing: the exact curve of LRU, its knee, and the page."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.cli import main
from mmcache.replay.costs import EngineModel
from mmcache.replay.generate import generate
from mmcache.replay.simulate import simulate
from mmcache.replay.size import CurvePoint, knee_of, size_workload
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
    sizing = size_workload(lambda: generate("catalogue", 1500), EngineModel(prefix_blocks=0))
    assert sizing.knee_bytes is not None
    at_knee = next(point for point in sizing.lru if point.capacity_bytes == sizing.knee_bytes)
    both = at_knee.seconds_saved + sizing.tier[-1].seconds_saved
    assert both == pytest.approx(sizing.lru[-1].seconds_saved), "with room for everything, nothing is encoded twice"


def test_the_knee_is_where_more_begins_to_gain_little() -> None:
    def curve(*points: tuple[int, float]) -> list[CurvePoint]:
        return [CurvePoint(capacity, 0.0, saved, 0) for capacity, saved in points]

    assert knee_of(curve((1, 0), (2, 9), (10, 10))) == 2
    assert knee_of(curve((1, 5), (10, 5))) == 1
    assert knee_of(curve((1, 0), (2, 0))) is None
    assert knee_of([]) is None


class Page(HTMLParser):
    """Tags that are open, and everything that would leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "line", "polyline", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "line", "polyline", "circle"):
            assert self.open.pop() == tag


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("command", ["size", "replay"])
def test_the_page_needs_nothing_but_itself(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    how = ["--simulate"] if command == "replay" else ["--target", "0.5"]
    policies = ["--policy", "lru", "--policy", "queue-aware"]
    files = ["--html", str(page), "--json", str(data)]
    assert main([command, *how, "--generate", "rolling", "--requests", "60", *policies, *files]) == 0
    assert capsys.readouterr().out
    text = page.read_text()
    parser = Page()
    parser.feed(text)
    assert parser.open == []
    assert parser.links == []
    assert "<script" not in text
    assert not re.search(r"https?:|url\(|@import", text)
    assert "<polyline" in text
    assert json.loads(data.read_text())["workload"] == "rolling"


def test_a_name_cannot_write_into_the_page(tmp_path: Path) -> None:
    trace = tmp_path / "<script>.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["size", str(trace), "--html", str(tmp_path / "page.html")]) == 0
    assert "<script>" not in (tmp_path / "page.html").read_text()


def test_colours_have_contrast_in_light_and_dark(tmp_path: Path) -> None:
    assert main(["size", "--generate", "catalogue", "--requests", "50", "--html", str(tmp_path / "p.html")]) == 0
    style = (tmp_path / "p.html").read_text().split("</style>")[0]
    schemes = re.findall(r":root \{([^}]*)\}", style)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        for name in colours.keys() - {"paper", "line"}:
            dark, light = sorted((luminance(colours[name]), luminance(colours["paper"])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{name} on paper"


def test_simulation_agrees_with_sizing_on_what_is_encoded_at_the_end_of_the_curve() -> None:
    engine = EngineModel(capacity_bytes=10**12, prefix_blocks=0)
    sizing = size_workload(lambda: generate("rolling", 300), engine)
    run = simulate(generate("rolling", 300), engine)
    assert run.hit_ratio == pytest.approx(sizing.lru[-1].hit_ratio)
