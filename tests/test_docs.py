"""The pages: code runs, links lead somewhere, the navigation leads to pages, the site builds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from mmcache.cli import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

# docs/ipc.md and the README have tests of their own, which also look at what is printed.
ELSEWHERE = {"ipc.md": "test_ipc_docs.py"}

TIERS_AFTER = "\nassert set(found) == {key} and torch.equal(found[key], rows)\nstore.close()\nassert loaded\n"


def program_of(page: Path) -> str:
    blocks = PYTHON.findall(page.read_text(encoding="utf-8"))
    if page.name == "tiers.md":
        blocks.append(TIERS_AFTER)
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


# -- commands ----------------------------------------------------------------------------------------------------------

COMMAND = re.compile(r"^ *(mmcache .*)$", re.MULTILINE)
HEAVY = ("mmcache audit", "mmcache replay  ")  # they run models


def commands_of(page: Path) -> list[str]:
    """Lines of the page's code that call the command."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    blocks += re.findall(
        r"(?:^    .*\n)+", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return [line for block in blocks for line in COMMAND.findall(block)]


def all_commands(heavy: bool) -> list[tuple[str, str]]:
    found = {line: page.name for page in PAGES for line in commands_of(page)}
    return [(page, line) for line, page in found.items() if line.startswith(HEAVY) is heavy]


def run_command(line: str, folder: Path) -> int:
    """Run a command with the reader's own files and stores in their place, without what is optional."""
    line = re.sub(r"\s{2,}\S.*$|\[[^\]]*\]", "", line).strip()
    return main([str(OWN[word](folder)) if word in OWN else word for word in shlex.split(line)[1:]])


def own_trace(folder: Path) -> Path:
    """Requests with shared prefixes, and blocks that come again behind others."""
    lines = [{"timestamp": 100 * i, "input_length": 2048, "output_length": 5, "hash_ids": [i % 7, 10 + i, 3, 4]}
             for i in range(40)]  # fmt: skip
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "trace.jsonl"


def own_store(folder: Path) -> Path:
    from mmcache.tiers import DiskTier, Key, encode_entry

    tier = DiskTier(folder / "store", 1 << 20)
    key = Key("0" * 64, "picture")
    tier.put_many({key: encode_entry(key, torch.ones(2, 4))})
    tier.close()
    return folder / "store"


def own_model(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    from mmcache.audit.tiny import TINY

    transformers.AutoConfig.for_model("gemma3", **TINY["gemma3"]).save_pretrained(folder / "my-model")
    return folder / "my-model"


def own_marks(folder: Path) -> Path:
    (folder / "marks.json").write_text('{"image_grid_thw": false}')
    return folder / "marks.json"


OWN = {
    "TRACE": own_trace,
    "DIR_OR_URL": own_store,
    "DIR": own_store,
    "./my-model": own_model,
    "marks.json": own_marks,
}
FOUND_WRONG = ("--config marks.json",)  # which is what the page shows: status 1


@pytest.mark.parametrize(("page", "line"), all_commands(heavy=False))
def test_the_commands_of_a_page_run(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(line, tmp_path) == 0
    for written in re.findall(r"--(?:json|html) (\S+)", line):
        assert (tmp_path / written).stat().st_size > 0


@pytest.mark.engine
@pytest.mark.parametrize(("page", "line"), all_commands(heavy=True))
def test_the_commands_that_run_models_run(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = any(words in line for words in FOUND_WRONG)
    assert run_command(line, tmp_path) == (1 if wrong else 0)
    if wrong and "--json" not in line:
        assert "SHOULD STAY" in capsys.readouterr().out


def test_commands_are_found_on_the_pages_that_have_them() -> None:
    assert {page.name for page in PAGES if commands_of(page)} >= {"audit.md", "capacity.md", "index.md", "tiers.md"}


# -- tables that repeat what the code says -----------------------------------------------------------------------------


def test_the_floors_are_those_of_the_code() -> None:
    from test_architecture import FLOORS

    rows = re.findall(r"^\| (\d) \| ([^|]*) \|", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(floor): set(re.findall(r"`(\w+)`", rooms)) for floor, rooms in rows} == dict(enumerate(FLOORS))


def test_the_table_of_metrics_is_what_is_exported() -> None:
    pytest.importorskip("prometheus_client")
    from mmcache import CacheConfig, FeatureCache, MultimodalCache
    from mmcache.metrics import CacheCollector
    from mmcache.tiers import MemoryTier

    cache = MultimodalCache(CacheConfig(capacity_bytes=1), [MemoryTier(1000)])
    exported = {family.name for family in CacheCollector(cache, features=FeatureCache(1)).collect()}
    cache.close()
    rows = re.findall(r"^\| (`mmcache_.*?) \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == exported


def test_the_table_of_extras_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = (DOCS / "index.md").read_text(encoding="utf-8").split("## Extras")[1]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(project["optional-dependencies"])


def test_the_sample_line_of_a_chat_can_be_read(tmp_path: Path) -> None:
    from mmcache.replay.chat import ROLES, read_chat

    page = (DOCS / "capacity.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"a picture")
    (tmp_path / "chat.jsonl").write_text(line, encoding="utf-8")
    (turn,) = read_chat(tmp_path / "chat.jsonl")
    assert (turn.conversation, turn.timestamp, len(turn.messages[0].parts)) == ("album", 11.0, 2)
    assert all(f"`{role}`" in page for role in ROLES)


def test_the_bench_page_names_scripts_that_exist() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"python (bench/\w+(?:\.py)?)", text))
    there = {f"bench/{path.name}" for path in (ROOT / "bench").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert named == there - {"bench/__pycache__"}


# -- links, navigation, the site ---------------------------------------------------------------------------------------


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
    for name in (
        "MultimodalCache",
        "Lookup",
        "EncoderLedger",
        "split_fields",
        "WindowError",
        "DiskTier",
        "CacheCollector",
        "CacheStats",
    ):
        assert name in reference
