"""vLLM as the deciding part of the connector sees it: requests, items, workers, and a store that can be slow."""

from __future__ import annotations

import itertools
import zlib
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmcache.engines.vllm.keys import EmbeddingFields, Keyer
from mmcache.engines.vllm.region import SharedRegion
from mmcache.engines.vllm.scheduler import SchedulerSide
from mmcache.engines.vllm.worker import WorkerSide
from mmcache.engines.vllm.writeback import WriteBack
from mmcache.hashing import ContentHasher
from mmcache.tiers import Expected, Key

NAMESPACE = "ab" * 32
WIDTH = 8
_names = itertools.count()


def digest(name: str) -> str:
    """An identifier as vLLM makes them."""
    return ContentHasher("blake3").digest(name)


class Data(UserDict[str, Any]):
    """Processed tensors of an item."""

    def get_data(self) -> dict[str, Any]:
        return dict(self)


def pixels(seed: int) -> Data:
    return Data(pixel_values=torch.full((4, 4), float(seed)), grid=torch.tensor([1, 2, 2]))


@dataclass
class Position:
    offset: int
    length: int
    embeds: int | None = None

    def get_num_embeds(self) -> int:
        return self.length if self.embeds is None else self.embeds


@dataclass
class Item:
    identifier: str
    mm_position: Position
    data: Data | None
    modality: str = "image"


@dataclass
class Request:
    request_id: str
    mm_features: list[Item]
    num_preemptions: int = 0
    lora_request: object = None


def item(name: str, offset: int = 0, rows: int = 4, *, data: Data | str | None = "own") -> Item:
    """An item whose content follows from its name."""
    own = pixels(zlib.crc32(name.encode()) % 65536)
    return Item(digest(name), Position(offset, rows), own if data == "own" else data)  # type: ignore[arg-type]


def request(*items: Item) -> Request:
    return Request(f"r{next(_names)}", list(items))


@dataclass
class Store:
    """A store whose answers come when the test says so (`answer`), or at once."""

    at_once: bool = True
    rows: dict[Key, Tensor] = field(default_factory=dict)
    asked: list[Mapping[Key, Expected | None]] = field(default_factory=list)
    put_rows: list[Tensor] = field(default_factory=list)
    keep: bool = False
    _waiting: list[tuple[Mapping[Key, Expected | None], Callable[[dict[Key, Tensor]], None]]] = field(
        default_factory=list
    )

    def prefetch(self, keys: Mapping[Key, Expected | None], on_done: Callable[[dict[Key, Tensor]], None]) -> None:
        self.asked.append(dict(keys))
        self._waiting.append((keys, on_done))
        if self.at_once:
            self.answer()

    def answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for keys, on_done in waiting:
            on_done({key: self.rows[key] for key in keys if key in self.rows})

    def put(self, key: Key, rows: Tensor) -> None:
        self.rows[key] = rows.clone()
        if self.keep:
            self.put_rows.append(rows)


class Later:
    """Jobs of the helper's thread, run when the test says so or at once."""

    def __init__(self) -> None:
        self.at_once = True
        self.jobs: list[Callable[[], None]] = []

    def __call__(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)
        if self.at_once:
            self.run()

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job()


class Engine:
    """Scheduler's side, one or more workers, and what vLLM does between them."""

    def __init__(
        self,
        *,
        memory: int = 1 << 16,
        workers: int = 1,
        attach: int | None = None,
        trust: bool = False,
        store: Store | None = None,
        consumes: bool = True,
        produces: bool = True,
        adapters_encode: bool = False,
        window: int = 64,
        width: int | None = WIDTH,
    ) -> None:
        self.now = 0.0
        self.store = store
        self.later = Later()
        self.name = f"test-{next(_names)}-{id(self)}"
        region = SharedRegion(self.name, memory)
        fields = EmbeddingFields(frozenset({"grid"}), frozenset({"image_embeds"}))
        keyer = Keyer(
            NAMESPACE,
            trust=trust,
            adapters_encode=adapters_encode,
            hasher=ContentHasher("blake3"),
            embedding_fields=lambda modality: fields,
            hash_later=self.later,
        )
        self.side = SchedulerSide(
            region,
            workers=workers,
            keyer=keyer,
            store=store,
            write_back=WriteBack(region, store) if store is not None else None,
            helper=self.later,
            consumes=consumes,
            produces=produces,
            width=lambda modality: width,
            dtype=torch.float32,
            window=window,
            patience=1.0,
            clock=lambda: self.now,
        )
        self.region = region
        self.workers: list[WorkerSide] = []
        self.caches: list[dict[str, Tensor]] = []
        self.saver = True
        for rank in range(workers if attach is None else attach):
            self.attach(rank)
        self.encoded: list[str] = []

    def attach(self, rank: int) -> None:
        """A worker opens the shared memory, as its own process would."""
        region = SharedRegion(self.name, self.region.nbytes)
        cpu = torch.device("cpu")
        self.workers.append(WorkerSide(region, rank=rank, loads=True, saves=rank == 0, dtype=torch.float32, device=cpu))
        self.caches.append({})

    def ready(self, request: Request, computed: int = 0, *, passes: int = 5) -> bool:
        """What vLLM learns within a few passes of its scheduler."""
        return any(self.side.prepare(request, computed) for _ in range(passes))

    def schedule(self, request: Request, computed: int = 0, indices: list[int] | None = None) -> list[str]:
        """Schedule a prepared request's items as vLLM does; returns what was promised."""
        chosen = range(len(request.mm_features)) if indices is None else indices
        promised, encode = [], []
        for index in chosen:
            feature = request.mm_features[index]
            if all(feature.identifier in cache for cache in self.caches):
                continue
            (promised if self.side.has_item(feature.identifier) else encode).append(index)
        for index in encode + promised:
            self.side.allocated(request, index)
        self._encode = [request.mm_features[index].identifier for index in encode]
        return [request.mm_features[index].identifier for index in promised]

    def step(self, *, freed: tuple[str, ...] = (), workers: list[int] | None = None) -> None:
        """Run the step that was scheduled, on all workers or on some."""
        self.plan = self.side.plan_step(freed)
        for rank in range(len(self.workers)) if workers is None else workers:
            self.run_worker(rank)
        self._encode = []

    def run_worker(self, rank: int) -> None:
        worker, cache = self.workers[rank], self.caches[rank]
        worker.begin(self.plan)
        worker.load(cache)
        for identifier in self._encode:
            cache[identifier] = self.encoder(identifier)
            worker.save(cache, identifier)
            if rank == 0:
                self.encoded.append(identifier)
        worker.end()

    def encoder(self, identifier: str) -> Tensor:
        """Rows that follow from the identifier."""
        return torch.full((4, WIDTH), float(zlib.crc32(identifier.encode()) % 65536))

    def forget(self) -> None:
        """vLLM evicts all that its encoder cache holds."""
        freed = tuple(self.caches[0])
        for cache in self.caches:
            cache.clear()
        self._encode: list[str] = []
        self.step(freed=freed)

    def serve(self, request: Request) -> list[str]:
        """Prepare, schedule and run a request to its end; returns what was loaded rather than encoded."""
        if not self.ready(request):
            return []
        promised = self.schedule(request)
        self.step()
        self.side.finished(request.request_id)
        return promised


def filled(name: str = "a") -> Store:
    """A store that an earlier engine has filled with one item."""
    store = Store()
    engine = Engine(store=store)
    engine.serve(request(item(name)))
    assert len(store.rows) == 1
    return store
