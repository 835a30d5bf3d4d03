"""Host memory that an engine's scheduler process and its worker processes share.

One file in /dev/shm: a cell for every worker, and behind them slots. Only the scheduler decides what lies where; a
worker is told. The file's name is taken away as soon as all workers have it open, so that nothing stays behind, however
the engine ends. Its pages are reserved when it is made: memory that is short is an error at the start, not a bus error.

A cell tells the scheduler what its worker has done (`StepPlan` numbers); a slot begins with a header that tells what
was written there. Both are plain memory, since vLLM carries no worker's message back from every kind of step.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmcache.errors import ConfigError

__all__ = ["DTYPES", "SLOT_HEADER_BYTES", "Cell", "SharedRegion", "SlotHeader", "slot_bytes"]

DTYPES: dict[int, torch.dtype] = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
SLOT_HEADER_BYTES = 64

_FOLDER = Path("/dev/shm")
_PREFIX = "mmcache-ec-"
_MAX_WORKERS = 256
_CELL_WORDS = 16
_CELLS_BYTES = (_MAX_WORKERS + 1) * _CELL_WORDS * 8  # the last one is the scheduler's
_WRITTEN = 0x4D4D43_57524954
_STALE_SECONDS = 60.0


class Cell:
    """Indices of a worker's numbers (unsigned, 64 bits) in its cell."""

    ROLE, STEP, LOADS, LOAD_BYTES, LOAD_NS, SAVES, SAVE_BYTES, SAVE_NS, REFUSED = range(9)


_LOADING, _BYSTANDER, _SCHEDULER = 1, 2, 3  # roles


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a worker wrote into a slot."""

    step: int
    rows: int
    width: int
    dtype: torch.dtype


def slot_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that a slot for these rows takes."""
    return SLOT_HEADER_BYTES + rows * width * dtype.itemsize


class SharedRegion:
    """The shared memory of one engine; every process of the engine opens it by the same name, whoever comes first.

    Args:
        name: unique to the engine (and the data-parallel rank).
        nbytes: memory for slots.

    Raises:
        ConfigError: /dev/shm has no room for it, or another size was given under this name.
    """

    def __init__(self, name: str, nbytes: int) -> None:
        _remove_stale()
        self.nbytes = nbytes
        self._path = _FOLDER / (_PREFIX + re.sub(r"[^0-9A-Za-z._-]", "_", name)[:160])
        size = _CELLS_BYTES + nbytes
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"shared memory cannot be made: {error}", field="memory_bytes") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # held for life: says that the file is not stale
            found = os.fstat(self._fd).st_size
            if found not in (0, size):
                raise ConfigError(
                    "another process of this engine has another size",
                    field="memory_bytes",
                    found=nbytes,
                    expected=found - _CELLS_BYTES,
                )
            try:
                os.posix_fallocate(self._fd, 0, size)
            except OSError as error:
                self._path.unlink(missing_ok=True)
                raise ConfigError(
                    f"{_FOLDER} cannot hold it ({error.strerror}); containers get more with --ipc=host or --shm-size",
                    field="memory_bytes",
                    found=nbytes,
                ) from error
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        whole: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._cells = whole[:_CELLS_BYTES].view(np.uint64).reshape(-1, _CELL_WORDS)
        self._slots = whole[_CELLS_BYTES:]

    # -- cells

    def attach(self, rank: int, *, loads: bool) -> npt.NDArray[np.uint64]:
        """A worker's own cell; `loads`: it runs the first pipeline stage, and has to be waited for.

        Raises:
            ConfigError: no such cell, or another worker has it.
        """
        if not 0 <= rank < _MAX_WORKERS:
            raise ConfigError("too many workers", field="rank", found=rank, expected=f"< {_MAX_WORKERS}")
        cell: npt.NDArray[np.uint64] = self._cells[rank]
        if cell[Cell.ROLE]:
            raise ConfigError("two workers of one rank share memory; engines need ids of their own", field="engine_id")
        cell[Cell.ROLE] = _LOADING if loads else _BYSTANDER
        return cell

    def claim(self) -> None:
        """Be the one scheduler that decides what lies in this memory.

        Raises:
            ConfigError: there is one already.
        """
        cell = self._cells[_MAX_WORKERS]
        if cell[Cell.ROLE]:
            raise ConfigError("two schedulers share memory; engines need ids of their own", field="engine_id")
        cell[Cell.ROLE] = _SCHEDULER

    def loading_ranks(self, workers: int) -> list[int] | None:
        """Ranks that load, or None while not all of the engine's workers share this memory."""
        roles = self._cells[:workers, Cell.ROLE]
        if len(roles) < workers or not roles.all():
            return None
        return [int(rank) for rank in np.flatnonzero(roles == _LOADING)]

    def done_step(self, ranks: list[int]) -> int:
        """The last step that all these workers have done."""
        return min((int(self._cells[rank, Cell.STEP]) for rank in ranks), default=0)

    def totals(self, workers: int) -> dict[int, int]:
        """Sums of the workers' numbers, by `Cell` index."""
        sums = self._cells[:workers].sum(axis=0)
        return {index: int(sums[index]) for index in range(Cell.LOADS, Cell.REFUSED + 1)}

    # -- slots

    def payload(self, offset: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The rows of a slot, sharing its memory: `[rows, width]` on the CPU."""
        array = self.payload_bytes(offset, rows * width * dtype.itemsize)
        return torch.from_numpy(array).view(dtype).view(rows, width)

    def payload_bytes(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot behind its header, as an array of its own over the shared memory."""
        start = offset + SLOT_HEADER_BYTES
        return self._slots[start : start + nbytes]

    def write_header(self, offset: int, header: SlotHeader) -> None:
        """Say what the slot holds. The mark that makes it valid is written last."""
        words = self._header(offset)
        words[0] = 0
        words[1:5] = (header.step, header.rows, header.width, _CODES[header.dtype])
        words[0] = _WRITTEN

    def clear_header(self, offset: int) -> None:
        """Say that the slot holds nothing."""
        self._header(offset)[0] = 0

    def read_header(self, offset: int) -> SlotHeader | None:
        """What the slot holds, or None."""
        words = [int(word) for word in self._header(offset)[:5]]
        dtype = DTYPES.get(words[4])
        if words[0] != _WRITTEN or dtype is None:
            return None
        return SlotHeader(words[1], words[2], words[3], dtype)

    def _header(self, offset: int) -> npt.NDArray[np.uint64]:
        return self._slots[offset : offset + SLOT_HEADER_BYTES].view(np.uint64)

    # -- life

    def pin(self) -> bool:
        """Page-lock the slots for copies to and from this process's GPU; False where that is refused."""
        pointer = self._slots.ctypes.data
        result = torch.cuda.cudart().cudaHostRegister(pointer, self._slots.nbytes, 0)  # type: ignore[no-untyped-call]
        return int(result) == 0

    def unlink(self) -> None:
        """Take the name away. Who has the memory open keeps it."""
        self._path.unlink(missing_ok=True)


def _remove_stale() -> None:
    """Remove what engines left behind that were killed before all their workers had started."""
    for path in _FOLDER.glob(_PREFIX + "*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < _STALE_SECONDS:
                continue  # perhaps opened and not locked yet
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
