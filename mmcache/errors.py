"""Every exception of mmcache, under one base class.

An error names what it is about (request, item, field) and what was found where something else was expected, both in its
message and as attributes, so that an engine can fail the one request and carry on. Raising leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ArenaFullError",
    "ConfigError",
    "ContentConflictError",
    "DamagedEntryError",
    "EmbeddingError",
    "FieldError",
    "MMCacheError",
    "MediaError",
    "MessageError",
    "MissingContentError",
    "PlaceholderError",
    "ReleasedError",
    "RequestError",
    "SelfWaitError",
    "TierError",
    "TraceError",
    "UnhashableContentError",
    "UnknownClientIdError",
    "UnresolvedItemError",
    "UnsupportedError",
    "WaitTimeoutError",
    "WindowError",
]


class MMCacheError(Exception):
    """Base of all errors that mmcache raises.

    Attributes:
        request_id: the request concerned, or None.
        item: index of the item within its request or batch, or None.
        field: name of the field concerned, or None.
        found: what was there, or None.
        expected: what should have been there, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        item: int | None = None,
        field: str | None = None,
        found: object = None,
        expected: object = None,
    ) -> None:
        self.request_id = request_id
        self.item = item
        self.field = field
        self.found = found
        self.expected = expected
        self.message = message
        where = []
        if request_id is not None:
            where.append(f"request {request_id!r}")
        if item is not None:
            where.append(f"item {item}")
        if field is not None:
            where.append(f"field {field!r}")
        text = f"{', '.join(where)}: {message}" if where else message
        if expected is not None:
            text += f"; expected {expected}"
        if found is not None:
            text += f"{',' if expected is not None else ';'} found {found}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only arguments do not survive the default reduction, and errors cross process boundaries.
        return _rebuild, (type(self), self.__dict__.copy(), self.args)

    def about(self, **attributes: Any) -> MMCacheError:
        """A copy of this error that names more, e.g. the request, for a caller that knows more than the raiser."""
        state = {k: self.__dict__[k] for k in ("request_id", "item", "field", "found", "expected")}
        state.update(attributes)
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__)
        MMCacheError.__init__(error, self.message, **state)
        return error


def _rebuild(cls: type[MMCacheError], state: dict[str, Any], args: tuple[Any, ...]) -> MMCacheError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(MMCacheError, ValueError):
    """A cache, index or tier was configured with values that cannot work."""


class FieldError(MMCacheError, ValueError):
    """A field does not fit its config: unknown name, wrong type, item counts that differ, slices out of range."""


class RequestError(MMCacheError, ValueError):
    """A request contradicts itself: unsorted items, two items that claim one row, unequal items with one identifier."""


class PlaceholderError(RequestError):
    """A placeholder range is malformed or lies outside the request's tokens."""


class WindowError(RequestError):
    """A window (computed, scheduled, needed-from, look-ahead) lies outside the request's tokens."""


class EmbeddingError(MMCacheError, ValueError):
    """Embeddings handed in do not fit: not asked for, wrong number of rows, wrong width, wrong kind of tensor."""


class MissingContentError(MMCacheError, LookupError):
    """Content is needed that this process does not have (an item that came as metadata only, say).

    Attributes:
        items: indices of all such items of the request, so that a client can resend them in one round.
    """

    def __init__(self, message: str, *, items: Sequence[int] = (), **where: Any) -> None:
        self.items = tuple(items)
        super().__init__(message, **where)


class UnknownClientIdError(MissingContentError):
    """Client-given ids came without content and are not known.

    Attributes:
        ids: all such ids of the request.
    """

    def __init__(self, message: str, *, ids: Sequence[str] = (), **where: Any) -> None:
        self.ids = tuple(ids)
        super().__init__(message, **where)


class ContentConflictError(MMCacheError, ValueError):
    """A client-given id came with other content than it was bound to."""


class UnhashableContentError(MMCacheError, TypeError):
    """Content holds an object whose identity is not defined; `path` says where it sits in the content."""

    def __init__(self, message: str, *, path: str = "", **where: Any) -> None:
        self.path = path
        super().__init__(message, **where)


class ReleasedError(MMCacheError, RuntimeError):
    """A lookup, match or handle was used after its release."""


class UnresolvedItemError(MMCacheError, RuntimeError):
    """Rows are needed for a merge that nobody has provided yet."""


class SelfWaitError(MMCacheError, RuntimeError):
    """Something waits for what it has to do itself (a lookup for rows to encode, say): it would wait for ever."""


class WaitTimeoutError(MMCacheError, TimeoutError):
    """Nothing that was waited for arrived in time."""


class UnsupportedError(MMCacheError, RuntimeError):
    """Out of scope by design: cross-attention encoder-decoder models, prompt embeddings, quantised storage."""


class MediaError(MMCacheError, ValueError):
    """An image, video or audio clip cannot be decoded, or the model does not take its kind."""


class TraceError(MMCacheError, ValueError):
    """A line of a trace cannot be read.

    Attributes:
        path: the trace file.
        line: number of the line, from 1, or None where the whole file is concerned.
    """

    def __init__(self, message: str, *, path: str, line: int | None = None, **where: Any) -> None:
        self.path = path
        self.line = line
        super().__init__(f"{path}, line {line}: {message}" if line is not None else f"{path}: {message}", **where)


class TierError(MMCacheError, RuntimeError):
    """A tier could not do what it was asked: refused, timed out, full, gone. Never reaches a request."""


class DamagedEntryError(MMCacheError, ValueError):
    """Stored bytes are not the entry that was asked for; `reason` is one word for counters.

    Attributes:
        reason: "foreign", "version", "truncated", "checksum", "namespace", "modality", "identifier" or "mismatch".
    """

    def __init__(self, message: str, *, reason: str, **where: Any) -> None:
        self.reason = reason
        super().__init__(message, **where)


class ArenaFullError(MMCacheError, MemoryError):
    """Shared memory has no room: the file system is too small for an arena, or what an arena holds is in use."""


class MessageError(MMCacheError, ValueError):
    """A message between processes is malformed, of another version, or contradicts what both sides know."""
