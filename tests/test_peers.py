"""`bench/peers`: one workload through the cache classes of other systems, and a clear word where they are missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The names that the bench asks for, with the least behind them that answers; the package as a whole cannot be imported.
SGLANG = """
from collections import OrderedDict
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

class EmbeddingResult:
    def __init__(self, *, embedding): self.embedding = embedding

class MultiModalStaticCache:
    def __init__(self, max_size): self.held = {}
    def get_single(self, key): return self.held.get(key)
    def set(self, key, result: EmbeddingResult, allocator: BaseTokenToKVPoolAllocator = None): self.held[key] = result
"""
DYNAMO = """
from typing import NamedTuple

class CachedEmbedding(NamedTuple):
    tensor: object

class MultimodalEmbeddingCacheManager:
    def __init__(self, capacity_bytes): self.held = {}
    def get(self, key): return self.held.get(key)
    def set(self, key, entry): self.held[key] = entry
"""


def compared(*arguments: str, path: Path | None = None) -> dict[str, list[str]]:
    """Rows of the table by system: hits, gigabytes moved, microseconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, (ROOT, path)))),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "peers"), "--workload", "catalogue", "--requests", "60", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("  not compared: "):
            rows["missing"] = [*rows.get("missing", []), line]
        elif line.startswith("  ") and line[2:44].strip():
            rows[line[2:44].strip()] = line[44:].split()[:3]
    return rows


def test_what_is_not_installed_is_named() -> None:
    rows = compared()
    assert rows["mmcache, ledger, one process"][:2] == rows["mmcache, ledger, split engine"][:2]
    assert rows["mmcache, ledger, one process"][0].endswith("%")
    for name, package in (("vLLM", "vllm"), ("SGLang", "sglang"), ("Dynamo", "dynamo")):
        if importlib.util.find_spec(package) is None:
            assert any(f"{name} is not installed" in line for line in rows["missing"])


def test_embedding_caches_that_are_installed_are_asked_the_same(tmp_path: Path) -> None:
    for name, text in (
        ("sglang/__init__.py", "raise ImportError('no GPU')\n"),
        ("sglang/srt/mem_cache/multimodal_cache.py", SGLANG),
        ("dynamo/common/memory/multimodal_embedding_cache_manager.py", DYNAMO),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = compared("--capacity", "100GB", path=tmp_path)
    hits, moved, _ = rows["mmcache, ledger, split engine"]
    for name in ("SGLang, embedding cache", "Dynamo, embedding cache"):
        assert rows[name][:2] == [hits, moved], "with room for everything all caches hit alike"


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_is_asked_the_same() -> None:
    rows = {name.split(", ", 1)[-1]: row for name, row in compared("--capacity", "100GB").items() if name != "missing"}
    assert rows["encoder cache"][0] == rows["ledger, split engine"][0]
    assert float(rows["encoder cache"][1]) >= float(rows["ledger, split engine"][1])
    assert rows["processor cache, front end"][0] == rows["processor cache, engine"][0]
    assert rows["KV cache manager"][0] == rows["PrefixIndex"][0]
    assert float(rows["block hashes"][2]) > 0
