"""Real servers on free loopback ports, for the tests of tiers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError("the server does not listen")


class RedisServer:
    """`redis-server` without persistence: killed, it starts again empty."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.options = options
        self.process: subprocess.Popen | None = None
        self.start()

    @staticmethod
    def why_not() -> str | None:
        if shutil.which("redis-server") is None:
            return "redis-server is not installed"
        try:
            import redis  # noqa: F401
        except ImportError:
            return "the redis package is not installed"
        return None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                "redis-server",
                *("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
                *("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru", *self.options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_port(self.port, self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Let it hang: connections stay, nothing is answered."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)


_HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"code {code}", flush=True)
sys.stdin.read()
"""


class MooncakeCluster:
    """A master, and a process that holds a segment."""

    def __init__(self, segment_bytes: int = 256 << 20) -> None:
        self.port = free_port()
        self.segment_bytes = segment_bytes
        self.master: subprocess.Popen | None = None
        self.holder: subprocess.Popen | None = None
        self.start_master()
        self.start_holder()

    @staticmethod
    def binary() -> str | None:
        beside = Path(sys.executable).with_name("mooncake_master")
        return str(beside) if beside.exists() else shutil.which("mooncake_master")

    @staticmethod
    def why_not() -> str | None:
        if MooncakeCluster.binary() is None:
            return "mooncake_master is not installed"
        try:
            from mooncake.store import MooncakeDistributedStore  # noqa: F401
        except ImportError as error:
            return f"the Mooncake package does not load: {error}"
        return None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_master(self) -> None:
        self.master = subprocess.Popen(
            [str(self.binary()), "--port", str(self.port), "--metrics_port", str(free_port())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_port(self.port, self.master)

    def start_holder(self) -> None:
        self.holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, self.address, str(self.segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.holder.stdout is not None
        said = self.holder.stdout.readline().decode().strip()
        if said != "ready":
            raise RuntimeError(f"the holder does not start: {said!r}")

    def kill_master(self) -> None:
        if self.master is not None:
            self.master.kill()
            self.master.wait()
            self.master = None

    def kill_holder(self) -> None:
        if self.holder is not None:
            self.holder.kill()
            self.holder.communicate()
            self.holder = None

    def kill(self) -> None:
        self.kill_holder()
        self.kill_master()


@contextmanager
def running(kind: type[Any], *options: Any) -> Iterator[Any]:
    """A server of this kind, for as long as this lasts; the test is skipped where there is none."""
    if why := kind.why_not():
        import pytest  # benches start servers, too

        pytest.skip(why)
    server = kind(*options)
    try:
        yield server
    finally:
        server.kill()
