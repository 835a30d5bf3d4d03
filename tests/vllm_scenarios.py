"""What vLLM is put through, each in a process of its own: `python vllm_scenarios.py NAME JSON`; the answer is JSON.

An engine that dies takes its process with it, and vLLM makes one connector a process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from itertools import count
from threading import Timer
from typing import Any

import vllm_tiny
from tier_servers import RedisServer

MEBIBYTE = 1 << 20


class Engine:
    """A tiny model in vLLM. `run` asks it one thing; `counts` says what the connector and the encoder did."""

    def __init__(self, model: str, connector: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM, SamplingParams

        self.sampling = SamplingParams(max_tokens=6, temperature=0, logprobs=3)
        role = options.pop("role", "ec_both")
        arguments: dict[str, Any] = {
            "model": model,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "block_size": 32,
            "max_num_batched_tokens": 1024,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": 64 * MEBIBYTE,
            "limit_mm_per_prompt": {"image": 4},
            "seed": 0,
            "disable_log_stats": False,
        } | options
        if connector is not None:
            arguments["ec_transfer_config"] = {
                "ec_connector": connector.pop("name", "MMCacheConnector"),
                "ec_role": role,
                "ec_connector_extra_config": {"memory_bytes": 16 * MEBIBYTE} | connector,
            }
        self.llm = LLM(**arguments)
        self.encoded = 0
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if core is not None and hasattr(core.model_executor, "driver_worker"):
            self._count_encodes(core.model_executor.driver_worker)
        self.connector = core.scheduler.ec_connector if core is not None else None

    def _count_encodes(self, worker: Any) -> None:
        # The encoder itself is counted, not what anybody says of it
        model = worker.worker.model_runner.model if hasattr(worker, "worker") else worker.model_runner.model
        encode = model.embed_multimodal

        def counted(**kwargs: Any) -> Any:
            rows = encode(**kwargs)
            self.encoded += len(rows)
            return rows

        model.embed_multimodal = counted

    def run(self, *conversation: dict[str, Any]) -> dict[str, Any]:
        return self.run_all([list(conversation)])[0]

    def run_all(self, conversations: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        outputs = self.llm.chat(conversations, self.sampling, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    sorted((token, entry.logprob) for token, entry in step.items())
                    for step in output.outputs[0].logprobs or ()
                ],
                "finish": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def counts(self) -> dict[str, float]:
        """vLLM's metrics of the connector, by name and label."""
        found: dict[str, float] = {"encoded": self.encoded}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:mmcache_"):
                name = metric.name.removeprefix("vllm:mmcache_")
                label = metric.labels.get("tier") or metric.labels.get("reason")
                found[f"{name}.{label}" if label else name] = metric.value
        return found


def ask(seed: int, *, lead: str = "", text: str = "what is this?") -> dict[str, Any]:
    return vllm_tiny.message(text, vllm_tiny.picture(seed), lead=lead)


def pictures(engine: Engine, seeds: list[int], lead: str = "") -> list[dict[str, Any]]:
    return [engine.run(ask(seed, lead=lead)) for seed in seeds]


def chat(engine: Engine, turns: int) -> list[dict[str, Any]]:
    """A conversation that grows by one picture a turn."""
    history: list[dict[str, Any]] = []
    answers = []
    for turn in range(turns):
        history.append(ask(100 + turn, text=f"turn {turn}"))
        answers.append(engine.run(*history))
        history.append({"role": "assistant", "content": f"answer {turn}"})
    return answers


# -- scenarios


def workload(model: str, connector: dict[str, Any] | None, seeds: list[int], turns: int = 0, **options: Any) -> Any:
    """Pictures one by one, then the same pictures behind other words, then a chat."""
    engine = Engine(model, connector, **options)
    first = pictures(engine, seeds)
    after_first = engine.counts()
    again = pictures(engine, seeds, lead="look here: ")
    after_again = engine.counts()
    talk = chat(engine, turns)
    return {"first": first, "again": again, "chat": talk, "counts": [after_first, after_again, engine.counts()]}


