"""The README's example runs as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_moves_one_picture_a_turn() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    env = {**os.environ, "PYTHONPATH": str(README.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert "window (0, 7), moved 256 B, covered 0 B, grids 1, (7, 32)" in first
    assert "window (6, 21), moved 256 B, covered 256 B, grids 2, (15, 32)" in second


def test_both_commands_use_the_constraints() -> None:
    commands = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(commands) == 2
    assert all("-c constraints.txt" in command for command in commands)
