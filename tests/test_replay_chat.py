"""Reading chat traces: what a line may hold, and what is said about one that is wrong."""

from __future__ import annotations

import base64
import gzip
import io
import json
from itertools import chain, pairwise
from pathlib import Path

import pytest

from mmcache.engines.chat import Audio, Photo, decode_audio, decode_image, encode_wav, media_of
from mmcache.errors import MediaError, TraceError
from mmcache.replay.chat import DEMO_TRACE, read_chat

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")


def png(color: tuple[int, ...] = (200, 10, 10), size: tuple[int, int] = (8, 6), mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, "PNG")
    return buffer.getvalue()


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


def image(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def write(path: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "empty.png").write_bytes(b"")
    return tmp_path / "trace.jsonl"


def test_a_line_is_a_request_with_its_whole_history(trace: Path) -> None:
    inline = base64.b64encode(png((1, 2, 3))).decode()
    write(
        trace,
        {
            "conversation": "c",
            "timestamp": 1.5,
            "unknown": [1],
            "messages": [
                {"role": "system", "content": "Be brief."},
                user({"type": "text", "text": "Look:"}, image("a.png"), image(f"data:image/png;base64,{inline}")),
                {"role": "assistant", "content": "Red."},
                user({"type": "image_url", "image_url": "a.png"}),
            ],
        },
        "",
        {"messages": [{"role": "user", "content": "no name, no time"}]},
    )
    first, second = read_chat(trace)
    assert (first.conversation, first.timestamp, first.line) == ("c", 1.5, 1)
    assert [message.role for message in first.messages] == ["system", "user", "assistant", "user"]
    assert first.messages[0].parts == ("Be brief.",)
    assert [part.data for part in media_of(first.messages)] == [png(), png((1, 2, 3)), png()]
    assert (second.conversation, second.timestamp, second.line) == ("line 3", None, 3)


def test_lines_without_a_name_that_go_on_from_each_other_are_one_conversation(trace: Path) -> None:
    def said(*texts: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": text} for text in texts]}

    lines = [said("a"), said("b"), said("a", "1", "2"), said("b", "1"), said("a", "1", "3"), said("a", "1", "2", "4")]
    names = [turn.conversation for turn in read_chat(write(trace, *lines))]
    # The fifth does not go on from the third, and the first was gone on from already.
    assert names == ["line 1", "line 2", "line 1", "line 2", "line 5", "line 1"]


def test_gzip_and_plain_read_alike_and_the_byte_order_mark_is_ignored(trace: Path) -> None:
    line = {"messages": [user(image("a.png"))]}
    plain = list(read_chat(write(trace, line)))
    packed = trace.with_suffix(".gz")
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps(line).encode()))
    assert [turn.messages[0].parts[0].data for turn in read_chat(packed)] == [
        turn.messages[0].parts[0].data for turn in plain
    ]


def test_audio_comes_as_base64_wav(trace: Path) -> None:
    sound = encode_wav(np.zeros(80, np.float32), 8000)
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}
    (turn,) = read_chat(write(trace, {"messages": [user(part)]}))
    (audio,) = media_of(turn.messages)
    assert isinstance(audio, Audio)
    assert audio.data == sound