def evictions(model: str, connector: dict[str, Any] | None, seeds: list[int], **options: Any) -> Any:
    """An encoder cache that holds one picture; then eight requests at once that share pictures."""
    engine = Engine(model, connector, max_num_batched_tokens=256, enable_prefix_caching=False, **options)
    first = pictures(engine, seeds)
    after_first = engine.counts()
    again = pictures(engine, seeds)
    after_again = engine.counts()
    new = [seeds[0] + 50, seeds[0] + 51]
    questions = [[ask(new[i % 2], text=f"question {i}")] for i in range(8)]
    crowd = engine.run_all(questions)
    counts = [after_first, after_again, engine.counts()]
    alone = [engine.run(*question) for question in questions]
    return {"first": first, "again": again, "crowd": crowd, "alone": alone, "counts": counts}


def client_ids(model: str, connector: dict[str, Any], digest: str) -> Any:
    """Ids of the client's: a name, and one that looks like a digest, for one picture and then for another."""
    engine = Engine(model, connector, mm_processor_cache_gb=0, enable_prefix_caching=False, max_num_batched_tokens=256)
    answers = []
    for uuid, seed in (("logo", 1), ("other", 9), ("logo", 2), (digest, 3), ("other", 9), (digest, 4)):
        message = vllm_tiny.message("what is this?", (uuid, vllm_tiny.picture(seed)))
        answers.append(engine.run(message))
    return {"answers": answers, "counts": engine.counts()}


def store_is_slow_and_then_dies(model: str, connector: dict[str, Any], seeds: list[int], pid: int) -> Any:
    """The store answers after a while; and is killed between the moment in which another request's items are ready and
    their use."""
    engine = Engine(model, connector | {"fetch_seconds": 30})
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    Timer(0.5, lambda: os.kill(pid, signal.SIGCONT)).start()
    answers = pictures(engine, seeds[:1])
    slow = {"seconds": time.monotonic() - start} | engine.counts()
    prepare = engine.connector.ensure_cache_available
    killed: list[bool] = []

    def prepare_then_kill(request: Any, num_computed_tokens: int) -> bool:
        ready = prepare(request, num_computed_tokens)
        if ready and not killed and engine.connector.has_cache_item(request.mm_features[0].identifier):
            killed.append(True)
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        return ready

    engine.connector.ensure_cache_available = prepare_then_kill
    answers += pictures(engine, seeds[1:])
    return {"answers": answers, "slow": slow, "killed": bool(killed), "counts": engine.counts()}


def store_hangs(model: str, connector: dict[str, Any], seeds: list[int]) -> Any:
    """A store that takes connections and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    engine = Engine(model, connector | {"store": url, "fetch_seconds": 0.3})
    start = time.monotonic()
    answers = pictures(engine, seeds)
    return {"answers": answers, "seconds": time.monotonic() - start, "counts": engine.counts()}


def store_restarts_empty(model: str, connector: dict[str, Any], seeds: list[int]) -> Any:
    """A store that dies while the engine runs, and comes back without what it held; the engine's memory holds two."""
    server = RedisServer()
    settings = connector | {"store": server.url, "memory_bytes": 150_000}
    engine = Engine(model, settings, enable_prefix_caching=False, max_num_batched_tokens=256)
    first, *others = seeds
    answers = pictures(engine, [first])
    text = vllm_tiny.message("hello")
    _until(lambda: engine.counts().get("store_bytes_written.redis", 0) > 0, lambda seed: engine.run(text))
    server.kill()
    answers += pictures(engine, others)
    server.start()
    answers += pictures(engine, [first])
    counts = engine.counts()
    written = counts["store_bytes_written.redis"]
    _until(lambda: engine.counts()["store_bytes_written.redis"] > written, lambda seed: pictures(engine, [seed]))
    server.kill()
    return {"answers": answers, "counts": counts}


