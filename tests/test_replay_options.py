"""Options of `mmcache replay --simulate` and `mmcache size`: none is ignored in silence."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest

import mmcache
from mmcache.cli import main
from mmcache.replay.traces import read_trace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat without images, and a Mooncake trace."""
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello."}]}\n')
    line = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    (tmp_path / "mooncake.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "option", "needs"),
    [
        ("replay --simulate --model llava", "--model", "a real model"),
        ("replay --simulate --model qwen2_5_vl", "--model", "a real model"),
        ("replay --simulate --no-cache", "--no-cache", "without --simulate"),
        ("replay --simulate {chat} --requests 5", "--requests", "--generate"),
        ("replay --simulate {chat} --requests 1000", "--requests", "--generate"),
        ("replay --simulate {chat} --size 5", "--size", "--generate"),
        ("size {chat} --rate 1", "--rate", "--generate"),
        ("size {chat} --seed 0", "--seed", "Mooncake or ServeGen"),
        ("size {chat} --image-share 0.2", "--image-share", "a Mooncake trace"),
        ("size {mooncake} --reuse 0", "--reuse", "a ServeGen trace"),
        ("size --generate growing --image-share 0.5", "--image-share", "a Mooncake trace"),
        ("size --generate growing --reuse 0.5", "--reuse", "a ServeGen trace"),
        ("size --generate growing --skip-bad-lines", "--skip-bad-lines", "a trace"),
        ("size {chat} --slots 2", "--slots", "--policy"),
        ("size {chat} --queue 2", "--queue", "--policy"),
        ("size {chat} --saturate", "--saturate", "--policy"),
        ("replay --simulate --generate growing --saturate --rate 3", "--rate", "without --saturate"),
    ],
)
def test_an_option_without_effect_is_refused_in_one_line(
    line: str, option: str, needs: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.format(chat=folder / "chat.jsonl", mooncake=folder / "mooncake.jsonl").split()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (complaint,) = captured.err.splitlines()
    assert complaint.startswith(f"mmcache: {option} has no effect here: it needs ")
    assert needs in complaint


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("replay --simulate {chat} --policy foo", "foo"),
        ("replay --simulate {chat} --capacity 1XB", "1XB"),
        ("replay --simulate {chat} --slots 0", "slots"),
        ("size {chat} --policy foo", "foo"),
        ("size {chat} --capacity 1XB", "1XB"),
        ("size {chat} --tier host", "host"),
        ("size --generate growing --requests 0", ">= 1"),
        ("size --generate growing --rate nan", "> 0"),
        ("size {chat} --costs item=x", "item=x"),
    ],
)
def test_values_are_checked_before_anything_runs(
    line: str, named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.format(chat=folder / "chat.jsonl").split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (complaint,) = captured.err.splitlines()
    assert named in complaint


def test_options_that_have_an_effect_are_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, mooncake = folder / "chat.jsonl", folder / "mooncake.jsonl"
    for line in (
        f"replay --simulate {chat} --skip-bad-lines --slots 2 --queue 3 --row-bytes 8 --prefix-blocks 0 --saturate",
        f"size {chat} --policy lru --slots 2 --queue 3 --saturate",
        f"size {mooncake} --image-share 0.5 --seed 3",
        "size --generate rolling --requests 9 --size 4 --rate 3 --seed 1",
    ):
        assert main(line.split()) == 0, line
    capsys.readouterr()


@pytest.mark.parametrize(
    ("width", "height", "rows"),
    [
        (280, 280, 100),
        (293, 267, 10 * 10),  # to the nearest row, and not down
        (295, 280, 11 * 10),
        (14, 14, 4),  # at least four rows
        (28 * 200, 28 * 100, 181 * 90),  # 20,000 rows are too many: 181.02 x 90.5 are as many as may be
    ],
)
def test_an_image_of_a_chat_has_the_rows_of_its_resized_edges(
    width: int, height: int, rows: int, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    buffer = io.BytesIO()
    image.new("1", (width, height)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    (turn,) = read_trace(trace)
    ((offset, clip),) = turn.clips
    assert clip.rows == rows
    assert offset == 4, "behind the markers of the message and of the image"
    assert len(turn.token_ids) == offset + rows + 3 + 3, "its end, the message's, and the beginning of the answer"


def test_a_prompt_of_a_chat_begins_with_the_prompt_of_the_turn_before(tmp_path: Path) -> None:
    history = [{"role": "user", "content": "What is it?"}]
    later = [*history, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}]
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(json.dumps({"messages": messages}) for messages in (history, later)))
    first, second = (turn.token_ids.tolist() for turn in read_trace(trace))
    assert second[: len(first)] == first


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"mmcache {mmcache.__version__}\n"
