"""Running scenarios in processes of their own.

Importing vLLM takes most of a scenario's time, so that the processes of most are copies of one that has imported it and
done nothing else; those that are to be like an operator's are started from nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from vllm_tiny import environment

HERE = Path(__file__).parent
SECONDS = 600  # for a scenario, on a machine that others use, too
IMPORTS = [
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.idefics3",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.idefics3.processing_idefics3",
    "mmcache.engines.vllm.connector",
]

_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Start the process that the others are copies of. Once, and before `run`."""
    _context.set_forkserver_preload(IMPORTS)
    before = dict(os.environ)
    os.environ.update(environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(name: str, **arguments: Any) -> Any:
    """The answer of a scenario."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        process = _context.Process(target=_work, args=(name, json.dumps(arguments), log.name))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        return _answer(name, process.exitcode, log.read())


def run_from_nothing(name: str, *, separate: bool = False, **arguments: Any) -> Any:
    """The same in a new interpreter; `separate`: the engine runs in processes apart from the one that asks it."""
    process = subprocess.run(
        [sys.executable, str(HERE / "vllm_scenarios.py"), name, json.dumps(arguments)],
        env=environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate else "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return _answer(name, process.returncode, process.stdout)


def _work(name: str, arguments: str, log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    import vllm_scenarios

    vllm_scenarios.main(name, arguments)


def _answer(name: str, status: int | None, output: str) -> Any:
    assert status == 0, f"{name} ended with {status}:\n{output[-6000:]}"
    line = next(line for line in reversed(output.splitlines()) if line.startswith("ANSWER "))
    return json.loads(line.removeprefix("ANSWER "))