def _until(reached: Callable[[], bool], ask: Callable[[int], Any]) -> None:
    """Ask until something has come to vLLM's metrics, which travel with its steps."""
    end = time.monotonic() + 60
    for seed in count(1000):
        if reached():
            return
        assert time.monotonic() < end
        ask(seed)


def found_by_vllm(model: str, connector: None) -> Any:
    """vLLM's own registries, with nothing but the installed entry point: the connector, twice, and its metrics; and
    what it says to a vLLM of a version that it was not written for."""
    import logging
    from functools import partial
    from types import SimpleNamespace

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.plugins import load_general_plugins
    from vllm_stages import Scheduler, engine_config

    import mmcache.engines.vllm as plugin

    load_general_plugins()
    plugin.register()
    wanted = SimpleNamespace(ec_connector=plugin.CONNECTOR_NAME, ec_connector_module_path=None)
    found = ECConnectorFactory.get_connector_class(wanted)
    registry = CollectorRegistry()
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = found.build_prom_metrics(SimpleNamespace(ec_transfer_config=None), types, ["model"], {0: ["m"]})
    stats = found.build_ec_connector_stats({"hits.redis": 2, "loads": 2, "store_up.redis": 1})
    later = found.build_ec_connector_stats({"hits.redis": 1, "store_up.redis": 0})
    metrics.observe(stats.aggregate(later).data)
    labels = {"model": "m", "tier": "redis"}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mmcache.vllm").addHandler(handler)
    plugin.plugin.TESTED_VERSIONS = ("0.1",)
    Scheduler(engine_config(model, "ec_both", {}, stages=1, ranks=1)).connector.shutdown()
    return {
        "connector": found.__name__,
        "said": said,
        "hits": registry.get_sample_value("vllm:mmcache_hits_total", labels),
        "store_up": registry.get_sample_value("vllm:mmcache_store_up", labels),
    }


def without_media(model: str, connector: dict[str, Any], seeds: list[int], lost: int) -> Any:
    """A consumer that is asked about pictures, and then about some of them by their ids alone."""
    engine = Engine(model, connector, role="ec_consumer", enable_prefix_caching=False, max_num_batched_tokens=256)
    first = pictures(engine, seeds)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    add_request = scheduler.add_request

    def add_without_media(request: Any) -> None:
        for feature in request.mm_features:
            feature.data = None
        add_request(request)

    scheduler.add_request = add_without_media
    bare = [engine.run(ask(seed, lead="by id: ")) for seed in (seeds[0], lost, seeds[1])]
    scheduler.add_request = add_request
    full = [engine.run(ask(seed, lead="by id: ")) for seed in (seeds[0], lost, seeds[1])]
    return {"first": first, "bare": bare, "full": full, "counts": engine.counts()}


def pairs_of_stages(model: str, connector: dict[str, Any]) -> Any:
    """Workers of two pipeline stages of two ranks, in each role that saves: see `vllm_stages`."""
    from vllm_stages import let_idefics3_have_stages, run_stages

    let_idefics3_have_stages()
    return {role: run_stages(model, role, dict(connector), stages=2, ranks=2) for role in ("ec_both", "ec_producer")}


def model_in_stages(model: str, connector: dict[str, Any], seeds: list[int], ranks: int) -> Any:
    """A model in two pipeline stages of some ranks each, all processes, and encoder caches for one picture."""
    from vllm_stages import let_idefics3_have_stages

    let_idefics3_have_stages()
    engine = Engine(
        model,
        connector,
        pipeline_parallel_size=2,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
        max_num_batched_tokens=256,
    )
    first = pictures(engine, seeds)
    again = pictures(engine, seeds)
    held = engine.llm.collective_rpc(lambda worker: len(worker.model_runner.encoder_cache))
    return {"first": first, "again": again, "counts": engine.counts(), "held": held}


def main(name: str, arguments: str) -> None:
    """Run a scenario and print its answer."""
    scenario = globals()[name]
    print("\nANSWER " + json.dumps(scenario(**json.loads(arguments))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
