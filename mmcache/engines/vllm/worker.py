"""The connector in a worker: copies between vLLM's encoder cache and the shared memory. No store, no decisions."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from mmcache.engines.vllm.messages import Load, Save, StepPlan
from mmcache.engines.vllm.region import Cell, SharedRegion, SlotHeader
from mmcache.errors import UnresolvedItemError
from mmcache.tiers.lifetime import call_at_exit

__all__ = ["WorkerSide"]

_log = logging.getLogger("mmcache.vllm")
_EXIT_SECONDS = 10.0


class WorkerSide:
    """One worker's part.

    Args:
        region: the engine's shared memory.
        rank: of this worker within its engine.
        loads: it runs the first pipeline stage, which merges embeddings.
        saves: it is the one of the first stage's workers that saves (all of them have the same rows).
        dtype: that the model's embeddings have; rows of another are not saved.
        device: where encoder caches live.
    """

    def __init__(
        self, region: SharedRegion, *, rank: int, loads: bool, saves: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._region = region
        self._loads = loads
        self._saves_rows = saves
        self._dtype = dtype
        self._device = device
        self._plan: StepPlan | None = None
        self._slots: dict[str, Save] = {}
        self._warned = False
        self._copies: _Copies | None = None
        if device.type == "cuda" and loads:
            self._copies = _Copies(region, device)
        self._cell = region.attach(rank, loads=loads)

    def begin(self, plan: StepPlan) -> None:
        """A step begins."""
        self._plan = plan
        self._slots = {save.identifier: save for save in plan.saves} if self._saves_rows else {}

    def load(self, encoder_cache: MutableMapping[str, Tensor]) -> None:
        """Put this step's loads into the encoder cache.

        Raises:
            UnresolvedItemError: a slot does not hold what the scheduler's side said. Going on would compute KV from
                foreign rows and cache it under the true content's hash.
        """
        if self._plan is None or not self._plan.loads or not self._loads:
            return
        start = time.perf_counter_ns()
        nbytes = 0
        for load in self._plan.loads:
            if load.identifier not in encoder_cache:
                encoder_cache[load.identifier] = rows = self._copy_out(load)
                nbytes += rows.nbytes
                self._cell[Cell.LOADS] += 1
        self._cell[Cell.LOAD_BYTES] += nbytes
        self._cell[Cell.LOAD_NS] += time.perf_counter_ns() - start

    def save(self, encoder_cache: MutableMapping[str, Tensor], identifier: str) -> None:
        """Write what was encoded into the slot that was given for it, if one was."""
        slot = self._slots.pop(identifier, None)
        if slot is None or self._plan is None:
            return
        start = time.perf_counter_ns()
        rows = encoder_cache[identifier]
        if type(rows) is not Tensor and not isinstance(rows, Tensor):
            self._refuse(identifier, f"a {type(rows).__name__}", slot)
            return
        if tuple(rows.shape) != (slot.rows, slot.width) or rows.dtype != self._dtype:
            self._refuse(identifier, f"{list(rows.shape)} {rows.dtype}", slot)
            return
        target = self._region.payload(slot.offset, slot.rows, slot.width, rows.dtype)
        header = SlotHeader(self._plan.step, slot.rows, slot.width, rows.dtype)
        if self._copies is None:
            target.copy_(rows.detach())
            self._region.write_header(slot.offset, header)
        else:
            self._copies.save(target, rows.detach(), slot.offset, header)
        self._cell[Cell.SAVES] += 1
        self._cell[Cell.SAVE_BYTES] += rows.nbytes
        self._cell[Cell.SAVE_NS] += time.perf_counter_ns() - start

    def end(self) -> None:
        """The step is over: tell the scheduler's side, as soon as the copies are done."""
        if self._plan is None:
            return
        step, self._plan = self._plan.step, None
        self._slots = {}
        if self._copies is None:
            self._cell[Cell.STEP] = step
        else:
            self._copies.acknowledge(self._cell, step)

    def _copy_out(self, load: Load) -> Tensor:
        header = self._region.read_header(load.offset)
        if header is None or (header.step, header.rows, header.width) != (load.written_in, load.rows, load.width):
            raise UnresolvedItemError(
                f"a slot does not hold the rows of {load.identifier!r}", found=header, expected=load
            )
        rows = self._region.payload(load.offset, header.rows, header.width, header.dtype)
        return rows.clone() if self._copies is None else self._copies.load(rows)

    def _refuse(self, identifier: str, found: str, slot: Save) -> None:
        self._cell[Cell.REFUSED] += 1
        if not self._warned:
            self._warned = True
            _log.warning(
                "rows of %r are not saved: %s where [%d, %d] %s was expected",
                identifier,
                found,
                slot.rows,
                slot.width,
                self._dtype,
            )


class _Copies:
    """Copies to and from a GPU that nobody waits for, but a thread that acknowledges the steps behind them."""

    def __init__(self, region: SharedRegion, device: torch.device) -> None:
        self._region = region
        self._device = device
        if not region.pin():
            _log.warning("the shared memory could not be page-locked; copies to %s will be slower", device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._saved: list[tuple[int, SlotHeader]] = []
        self._queue: SimpleQueue[tuple[Any, Any, list[tuple[int, SlotHeader]], Any, int] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="mmcache-ec-copies", daemon=True)
        self._thread.start()
        call_at_exit(self._stop)

    def load(self, rows: Tensor) -> Tensor:
        # On the current stream: what reads the rows comes behind this in it
        return rows.to(self._device, non_blocking=True)

    def save(self, target: Tensor, rows: Tensor, offset: int, header: SlotHeader) -> None:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(rows, non_blocking=True)
        rows.record_stream(stream)
        self._saved.append((offset, header))

    def acknowledge(self, cell: Any, step: int) -> None:
        saved, self._saved = self._saved, []
        loaded, stored = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        loaded.record(torch.cuda.current_stream(self._device))
        stored.record(self._stream)
        self._queue.put((loaded, stored, saved, cell, step))

    def _stop(self) -> None:
        self._queue.put(None)
        self._thread.join(_EXIT_SECONDS)

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (work := self._queue.get()) is not None:
            loaded, stored, saved, cell, step = work
            stored.synchronize()
            for offset, header in saved:
                self._region.write_header(offset, header)
            loaded.synchronize()
            cell[Cell.STEP] = step
