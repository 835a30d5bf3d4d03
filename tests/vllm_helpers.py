"""Running scenarios in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tiny import environment

HERE = Path(__file__).parent


@dataclass
class Scenario:
    """A process that runs one scenario."""

    name: str
    process: subprocess.Popen[str]

    def answer(self) -> Any:
        output, _ = self.process.communicate(timeout=400)
        assert self.process.returncode == 0, f"{self.name} ended with {self.process.returncode}:\n{output[-6000:]}"
        line = next(line for line in reversed(output.splitlines()) if line.startswith("ANSWER "))
        return json.loads(line.removeprefix("ANSWER "))


def start(name: str, *, separate: bool = False, **arguments: Any) -> Scenario:
    """Start a scenario; `separate`: the engine runs in processes apart from the one that asks it."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "vllm_scenarios.py"), name, json.dumps(arguments)],
        env=os.environ | environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate else "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Scenario(name, process)


def run(name: str, **arguments: Any) -> Any:
    return start(name, **arguments).answer()
