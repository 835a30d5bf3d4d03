"""Simulation: made workloads, traces of every kind, and what the simulated engine counts."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from mmcache import ConfigError, MMCacheError
from mmcache.cli import main
from mmcache.errors import TraceError
from mmcache.replay.costs import CostModel, EngineModel, TierModel, parse_costs, parse_size, parse_tier
from mmcache.replay.generate import WORKLOADS, generate
from mmcache.replay.measures import Latencies, Simulation, TimeSeries
from mmcache.replay.simulate import simulate
from mmcache.replay.traces import read_trace
from mmcache.replay.workload import Clip, Conversations, Turn, tokens_from

ROW = 100
ENGINE = EngineModel(capacity_bytes=10**9, row_bytes=ROW, block_size=4, prefix_blocks=10_000)
PLAIN = EngineModel(capacity_bytes=10**9, row_bytes=ROW, prefix_blocks=0)


def turn(name: str, *parts: str | int, time: float | None = None, **more: object) -> Turn:
    """A request; a string is a clip of 10 rows and 1,000 bytes, a number a token of text."""
    made = [Clip(p, 10, 1000) if isinstance(p, str) else np.array([p], np.int32) for p in parts]
    tokens, clips = tokens_from(*made)
    return Turn(name, tokens, clips, time, **more)  # type: ignore[arg-type]


def engine(base: EngineModel = PLAIN, **changes: object) -> EngineModel:
    values = {name: getattr(base, name) for name in EngineModel.__slots__}
    return EngineModel(**{**values, **changes})


# -- counting ----------------------------------------------------------------------------------------------------------


def test_a_content_is_encoded_once_and_counted_by_what_became_of_it() -> None:
    run = simulate([turn("1", "a", "b", time=0), turn("2", "b", "c", "b", time=10)], PLAIN)
    assert run.items == {"covered": 0, "stored": 2, "loaded": 0, "in_flight": 0, "missing": 3}
    assert run.bytes["transfer"] == 3000
    assert run.bytes["stored"] == 2000
    assert run.total_bytes == 5 * 1000 + 5 * 24
    assert run.encodes == 3
    assert run.hit_ratio == pytest.approx(2 / 5)
    assert run.most_used_bytes == 3 * 10 * ROW


def test_whoever_comes_while_it_is_encoded_waits_for_it() -> None:
    run = simulate([turn("1", "a", time=0), turn("2", "a", time=0)], PLAIN)
    assert run.items["in_flight"] == run.items["missing"] == 1
    assert run.encodes == 1


def test_a_followed_turn_has_its_history_covered_and_moves_what_is_new() -> None:
    first = turn("c", "a", 1, 2, time=0, last=False)
    second = turn("c", "b", 3, time=10, follows=True, number=2)
    run = simulate([first, second], ENGINE)
    assert run.items == {"covered": 1, "stored": 0, "loaded": 0, "in_flight": 0, "missing": 2}
    assert run.bytes["covered"] == 1000
    assert run.prefix_tokens == 12
    assert [row["moved"] for row in run.turns.rows()] == [1000, 1000]


def test_generated_tokens_are_part_of_the_next_prompt() -> None:
    turns = [turn("c", "a", time=0, output_tokens=6, last=False), turn("c", 7, time=10, follows=True)]
    run = simulate(turns, ENGINE)
    assert run.tokens == 10 + 10 + 6 + 1
    assert run.prefix_tokens == 16


def test_a_turn_does_not_run_before_the_one_that_it_follows_has_ended() -> None:
    turns = [turn("c", "a", time=0, output_tokens=1000, last=False), turn("c", "a", time=0.01, follows=True, number=2)]
    run = simulate(turns, engine(ENGINE, costs=CostModel(decode=1.0)))
    assert run.requests == 2
    assert run.items["missing"] == 1
    assert run.seconds > 1000
    assert run.ttft.most < 1, "its latency begins when its turn came"


def test_latency_is_transfer_and_encoding_and_prefill_one_after_the_other() -> None:
    costs = CostModel(item=1.0, row=0.1, link=1000.0, prefill=10.0, decode=0.5)
    run = simulate([turn("1", "a", time=5, output_tokens=4)], engine(costs=costs))
    assert run.ttft.mean == pytest.approx(1.0 + (1.0 + 10 * 0.1) + 10 / 10)
    assert run.seconds == pytest.approx(4.0 + 4 * 0.5)
    assert run.encode_seconds == run.plain_encode_seconds == pytest.approx(2.0)


def test_requests_wait_for_a_slot_and_are_known_while_they_wait() -> None:
    # Room for one. `a` is held when `b` and `a` wait: knowing that, `b` is served and `a` still hits, or misses once.
    turns = [turn("1", "a", time=0), turn("2", "b", time=0), turn("3", "a", time=0)]
    run = simulate(turns, engine(capacity_bytes=2 * 10 * ROW, slots=1))
    assert run.items["stored"] == 1
    tight = [turn(str(i), name) for i, name in enumerate("abcabdabcabd" * 4)]
    small = engine(capacity_bytes=2 * 10 * ROW, slots=1, queue=12)
    lru, aware = (simulate(tight, engine(small, policy=policy)) for policy in ("lru", "queue-aware"))
    assert lru.hit_ratio == 0
    assert aware.hit_ratio > 0.3


def test_room_is_never_exceeded_and_evictions_are_counted() -> None:
    turns = [turn(str(i), f"i{i % 7}", time=float(i)) for i in range(70)]
    run = simulate(turns, engine(capacity_bytes=3 * 10 * ROW))
    assert run.most_used_bytes == 3 * 10 * ROW
    assert sum(run.evictions.values()) == run.encodes - 3
    nothing = simulate(turns, engine(capacity_bytes=0))
    assert nothing.encodes == 70
    assert nothing.uncached == {"larger than the budget": 70}


def test_tiers_give_what_the_budget_has_no_room_for() -> None:
    tier = TierModel("host", 10**6, bandwidth=1e6, latency=0.5)
    turns = [turn(str(i), "ab"[i % 2], time=10.0 * i) for i in range(6)]
    costs = CostModel(item=0, row=0, link=1e12, prefill=1e12)
    run = simulate(turns, engine(capacity_bytes=10 * ROW, tiers=(tier,), costs=costs))
    assert run.encodes == run.items["missing"] == 2
    assert run.tier_hits == {"host": 4}
    assert run.items["loaded"] == 4
    assert run.bytes["transfer"] == 2000
    assert run.bytes["stored"] == 4000
    assert run.ttft.most == pytest.approx(0.5 + 1000 / 1e6)
    small = simulate(turns, engine(capacity_bytes=10 * ROW, tiers=(TierModel("host", 10 * ROW, 1e6),)))
    assert small.tier_hits == {}


def test_the_salt_keeps_tenants_apart() -> None:
    turns = [turn("1", "a", time=0, salt="x"), turn("2", "a", time=10, salt="y"), turn("3", "a", time=20, salt="x")]
    assert simulate(turns, ENGINE).items["missing"] == 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_byte_and_item_is_accounted_for(name: str) -> None:
    turns = list(generate(name, 150, seed=3))
    run = simulate(turns, EngineModel(capacity_bytes=500_000_000))
    conversations = Conversations()
    requests = [(len(r.items), sum(i.fields.payload_bytes + i.fields.kept_bytes for i in r.items if i.fields))
                for r in map(conversations.request, turns)]  # fmt: skip
    assert run.requests == 150
    assert sum(run.items.values()) == sum(count for count, _ in requests)
    assert run.total_bytes == sum(nbytes for _, nbytes in requests)
    assert sum(sum(bucket) for bucket in run.series.buckets) == run.total_bytes
    assert run.encode_seconds <= run.needed_seconds <= run.plain_encode_seconds + 1e-9


# -- made workloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_says_everything(name: str) -> None:
    def shown(seed: int, count: int) -> list[object]:
        return [(t.conversation, t.token_ids.tolist(), t.clips, t.time, t.follows) for t in generate(name, count, seed=seed)]  # fmt: skip # noqa: E501

    assert shown(1, 40) == shown(1, 60)[:40]
    assert shown(1, 40) != shown(2, 40)
    times = [t.time or 0 for t in generate(name, 200, rate=5.0)]
    assert times == sorted(times)
    assert 20 < times[-1] < 80


def test_the_workloads_are_what_they_are_called() -> None:
    runs = {name: simulate(generate(name, 600), EngineModel(capacity_bytes=10**12)) for name in WORKLOADS}
    assert runs["growing"].items["covered"] > 3 * runs["growing"].items["missing"]
    assert runs["growing"].items["stored"] == 0
    assert runs["rolling"].items["stored"] > 2 * runs["rolling"].items["missing"]
    assert runs["agent"].items["stored"] > 0
    assert runs["documents"].prefix_ratio > 0.5
    assert runs["catalogue"].prefix_ratio == 0
    assert runs["catalogue"].hit_ratio > 0.3
    assert runs["video"].items["covered"] > 0
    assert runs["unique"].hit_ratio == 0
    assert runs["unique"].encode_seconds == pytest.approx(runs["unique"].plain_encode_seconds)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("growing", lambda turns: max(turn.number for turn in turns)),
        ("rolling", lambda turns: max(len(turn.clips) for turn in turns)),
        ("agent", lambda turns: max(turn.number for turn in turns)),
        ("documents", lambda turns: len({turn.clips[0][1] for turn in turns})),
        ("catalogue", lambda turns: len({clip for turn in turns for _, clip in turn.clips})),
        ("video", lambda turns: max(clip.rows for turn in turns for _, clip in turn.clips) / 64),
    ],
)
def test_a_workload_is_as_large_as_it_is_said_to_be(name: str, shown: Callable[[list[Turn]], float]) -> None:
    assert shown(list(generate(name, 600, size=5))) == 5


def test_popular_pictures_come_more_often() -> None:
    clips = [clip for turn in generate("catalogue", 3000, size=100) for _, clip in turn.clips]
    often = sorted((clips.count(clip) for clip in set(clips)), reverse=True)
    assert often[0] > 1.5 * often[1] > 2 * often[4], "as 1, 1/2 and 1/5"


def test_a_growing_history_moves_one_image_a_turn() -> None:
    run = simulate(itertools.islice(generate("growing", 2000), 2000), EngineModel(prefix_blocks=1 << 20))
    assert run.encodes == run.requests
    assert len({row["moved"] for row in run.turns.rows()}) == 1


def test_only_conversations_that_go_on_are_kept() -> None:
    conversations = Conversations()
    most = 0
    for each in generate("growing", 3000):
        conversations.request(each)
        most = max(most, len(conversations))
    assert most <= 32


def test_wrong_workloads_are_refused() -> None:
    for arguments in (("no such", 1, 1.0), ("growing", 0, 1.0), ("growing", 1, 0.0)):
        with pytest.raises(ConfigError):
            generate(arguments[0], arguments[1], rate=arguments[2])
    for name, size in (("growing", 0), ("video", -1), ("unique", 3)):
        with pytest.raises(ConfigError, match="size"):
            generate(name, 1, size=size)


# -- traces ------------------------------------------------------------------------------------------------------------


def line(ids: Iterable[int], length: int, time: int = 0, output: int = 1) -> str:
    return json.dumps({"timestamp": time, "input_length": length, "output_length": output, "hash_ids": list(ids)})


def test_mooncake_blocks_are_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join([line([0, 1, 2], 1300), line([0, 1, 3], 1100, 60_000)]))
    first, second = read_trace(trace)
    assert (first.time, second.time) == (0, 60)
    assert len(first.token_ids) == 1300
    assert (first.token_ids[:1024] == second.token_ids[:1024]).all()
    assert (first.token_ids[1024:1100] != second.token_ids[1024:1100]).all()
    run = simulate([first, second], EngineModel())
    assert run.prefix_tokens == 1024


def test_some_blocks_are_images_wherever_they_occur(tmp_path: Path) -> None:
    trace = tmp_path / "t.gz"
    trace.write_bytes(gzip.compress("\n".join([line(range(400), 400 * 512), line(range(400), 399 * 512 + 1)]).encode()))
    all_of, cut = read_trace(trace, image_share=1.0)
    assert len(all_of.clips) == 400
    assert len(cut.clips) == 399, "a part of a block is no image"
    some, again = read_trace(trace, image_share=0.3)
    assert 80 < len(some.clips) < 160
    assert some.clips[:50] == again.clips[:50]
    (other, _), (none, _) = read_trace(trace, image_share=0.3, seed=1), read_trace(trace)
    assert other.clips != some.clips
    assert none.clips == ()


BAD = ["{", "[]", '{"hash_ids": []}', line([1, 2], 512), line([1], 513), line([-1], 5), line([1], 5, -1), '{"a": 1}']


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_reported_with_its_number_and_skipped_only_if_asked(tmp_path: Path, bad: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join([line([1], 5), "", bad, line([2], 5)]))
    with pytest.raises(TraceError, match="line 3"):
        list(read_trace(trace))
    told: list[TraceError] = []
    assert len(list(read_trace(trace, on_bad=told.append))) == 2
    assert [error.line for error in told] == [3]
    trace.write_text("\n".join([bad, line([2], 5)]))
    if bad != BAD[-1]:
        with pytest.raises(TraceError, match="line 1"):
            list(read_trace(trace))


def test_unknown_and_empty_files_are_refused(tmp_path: Path) -> None:
    for text in ("", '{"a": 1}\n'):
        (tmp_path / "t.jsonl").write_text(text)
        with pytest.raises(TraceError):
            list(read_trace(tmp_path / "t.jsonl"))
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_trace(tmp_path / "gone"))


def client(folder: Path, name: str, rows: list[str], **columns: str) -> Path:
    sizes = {"text_tokens": "{7: 1.0}", "image_tokens": "{100: 0.5, 300: 0.5}", "image_count": "{2: 1.0}"}
    (folder / f"{name}-trace.csv").write_text("\n".join(rows))
    dataset = {"0": {**sizes, "output_tokens": "{3: 1}", **columns}}
    (folder / f"{name}-dataset.json").write_text(json.dumps(dataset))
    return folder / f"{name}-trace.csv"


def test_servegen_clients_are_drawn_as_their_columns_say(tmp_path: Path) -> None:
    one = client(tmp_path, "one", ["0,0,0,,0,0", "600,2,1,Gamma,1,0.5", "1200,0,0,,0,0"])
    client(tmp_path, "two", ["0,1,1,Weibull,1,1", "600,0,0,,0,0"])
    turns = list(read_trace(one))
    assert 1000 < len(turns) < 1400
    assert all(600 <= (t.time or 0) < 1200 for t in turns)
    assert {len(t.clips) for t in turns} == {2}
    rows = [clip.rows for t in turns for _, clip in t.clips]
    assert set(rows) == {100, 300}
    assert 0.4 < rows.count(100) / len(rows) < 0.6
    assert {t.output_tokens for t in turns} == {3}
    assert len({clip.identifier for t in turns for _, clip in t.clips}) == len(rows), "all images differ"
    both = list(read_trace(tmp_path))
    assert len(both) > len(turns) + 400
    assert [t.time for t in both] == sorted(t.time or 0 for t in both)
    again = [clip.identifier for t in read_trace(one, reuse=0.5) for _, clip in t.clips]
    assert 0.4 < len(set(again)) / len(again) < 0.6
    assert [t.time for t in read_trace(one)] == [t.time for t in turns]
    assert [t.time for t in read_trace(one, seed=1)] != [t.time for t in turns]


def test_packed_servegen_clients_are_the_same(tmp_path: Path) -> None:
    trace = client(tmp_path, "one", ["0,1,1,Gamma,1,1", "600,0,0,,0,0"])
    plain = list(read_trace(tmp_path))
    for file in list(tmp_path.iterdir()):
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    shown = [(turn.time, turn.clips, turn.output_tokens) for turn in plain]
    for where in (tmp_path, trace.with_name(f"{trace.name}.gz")):
        assert [(turn.time, turn.clips, turn.output_tokens) for turn in read_trace(where)] == shown


WRONG_ROWS = ["1,2", "x,1,1,Gamma,1,1", "600,1,1,Cauchy,1,1", "600,1,1,Gamma,0,1", "600,-1,1,Gamma,1,1"]


@pytest.mark.parametrize("row", WRONG_ROWS)
def test_bad_servegen_rows_are_named(tmp_path: Path, row: str) -> None:
    trace = client(tmp_path, "one", ["0,1,1,Gamma,1,1", row])
    with pytest.raises(TraceError, match="line 2"):
        list(read_trace(trace))
    assert list(read_trace(trace, on_bad=lambda error: None))


@pytest.mark.parametrize("text", ["", "{}", "{1: 2", "{-1: 1}", "{1: -1}", "{1: 0}", "__import__('os')", "{'a': 1}"])
def test_bad_servegen_distributions_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="text_tokens"):
        list(read_trace(client(tmp_path, "one", ["0,1,1,Gamma,1,1"], text_tokens=text)))


def test_the_demo_is_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    assert main(["replay", "--simulate", "--json", str(tmp_path / "out.json")]) == 0
    (run,) = json.loads((tmp_path / "out.json").read_text())["simulations"]
    assert run["items"] == {"covered": 65, "stored": 23, "loaded": 0, "in_flight": 0, "missing": 30}
    assert "hit ratio of embeddings" in capsys.readouterr().out


# -- measures and options ----------------------------------------------------------------------------------------------


def test_latencies_and_series_stay_small_and_right() -> None:
    latencies, series = Latencies(), TimeSeries(1)
    for i in range(1, 10_001):
        latencies.add(i / 1000)
        series.add(float(i), (1,))
    assert latencies.mean == pytest.approx(5.0005)
    assert latencies.quantile(0.5) == pytest.approx(5.0, rel=0.03)
    assert latencies.quantile(0.99) == pytest.approx(9.9, rel=0.03)
    assert len(series.buckets) <= 96
    assert sum(bucket[0] for bucket in series.buckets) == 10_000
    assert Simulation("lru", 0).hit_ratio == 0


def test_options_are_read_strictly() -> None:
    assert parse_size("8GB") == 8_000_000_000
    assert parse_size("1.5 MiB") == 3 * 2**19
    assert parse_size("2G") == 2**31
    assert parse_tier("host:1GB:2MB:50") == TierModel("host", 10**9, 2e6, 50e-6)
    assert parse_costs("item=0.5,link=1e9") == CostModel(item=0.5, link=1e9)
    wrong: list[tuple[Callable[[str], object], str]] = [
        *((parse_size, text) for text in ("", "GB", "-1", "8XB", "1e999", "1.2.3MB")),
        *((parse_tier, text) for text in ("host", "host:1GB", "host:1GB:0", ":1:1", "h:1:1:x", "h:1:1:-3")),
        *((parse_costs, text) for text in ("item", "no=1", "item=x", "item=-1", "link=0", "item=inf")),
    ]
    for parse, text in wrong:
        with pytest.raises(ConfigError):
            parse(text)
    for change in ({"slots": 0}, {"queue": 0}, {"policy": "no"}, {"capacity_bytes": -1}, {"row_bytes": True}):
        with pytest.raises(ConfigError):
            engine(**change)


def test_the_command_tells_what_is_wrong_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join([line([1], 5), "{", line([2], 5)]))
    for arguments in (
        ["--simulate", str(trace)],
        ["--simulate", str(trace), "--generate", "growing"],
        ["--simulate", "--generate", "growing", "--policy", "no"],
        ["--simulate", "--generate", "growing", "--json", str(tmp_path / "no" / "x")],
        ["--generate", "growing"],
        ["--simulate", "--generate", "unique", "--size", "3"],
    ):
        assert main(["replay", *arguments]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["replay", "--simulate", str(trace), "--skip-bad-lines", "--policy", "lru", "--policy", "gdsf"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("jsonl, line 2") == 1
    assert "lines skipped" in captured.out
    assert issubclass(TraceError, MMCacheError)
