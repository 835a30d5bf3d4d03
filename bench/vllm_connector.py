"""Encodes and time to first token in vLLM: without a connector, with vLLM's example connector, and with mmcache's.

Several chats that take turns, each turn with a picture more, in an engine whose KV and encoder caches are too small for
all of them: what is evicted has to be encoded again, unless it is kept elsewhere. Every engine is new, and runs in a
process apart from the one that asks it (in one process, a scheduler that defers a request spins, and threads starve).
`cold` starts with an empty store; `warm` is the next engine with the store that `cold` left.

    VENV/bin/python bench/vllm_connector.py [--chats 4] [--turns 3] [--layers 12] [--rounds 1]

Run it in an environment with vLLM and mmcache. Times are medians over all requests; ratios are what carries over, those
of single rounds too, since other work on the machine does not hit all engines alike. `--rounds 0` runs no engine and
prints only what the connector costs vLLM's scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import vllm_tiny  # noqa: E402

VARIANTS = ("none", "example", "cpu", "mmcache")


def connector(variant: str, folder: Path) -> dict[str, Any] | None:
    if variant == "example":
        return {"name": "ECExampleConnector", "shared_storage_path": str(folder)}
    if variant == "cpu":
        return {"name": "ECCPUConnector", "ec_cpu_bytes": 64 << 20}
    if variant == "mmcache":
        return {"store": f"file://{folder}", "memory_bytes": 64 << 20}
    return None


def trace(model: str, variant: str, folder: Path, chats: int, turns: int) -> dict[str, Any]:
    """Run all chats, turn by turn, and time each request."""
    from vllm_scenarios import Engine, ask

    engine = Engine(
        model,
        connector(variant, folder),
        max_num_batched_tokens=640,
        kv_cache_memory_bytes=(5 << 20) // 4,
        limit_mm_per_prompt={"image": turns},
    )
    engine.llm.collective_rpc(count_encodes)
    engine.run(ask(999))  # compilation and caches of the process
    histories: list[list[dict[str, Any]]] = [[] for _ in range(chats)]
    first_tokens, answers = [], []
    before = engine.llm.collective_rpc(encodes)[0]
    for turn in range(turns):
        for chat, history in enumerate(histories):
            history.append(ask(100 * chat + turn, text=f"turn {turn}"))
            output = engine.llm.chat([history], engine.sampling, use_tqdm=False)[0]
            first_tokens.append(output.metrics.first_token_latency)
            answers.append(list(output.outputs[0].token_ids))
            history.append({"role": "assistant", "content": f"answer {turn}"})
    after = engine.llm.collective_rpc(encodes)[0]
    return {"encodes": after - before, "first_tokens": first_tokens, "answers": answers}


def count_encodes(worker: Any) -> None:
    """In the worker: count what the encoder itself is given."""
    model = worker.model_runner.model
    encode, model.encodes = model.embed_multimodal, 0

    def counted(**kwargs: Any) -> Any:
        rows = encode(**kwargs)
        model.encodes += len(rows)
        return rows

    model.embed_multimodal = counted


def encodes(worker: Any) -> int:
    return int(worker.model_runner.model.encodes)


def decisions() -> None:
    """What vLLM's scheduler waits for: a question, and a request with 26 items that are all ready."""
    from vllm_fakes import Engine, item, request

    engine = Engine(memory=1 << 20, window=256)
    asked = request(*(item(str(i), 4 * i) for i in range(26)))
    engine.serve(asked)
    engine.forget()
    if not engine.ready(asked):
        raise SystemExit("the items are not ready")
    names = [feature.identifier for feature in asked.mm_features]
    known = dict.fromkeys(names)
    floor = spent(lambda: [name in known for name in names])
    question = spent(lambda: [engine.side.has_item(name) for name in names])
    ready = spent(lambda: engine.side.prepare(asked, 0))
    print(f"26 dict look-ups: {floor:.2f} us")
    print(f"has_cache_item, 26 times: {question:.2f} us, {question / floor:.1f} times that")
    print(f"ensure_cache_available, 26 items ready: {ready:.0f} us, {ready / floor:.0f} times that\n")


def spent(function: Callable[[], object]) -> float:
    """Median microseconds of this process's time."""
    times = []
    for _ in range(200):
        start = time.process_time_ns()
        for _ in range(20):
            function()
        times.append(time.process_time_ns() - start)
    return statistics.median(times) / 20e3


def measure(arguments: argparse.Namespace, model: Path, variant: str, folder: Path) -> dict[str, Any] | str:
    command = [sys.executable, __file__, "--chats", str(arguments.chats), "--turns", str(arguments.turns)]
    process = subprocess.run(
        [*command, "--one", json.dumps([str(model), variant, str(folder)])],
        env=os.environ | vllm_tiny.environment() | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in reversed(process.stdout.splitlines()):
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    # What the engine's process said, not what its parent made of it
    errors = [line for line in process.stdout.splitlines() if "Error: " in line and "initialization failed" not in line]
    return errors[-1] if errors else f"ended with {process.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12, help="of the vision encoder")
    parser.add_argument("--rounds", type=int, default=1, help="engines of each kind, interleaved")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        model, variant, folder = json.loads(arguments.one)
        result = trace(model, variant, Path(folder), arguments.chats, arguments.turns)
        print("\nRESULT " + json.dumps(result), flush=True)
        return
    decisions()
    if not arguments.rounds:
        return
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        model = vllm_tiny.write_model(
            root / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=arguments.layers
        )
        report(arguments, model, root)


def report(arguments: argparse.Namespace, model: Path, root: Path) -> None:
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for round_ in range(arguments.rounds):
        for variant in VARIANTS:
            folder = root / f"{variant}-{round_}"
            folder.mkdir()
            for phase in ("cold", "warm"):
                result = measure(arguments, model, variant, folder)
                if isinstance(result, str):
                    print(f"{variant}: does not run here: {result}")
                    break
                results.setdefault((variant, phase), []).append(result)
    plain = results["none", "cold"]
    print(f"{arguments.chats} chats of {arguments.turns} turns; {arguments.chats * arguments.turns} pictures\n")
    print("| connector | store | encodes | first token, ms | ratio | of each round | same tokens |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    bases = [median(without) for without in zip(plain, results["none", "warm"])]
    for (variant, phase), runs in results.items():
        first = median(runs)
        encodes = statistics.median(result["encodes"] for result in runs)
        rounds = [median([result]) / base for result, base in zip(runs, bases)]
        each = ", ".join(f"{ratio:.2f}" for ratio in rounds)
        same = all(result["answers"] == plain[0]["answers"] for result in runs)
        ratio = statistics.median(rounds)
        print(f"| {variant} | {phase} | {encodes:g} | {first * 1000:.1f} | {ratio:.2f} | {each} | {same} |")


def median(runs: Iterable[dict[str, Any]]) -> float:
    return statistics.median(t for result in runs for t in result["first_tokens"])


if __name__ == "__main__":
    main()
