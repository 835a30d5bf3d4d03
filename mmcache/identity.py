"""Ids that clients give to their media, so that they need not send them again.

An id is a name for content, never an identity of its own: it is bound to the content that it was first seen with, and
what is cached stays keyed by that content. So a wrong id cannot put a wrong picture before a model, and one tenant's
ids mean nothing to another.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from cachetools import TTLCache

from mmcache.errors import ConfigError, ContentConflictError, RequestError, UnknownClientIdError
from mmcache.integers import as_int
from mmcache.namespaces import Namespace, namespace_fingerprint

__all__ = ["ClientIds"]

_LONGEST = 4096
_VERSION = b"mmcache-client-id-1"


class ClientIds:
    """Bindings of client-given ids to content digests, bounded in number and in age. Thread-safe.

    Bind an id to the digest of content without processor settings (`Source.content`), and derive the item's identifier
    from content and settings: then one id serves requests of different settings.
    """

    def __init__(
        self,
        namespace: str | Namespace,
        *,
        max_bindings: int = 65536,
        ttl_seconds: float = 86400.0,
        on_conflict: Literal["error", "replace"] = "error",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without bindings.

        Args:
            namespace: ids of other namespaces are other ids.
            max_bindings: above it the least recently used is forgotten.
            ttl_seconds: a binding is forgotten that long after its content was last seen.
            on_conflict: what to do with an id that comes with other content than before: "error" refuses the request,
                "replace" binds the id to the new content, and the old is not served under it again.
            clock: seconds; tests give their own.

        Raises:
            ConfigError: a value that cannot work.
        """
        number = as_int(max_bindings)
        if number is None or number < 1:
            raise ConfigError("max_bindings is an integer >= 1", field="max_bindings", found=repr(max_bindings))
        if isinstance(ttl_seconds, bool) or not isinstance(ttl_seconds, int | float) or not ttl_seconds > 0:
            raise ConfigError("a time to live is positive", field="ttl_seconds", found=repr(ttl_seconds))
        if on_conflict not in ("error", "replace"):
            raise ConfigError(
                "unknown reaction", field="on_conflict", found=repr(on_conflict), expected="'error' or 'replace'"
            )
        namespace_fingerprint(namespace)
        self._namespace = namespace
        self._replace = on_conflict == "replace"
        self._bindings: TTLCache[bytes, str] = TTLCache(number, ttl_seconds, timer=clock)
        self._lock = threading.Lock()
        self._conflicts = self._unknown = 0

    def key(self, client_id: str | bytes, *, salt: str | None = None) -> str:
        """What the id is known by here: 64 hexadecimal digits, fit for a file name, and never a content's digest.

        Raises:
            RequestError: the id is empty, longer than 4096 bytes (UTF-8), or neither text nor bytes.
        """
        return f"client-{self._key(client_id, namespace_fingerprint(self._namespace, salt=salt)).hex()}"

    def resolve(
        self,
        ids: Sequence[str | bytes | None],
        contents: Sequence[str | None],
        *,
        salt: str | None = None,
        request_id: str | None = None,
    ) -> list[str]:
        """The content digests of a request's items, for items that came with content, an id, or both.

        Args:
            ids: the id of each item, or None where the client gave none. Text and its UTF-8 bytes are one id.
            contents: the digest of each item's content, or None where only the id came.
            salt: the tenant's salt. None and "" differ.
            request_id: for errors.

        Returns:
            One digest for each item. Ids that came with content are bound to it from now on.

        Raises:
            UnknownClientIdError: ids without content that are not bound; names all of them, so that the client can send
                their content in one round.
            ContentConflictError: an id came with other content than it is bound to, or twice with different content.
            RequestError: an item has neither id nor content, a malformed id, or there are not two sequences of equal
                length.
        """
        for name, given_as in (("ids", ids), ("contents", contents)):
            if not isinstance(given_as, Sequence) or isinstance(given_as, str | bytes):
                raise RequestError(
                    "a sequence with an entry for each item",
                    request_id=request_id,
                    field=name,
                    found=type(given_as).__name__,
                )
        if len(ids) != len(contents):
            raise RequestError(
                "one id (or None) for each content", request_id=request_id, found=len(ids), expected=len(contents)
            )
        tenant = namespace_fingerprint(self._namespace, salt=salt)
        keys: list[bytes | None] = []
        given: dict[bytes, str] = {}
        for index, (client_id, content) in enumerate(zip(ids, contents)):
            if content is not None and (type(content) is not str or not content):
                raise RequestError(
                    "a content digest is a non-empty string", request_id=request_id, item=index, found=repr(content)
                )
            if client_id is None:
                if content is None:
                    raise RequestError("an item has neither id nor content", request_id=request_id, item=index)
                keys.append(None)
                continue
            key = self._key(client_id, tenant, request_id, index)
            keys.append(key)
            if content is not None and given.setdefault(key, content) != content:
                raise ContentConflictError(
                    "one id came with two contents in one request",
                    request_id=request_id,
                    item=index,
                    found=content,
                    expected=given[key],
                )
        return self._bind(ids, contents, keys, given, request_id)

    def _bind(
        self,
        ids: Sequence[str | bytes | None],
        contents: Sequence[str | None],
        keys: list[bytes | None],
        given: dict[bytes, str],
        request_id: str | None,
    ) -> list[str]:
        with self._lock:
            found = [
                content if key is None or content is not None else given.get(key) or self._bindings.get(key)
                for content, key in zip(contents, keys)
            ]
            unknown = [index for index, content in enumerate(found) if content is None]
            if unknown:
                self._unknown += len(unknown)
                names = list(dict.fromkeys(_text(ids[index]) for index in unknown))
                raise UnknownClientIdError(
                    f"{len(names)} ids came without content and are not known: send the content of "
                    + ", ".join(map(_short, names)),
                    ids=names,
                    items=unknown,
                    request_id=request_id,
                )
            bound = {key: self._bindings.get(key, content) for key, content in given.items()}
            conflicts = [key for key, content in given.items() if bound[key] != content]
            self._conflicts += len(conflicts)
            if conflicts and not self._replace:
                first = next(i for i, key in enumerate(keys) if key == conflicts[0] and contents[i] is not None)
                raise ContentConflictError(
                    f"the id {_short(_text(ids[first]))} came with other content than it is bound to",
                    request_id=request_id,
                    item=first,
                    found=contents[first],
                    expected=bound[conflicts[0]],
                )
            self._bindings.update(given)
        return [content for content in found if content is not None]

    def forget(self, client_id: str | bytes, *, salt: str | None = None) -> None:
        """Drop a binding, e.g. of content that was withdrawn. Idempotent.

        Raises:
            RequestError: a malformed id.
        """
        key = self._key(client_id, namespace_fingerprint(self._namespace, salt=salt))
        with self._lock:
            self._bindings.pop(key, None)

    def clear(self) -> None:
        """Drop all bindings."""
        with self._lock:
            self._bindings.clear()

    def __len__(self) -> int:
        with self._lock:
            self._bindings.expire()
            return len(self._bindings)

    @property
    def conflicts(self) -> int:
        """How many ids have come with other content than they were bound to, refused or replaced."""
        return self._conflicts

    @property
    def unknown(self) -> int:
        """How many ids have come without content and unknown."""
        return self._unknown

    def _key(
        self, client_id: str | bytes, tenant: str, request_id: str | None = None, item: int | None = None
    ) -> bytes:
        if not isinstance(client_id, str | bytes):
            raise RequestError(
                "a client's id is text or bytes", request_id=request_id, item=item, found=type(client_id).__name__
            )
        data = client_id if isinstance(client_id, bytes) else client_id.encode("utf-8", "surrogatepass")
        if not 0 < len(data) <= _LONGEST:
            raise RequestError(
                "a client's id has 1 to 4096 bytes", request_id=request_id, item=item, found=f"{len(data)} bytes"
            )
        return hashlib.sha256(b"%s:%d:%s:%d:%s" % (_VERSION, len(tenant), tenant.encode(), len(data), data)).digest()


def _text(client_id: str | bytes | None) -> str:
    return client_id if isinstance(client_id, str) else (client_id or b"").decode("utf-8", "backslashreplace")


def _short(name: str) -> str:
    return repr(name) if len(name) <= 64 else f"{name[:61]!r}..."
