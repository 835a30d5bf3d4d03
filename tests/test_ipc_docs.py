"""The example of docs/ipc.md runs, and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


PAGE = (ROOT / "docs" / "ipc.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(import io.*?)```", PAGE, re.DOTALL)


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "example.py"
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=500, check=False
    )


@pytest.mark.engine
def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    (output,) = re.findall(r"It prints\n\n```\n(.*?)```", PAGE, re.DOTALL)
    done = run(CODE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


@pytest.mark.engine
@pytest.mark.parametrize(
    ("place", "victims"),
    [
        ("    receiver = Receiver(", "('rank 1',)"),
        ("        with step, torch.no_grad():", "('rank 0', 'rank 1')"),
    ],
    ids=["one before it joins", "both in the middle of a step"],
)
def test_the_example_ends_when_workers_are_killed(place: str, victims: str, tmp_path: Path) -> None:
    assert CODE.count(place) == 1
    indent = place[: len(place) - len(place.lstrip())]
    killed = f"{indent}if name in {victims}:\n{indent}    import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    done = run(CODE.replace(place, killed + place), tmp_path)
    assert done.returncode == 1
    assert re.search(r"RuntimeError: rank \d is gone", done.stderr), done.stderr
