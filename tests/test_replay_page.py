"""The page of a sizing or a simulation: alone, legible, and as it looks in a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chromium import BINARY, Chromium

from mmcache.cli import main
from mmcache.replay.charts import Axis, Mark, line_chart, stacked_chart

VOID = ("meta", "link", "line", "polyline", "polygon")


class Page(HTMLParser):
    """Tags that are open, and everything that would leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
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
    assert parser.links == ["data:,"], "an empty icon, so that none is asked for"
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
        for name in colours.keys() - {"paper", "card", "line"}:
            for ground in ("paper", "card"):
                dark, light = sorted((luminance(colours[name]), luminance(colours[ground])))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{name} on {ground}"


# -- charts ------------------------------------------------------------------------------------------------------------

NUMBERS = Axis("x", "{:g}".format)
SIZES = Axis("y", "{:g} B".format)


def test_axes_have_round_numbers_and_reach_over_the_values() -> None:
    chart = line_chart("t", NUMBERS, SIZES, {"a": [(0, 3), (37, 93)]})
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", chart)
    assert texts == ["0 B", "20 B", "40 B", "60 B", "80 B", "100 B", "0", "10", "20", "30"]
    logarithmic = line_chart("t", Axis("x", "{:g}".format, logarithmic=True), SIZES, {"a": [(3, 0), (4000, 0.5)]})
    assert re.findall(r"<text[^>]*>([^<]*)</text>", logarithmic)[-3:] == ["10", "100", "1000"]


def test_every_point_says_its_value_and_nothing_is_drawn_of_nothing() -> None:
    chart = line_chart("t", NUMBERS, SIZES, {"<a>": [(1, 2), (3, 4)], "b": [(1, 5)]}, [Mark(2, "here")])
    assert re.findall(r"<title>([^<]*)</title>", chart) == ["&lt;a&gt;, 1: 2 B", "&lt;a&gt;, 3: 4 B", "b, 1: 5 B"]
    assert ">here</text>" in chart
    assert line_chart("t", NUMBERS, SIZES, {"a": []}) == ""
    assert stacked_chart("t", NUMBERS, SIZES, {"a": []}) == ""


def test_areas_add_up() -> None:
    chart = stacked_chart("t", NUMBERS, SIZES, {"a": [(0, 10), (1, 20)], "b": [(0, 30), (1, 0)]})
    first, second = re.findall(r'<polygon[^>]* points="([^"]*)"', chart)
    heights = [[float(point.split(",")[1]) for point in area.split()] for area in (first, second)]
    assert heights[0][:2] == heights[1][3:1:-1], "the second one stands on the first"
    assert heights[1][1] == heights[0][1], "and adds nothing where it is nothing"


# -- a real browser ----------------------------------------------------------------------------------------------------

# Of every text that is shown: its colour and what lies behind it. Of every mark in a chart: its stroke or fill.
LOOK = """
(() => {
  const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [dark, bright] = [light(a), light(b)].sort((x, y) => x - y);
    return (bright + 0.05) / (dark + 0.05);
  };
  const texts = [], shapes = [], small = [];
  for (const e of document.querySelectorAll("main, main *")) {
    const style = getComputedStyle(e);
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.tagName === "title") continue;
    const colour = e.closest("svg") ? style.fill : style.color;
    texts.push([e.tagName + "." + e.textContent.trim().slice(0, 30), contrast(rgb(colour).slice(0, 3), behind(e))]);
    const scale = e.ownerSVGElement ? e.ownerSVGElement.clientWidth / e.ownerSVGElement.viewBox.baseVal.width : 1;
    small.push(parseFloat(style.fontSize) * scale);
  }
  for (const e of document.querySelectorAll("polyline, polygon, circle, line.curve, .legend i")) {
    const style = getComputedStyle(e);
    const colour = e.matches("polyline, line") ? style.stroke : e.matches("i") ? style.backgroundColor : style.fill;
    shapes.push([e.tagName, contrast(rgb(colour).slice(0, 3), behind(e.parentElement))]);
  }
  return {
    texts, shapes, smallest: Math.min(...small), scroll: document.documentElement.scrollWidth, width: innerWidth,
    beyond: [...document.querySelectorAll("main *:not(.wide *)")]
      .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
      .map((e) => e.outerHTML.slice(0, 80)),
    paper: getComputedStyle(document.body).backgroundColor,
  };
})()
"""


def asked_for(browser: Chromium) -> list[str]:
    sent = [event["params"] for event in browser.events if event["method"] == "Network.requestWillBeSent"]
    return [params["request"]["url"] for params in sent]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages")
    sizing, simulation, nothing = (folder / f"{name}.html" for name in ("sizing", "simulation", "nothing"))
    policies = ["--policy", "lru", "--policy", "queue-aware", "--policy", "gdsf"]
    tiers = ["--tier", "host:500MB:20GB:50", "--tier", "disk:4GB:2GB:200"]
    rolling = ["--generate", "rolling", "--requests", "300"]
    assert main(["size", *rolling, *policies, *tiers, "--target", "0.4", "--html", str(sizing)]) == 0
    simulate = ["replay", "--simulate", *rolling, *policies, *tiers, "--capacity", "100MB", "--html", str(simulation)]
    assert main(simulate) == 0
    assert main(["size", "--generate", "unique", "--requests", "20", "--html", str(nothing)]) == 0
    return [sizing, simulation, nothing]


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="needs Chromium (Debian's package `chromium`)")
def test_the_page_in_a_browser(pages: list[Path], tmp_path: Path) -> None:
    papers = set()
    with Chromium(tmp_path) as browser:
        for page in pages:
            for width, scheme in ((375, "light"), (375, "dark"), (1280, "light"), (1280, "dark")):
                browser.show(page, width=width, scheme=scheme)
                browser.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
                look = browser.evaluate(LOOK)
                assert look["scroll"] <= look["width"] == width, f"{page.name} scrolls sideways at {width}"
                assert look["beyond"] == [], f"{page.name} at {width}"
                assert look["texts"]
                for name, contrast in look["texts"]:
                    assert contrast >= 4.5, f"{name} in {page.name}, {scheme}"
                for name, contrast in look["shapes"]:
                    assert contrast >= 3, f"{name} in {page.name}, {scheme}"
                assert look["smallest"] >= 9, f"{page.name} at {width}: text too small to read"
                papers.add((scheme, look["paper"]))
                asked = [
                    e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"
                ]
                assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
                complaints = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
                assert [event for event in browser.events if event["method"] in complaints] == []
    assert len(papers) == 2, "one ground in light, another in dark"


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="needs Chromium (Debian's package `chromium`)")
def test_the_browser_test_sees_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><main><p style='color:#aaa'>pale</p>"
        "<p style='width:600px'>wide</p><img src='gone.png'></main><script>console.error('no')</script>"
    )
    with Chromium(tmp_path / "profile") as browser:
        browser.show(page, width=375, scheme="light")
        look = browser.evaluate(LOOK)
        assert look["scroll"] > 375
        assert look["beyond"]
        assert min(contrast for _, contrast in look["texts"]) < 3
        methods = {event["method"] for event in browser.events}
        assert {"Runtime.consoleAPICalled", "Log.entryAdded"} <= methods
        assert any(url.endswith("gone.png") for url in asked_for(browser))
