"""The embedding caches of SGLang and Dynamo: least recently used out first, keyed by a digest of the content."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from asks import Ask, Tally, Unavailable, timed
from xxhash import xxh3_64_intdigest

Get: TypeAlias = "Callable[[Any], Any]"
Put: TypeAlias = "Callable[[Any, torch.Tensor], None]"


@cache
def sglang_cache() -> ModuleType:
    """The module of SGLang's embedding cache.

    Importing the package takes its whole GPU stack. Where that is missing the one file is loaded without it: of the
    rest of the package it names one class, and that in annotations only.
    """
    where = "sglang.srt.mem_cache.multimodal_cache"
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise Unavailable("SGLang is not installed")
    try:
        return importlib.import_module(where)
    except Exception as error:  # it fails in many ways where there is no GPU
        reason = error
    for module in [module for module in sys.modules if module.split(".")[0] == "sglang"]:
        del sys.modules[module]
    folder = Path(found.submodule_search_locations[0])
    for package in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        parent = sys.modules[package] = ModuleType(package)
        parent.__path__ = [str(folder.joinpath(*package.split(".")[1:]))]
    allocator = sys.modules["sglang.srt.mem_cache.allocator"] = ModuleType("sglang.srt.mem_cache.allocator")
    allocator.BaseTokenToKVPoolAllocator = object  # type: ignore[attr-defined]
    try:
        return importlib.import_module(where)
    except Exception as error:
        raise Unavailable(f"SGLang's cache cannot be loaded: {reason}; its file alone: {error}") from error


def dynamo_cache() -> ModuleType:
    """The module of Dynamo's embedding cache."""
    try:
        return importlib.import_module("dynamo.common.memory.multimodal_embedding_cache_manager")
    except ModuleNotFoundError as error:
        raise Unavailable(f"Dynamo is not installed: {error}") from error


def _named(system: str, package: str) -> str:
    try:
        return f"{system} {version(package)}"
    except PackageNotFoundError:
        return system


class Embeddings:
    """A look-up for each item that no prefix covers, and a write for each that misses."""

    def __init__(self, name: str, row_bytes: int, key: Callable[[str], Any], get: Get, put: Put) -> None:
        self._row_bytes = row_bytes
        self._key = key
        self._get = get
        self._put = put
        self._tally = Tally(f"{name}, embedding cache", "get, set; ships what it has not")

    def serve(self, ask: Ask) -> None:
        tally, needed, get, put = self._tally, ask.needed(), self._get, self._put
        keys = [self._key(clip.identifier) for clip in needed]
        # Sizes as real tensors have them, without their memory.
        rows = [torch.empty(clip.rows * self._row_bytes, dtype=torch.uint8, device="meta") for clip in needed]
        missed: list[int] = []

        def step() -> None:
            for place, key in enumerate(keys):
                if get(key) is None:
                    put(key, rows[place])
                    missed.append(place)

        timed(tally, step)
        tally.asked += len(needed)
        tally.found += len(needed) - len(missed)
        tally.shipped += sum(needed[place].payload_bytes for place in missed)

    def tallies(self) -> list[Tally]:
        return [self._tally]


def sglang(capacity_bytes: int, row_bytes: int) -> Embeddings:
    module = sglang_cache()
    held = module.MultiModalStaticCache(capacity_bytes)

    def put(key: int, rows: torch.Tensor) -> None:
        held.set(key, module.EmbeddingResult(embedding=rows))

    name = _named("SGLang", "sglang")
    return Embeddings(name, row_bytes, lambda text: xxh3_64_intdigest(text.encode()), held.get_single, put)


def dynamo(capacity_bytes: int, row_bytes: int) -> Embeddings:
    module = dynamo_cache()
    held = module.MultimodalEmbeddingCacheManager(capacity_bytes)

    def put(key: str, rows: torch.Tensor) -> None:
        held.set(key, module.CachedEmbedding(rows))

    return Embeddings(_named("Dynamo", "ai-dynamo"), row_bytes, str, held.get, put)
