"""The connector in the workers of an engine with pipeline stages: vLLM's own objects and process groups, but no model.

Every worker is a process that vLLM's own start-up has put into its groups; the connector in it is the one that vLLM
made. What a model runner does in a step is done here in every stage, also in those whose runner would not ask the
connector, and each rank has rows of its own, so that whoever loads or saves can be told.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm_fakes import Request, item, request

WIDTH = 8
ROWS = 4


def engine_config(model: str, role: str, connector: dict[str, Any], *, stages: int, ranks: int) -> Any:
    """What vLLM makes of its arguments."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
        ec_transfer_config={
            "ec_connector": "MMCacheConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"memory_bytes": 1 << 20} | connector,
        },
    )
    config = arguments.create_engine_config()
    config.ec_transfer_config.mm_encoder_output_widths = {"image": WIDTH}  # vLLM measures them before its scheduler
    return config


def let_idefics3_have_stages() -> None:
    """Make up, in this process and its workers, for what vLLM lacks to run Idefics3 in pipeline stages on a CPU."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.idefics3 import Idefics3ForConditionalGeneration as Idefics3
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class Staged(Idefics3):
        # Its language model has stages; the whole does not say so
        supports_pp = True
        _processor_factory = Idefics3._processor_factory

        def make_empty_intermediate_tensors(self, **arguments: Any) -> Any:
            return self.model.text_model.make_empty_intermediate_tensors(**arguments)

    ModelRegistry.register_model("Idefics3ForConditionalGeneration", Staged)
    load_model = CPUModelRunner.load_model

    def load_model_and_make_buffers(self: Any, **arguments: Any) -> None:
        load_model(self, **arguments)
        # A dummy run makes these, which is left out on a CPU
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )

    CPUModelRunner.load_model = load_model_and_make_buffers
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # workers get all this


class Workers:
    """All workers of an engine. `step` has them run one step."""

    def __init__(self, config: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"file://{self._folder.name}/meeting"
        self._pipes: list[Connection] = []
        for rank in range(config.parallel_config.world_size):
            ours, theirs = context.Pipe()
            context.Process(target=_work, args=(config, rank, meeting, theirs), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        self.first_stage = [pipe.recv() for pipe in self._pipes]

    def step(self, output: Any, *, encode: list[str], ranks: list[int]) -> list[float | None]:
        """One step of these ranks: what is then in each encoder cache, as the number that fills its rows."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((output, encode, rank in ranks))
        return [pipe.recv() for pipe in self._pipes]

    def promises(self, identifier: str) -> list[str]:
        """What workers say when they are asked for a promise, as only a scheduler may be."""
        for pipe in self._pipes:
            pipe.send(identifier)
        return [pipe.recv() for pipe in self._pipes]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def _work(config: Any, rank: int, meeting: str, pipe: Connection) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.ec_transfer import get_ec_transfer
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin as Runner
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    torch.set_num_threads(1)
    config.parallel_config.rank = rank  # as vLLM's worker does
    with set_current_vllm_config(config):
        init_worker_distributed_environment(config, rank, meeting, rank, "gloo")
    pipe.send(get_pp_group().is_first_rank)
    while (order := pipe.recv()) is not None:
        if isinstance(order, str):
            try:
                pipe.send(str(get_ec_transfer().has_cache_item(order)))
            except Exception as error:
                pipe.send(type(error).__name__)
            continue
        output, encode, runs = order
        cache: dict[str, torch.Tensor] = {}
        if runs:
            with Runner.maybe_get_ec_connector_output(output, encoder_cache=cache):
                for identifier in encode:
                    cache[identifier] = torch.full((ROWS, WIDTH), float(rank + 1))
                    Runner.maybe_save_ec_to_connector(cache, identifier)
        pipe.send(next((float(rows.unique()) for rows in cache.values()), None))


class Scheduler:
    """The connector that vLLM makes beside its scheduler, asked as the scheduler asks it."""

    def __init__(self, config: Any) -> None:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

        self.connector = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)

    def schedule(self, asked: Request) -> tuple[Any, list[str], list[str]]:
        """A step for a request: vLLM's message to its workers, what was promised, and what is to be encoded."""
        end = time.monotonic() + 30
        while not self.connector.ensure_cache_available(asked, 0):  # hashing has a thread
            assert time.monotonic() < end
            time.sleep(0.001)
        identifiers = [feature.identifier for feature in asked.mm_features]
        promised = [name for name in identifiers if self.connector.has_cache_item(name)]
        for index in range(len(identifiers)):
            self.connector.update_state_after_alloc(asked, index)
        return self.message([]), promised, [name for name in identifiers if name not in promised]

    def message(self, freed: list[str]) -> Any:
        """What vLLM tells its workers: a step, in which its encoder cache drops what is `freed`."""
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        output.free_encoder_mm_hashes = freed
        output.ec_connector_metadata = self.connector.build_connector_meta(output)
        return output

    def count(self, *names: str) -> dict[str, float]:
        """What was counted since the last time."""
        stats = self.connector.get_ec_connector_stats()
        return {name: stats.data.get(name, 0) if stats is not None else 0 for name in names}


def run_stages(model: str, role: str, connector: dict[str, Any], *, stages: int, ranks: int) -> dict[str, Any]:
    """Two pictures through all stages: who loads, who saves, and what is promised."""
    config = engine_config(model, role, connector, stages=stages, ranks=ranks)
    workers, scheduler = Workers(config), Scheduler(config)
    everyone, first = list(range(stages * ranks)), list(range(ranks))
    answer: dict[str, Any] = {"first stage": workers.first_stage}

    def step(name: str, picture: str, chosen: list[int]) -> None:
        asked = request(item(picture))
        output, promised, encode = scheduler.schedule(asked)
        held = workers.step(output, encode=encode, ranks=chosen)
        scheduler.connector.request_finished(asked)
        workers.step(scheduler.message([item(picture).identifier]), encode=[], ranks=sorted({*first, *chosen}))
        answer[name] = {"promised": len(promised), "rows": held} | scheduler.count("loads", "saves")

    step("encoded in later stages only", "one", everyone[ranks:])
    step("encoded in every stage", "one", everyone)
    step("needed again", "one", everyone)
    step("encoded while later stages are not asked", "two", first)
    step("needed again while later stages are not asked", "two", first)
    answer["workers' promises"] = workers.promises(item("one").identifier)
    workers.stop()
    scheduler.connector.shutdown()
    return answer
