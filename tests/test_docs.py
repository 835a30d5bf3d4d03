"""The pages: code runs, links lead somewhere, the navigation leads to pages, the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

# docs/ipc.md and the README have tests of their own, which also look at what is printed.
ELSEWHERE = {"ipc.md": "test_ipc_docs.py"}

# What a page leaves to the reader: names before its code, and places and servers that are the reader's own.
TIERS_BEFORE = """
import pathlib, tempfile
secret = b"k" * 32
models = tempfile.mkdtemp()
pathlib.Path(models, "model.safetensors").write_bytes(b"weights")
"""
TIERS_BETWEEN = """
import torch
from mmcache import MultimodalItem, MultimodalRequest, PlaceholderRange, encoder_inputs
from mmcache.tiers import TieredStore
tiers = [MemoryTier(1 << 20)]
device, n, take, rows = "cpu", 0, print, torch.ones(2, 4)
item = MultimodalItem("image", None, PlaceholderRange(0, 2), hasher.digest(b"picture"))
request = MultimodalRequest("r", [9, 9], [item])
"""
TIERS_AFTER = "\nassert set(found) == {key} and torch.equal(found[key], rows)\n"
READERS_OWN = {
    '"/models/qwen2.5-vl-7b"': "models",
    '"/var/cache/mmcache"': "tempfile.mkdtemp()",
    ', RedisTier("rediss://:password@cache:6379/0")': "",
}


def program_of(page: Path) -> str:
    blocks = PYTHON.findall(page.read_text(encoding="utf-8"))
    if page.name == "tiers.md":
        assert len(blocks) == 3
        for theirs, ours in READERS_OWN.items():
            assert theirs in blocks[0]
            blocks[0] = blocks[0].replace(theirs, ours)
        blocks = [TIERS_BEFORE, blocks[0], TIERS_BETWEEN, *blocks[1:], TIERS_AFTER]
    return "\n".join(blocks)


def with_code() -> list[Path]:
    return [page for page in PAGES if PYTHON.search(page.read_text(encoding="utf-8")) and page.name not in ELSEWHERE]


@pytest.mark.parametrize("page", with_code(), ids=lambda page: page.name)
def test_the_code_of_a_page_runs_as_one_program(page: Path, tmp_path: Path) -> None:
    program = tmp_path / "page.py"
    program.write_text(program_of(page), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pages_whose_code_runs_elsewhere_are_tested_there() -> None:
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text(encoding="utf-8")


def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{page.name} links to {link}"


def test_every_entry_of_the_navigation_is_a_page_and_stands_there_once() -> None:
    entries = re.findall(r":\s+([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert set(entries) <= {page.name for page in PAGES}


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="needs mmcache[docs]",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    for name in ("MultimodalCache", "Lookup", "EncoderLedger", "split_fields", "WindowError", "DiskTier"):
        assert name in reference
