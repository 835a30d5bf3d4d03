"""The connector in a real vLLM engine: outputs as without it, no encode twice, and no fault that reaches a request.

Every engine is a process of its own. They run two at a time, in the order in which `Runs` starts them, and each test
looks at what some of them answered.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tier_servers import RedisServer
from vllm_helpers import prepare, run, run_from_nothing

from mmcache.tiers import DiskTier, Entry, encode_entry

if find_spec("vllm") is None:  # importing it takes long, and is left to the engines' processes
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

SEEDS = [1, 2, 3]
DIGEST = "5e" * 32
TURNS = 2


def alike(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Equal but for the order in which sums were made."""
    for answer, other in zip(answers, expected, strict=True):
        if answer["tokens"] != other["tokens"]:
            return False
        for step, steps in zip(answer["logprobs"], other["logprobs"], strict=True):
            chosen = dict(map(tuple, steps))
            if any(abs(chosen[token] - logprob) >= 1e-3 for token, logprob in step if token in chosen):
                return False
    return True


def every(answers: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Tokens and log-probabilities, to the bit."""
    return [(answer["tokens"], answer["logprobs"]) for answer in answers]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from vllm_tiny import write_model

    return str(write_model(tmp_path_factory.mktemp("model")))


class Runs:
    """All scenarios, each run once."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._pool = ThreadPoolExecutor(2)
        self._futures: dict[str, Future[Any]] = {}
        self._start("filling", self._fill)
        self._start("plain", lambda: self._run("workload", None, seeds=[*SEEDS, 4, 9], turns=TURNS))
        self._start("found", lambda: self._run("found_by_vllm", None))
        self._start("two ranks", lambda: self._after("filling", self._two_ranks))
        self._start("reading", lambda: self._after("filling", self._read))
        self._start("other dtype", lambda: self._after("filling", self._other_dtype))
        self._start("damaged", lambda: self._after("filling", self._damaged))
        self._start("evicting", lambda: self._run("evictions", self.store("evicting"), seeds=SEEDS))
        self._start("client ids", lambda: self._run("client_ids", self.store("client"), digest=DIGEST))
        self._start("hanging", lambda: self._run("store_hangs", {}, seeds=SEEDS))
        self._start("restarting", lambda: self._run("store_restarts_empty", {}, seeds=SEEDS))
        self._start("dying", self._dying)
        self._start("encoding only", lambda: self._run("workload", self._ids(), seeds=SEEDS, role="ec_producer"))
        self._start("without media", lambda: self._after("encoding only", self._without_media))
        self._start("pairs of stages", lambda: self._run("pairs_of_stages", {}))
        self._start("in stages", lambda: self._run("model_in_stages", {}, seeds=SEEDS[:2], ranks=2))

    def __getitem__(self, name: str) -> Any:
        return self._futures[name].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def store(self, name: str) -> dict[str, Any]:
        return {"store": f"file://{self._folder / name}"}

    def _start(self, name: str, job: Callable[[], Any]) -> None:
        self._futures[name] = self._pool.submit(job)

    def _after(self, name: str, job: Callable[[], Any]) -> Any:
        self._futures[name].result()
        return job()

    def _run(self, scenario: str, connector: dict[str, Any] | None, **arguments: Any) -> Any:
        return run(scenario, model=self._model, connector=connector, **arguments)

    def _fill(self) -> Any:
        connector = self.store("filled")
        return run_from_nothing("workload", model=self._model, connector=connector, seeds=SEEDS, turns=TURNS)

    def _read(self) -> Any:
        return self._run("workload", self.store("filled"), seeds=SEEDS, turns=TURNS)

    def _two_ranks(self) -> Any:
        return run_from_nothing(
            "workload",
            separate=True,
            model=self._model,
            connector=self._copy("filled", "two ranks"),
            seeds=[*SEEDS[:2], 4],
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )

    def _other_dtype(self) -> Any:
        return self._run("workload", self._copy("filled", "other dtype"), seeds=SEEDS, dtype="bfloat16")

    def _damaged(self) -> Any:
        connector = self._copy("filled", "damaged")
        tier = DiskTier(self._folder / "damaged", 1 << 30)
        keys = [line.key for line in tier.scan() if line.key is not None]
        spoil = [_flip_a_bit, _drop_a_row, _other_dtype, _flip_a_bit, _flip_a_bit]
        assert len(keys) == len(spoil)
        for (key, entry), change in zip(tier.get_many(keys).items(), spoil):
            tier.remove_many([key])
            tier.put_many({key: change(key, entry)})
        tier.close()
        return self._run("workload", connector, seeds=SEEDS, turns=TURNS)

    def _dying(self) -> Any:
        server = RedisServer()
        try:
            store = {"store": server.url}
            self._run("workload", dict(store), seeds=SEEDS)
            assert server.process is not None
            return self._run("store_is_slow_and_then_dies", store, seeds=SEEDS, pid=server.process.pid)
        finally:
            server.kill()

    def _ids(self) -> dict[str, Any]:
        return self.store("by id") | {"trust_client_ids": True}

    def _without_media(self) -> Any:
        return self._run("without_media", self._ids(), seeds=SEEDS, lost=9)

    def _copy(self, name: str, copy: str) -> dict[str, Any]:
        shutil.copytree(self._folder / name, self._folder / copy)
        return self.store(copy)


def _flip_a_bit(key: Any, entry: Entry) -> Entry:
    payload = entry.payload.clone()
    payload[7] ^= 1
    return Entry(entry.header, payload)


def _drop_a_row(key: Any, entry: Entry) -> Entry:
    return encode_entry(key, entry.payload.view(torch.float32).view(-1, 128)[:-1])


def _other_dtype(key: Any, entry: Entry) -> Entry:
    return encode_entry(key, entry.payload.view(torch.float32).view(-1, 128).to(torch.bfloat16))


@pytest.fixture(scope="module")
def runs(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    prepare()
    runs = Runs(model, tmp_path_factory.mktemp("stores"))
    yield runs
    runs.close()


def test_with_an_empty_store_all_is_encoded_once_saved_and_answered_as_without_a_connector(runs: Runs) -> None:
    plain, filling = runs["plain"], runs["filling"]
    count = len(SEEDS)
    for part in ("first", "again"):
        assert every(filling[part]) == every(plain[part][:count])
    assert every(filling["chat"]) == every(plain["chat"])
    end = filling["counts"][-1]
    assert end["encoded"] == end["encodes"] == end["saves"] == count + TURNS
    assert "loads" not in end


def test_pictures_change_the_answers_so_that_equality_means_something(runs: Runs) -> None:
    answers = every(runs["plain"]["first"])
    assert all(answers[i] != answers[j] for i in range(len(answers)) for j in range(i))


def test_vllm_finds_the_connector_and_its_metrics(runs: Runs) -> None:
    found = runs["found"]
    assert found["connector"] == "MMCacheConnector"
    assert found["hits"] == 3
    assert found["store_up"] == 0


def test_a_vllm_of_another_version_is_named_at_the_start(runs: Runs) -> None:
    (note,) = runs["found"]["said"]
    assert "0.32.0" in note
    assert "0.1.x" in note


def test_another_engine_encodes_nothing_and_answers_to_the_bit(runs: Runs) -> None:
    filling, reading = runs["filling"], runs["reading"]
    for part in ("first", "again", "chat"):
        assert every(reading[part]) == every(filling[part])
    end = reading["counts"][-1]
    assert end["loads"] == end["hits.store"] == end["store_hits.disk"] == len(SEEDS) + TURNS
    assert end["load_bytes"] == end["loads"] * 144 * 128 * 4
    assert end["encoded"] == 0
    assert "encodes" not in end
    assert "saves" not in end


def test_under_tensor_parallelism_every_rank_loads_and_one_saves(runs: Runs) -> None:
    # Also the run in which the one that asks, the scheduler and the workers are processes apart
    both, plain = runs["two ranks"], runs["plain"]["first"]
    assert alike(both["first"], [plain[0], plain[1], plain[3]])
    end = both["counts"][0]
    assert end["hits.store"] == end["store_hits.disk"] == 2
    assert end["loads"] == 2 * 2
    assert end["encodes"] == end["saves"] == 1
    again = both["counts"][1]
    assert again.get("encodes") == 1


def test_under_pipeline_parallelism_the_first_stage_loads_and_its_first_rank_saves(runs: Runs) -> None:
    staged = runs["in stages"]
    assert alike(staged["first"], runs["plain"]["first"][:2])
    assert alike(staged["again"], staged["first"])
    counts = staged["counts"]
    assert counts["encodes"] == counts["saves"] == 2
    assert counts["hits.memory"] == 2
    assert counts["loads"] == 2 * 2
    assert staged["held"] == [1, 1, 0, 0]


@pytest.mark.parametrize("role", ["ec_both", "ec_producer"])
def test_later_stages_neither_save_nor_load_nor_promise_although_they_are_asked_to(runs: Runs, role: str) -> None:
    # Rank r fills its rows with r + 1: rows say who wrote them
    said = runs["pairs of stages"][role]
    encoded = {"promised": 0, "loads": 0}
    loaded = {"promised": 1, "loads": 2, "saves": 0, "rows": [1, 1, None, None]}
    if role == "ec_producer":  # has no use for rows; that they are stored is all that it needs to know
        loaded |= {"loads": 0, "rows": [None] * 4}
    assert said["first stage"] == [True, True, False, False]
    assert said["encoded in later stages only"] == encoded | {"saves": 0, "rows": [None, None, 3, 4]}
    assert said["encoded in every stage"] == encoded | {"saves": 1, "rows": [1, 2, 3, 4]}
    assert said["needed again"] == loaded
    assert said["encoded while later stages are not asked"] == encoded | {"saves": 1, "rows": [1, 2, None, None]}
    assert said["needed again while later stages are not asked"] == loaded
    assert set(said["workers' promises"]) == {"UnsupportedError"}


def test_an_engine_that_only_encodes_saves_and_one_that_only_consumes_loads(runs: Runs) -> None:
    made, used = runs["encoding only"]["counts"][-1], runs["without media"]
    assert made["encoded"] == made["saves"] == len(SEEDS)
    assert "loads" not in made
    assert every(used["first"]) == every(runs["plain"]["first"][: len(SEEDS)])
    end = used["counts"]
    assert end["store_hits.disk"] == len(SEEDS)
    assert end["encoded"] == end["encodes"] == 1  # a picture that no engine had encoded
    assert "saves" not in end


def test_a_request_without_media_is_served_from_the_store_or_fails_and_no_other_does(runs: Runs) -> None:
    used = runs["without media"]
    found, lost, also_found = used["bare"]
    one, unknown, two = used["full"]
    assert every([found, also_found]) == every([one, two])
    assert (lost["finish"], lost["tokens"]) == ("error", [])
    assert unknown["finish"] == "length"
    assert every([unknown]) != every([one])
    assert used["counts"]["failed_requests"] == 1


def test_what_the_prefix_cache_covers_is_neither_loaded_nor_encoded(runs: Runs) -> None:
    # The second turn of the chat carries two pictures; the first one's KV exists
    for name in ("filling", "reading"):
        assert runs[name]["chat"][1]["cached"] >= 144
        before, after = runs[name]["counts"][1:]
        moved = [after.get(kind, 0) - before.get(kind, 0) for kind in ("encodes", "loads")]
        assert sum(moved) == TURNS


def test_evicted_pictures_are_loaded_not_encoded(runs: Runs) -> None:
    evicting = runs["evicting"]
    first, again, _ = evicting["counts"]
    assert every(evicting["again"]) == every(evicting["first"]) == every(runs["plain"]["first"][: len(SEEDS)])
    assert first["encoded"] == again["encoded"] == len(SEEDS)
    assert again["loads"] == again["hits.memory"] == len(SEEDS)


def test_eight_requests_at_once_share_two_encodes(runs: Runs) -> None:
    _, before, after = runs["evicting"]["counts"]
    assert after["encoded"] - before["encoded"] == 2
    assert alike(runs["evicting"]["crowd"], runs["evicting"]["alone"])


def test_a_clients_name_for_a_picture_is_neither_saved_nor_loaded(runs: Runs) -> None:
    answers, plain = every(runs["client ids"]["answers"]), every(runs["plain"]["first"])
    one, two, three, four, nine = plain
    assert answers == [one, nine, two, three, nine, four]
    counts = runs["client ids"]["counts"]
    # Two pictures came under an id that looks like vLLM's own digests: they are stored under what they show
    assert counts["saves"] == 2
    assert counts["refused.client_id"] == 4
    assert "loads" not in counts


def test_an_engine_of_another_dtype_shares_nothing(runs: Runs) -> None:
    end = runs["other dtype"]["counts"][-1]
    assert end["encoded"] == end["saves"] == len(SEEDS)
    assert "store_hits.disk" not in end
    assert "store_damaged.disk" not in end


def test_damaged_entries_and_entries_of_other_shape_or_dtype_are_encoded_anew(runs: Runs) -> None:
    damaged = runs["damaged"]
    for part in ("first", "again", "chat"):
        assert every(damaged[part]) == every(runs["filling"][part])
    end = damaged["counts"][-1]
    assert end["store_damaged.disk"] == end["encoded"] == len(SEEDS) + TURNS
    assert "loads" not in end


def test_a_slow_store_delays_a_request_that_then_loads(runs: Runs) -> None:
    slow = runs["dying"]["slow"]
    assert slow["seconds"] >= 0.5
    assert slow["deferred"] == slow["loads"] == slow["store_hits.redis"] == 1
    assert slow["encoded"] == 0


def test_a_store_that_is_killed_between_prefetch_and_use_costs_nothing_but_encodes(runs: Runs) -> None:
    dying = runs["dying"]
    assert dying["killed"]
    assert every(dying["answers"]) == every(runs["plain"]["first"][: len(SEEDS)])
    counts = dying["counts"]
    assert counts["loads"] == 2
    assert counts["encoded"] == len(SEEDS) - 2


def test_a_store_that_never_answers_delays_and_no_more(runs: Runs) -> None:
    hanging = runs["hanging"]
    assert every(hanging["answers"]) == every(runs["plain"]["first"][: len(SEEDS)])
    assert hanging["counts"]["encoded"] == len(SEEDS)
    assert hanging["counts"]["deferred"] >= 1
    assert hanging["counts"]["store_errors.redis"] >= 1


def test_a_store_that_restarts_empty_is_only_slower(runs: Runs) -> None:
    # The last picture is the first one again, which the memory did not keep and the store has forgotten
    restarting = runs["restarting"]
    plain = every(runs["plain"]["first"][: len(SEEDS)])
    assert every(restarting["answers"]) == [*plain, plain[0]]
    counts = restarting["counts"]
    assert counts["encoded"] == len(SEEDS) + 1
    assert "loads" not in counts
