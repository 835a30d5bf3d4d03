"""The index of a disk tier: one SQLite database (WAL) that all processes on a directory share.

It holds a row for every entry and every reservation, and the running total of bytes (kept by triggers), so that neither
the budget nor eviction needs a scan. A row is a *reservation* while it has an owner: its file may be missing or half
written. It becomes an entry when the owner is cleared, after the file is in place. It is a reservation again, of no
bytes, from the moment it is to go until after its file has gone. So whatever a killed process leaves, in between, has
an owner that is not alive, and nobody has to compare files with rows.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mmcache.errors import ConfigError
from mmcache.tiers.keys import Key, from_utf8

__all__ = ["NAME", "DiskIndex", "IndexRow", "Notes", "is_damage"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    name TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    identifier BLOB NOT NULL,
    bytes INTEGER NOT NULL,
    used INTEGER NOT NULL,
    owner TEXT,
    modality BLOB NOT NULL DEFAULT x''
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON entries (used) WHERE owner IS NULL;
CREATE INDEX IF NOT EXISTS by_owner ON entries (owner) WHERE owner IS NOT NULL;
CREATE TABLE IF NOT EXISTS totals (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    entries INTEGER NOT NULL,
    bytes INTEGER NOT NULL
);
INSERT OR IGNORE INTO totals VALUES (0, 0, 0);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - OLD.bytes;
END;
CREATE TRIGGER IF NOT EXISTS resized AFTER UPDATE OF bytes ON entries BEGIN
    UPDATE totals SET bytes = bytes + NEW.bytes - OLD.bytes;
END;
"""
_FORMAT_1 = "ALTER TABLE entries ADD COLUMN modality BLOB NOT NULL DEFAULT x''"
"""What an index of the first format lacks. Its processes, where any are left, go on beside this one's."""
NAME = re.compile("[0-9a-f]{64}")
"""Names of entries and of their files."""
_EVICT_BATCH = 64
_PAGE = 512
_COLUMNS = "name, namespace, identifier, bytes, used, owner, modality"


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A row of the index.

    Attributes:
        name: name of the entry and of its file.
        namespace: namespace fingerprint.
        identifier: content identifier, UTF-8.
        nbytes: bytes of the file.
        used: when it was last used, nanoseconds since the epoch.
        owner: who is writing or removing it, or None while it is published.
        modality: UTF-8.
    """

    name: str
    namespace: str
    identifier: bytes
    nbytes: int
    used: int
    owner: str | None
    modality: bytes

    @property
    def key(self) -> Key | None:
        """The entry's key, or None where this format does not call it so: whoever wrote it had another one, or it
        is damaged."""
        try:
            key = Key(self.namespace, from_utf8(self.identifier), from_utf8(self.modality))
        except (ConfigError, ValueError, AttributeError):  # no UTF-8, or not even bytes
            return None
        return key if key.name == self.name else None


@dataclass(slots=True)
class Notes:
    """What the next transaction has to take in: names of files that were read (with the time, in nanoseconds), were
    found missing, are in place, or are not there any more and never will be."""

    used: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.used) + len(self.lost) + len(self.written) + len(self.gone)

    def merged(self, later: Notes) -> Notes:
        """These notes and later ones."""
        return Notes(
            self.used | later.used,
            self.lost | later.lost,
            self.written | later.written,
            self.gone | later.gone,
        )


class DiskIndex:
    """One connection per thread to the index at `path`; every method that changes it is called within `transaction`.

    Raises (everywhere): sqlite3.Error.
    """

    def __init__(self, path: Path, *, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        with self.transaction() as db:
            for statement in _statements(_SCHEMA):
                db.execute(statement)
            if "modality" not in {column[1] for column in db.execute("PRAGMA table_info(entries)")}:
                db.execute(_FORMAT_1)
        stat = path.stat()
        self.identity = (stat.st_dev, stat.st_ino)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """An immediate transaction of this thread's connection: committed at the end, rolled back on an exception."""
        db = self._connection()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
        except BaseException:
            db.rollback()
            raise
        else:
            db.commit()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections, self._all = self._all, []
        for connection in connections:
            connection.close()

    def totals(self) -> tuple[int, int]:
        """Number of rows and their bytes, reservations included."""
        row = self._connection().execute("SELECT entries, bytes FROM totals").fetchone()
        return (row[0], row[1]) if row else (0, 0)

    @staticmethod
    def recount(db: sqlite3.Connection) -> bool:
        """Count rows and bytes again, one by one; whether the totals were wrong."""
        before = db.execute("SELECT entries, bytes FROM totals").fetchone()
        db.execute("UPDATE entries SET bytes = 0, used = 0 WHERE typeof(bytes) <> 'integer' OR bytes < 0")
        db.execute("UPDATE entries SET used = 0 WHERE typeof(used) <> 'integer'")
        counted = db.execute("SELECT count(*), coalesce(sum(bytes), 0) FROM entries").fetchone()
        if before != counted:
            db.execute("INSERT OR REPLACE INTO totals VALUES (0, ?, ?)", counted)
        return bool(before != counted)

    @staticmethod
    def plausible(db: sqlite3.Connection, capacity: int) -> bool:
        """Whether the totals can be right for a directory within a budget. Costs nothing."""
        row = db.execute("SELECT entries, bytes FROM totals").fetchone()
        return row is not None and all(type(n) is int and n >= 0 for n in row) and row[1] <= capacity

    def rows(self, names: Sequence[str]) -> dict[str, IndexRow]:
        """The rows of these names, by name."""
        marks = ",".join("?" * len(names))
        found = self._connection().execute(f"SELECT {_COLUMNS} FROM entries WHERE name IN ({marks})", list(names))
        return {row[0]: _row(*row) for row in found}

    def published(self, namespace: str | None = None) -> Iterator[IndexRow]:
        """All published rows, or one namespace's, in the order of their names; read in pages, so that writers go on."""
        db = self._connection()
        name = ""
        while True:
            page = db.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE name > ? AND owner IS NULL AND (? IS NULL OR namespace = ?)"
                f" ORDER BY name LIMIT {_PAGE}",
                (name, namespace, namespace),
            ).fetchall()
            if not page:
                return
            yield from (_row(*row) for row in page)
            name = page[-1][0]

    def take_in(self, db: sqlite3.Connection, notes: Notes, owner: str, exists: Callable[[str], bool]) -> None:
        """Bring the index up to date with what was noted since the last transaction."""
        self.publish(db, list(notes.written), owner)
        self.drop(db, list(notes.gone), owner)
        self.touch(db, list(notes.used.items()))
        lost = list(notes.lost)
        for start in range(0, len(lost), _PAGE):
            rows = self.rows(lost[start : start + _PAGE])
            self.delete(db, [name for name, row in rows.items() if row.owner is None and not exists(name)])

    @staticmethod
    def insert(db: sqlite3.Connection, rows: Sequence[IndexRow]) -> None:
        """Add rows whose names are not there."""
        db.executemany(
            f"INSERT INTO entries ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(r.name, r.namespace, r.identifier, r.nbytes, r.used, r.owner, r.modality) for r in rows],
        )

    @staticmethod
    def publish(db: sqlite3.Connection, names: Sequence[str], owner: str) -> None:
        """Turn this owner's reservations into entries."""
        db.executemany(
            "UPDATE entries SET owner = NULL WHERE name = ? AND owner = ?", [(name, owner) for name in names]
        )

    @staticmethod
    def delete(db: sqlite3.Connection, names: Sequence[str]) -> None:
        """Forget rows; names without one are ignored."""
        db.executemany("DELETE FROM entries WHERE name = ?", [(name,) for name in names])

    @staticmethod
    def condemn(db: sqlite3.Connection, names: Sequence[str], owner: str) -> None:
        """Turn entries into this owner's reservations of no bytes: it unlinks their files and then drops them."""
        db.executemany(
            "UPDATE entries SET owner = ?, bytes = 0 WHERE name = ? AND owner IS NULL",
            [(owner, name) for name in names],
        )

    @staticmethod
    def drop(db: sqlite3.Connection, names: Sequence[str], owner: str) -> None:
        """Forget this owner's reservations."""
        db.executemany("DELETE FROM entries WHERE name = ? AND owner = ?", [(name, owner) for name in names])

    @staticmethod
    def touch(db: sqlite3.Connection, uses: Sequence[tuple[str, int]]) -> None:
        """Move published rows up in the order of use; pairs of name and nanoseconds."""
        db.executemany("UPDATE entries SET used = ? WHERE name = ? AND owner IS NULL", [(t, n) for n, t in uses])

    @staticmethod
    def owners(db: sqlite3.Connection) -> Iterator[str]:
        """Who has reservations. Costs what owners there are, however many reservations they have."""
        after = ""
        while row := db.execute(
            "SELECT owner FROM entries WHERE owner > ? ORDER BY owner LIMIT 1", (after,)
        ).fetchone():
            (after,) = row
            yield after

    @staticmethod
    def reserved_by(db: sqlite3.Connection, owner: str) -> list[str]:
        """Names of an owner's reservations."""
        return [name for (name,) in db.execute("SELECT name FROM entries WHERE owner = ?", (owner,))]

    @staticmethod
    def names(db: sqlite3.Connection) -> tuple[set[str], set[str]]:
        """Names of all rows, and of those that are reservations."""
        # Reading nothing but the key is five times as fast as asking each row whether it has an owner
        rows = {name for (name,) in db.execute("SELECT name FROM entries")}
        reserved = {name for (name,) in db.execute("SELECT name FROM entries WHERE owner IS NOT NULL")}
        return rows, reserved

    @staticmethod
    def evict(db: sqlite3.Connection, target: int, owner: str) -> list[IndexRow]:
        """Condemn entries, least recently used first, until the total is at most `target` bytes."""
        evicted: list[IndexRow] = []
        while True:
            counted = db.execute("SELECT bytes FROM totals").fetchone()
            over = counted[0] - target if counted else 0
            if over <= 0:
                return evicted
            batch = []
            for row in db.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE owner IS NULL ORDER BY used LIMIT {_EVICT_BATCH}"
            ):
                if over <= 0:
                    break
                batch.append(_row(*row))
                over -= batch[-1].nbytes
            if not batch:
                return evicted
            DiskIndex.condemn(db, [victim.name for victim in batch], owner)
            evicted += batch

    def _connection(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = sqlite3.connect(self._path, timeout=self._timeout, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            with self._lock:
                self._all.append(db)
            self._local.db = db
        return db


def _row(
    name: object, namespace: str, identifier: bytes, nbytes: object, used: object, owner: str | None, modality: bytes
) -> IndexRow:
    # SQLite's columns hold values of any type. A number that is none says nothing; a name that is none hides its file
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise sqlite3.DatabaseError("a row's name is none of an entry")
    size = nbytes if type(nbytes) is int and nbytes >= 0 else 0
    return IndexRow(name, namespace, identifier, size, used if type(used) is int else 0, owner, modality)


def is_damage(error: Exception) -> bool:
    """Whether an error says that the database is malformed, or not this one: a table that is missing, say."""
    if not isinstance(error, sqlite3.OperationalError):
        return type(error) is sqlite3.DatabaseError  # others are subclasses
    # Without a code: text that is no UTF-8
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) == sqlite3.SQLITE_ERROR


def _statements(script: str) -> Iterator[str]:
    # executescript would commit the transaction it runs in
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
