"""Entries in a Redis server: one pipelined round trip for all keys of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mmcache.errors import ConfigError, DamagedEntryError, TierError
from mmcache.tiers.arguments import check_entries, check_name, check_namespace, check_seconds, check_whole, keys_of
from mmcache.tiers.entry import Entry, check_pinning, join_entry, read_header, split_entry
from mmcache.tiers.keys import MAX_IDENTIFIER_BYTES, Key
from mmcache.tiers.protocol import PutOutcome, StoredEntry, TierUsage
from mmcache.tiers.remote import DEFAULT_LARGEST_ENTRY, key_prefix, remote_name

__all__ = ["RedisTier", "connect", "pipelined"]

_HEADER_LIMIT = MAX_IDENTIFIER_BYTES + 512
_SCAN_PAGE = 256


class RedisTier:
    """A Redis server as a tier, shared by a fleet.

    Values are bounded before they are read (`GETRANGE`, not `GET`), never unpickled, and expire `ttl_seconds` after
    their last use. `maxmemory` with an `allkeys` policy is how the server keeps to its memory; entries that it evicted
    are misses.

    Args:
        url: `redis://[user:password@]host:port/db`, or `rediss://` for TLS; options as the `redis` package knows them.
        ttl_seconds: lifetime after the last use.
        timeout: seconds for connecting and for each read or write of the socket.
        largest_entry: bytes; larger entries are neither stored nor read.
        one_trust_domain: all clients of the server trust each other, so that weak digests are acceptable.
        pinned: read into page-locked memory, for fast copies to a GPU.
        name: name for counters and events.

    Raises:
        ConfigError: a number is not positive, the URL cannot be read, or the `redis` package is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_seconds: float = 86400.0,
        timeout: float = 1.0,
        largest_entry: int = DEFAULT_LARGEST_ENTRY,
        one_trust_domain: bool = False,
        pinned: bool = False,
        name: str = "redis",
    ) -> None:
        check_seconds("ttl_seconds", ttl_seconds)
        check_seconds("timeout", timeout)
        check_whole("largest_entry", largest_entry)
        check_name(name)
        check_pinning(pinned)
        self.name = name
        self.shared = not one_trust_domain
        self._ttl_ms = max(1, int(ttl_seconds * 1000))
        self._largest = largest_entry
        self._pinned = pinned
        self._client, self._error = connect(url, timeout)
        self._closed = False

    def contains_many(self, keys: Sequence[Key]) -> dict[Key, int]:
        """See `Tier`."""
        keys = keys_of(keys)
        sizes = self._run([("STRLEN", remote_name(key)) for key in keys])
        return {key: size for key, size in zip(keys, sizes, strict=True) if isinstance(size, int) and size}

    def get_many(self, keys: Sequence[Key]) -> dict[Key, Entry]:
        """See `Tier`. A hit also renews the entry's lifetime, in the same round trip."""
        keys = keys_of(keys)
        commands: list[tuple[Any, ...]] = []
        for key in keys:
            name = remote_name(key)
            commands += [("GETRANGE", name, 0, self._largest), ("PEXPIRE", name, self._ttl_ms)]
        values = self._run(commands)[::2]
        found = {}
        for key, value in zip(keys, values, strict=True):
            if not isinstance(value, bytes):  # a value of another type: no entry, and whoever decodes it will say so
                found[key] = split_entry(key, b"")
            elif value:
                found[key] = split_entry(key, value, pinned=self._pinned)
        return found

    def put_many(self, entries: Mapping[Key, Entry]) -> PutOutcome:
        """See `Tier`. Replaces."""
        check_entries(entries)
        fitting = {key: entry for key, entry in entries.items() if entry.nbytes <= self._largest}
        replies = self._run(
            [("SET", remote_name(key), join_entry(entry), "PX", self._ttl_ms) for key, entry in fitting.items()]
        )
        stored = [
            key for key, reply in zip(fitting, replies, strict=True) if reply and not isinstance(reply, Exception)
        ]
        if fitting and not stored:
            raise TierError(f"nothing was stored: {replies[0]}", field=self.name)
        return PutOutcome(frozenset(stored))

    def remove_many(self, keys: Sequence[Key]) -> int:
        """See `Tier`."""
        return sum(reply for reply in self._run([("UNLINK", remote_name(key)) for key in keys_of(keys)]) if reply == 1)

    def clear(self, namespace: str | None = None) -> int:
        """See `Tier`."""
        check_namespace(namespace)
        return sum(
            sum(reply for reply in self._run([("UNLINK", name) for name in page]) if reply == 1)
            for page in self._pages(key_prefix(namespace))
        )

    def remove_strays(self, *, dry_run: bool = False) -> int:
        """Values under names of entries that are no entries of these names; their number, and they are removed unless
        `dry_run`."""
        strays = [stored.name for stored in self.scan() if stored.key is None]
        if not dry_run:
            self._run([("UNLINK", name) for name in strays])
        return len(strays)

    def scan(self) -> Iterator[StoredEntry]:
        """See `Tier`."""
        for page in self._pages(key_prefix()):
            commands: list[tuple[Any, ...]] = []
            for name in page:
                commands += [("STRLEN", name), ("GETRANGE", name, 0, _HEADER_LIMIT)]
            replies = self._run(commands)
            for name, size, header in zip(page, replies[::2], replies[1::2], strict=True):
                text = name.decode("utf-8", "replace")
                yield StoredEntry(text, _key_in(header, text), size if isinstance(size, int) else 0)

    def usage(self) -> TierUsage:
        """See `Tier`. Memory is the whole server's, whoever else uses it; entries are not counted."""
        self._check_open()
        with self._answering():
            memory = self._client.info("memory")
            return TierUsage(None, int(memory["used_memory"]), int(memory.get("maxmemory", 0)) or None)

    def close(self) -> None:
        """Close the connections; entries stay."""
        self._closed = True
        self._client.close()

    def _pages(self, prefix: str) -> Iterator[list[bytes]]:
        cursor = 0
        while True:
            self._check_open()
            with self._answering():
                cursor, page = self._client.scan(cursor, match=prefix + "*", count=_SCAN_PAGE)
                page = [bytes(memoryview(name)) for name in page]
            if page:
                yield page
            if not cursor:
                return

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._check_open()
        if not commands:
            return []
        with self._answering():
            return pipelined(self._client, commands)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise TierError(f"the server failed: {error}", field=self.name) from error
        except Exception as error:  # no answer of Redis's; the connection may hold the rest of it
            self._client.connection_pool.disconnect()
            raise TierError(f"the server's answer cannot be read: {error!r}", field=self.name) from error

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", field=self.name)


