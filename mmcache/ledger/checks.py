"""What must hold of settings, and of sizes and costs that are reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from numbers import Real

from mmcache.errors import ConfigError, EmbeddingError, WindowError
from mmcache.integers import as_int
from mmcache.items import MultimodalRequest
from mmcache.ledger.records import Ticket
from mmcache.ledger.table import EntryTable
from mmcache.planning import StepPlan, check_window, needed_items

__all__ = [
    "check_least",
    "check_length",
    "check_period",
    "check_report",
    "check_row_bytes",
    "check_seconds",
    "check_settings",
    "check_shrink",
    "check_sizes",
]


def check_settings(
    capacity_bytes: object, row_bytes: object, lease_seconds: object
) -> tuple[int, dict[str, int], float]:
    """A ledger's budget, bytes of rows and lease. Raise ConfigError where one of them is none."""
    capacity = check_least(0, capacity_bytes, "capacity_bytes")
    return capacity, check_row_bytes(row_bytes), check_period(lease_seconds, "lease_seconds")


def check_least(least: int, value: object, name: str) -> int:
    """The setting of that name. Raise ConfigError unless it is an integer, and not less than that."""
    number = as_int(value)
    if number is None or number < least:
        raise ConfigError(f"{name} is an integer >= {least}", field=name, found=repr(value))
    return number


def check_row_bytes(row_bytes: object) -> dict[str, int]:
    """Bytes of a row by modality. Raise ConfigError where a modality is no name, or a size no integer >= 1."""
    if not isinstance(row_bytes, Mapping):
        raise ConfigError("bytes of a row, by modality", field="row_bytes", found=type(row_bytes).__name__)
    for modality in row_bytes:
        if not isinstance(modality, str):
            raise ConfigError("a modality is a name", field="row_bytes", found=repr(modality))
    return {modality: check_least(1, size, f"row_bytes[{modality!r}]") for modality, size in row_bytes.items()}


def check_period(value: object, name: str) -> float:
    """The setting of that name, in seconds. Raise ConfigError unless it is a number > 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ConfigError(f"{name} is a number > 0", field=name, found=repr(value))
    return float(value)


def check_length(request: MultimodalRequest, num_computed_tokens: int) -> int:
    """The number of tokens from the first that have KV; raises as `check_window`."""
    plain = type(num_computed_tokens) is int and type(request) is MultimodalRequest
    if plain and 0 <= num_computed_tokens <= request.num_tokens:  # every step passes here
        return num_computed_tokens
    return check_window(request, num_computed_tokens)[0]


def check_shrink(ticket: Ticket, num_scheduled_tokens: object) -> tuple[int, tuple[int, int, Sequence[int]]]:
    """Where the shorter window ends, and what it needs. Raise WindowError where it is longer than the present one."""
    length = ticket.end - ticket.start
    number = as_int(num_scheduled_tokens)
    if number is None or not 0 <= number <= length:
        raise WindowError(
            "a lookup shrinks to a shorter window",
            request_id=ticket.request.request_id,
            expected=f"an integer from 0 to {length}",
            found=repr(num_scheduled_tokens),
        )
    end = ticket.start + number
    return end, needed_items(ticket.request, ticket.needed_from, end + ticket.lookahead, ticket.num_items)


def check_sizes(
    step: Ticket | StepPlan, sizes: Mapping[int, int], seconds: float | None, request_id: str
) -> Mapping[int, int]:
    """Bytes by item index. Raise EmbeddingError for items that a plan needs no rows of, or a time that is none."""
    check_seconds(seconds, request_id)
    if isinstance(step, Ticket):  # counted in this process, of what it calls missing
        return sizes
    if not isinstance(sizes, Mapping):
        raise EmbeddingError(
            "stored rows are reported as {item index: bytes}", request_id=request_id, found=type(sizes).__name__
        )
    needed = [item.index for item in step.items if item.handle >= 0]
    checked = {}
    for key, size in sizes.items():
        index, nbytes = as_int(key), as_int(size)
        if index is None or index not in needed:
            raise EmbeddingError(
                "rows of an item that the plan does not need",
                request_id=request_id,
                item=index,
                expected=f"one of {needed}",
                found=repr(key),
            )
        if nbytes is None:
            raise EmbeddingError("bytes of rows are an integer", request_id=request_id, item=index, found=repr(size))
        checked[index] = nbytes
    return checked


def check_seconds(seconds: float | None, request_id: str) -> None:
    """Raise EmbeddingError unless an encode can have taken that long; None where nobody measured."""
    if type(seconds) is float and 0 <= seconds < inf:
        return  # what nearly all report: the test of an abstract class below takes longer than all else here
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 <= float(seconds) < inf
    ):
        raise EmbeddingError(
            "an encode takes a finite number of seconds", request_id=request_id, expected=">= 0", found=repr(seconds)
        )


def check_report(table: EntryTable, ticket: Ticket, sizes: Mapping[int, int]) -> None:
    """Raise EmbeddingError where rows that a worker stored are not as large as the room that was taken for them.

    The rows may be in the stores: they are dropped with the entry, whatever becomes of it.
    """
    learned: dict[str, int] = {}
    for index, nbytes in sizes.items():
        entry = ticket.entries.get(index)
        if entry is None or entry.owner is not ticket:
            continue
        entry.written = True
        rows = entry.num_rows
        expected = nbytes // rows * rows
        if not entry.detached:
            row_bytes = table.row_bytes.get(entry.modality)
            if row_bytes is None:
                row_bytes = learned.setdefault(entry.modality, nbytes // rows)
            expected = row_bytes * rows
        if nbytes != expected or nbytes <= 0:
            raise EmbeddingError(
                f"rows of modality {entry.modality!r} have another width than before or than configured",
                request_id=ticket.request.request_id,
                item=index,
                expected=f"{expected} bytes for {rows} rows",
                found=nbytes,
            )
