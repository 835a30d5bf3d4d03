"""Simulating long workloads: memory does not grow with them, and the bench of it measures what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from mmcache.replay.costs import EngineModel, TierModel
from mmcache.replay.generate import generate
from mmcache.replay.simulate import simulate

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["growing", "rolling", "unique"])
def test_memory_is_flat_in_the_length_of_a_workload(name: str) -> None:
    engine = EngineModel(
        capacity_bytes=100_000_000, prefix_blocks=2000, tiers=(TierModel("host", 200_000_000, 1e9),), slots=4
    )

    def peak(requests: int) -> int:
        tracemalloc.start()
        simulate(generate(name, requests), engine)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    simulate(generate(name, 2700), engine)  # names of contents are made once and kept, as many as a bound allows
    # In 900 requests the first conversations have ended: from there on as many are under way.
    assert peak(2700) < 1.5 * peak(900), "three times as long"


def test_the_bench_measures_made_workloads_and_every_trace(tmp_path: Path) -> None:
    lines = [{"timestamp": 60_000 * i, "input_length": 1024, "output_length": 1, "hash_ids": [0, i]} for i in range(30)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "one-trace.csv").write_text("0,1,1,Gamma,1,1\n600,0,0,,0,0\n")
    sizes = {
        "text_tokens": "{7: 1.0}",
        "image_tokens": "{100: 1.0}",
        "image_count": "{2: 1}",
        "output_tokens": "{3: 1}",
    }
    (tmp_path / "clients" / "one-dataset.json").write_text(json.dumps({"0": sizes}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "replay.py"), "--requests", "50", "--traces", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()[1:]}
    assert list(rows) == ["growing", "clients", "some.jsonl, 0%", "some.jsonl, 20%"]
    assert [row[0] for row in rows.values()] == ["50", "50", "30", "30"]
    assert rows["some.jsonl, 0%"][6] == "48.3%", "of each prompt but the first, the first block"
