"""What must hold: of sizes and costs that are reported, and of the ledger's books after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from numbers import Real

from mmcache.errors import ConfigError, EmbeddingError, MMCacheError, WindowError
from mmcache.integers import as_int
from mmcache.items import MultimodalRequest
from mmcache.ledger.records import GONE, READY, RESERVED, Entry, Session, Ticket
from mmcache.ledger.table import EntryTable
from mmcache.planning import StepPlan, check_window, needed_items

__all__ = [
    "check_books",
    "check_capacity",
    "check_length",
    "check_report",
    "check_seconds",
    "check_shrink",
    "check_sizes",
]


def check_capacity(capacity_bytes: object) -> int:
    """The budget. Raise ConfigError unless it is an integer >= 0."""
    number = as_int(capacity_bytes)
    if number is None or number < 0:
        raise ConfigError("capacity_bytes is an integer >= 0", field="capacity_bytes", found=repr(capacity_bytes))
    return number


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


def check_books(table: EntryTable, sessions: Iterable[Session]) -> None:
    """Raise MMCacheError, naming the account, where sums and references do not agree with the entries themselves."""
    budget = table.budget
    entries = list(budget.entries.values())
    pins: Counter[Entry] = Counter()
    users: Counter[Entry] = Counter()
    for session in sessions:
        pins.update(list(session.held))
        for ticket in session.tickets:
            _expect("a released lookup is listed", ticket.released, False)
            users.update({e: 1 for e in ticket.entries.values() if e is not None and e.state is READY and not e.cached})
            for entry in ticket.entries.values():
                if entry is not None:
                    _expect(f"entry {entry.handle} is gone but used", entry.state is GONE, False)
    for entry in entries:
        _expect(f"pins of entry {entry.handle}", entry.pins, pins[entry])
        if entry.state is READY and not entry.cached:
            _expect(f"users of uncached entry {entry.handle}", entry.users, users[entry])
        if entry.state is RESERVED:
            lookups = [t for t in (entry.owner, *entry.waiters) if t is not None]
            _expect(f"released lookups at entry {entry.handle}", [t.plan_id for t in lookups if t.released], [])
        if not entry.detached:
            _expect(f"entry {entry.handle} can be found", entry.scope.get(entry.identifier) is entry, True)
    for scope in table.scopes.values():
        for entry in scope.values():
            _expect(f"entry {entry.handle} is known by its handle", budget.entries.get(entry.handle) is entry, True)
    fixed = sum(e.nbytes for e in entries if e.pins or e.state is RESERVED)
    _expect("bytes used", budget.used, sum(e.nbytes for e in entries))
    _expect("bytes pinned or reserved", budget.fixed, fixed)
    _expect("bytes used are within the budget", 0 <= budget.used <= budget.capacity, True)
    _expect("bytes of uncached entries", sum(e.nbytes for e in entries if not e.cached), 0)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise MMCacheError(f"the ledger's books do not balance: {what}", found=repr(found), expected=repr(expected))