GOOD = {"messages": [{"role": "user", "content": "hello"}]}
BAD = {
    "not JSON": ("{", "is not JSON"),
    "not an object": ("[1]", "JSON object"),
    "deeply nested": ("[" * 200_000, "is not JSON"),
    "no messages": ({"conversation": "c"}, "list of messages"),
    "empty messages": ({"messages": []}, "list of messages"),
    "conversation is a list": ({**GOOD, "conversation": [1]}, "conversation"),
    "timestamp is text": ({**GOOD, "timestamp": "now"}, "timestamp"),
    "timestamp is true": ({**GOOD, "timestamp": True}, "timestamp"),
    "timestamp is not a number": ('{"timestamp": NaN, "messages": [{"role": "user", "content": "x"}]}', "timestamp"),
    "timestamp is endless": ('{"timestamp": 1e999, "messages": [{"role": "user", "content": "x"}]}', "timestamp"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role"),
    "role is a list": ({"messages": [{"role": [], "content": "x"}]}, "unknown role"),
    "message is text": ({"messages": ["hello"]}, "message 0"),
    "no content": ({"messages": [{"role": "user"}]}, "content"),
    "unknown part": ({"messages": [user({"type": "video_url", "video_url": "x"})]}, "unknown type"),
    "part is text": ({"messages": [user("x")]}, "part 0"),
    "text is a number": ({"messages": [user({"type": "text", "text": 3})]}, "no text"),
    "lone surrogate": ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "Unicode"),
    "no url": ({"messages": [user({"type": "image_url", "image_url": {}})]}, "no image url"),
    "missing file": ({"messages": [user(image("gone.png"))]}, "no such image file"),
    "a folder": ({"messages": [user(image("."))]}, "no such image file"),
    "empty file": ({"messages": [user(image("empty.png"))]}, "empty"),
    "NUL in the name": ({"messages": [user(image("a\x00.png"))]}, "message 0, part 0"),
    "name of 5000 letters": ({"messages": [user(image("a" * 5000))]}, "message 0, part 0"),
    "absolute path": ({"messages": [user(image("/etc/hostname"))]}, "relative"),
    "file scheme": ({"messages": [user(image("file:///etc/hostname"))]}, "relative"),
    "web address": ({"messages": [user(image("https://example.org/a.png"))]}, "nothing is downloaded"),
    "web address in capitals": ({"messages": [user(image("HTTP://example.org/a.png"))]}, "nothing is downloaded"),
    "data URI without base64": ({"messages": [user(image("data:image/png,abc"))]}, "broken data URI"),
    "data URI without a comma": ({"messages": [user(image("data:image/png;base64"))]}, "broken data URI"),
    "data URI of text": ({"messages": [user(image("data:text/plain;base64,aGk="))]}, "another type"),
    "data URI with bad base64": ({"messages": [user(image("data:image/png;base64,@@@"))]}, "not base64"),
    "data URI cut short": ({"messages": [user(image("data:image/png;base64,abcde"))]}, "not base64"),
    "data URI with nothing": ({"messages": [user(image("data:image/png;base64,"))]}, "no bytes"),
    "audio of another format": (
        {"messages": [user({"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}})]},
        "unknown format",
    ),
    "audio without data": ({"messages": [user({"type": "input_audio", "input_audio": {}})]}, "no audio data"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_names_file_line_and_fault(trace: Path, name: str) -> None:
    line, fault = BAD[name]
    turns = read_chat(write(trace, GOOD, line, GOOD))
    assert next(turns).line == 1
    with pytest.raises(TraceError) as caught:
        next(turns)
    assert caught.value.line == 2
    assert caught.value.path == str(trace)
    assert f"{trace}, line 2" in str(caught.value)
    assert fault in str(caught.value)


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.jsonl"):
        list(read_chat(tmp_path / "gone.jsonl"))
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_chat(tmp_path))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(TraceError, match=r"line 2.*not UTF-8"):
        list(read_chat(latin))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 100)[:-20])
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_chat(cut))


def test_an_image_that_cannot_be_decoded_is_named(trace: Path) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).convert("RGB").save(buffer, "JPEG")
    (trace.parent / "cut.jpg").write_bytes(buffer.getvalue()[:-400])
    (trace.parent / "text.jpg").write_bytes(b"no image at all")
    for name in ("cut.jpg", "text.jpg"):
        (turn,) = read_chat(write(trace, {"messages": [user(image(name))]}))
        (photo,) = media_of(turn.messages)
        assert isinstance(photo, Photo)
        with pytest.raises(MediaError, match=f"message 0, part 0 .{name}"):
            decode_image(photo.data, photo.source)


def test_images_decode_to_rgb_with_orientation_and_transparency_settled() -> None:
    assert decode_image(png((7, 7, 7, 0), mode="RGBA")).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(png((9,), mode="L")).getpixel((0, 0)) == (9, 9, 9)
    turned = Image.new("RGB", (8, 6))
    exif = turned.getexif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).size == (6, 8)


def test_wav_goes_there_and_back_and_a_broken_one_is_refused() -> None:
    samples = np.sin(np.arange(200) / 7).astype(np.float32)
    back, rate = decode_audio(encode_wav(samples, 16000))
    assert rate == 16000
    assert np.abs(back - samples).max() < 1e-4
    for broken in (b"", b"RIFF", encode_wav(samples, 16000)[:-10], encode_wav(samples[:0], 16000)):
        with pytest.raises(MediaError, match="clip"):
            decode_audio(broken, "clip")


def test_the_demo_shows_what_it_promises() -> None:
    turns = list(read_chat(DEMO_TRACE))
    conversations: dict[str, list[list[bytes]]] = {}
    order = []
    for turn in turns:
        conversations.setdefault(turn.conversation, []).append([part.data for part in media_of(turn.messages)])
        order.append(turn.conversation)
    assert len(conversations) >= 4
    assert all(len(history) >= 6 for history in conversations.values())
    assert sum(a != b for a, b in pairwise(order)) > len(order) // 2, "conversations take turns"
    times = [turn.timestamp for turn in turns]
    assert times == sorted(times)
    for history in conversations.values():
        fresh = [len(set(now) - set(before)) for before, now in zip([[], *history], history)]
        assert all(1 <= count <= 3 for count in fresh[:-1])
    growing = [history for history in conversations.values() if all(a == b[: len(a)] for a, b in pairwise(history))]
    rolling = [history for history in conversations.values() if history not in growing]
    assert len(growing) >= 3
    assert rolling
    assert all(history[-1][:1] != history[0][:1] for history in rolling), "the oldest image has left"
    assert any(len(now) - len(before) > len(set(now) - set(before)) for h in growing for before, now in pairwise(h))
    shared = [
        (one, other)
        for one in conversations
        for other in conversations
        if one < other
        if set(chain(*conversations[one])) & set(chain(*conversations[other]))
    ]
    assert shared, "two conversations share an image"
    assert sum(file.stat().st_size for file in DEMO_TRACE.parent.iterdir()) < 1_000_000
    text = DEMO_TRACE.read_text()
    assert "data:image/jpeg;base64," in text
    assert ".jpg" in text