def pipelined(client: Any, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The replies to commands that are sent at once; an error that concerns one command is its reply."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _key_in(header: object, name: str) -> Key | None:
    try:
        key = read_header(header).key if isinstance(header, bytes) else None
    except DamagedEntryError:
        return None
    return key if key is not None and remote_name(key) == name else None


def connect(url: str, timeout: float) -> tuple[Any, tuple[type[Exception], ...]]:
    """A client, not connected yet, and the errors it raises. One attempt a command, and one more on a new connection.

    Raises:
        ConfigError: the URL cannot be read, or the `redis` package is missing.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError("Redis needs an extra: pip install mmcache[redis]", field="redis") from error
    if not isinstance(url, str):
        raise ConfigError("not a Redis URL", field="url", found=type(url).__name__, expected="redis:// or rediss://")
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 1),
            decode_responses=False,
        )
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # which knows the options; it does not connect
    except (ValueError, TypeError, AttributeError) as error:
        # The URL may hold a password, so the message leaves it out
        raise ConfigError("not a Redis URL", field="url", expected="redis:// or rediss://") from error
    if pool.connection_kwargs.get("decode_responses"):
        raise ConfigError("entries are no text", field="url", found="decode_responses", expected="answers in bytes")
    return client, (redis.RedisError, OSError)
