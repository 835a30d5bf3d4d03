"""The style of the page: light and dark, narrow and wide."""

from __future__ import annotations

from mmcache.replay.charts import COLOURS

__all__ = ["STYLE"]

_DASHES = (
    "none",
    "7 4",
    "2 3",
    "10 3 2 3",
    "4 2",
)  # so that lines differ without their colours, and where they overlap

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #4d5763; --paper: #ffffff; --card: #f4f6f9; --line: #d5dae1;
  --c0: #0b5cad; --c1: #b3430b; --c2: #1a7a3c; --c3: #7a3fb0; --c4: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #adb6c2; --paper: #14171b; --card: #1d2127;
  --line: #39414b; --c0: #6db3ff; --c1: #ff9a63; --c2: #63d38a; --c3: #cf9bff; --c4: #e6bd55; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
main { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 76rem; }
.brand { margin: 0; color: var(--soft); font-size: .875rem; letter-spacing: .04em; }
h1 { margin: 0 0 .5rem; font-size: 1.6rem; line-height: 1.2; }
h2 { margin: 2.25rem 0 .75rem; font-size: 1.2rem; line-height: 1.3; }
.lead { margin: 0 0 1.25rem; max-width: 48rem; font-size: 1.1rem; }
.note, .axes { color: var(--soft); font-size: .875rem; } .note { max-width: 48rem; margin: 1.25rem 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem; margin: 0; }
.facts div { padding: .6rem .75rem; background: var(--card); border-radius: .5rem; }
.facts dt { color: var(--soft); font-size: .875rem; line-height: 1.3; }
.facts dd { margin: .15rem 0 0; font-size: 1.25rem; font-weight: 600; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; max-width: 36rem; } figcaption { font-weight: 600; } .axes { margin: .15rem 0 0; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
svg .axis { stroke: var(--line); } svg .curve { fill: none; stroke-width: 2.25; stroke-linejoin: round; }
svg .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
svg .name { fill: var(--ink); paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .25rem 0; padding: 0; list-style: none;
  font-size: .875rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.legend i { width: .85rem; height: .85rem; border-radius: 2px; } .legend .key { width: 24px; height: 10px; }
.wide { overflow-x: auto; border-radius: .25rem; } .wide:focus-visible { outline: 2px solid var(--c0); }
table { border-collapse: collapse; min-width: min(100%, 30rem); font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { padding-left: 0; text-align: left; white-space: normal; } tbody th { font-weight: 400; }
thead th { color: var(--soft); font-weight: 600; }
details { margin-top: 1.5rem; } summary { cursor: pointer; font-weight: 600; padding: .35rem 0; }
@media print { details > * { display: block; } figure { break-inside: avoid; } }
""" + "\n".join(
    f".s{i} {{ stroke: var(--c{i}); stroke-dasharray: {_DASHES[i]}; }}"
    f" .f{i} {{ fill: var(--c{i}); background: var(--c{i}); }}"
    for i in range(COLOURS)
)
