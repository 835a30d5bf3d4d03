"""What must hold of the ledger's books after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mmcache.errors import MMCacheError
from mmcache.ledger.records import GONE, READY, RESERVED, Entry, Session
from mmcache.ledger.table import EntryTable

__all__ = ["check_books"]


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
        _expect(
            f"the scope of entry {entry.handle} is the one", budget.scopes.get(entry.scope.key) is entry.scope, True
        )
    _expect("scopes are those of entries", len(budget.scopes), len({entry.scope.key for entry in entries}))
    detached = Counter(entry.scope.key for entry in entries if entry.detached)
    _expect("detached entries by scope", {key: s.detached for key, s in budget.scopes.items() if s.detached}, detached)
    for scope in budget.scopes.values():
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
