"""Two processes, one encode: a claim with a lease on a Redis server says who of a fleet encodes a content.

Optional, since it costs a round trip before the encoder runs; worth it where encoding takes much longer than that.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from threading import Condition, Thread
from typing import Any

from mmcache.errors import TierError
from mmcache.tiers.arguments import check_seconds, keys_of
from mmcache.tiers.breaker import CircuitBreaker
from mmcache.tiers.keys import Key
from mmcache.tiers.lifetime import forked_with
from mmcache.tiers.redis import connect, pipelined

__all__ = ["EncodeClaims"]

_log = logging.getLogger("mmcache.tiers")

# A claim is renewed and given up only by its holder: after a pause longer than the lease it may be another's
_RENEW = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) else return 0 end"
)
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


class EncodeClaims:
    """Claims of this process, renewed on a thread until they are released or the process ends.

    Who does not get a claim looks for the rows in the tiers and claims again from time to time: the holder either
    stores the rows and releases, or dies, and then its lease runs out and exactly one of the others gets the claim. A
    server that cannot be reached grants everything: encoding twice is slower, and not wrong. Once this is closed,
    everything is granted, too. A forked child has none of its parent's claims, and may make its own.

    Args:
        url: of the Redis server, as for `RedisTier`.
        lease_seconds: after so long without renewal a holder counts as dead.
        timeout: seconds for connecting and for each read or write of the socket.

    Raises:
        ConfigError: a number is not positive, the URL cannot be read, or the `redis` package is missing.
    """

    def __init__(self, url: str, *, lease_seconds: float = 10.0, timeout: float = 1.0) -> None:
        check_seconds("lease_seconds", lease_seconds)
        check_seconds("timeout", timeout)
        self._client, self._error = connect(url, timeout)
        self._lease_ms = max(1, int(lease_seconds * 1000))
        self._closed = False
        self.forked()
        forked_with(self)

    def forked(self) -> None:
        """Begin as the process that this is now: without claims, and without a thread that renews them."""
        self._breaker = CircuitBreaker()
        self._token = uuid.uuid4().hex
        self._condition = Condition()
        self._held: dict[Key, None] = {}
        self._thread: Thread | None = None

    def claim(self, keys: Iterable[Key]) -> set[Key]:
        """Those of the keys that are this process's to encode; one round trip. Release them afterwards."""
        keys = list(dict.fromkeys(keys_of(keys)))
        with self._condition:
            if self._closed:
                return set(keys)
            if self._thread is None:
                self._thread = Thread(target=self._renew_all, name="mmcache-claims", daemon=True)
                self._thread.start()
            asked = [key for key in keys if key not in self._held]
        granted = set(keys).difference(asked)
        replies = self._run([("SET", _name(key), self._token, "NX", "PX", self._lease_ms) for key in asked])
        taken = [key for key, reply in zip(asked, replies, strict=True) if reply is not None]
        with self._condition:
            self._held.update(dict.fromkeys(taken))
            self._condition.notify()
        return granted.union(taken)

    def release(self, keys: Iterable[Key]) -> None:
        """Give claims up: the rows are stored, or will not be. Keys that are not held are ignored."""
        keys = keys_of(keys)
        with self._condition:
            given_up = [key for key in keys if self._held.pop(key, self._held) is None]
        self._run([("EVAL", _RELEASE, 1, _name(key), self._token) for key in given_up])

    def close(self) -> None:
        """Release everything and stop renewing. Idempotent."""
        with self._condition:
            held = list(self._held)
            self._closed = True
            self._condition.notify()
        self.release(held)
        if self._thread is not None:
            self._thread.join(1.0)
        self._client.close()

    def _renew_all(self) -> None:
        pause = self._lease_ms / 3000
        while True:
            with self._condition:
                end = time.monotonic() + pause
                while not self._closed and (left := end - time.monotonic()) > 0:
                    self._condition.wait(left)
                if self._closed:
                    return
                held = list(self._held)
            replies = self._run([("EVAL", _RENEW, 1, _name(key), self._token, self._lease_ms) for key in held])
            lost = [key for key, reply in zip(held, replies, strict=True) if reply == 0]
            with self._condition:  # ran out while this process was paused: whoever has it now encodes it as well
                for key in lost:
                    self._held.pop(key, None)

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Replies, or an exception for each command: who does not know whether others encode does it himself."""
        if not commands:
            return []
        if not self._breaker.allows:
            return [TierError("left alone for a while")] * len(commands)
        try:
            replies = pipelined(self._client, commands)
        except self._error as error:
            if self._breaker.failure():
                _log.warning("claims cannot be asked for, everything is granted until they can: %s", error)
            return [error] * len(commands)
        self._breaker.success()
        return replies


def _name(key: Key) -> str:
    return f"mmcacheclaim-{key.name}"
