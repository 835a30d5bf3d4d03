"""The example of docs/ipc.md runs, and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.engine
def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ipc.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import io.*?)```", page, re.DOTALL)
    (output,) = re.findall(r"It prints\n\n```\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
