"""Entries in Mooncake Store: header and payload straight from and into their own memory, registered for the transfer.

What the store does, as measured with 0.3.13: a put of a key that is there succeeds and does not replace; objects die
with the process that holds their segment, while the master may list them for ten seconds more; calls to a master that
is gone take four seconds each, and setting up a client takes ninety. Hence: names are content-addressed, sizes come
from the store and are checked before memory is allocated, an object that cannot be read is a miss, and the master's
port is tried before a client is set up.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from threading import Condition, Lock
from typing import Any

from torch import Tensor

from mmcache.errors import ConfigError, TierError, UnsupportedError
from mmcache.tiers.arguments import check_entries, check_name, check_namespace, check_seconds, check_whole, keys_of
from mmcache.tiers.entry import Entry, check_pinning, header_bytes, host_bytes, writable_view
from mmcache.tiers.keys import Key
from mmcache.tiers.lifetime import forked_with
from mmcache.tiers.protocol import PutOutcome, StoredEntry, TierUsage
from mmcache.tiers.remote import DEFAULT_LARGEST_ENTRY, key_prefix, remote_name

__all__ = ["MooncakeTier"]

_RPC_FAILED = -900
_CLOSE_SECONDS = 5.0


class MooncakeTier:
    """A Mooncake cluster as a tier, shared by a fleet.

    This process is a client; give it a segment and it holds other processes' objects too, which die with it. A
    deployment runs holder processes of its own (`mooncake_client`, `mooncake_store_service`).

    Args:
        master: `host:port` of the master.
        local_hostname: name or address under which the other processes reach this one.
        metadata_server: as Mooncake knows it; `P2PHANDSHAKE` needs no server.
        protocol: `tcp` or `rdma`.
        devices: RDMA devices, comma-separated.
        segment_bytes: memory that this process lends to the cluster.
        buffer_bytes: the client's own transfer buffer.
        timeout: seconds for reaching the master when the client is set up, which happens at first use.
        largest_entry: bytes; larger entries are neither stored nor read.
        one_trust_domain: all clients of the cluster trust each other, so that weak digests are acceptable.
        pinned: read into page-locked memory, for fast copies to a GPU.
        name: name for counters and events.

    Raises:
        ConfigError: the address cannot be read, a number cannot be, or the Mooncake package is missing.
    """

    def __init__(
        self,
        master: str,
        *,
        local_hostname: str = "127.0.0.1",
        metadata_server: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        segment_bytes: int = 0,
        buffer_bytes: int = 16 << 20,
        timeout: float = 1.0,
        largest_entry: int = DEFAULT_LARGEST_ENTRY,
        one_trust_domain: bool = False,
        pinned: bool = False,
        name: str = "mooncake",
    ) -> None:
        host, _, port = master.rpartition(":") if isinstance(master, str) else ("", "", "")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError("not an address", field="master", found=repr(master), expected="host:port")
        try:
            make = import_module("mooncake.store").MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError("Mooncake needs an extra: pip install mmcache[mooncake]", field="mooncake") from error
        check_whole("segment_bytes", segment_bytes, least=0)
        check_whole("buffer_bytes", buffer_bytes)
        check_whole("largest_entry", largest_entry)
        check_seconds("timeout", timeout)
        check_name(name)
        check_pinning(pinned)
        self.name = name
        self.shared = not one_trust_domain
        self._make: Any = make
        self._address = (host, int(port))
        self._setup = (
            local_hostname,
            metadata_server,
            segment_bytes,
            buffer_bytes,
            protocol,
            devices,
            master,
        )
        self._timeout = timeout
        self._largest = largest_entry
        self._pinned = pinned
        self._store: Any = None
        self._setting_up = Lock()
        self._calls = 0
        self._idle = Condition()
        self._closed = False
        self._forked = False
        forked_with(self)

    def contains_many(self, keys: Sequence[Key]) -> dict[Key, int]:
        """See `Tier`. What a dead process held may be listed for some seconds more."""
        keys = keys_of(keys)
        with self._client() as store:
            return self._sizes(store, keys)

    def get_many(self, keys: Sequence[Key]) -> dict[Key, Entry]:
        """See `Tier`. One request for the sizes and one for the data, whatever the number of keys."""
        keys = keys_of(keys)
        with self._client() as store:
            sizes = self._sizes(store, keys)
            entries = {
                key: (
                    host_bytes(min(size, header_bytes(key))),
                    host_bytes(max(0, size - header_bytes(key)), pinned=self._pinned),
                )
                for key, size in sizes.items()
                if size <= self._largest
            }
            # What is too large for this process is no entry of its fleet; found, so that it can be dropped
            found = {key: Entry(b"", host_bytes(0)) for key in sizes if key not in entries}
            if not entries:
                return found
            with self._registered(store, list(entries.values())) as (pointers, lengths):
                codes = store.batch_get_into_multi_buffers([remote_name(key) for key in entries], pointers, lengths)
        self._check(codes)
        for (key, (header, payload)), code in zip(entries.items(), codes, strict=True):
            if code >= 0:
                found[key] = Entry(bytes(writable_view(header)), payload)
        return found

    def put_many(self, entries: Mapping[Key, Entry]) -> PutOutcome:
        """See `Tier`. What is there stays as it is."""
        check_entries(entries)
        fitting = {key: entry for key, entry in entries.items() if entry.nbytes <= self._largest}
        if not fitting:
            return PutOutcome(frozenset())
        parts = []
        for entry in fitting.values():
            header = host_bytes(len(entry.header))
            writable_view(header)[:] = entry.header
            parts.append((header, entry.payload))
        with self._client() as store, self._registered(store, parts) as (pointers, lengths):
            codes = store.batch_put_from_multi_buffers([remote_name(key) for key in fitting], pointers, lengths)
        self._check(codes)
        stored = [key for key, code in zip(fitting, codes, strict=True) if code == 0]
        if not stored:
            raise TierError("nothing was stored", field=self.name, found=f"code {codes[0]}")
        return PutOutcome(frozenset(stored))

    def remove_many(self, keys: Sequence[Key]) -> int:
        """See `Tier`. By force: a reader's lease does not keep an entry that is to go (checksums tell it)."""
        keys = keys_of(keys)
        if not keys:
            return 0
        with self._client() as store:
            codes = store.batch_remove([remote_name(key) for key in keys], True)
        self._check(codes)
        return sum(code == 0 for code in codes)

    def clear(self, namespace: str | None = None) -> int:
        """See `Tier`."""
        check_namespace(namespace)
        with self._client() as store:
            removed = int(store.remove_by_regex("^" + key_prefix(namespace), True))
        self._check([removed])
        return max(0, removed)

    def scan(self) -> Iterator[StoredEntry]:
        """See `Tier`. Mooncake's clients cannot list objects.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("Mooncake's clients cannot list objects; its master's admin port can")

    def usage(self) -> TierUsage:
        """See `Tier`. The master's metrics know; its clients do not."""
        with self._client():
            return TierUsage(None, None, None)

    def forked(self) -> None:
        """This is a forked child, in which the client's threads are not: it must not be called, nor closed."""
        self._forked = True

    def close(self) -> None:
        """Leave the cluster; what this process held for it is lost. Waits some seconds for calls that are under way."""
        if self._forked:
            return
        with self._idle:
            self._closed = True
            if not self._idle.wait_for(lambda: self._calls == 0, _CLOSE_SECONDS):
                return  # a call that hangs still uses the client, and closing it underneath would crash the process
        with self._setting_up:
            store, self._store = self._store, None
        if store is not None:
            store.close()

    @contextmanager
    def _client(self) -> Iterator[Any]:
        if self._forked:
            raise TierError("the tier was made in another process; make it after the fork", field=self.name)
        with self._idle:
            if self._closed:
                raise TierError("the tier is closed", field=self.name)
            self._calls += 1
        try:
            yield self._connected()
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _connected(self) -> Any:
        with self._setting_up:
            if self._store is None:
                try:
                    socket.create_connection(self._address, self._timeout).close()
                except OSError as error:
                    raise TierError(f"the master cannot be reached: {error}", field=self.name) from error
                store = self._make()
                if code := store.setup(*self._setup):
                    raise TierError("the client could not be set up", field=self.name, found=f"code {code}")
                self._store = store
            return self._store

    def _sizes(self, store: Any, keys: Sequence[Key]) -> dict[Key, int]:
        if not keys:
            return {}
        names = [remote_name(key) for key in keys]
        replicas = store.batch_get_replica_desc(names)
        if not replicas:
            self._check(store.batch_is_exist(names[:1]))  # no replicas is also what a master that is gone looks like
        sizes = {}
        for key, name in zip(keys, names, strict=True):
            for replica in replicas.get(name, ()):
                if replica.is_memory_replica():
                    sizes[key] = int(replica.get_memory_descriptor().buffer_descriptor.size)
                    break
            else:
                if replicas.get(name) and (size := store.get_size(name)) > 0:  # on another medium
                    sizes[key] = int(size)
        return sizes

    @contextmanager
    def _registered(
        self, store: Any, entries: Sequence[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        """Addresses and sizes of the parts, registered with the transfer engine for as long as this lasts."""
        parts = [[part for part in entry if part.numel()] for entry in entries]
        registered = set()
        try:
            for part in (part for entry in parts for part in entry):
                if part.data_ptr() in registered:  # one content under two keys
                    continue
                if code := store.register_buffer(part.data_ptr(), part.numel()):
                    raise TierError("memory could not be registered", field=self.name, found=f"code {code}")
                registered.add(part.data_ptr())
            yield [[p.data_ptr() for p in entry] for entry in parts], [[p.numel() for p in entry] for entry in parts]
        finally:
            for pointer in registered:
                store.unregister_buffer(pointer)

    def _check(self, codes: Sequence[int]) -> None:
        if any(code <= _RPC_FAILED for code in codes):
            raise TierError("the master does not answer", field=self.name, found=f"code {min(codes)}")
