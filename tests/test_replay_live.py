"""`mmcache replay`: what it prints and writes, and how it fails."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")
pytest.importorskip("rich")

import torch
from PIL import Image

from mmcache.cli import main
from mmcache.engines.chat import Message, Photo
from mmcache.engines.transformers import FAMILIES, default_engine, tiny_adapter
from mmcache.errors import ConfigError, TraceError
from mmcache.replay.chat import DEMO_TRACE, ChatTurn, read_chat
from mmcache.replay.costs import EngineModel
from mmcache.replay.live import LiveReplay, Measures, TurnResult, replay_live
from mmcache.replay.simulate import simulate
from mmcache.replay.table import size_text, time_text
from mmcache.replay.workload import Clip, Turn

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def picture(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.effect_mandelbrot((64, 56), (-2 + seed / 100, -1.5, 1, 1.5), 40).convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations of two turns; they share the first picture, and one more in the second turn."""
    lines = []
    for turn in range(2):
        for name in ("a", "b"):
            messages: list[dict[str, object]] = []
            for index in range(turn + 1):
                seeds = [0] if index == 0 else [ord(name), ord(name) + 1]
                content: list[dict[str, object]] = [{"type": "text", "text": f"{name} asks: "}]
                for seed in seeds:
                    url = "data:image/png;base64," + base64.b64encode(picture(seed)).decode()
                    content.append({"type": "image_url", "image_url": {"url": url}})
                messages.append({"role": "user", "content": content})
                if index < turn:
                    messages.append({"role": "assistant", "content": "Yes."})
            lines.append(json.dumps({"conversation": name, "timestamp": float(turn), "messages": messages}))
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_it_prints_every_turn_the_totals_and_the_largest_difference(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    assert main(["replay", str(trace), "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    for word in ("prompt", "prefix", "cov/", "moved", "kept", "covered", "stored", "proc.", "encoder", "first"):
        assert word in printed
    for sentence in (
        "cov: covered, ",
        "sto: stored, ",
        "miss: missing, ",
        "vary from run to run",
        "Totals of 4 turns\n",
    ):
        assert sentence in re.sub(r" +\n", "\n", printed)
    for turn in ("1 a", "2 b", "3 a", "4 b"):
        assert turn in printed
    assert "largest difference of logits" in printed
    assert "the same tokens" in printed
    written = json.loads(target.read_text())
    assert written["equal"] is True
    assert written["largest_logit_difference"] <= 1e-4
    assert [turn["cached"]["items"] for turn in written["turns"]] == [
        {"covered": 0, "stored": 0, "in_flight": 0, "missing": 1},
        {"covered": 0, "stored": 1, "in_flight": 0, "missing": 0},
        {"covered": 1, "stored": 0, "in_flight": 0, "missing": 2},
        {"covered": 1, "stored": 1, "in_flight": 0, "missing": 1},
    ]
    cached, plain = written["totals"]["cached"], written["totals"]["plain"]
    assert cached["encoder_runs"] == cached["preprocessed"] == 4
    assert plain["encoder_runs"] == plain["preprocessed"] == 8
    assert sum(cached["bytes"].values()) == plain["bytes"]["transferred"]
    assert cached["prefix_tokens"] > 0 == plain["prefix_tokens"]
    assert cached["prompt_tokens"] == plain["prompt_tokens"]
    for turn in written["turns"]:
        assert turn["cached"]["ttft"] > 0 < turn["plain"]["ttft"]
        assert set(turn["cached"]["bytes"]) == {
            "transferred", "kept_on_cpu", "covered", "stored", "in_flight", "later",
        }  # fmt: skip


def test_no_cache_runs_plainly(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    assert main(["replay", str(trace), "--no-cache", "--json", str(target), "--model", "llava"]) == 0
    assert "difference" not in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert written["model"] == "llava"
    assert written["totals"]["cached"] is None
    assert written["largest_logit_difference"] is None
    assert written["totals"]["plain"]["encoder_runs"] == 8


def simulated_items(turns: Sequence[ChatTurn], family: str) -> dict[str, int]:
    """What the simulator makes of the prompts of a real model."""
    engine = default_engine(tiny_adapter(family))
    workload = []
    for number, turn in enumerate(turns):
        request = engine.submit(turn.messages, request_id=str(number)).request
        places = [(item.placeholder, item.identifier) for item in request.items]
        clips = tuple((place.offset, Clip(identifier, place.length, 1)) for place, identifier in places)
        workload.append(Turn(turn.conversation, request.token_ids, clips, time=60.0 * number))  # one after the other
    items = simulate(workload, EngineModel()).items
    return {status: count for status, count in items.items() if status != "loaded"}


def test_the_simulator_decides_as_the_real_run_does(trace: Path) -> None:
    turns = list(read_chat(trace))
    result = replay_live(turns, trace="small", model="llava", max_new_tokens=1)
    assert result.cached is not None
    assert result.cached.items == simulated_items(turns, "llava")


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen2_audio"])
def test_the_demo_runs_on_every_family_that_takes_images(family: str) -> None:
    turns = list(read_chat(DEMO_TRACE))
    result = replay_live(turns, trace="demo", model=family, max_new_tokens=2)
    assert result.equal is True
    assert result.cached is not None
    assert result.cached.preprocessed == result.cached.encoder_runs == result.cached.items["missing"] == 30
    assert result.cached.items["covered"] > result.cached.items["stored"] > 0
    assert sum(result.cached.bytes.values()) == sum(result.plain.bytes.values())
    assert result.cached.bytes["transferred"] < result.plain.bytes["transferred"] / 3
    assert result.cached.items == simulated_items(turns, family), "the simulator decides as the real run does"
    rolling = [turn for turn in result.turns if turn.conversation == "camera"][3:]
    assert all(turn.cached is not None and turn.cached.items["stored"] >= 2 for turn in rolling)


def turn(*parts: str | Photo, line: int = 3) -> ChatTurn:
    return ChatTurn("c", None, (Message("user", parts),), line)


def test_media_that_cannot_be_used_name_the_line() -> None:
    broken = turn(Photo(picture(0)[:-60], "message 0, part 0 (x.png)"))
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 3: .*x\.png") as caught:
        replay_live([turn("hello", line=2), broken], trace="trace.jsonl", model="llava")
    assert caught.value.line == 3
    wide = io.BytesIO()
    Image.new("RGB", (1000, 2)).save(wide, "PNG")
    with pytest.raises(TraceError, match=r"line 3: strip\.png cannot be preprocessed: .*aspect ratio"):
        replay_live([turn(Photo(wide.getvalue(), "strip.png"))], trace="trace.jsonl")
    with pytest.raises(TraceError, match="qwen2_audio takes no image"):
        replay_live([turn(Photo(picture(0)))], trace="trace.jsonl", model="qwen2_audio")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["gone.jsonl"], "gone.jsonl"),
        (["{trace}", "--model", "gpt2"], "unknown model family"),
        (["{trace}", "--json", "/nowhere/at/all.json"], "cannot be written"),
        (["{empty}"], "no requests"),
        (["{bad}"], "line 2"),
        (["--no-cache", "--policy", "foo"], "--policy has no effect here: it needs --simulate"),
        (["--no-cache", "--capacity", "1XB"], "--capacity has no effect here: it needs --simulate"),
        (["--capacity", "8GB", "--requests", "5"], "--capacity has no effect here"),
        (["--requests", "5"], "--requests has no effect here: it needs --simulate"),
        (["--slots", "0"], "--slots has no effect here"),
        (["--saturate"], "--saturate has no effect here"),
        (["--generate", "growing"], "--generate has no effect here"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    arguments: list[str], complaint: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, bad = trace.with_name("empty.jsonl"), trace.with_name("bad.jsonl")
    empty.write_text("\n")
    bad.write_text(trace.read_text().splitlines()[0] + "\n{}\n")
    filled = [part.format(trace=trace, empty=empty, bad=bad) for part in arguments]
    assert main(["replay", *filled]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("mmcache: ")
    assert complaint in line


def test_runs_that_do_not_agree_are_not_called_equal() -> None:
    def result(**values: object) -> LiveReplay:
        one = TurnResult(1, "c", None, Measures(), [1], Measures(), **values)
        return LiveReplay("t", "m", [one])

    assert result(logit_difference=1e-6, same_tokens=True).equal is True
    assert result(logit_difference=1e-6, same_tokens=False).equal is False
    assert result(logit_difference=1e-3, same_tokens=True).equal is False


def test_sizes_and_times_for_people() -> None:
    assert [size_text(size) for size in (0, 24, 999, 1000, 18_800_000, 2_500_000_000, 999_960)] == [
        "0", "24 B", "999 B", "1.0 kB", "18.8 MB", "2.5 GB", "1.0 MB",
    ]  # fmt: skip
    assert [time_text(seconds) for seconds in (0.0123, 2.5, 61.0)] == ["12 ms", "2,500 ms", "61.0 s"]


@pytest.mark.parametrize(("missing", "extra"), [("rich", "demo"), ("transformers", "transformers")])
def test_a_missing_extra_is_named(missing: str, extra: str, trace: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from mmcache.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", str(trace)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"pip install mmcache[{extra}]" in done.stderr


def test_help_is_quick_and_imports_no_extra() -> None:
    code = (
        "import sys\nfrom mmcache.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'transformers', 'rich', 'PIL', 'mmcache.replay', 'mmcache.engines'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "replay" in done.stdout


def test_an_unknown_family_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="one of"):
        replay_live([], trace="t", model="unknown")


def test_the_page_of_a_run_shows_both_runs(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    assert main(["replay", str(trace), "--html", str(page), "--json", str(data)]) == 0
    text = page.read_text()
    assert text.count("<figure>") == 3
    assert "with mmcache" in text
    assert "Both runs generated the same tokens" in text
    totals = json.loads(data.read_text())["totals"]
    assert f"<td>{totals['cached']['encoder_runs']}</td><td>{totals['plain']['encoder_runs']}</td>" in text


def test_bad_lines_are_skipped_only_if_asked(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text("{\n" + trace.read_text())
    assert main(["replay", str(trace), "--no-cache"]) == 2
    assert "line 1" in capsys.readouterr().err
    assert main(["replay", str(trace), "--no-cache", "--skip-bad-lines"]) == 0
    captured = capsys.readouterr()
    assert "line 1" in captured.err
    assert "1 line was skipped." in captured.out
