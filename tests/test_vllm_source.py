"""The connector against the source of vLLM releases, without running or installing them.

`VLLM_SOURCES` names folders that hold a `vllm/` package each, separated as in PATH: wheels that were unpacked. An
installed vLLM is looked at, too.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

BASE = "vllm.distributed.ec_transfer.ec_connector.base"
INSTALLED = find_spec("vllm")
SOURCES = [Path(folder) for folder in os.environ.get("VLLM_SOURCES", "").split(os.pathsep) if folder]
SOURCES += [Path(place).parent for place in (INSTALLED.submodule_search_locations or () if INSTALLED else ())]
if not SOURCES:
    pytest.skip("no vLLM is installed, and VLLM_SOURCES names no source of one", allow_module_level=True)

READ = {  # what is read of vLLM's objects, by class and the module that defines it
    ("vllm.config.ec_transfer", "ECTransferConfig"): {
        "ec_connector_extra_config",
        "engine_id",
        "mm_encoder_output_widths",
    },
    ("vllm.config.model", "ModelConfig"): {
        "dtype",
        "hf_config",
        "is_encoder_decoder",
        "model",
        "model_weights",
        "multimodal_config",
        "quantization",
        "quantization_config",
        "revision",
    },
    ("vllm.config.multimodal", "MultiModalConfig"): {
        "compute_hash",
        "media_io_kwargs",
        "mm_encoder_fp8_scale_path",
        "mm_hasher_algorithm",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    },
    ("vllm.config.parallel", "ParallelConfig"): {"data_parallel_index", "data_parallel_rank", "rank", "world_size"},
    ("vllm.config.scheduler", "SchedulerConfig"): {"max_num_batched_tokens"},
    ("vllm.config.vllm", "VllmConfig"): {
        "ec_transfer_config",
        "instance_id",
        "load_config",
        "lora_config",
        "model_config",
        "num_speculative_tokens",
        "parallel_config",
        "scheduler_config",
        "weight_transfer_config",
    },
    ("vllm.config.lora", "LoRAConfig"): {"enable_tower_connector_lora"},
    ("vllm.config.load", "LoadConfig"): {"load_format"},
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec"): {"data", "identifier", "mm_position", "modality"},
    ("vllm.multimodal.inputs", "PlaceholderRange"): {"get_num_embeds", "length", "offset"},
    ("vllm.v1.core.sched.output", "SchedulerOutput"): {"free_encoder_mm_hashes"},
    ("vllm.v1.request", "Request"): {"lora_request", "mm_features", "num_preemptions", "request_id"},
}


@pytest.fixture(params=SOURCES, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@lru_cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def module(source: Path, name: str) -> ast.Module:
    path = source.joinpath(*name.split("."))
    return parse(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def ours() -> dict[str, ast.Module]:
    spec = find_spec("mmcache")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    return {file.stem: parse(file) for file in Path(folder, "engines", "vllm").glob("*.py")}


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def class_of(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def members(cls: ast.ClassDef) -> set[str]:
    """Fields, methods and what methods set on `self`."""
    found = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    found |= {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def defined(tree: ast.Module) -> set[str]:
    """Names at the top of a module, also under conditions and in what it gives out on demand."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)  # a module's `__getattr__` compares with these
    return found


def signature(function: ast.FunctionDef) -> tuple[list[str], bool]:
    arguments = function.args
    return [
        a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ], arguments.kwarg is not None


def uses() -> Iterator[tuple[str, str]]:
    """Modules of vLLM that the connector imports, with what it takes from them."""
    for tree in ours().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((str(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and _imported(node.value):
                yield str(_imported(node.value)), node.attr
            elif isinstance(node, ast.Assign) and _imported(node.value):
                (target,) = node.targets
                name = ast.unparse(target)
                for use in ast.walk(tree):
                    if isinstance(use, ast.Attribute) and ast.unparse(use.value) == name:
                        yield str(_imported(node.value)), use.attr


def _imported(node: ast.expr) -> str | None:
    if (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "import_module"
        and isinstance(node.args[0], ast.Constant)
    ):
        name = str(node.args[0].value)
        return name if name.startswith("vllm") else None
    return None


def test_everything_that_is_imported_of_it_is_there(source: Path) -> None:
    used = set(uses())
    assert (BASE, "ECConnectorBase") in used
    assert ("vllm.distributed.ec_transfer.ec_connector.factory", "ECConnectorFactory") in used
    assert ("vllm.distributed.parallel_state", "get_pp_group") in used
    for name, attribute in sorted(used):
        if (name, attribute) != ("vllm", "__version__"):
            assert attribute in defined(module(source, name)), f"{name}.{attribute}"


def test_the_connector_has_every_abstract_method_and_the_signatures_of_its_base(source: Path) -> None:
    base = functions(class_of(module(source, BASE), "ECConnectorBase").body)
    mine = functions(class_of(ours()["connector"], "MMCacheConnector").body)
    abstract = {name for name, node in base.items() if "abstractmethod" in map(ast.unparse, node.decorator_list)}
    assert abstract
    assert abstract <= set(mine)
    both = set(base) & set(mine)
    assert len(both) >= 14
    for name in both:
        assert signature(mine[name]) == signature(base[name]), name
    public = {name for name in mine if not name.startswith("_")}
    assert public <= set(base), "methods that nobody calls"


def test_the_metrics_have_the_signatures_of_their_bases(source: Path) -> None:
    tree = module(source, "vllm.distributed.ec_transfer.ec_connector.metrics")
    for base, mine in (("ECConnectorStats", "MMCacheStats"), ("ECConnectorPromMetrics", "MMCacheMetrics")):
        theirs = functions(class_of(tree, base).body)
        for name, node in functions(class_of(ours()["metrics"], mine).body).items():
            assert signature(node) == signature(theirs[name]), f"{mine}.{name}"


def test_every_call_of_the_connector_in_the_engine_fits_its_methods(source: Path) -> None:
    mine = functions(class_of(ours()["connector"], "MMCacheConnector").body)
    called: dict[str, int] = {}
    for file in (source / "vllm" / "v1").rglob("*.py"):
        if "ec_connector" not in file.read_text():
            continue
        for node in ast.walk(parse(file)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in mine:
                continue
            receiver = ast.unparse(node.func.value)
            if receiver.rpartition(".")[2] not in ("ec_connector", "get_ec_transfer()"):
                continue
            called[node.func.attr] = called.get(node.func.attr, 0) + 1
            names, any_keyword = signature(mine[node.func.attr])
            free = names[1 + len(node.args) :]  # behind `self`
            assert len(node.args) <= len(names) - 1, ast.unparse(node)
            given = {keyword.arg for keyword in node.keywords}
            assert any_keyword or given <= {*free, None}, ast.unparse(node)
    for name in (
        "bind_connector_metadata",
        "build_connector_meta",
        "clear_connector_metadata",
        "ensure_cache_available",
        "get_ec_connector_stats",
        "has_cache_item",
        "request_finished",
        "save_caches",
        "shutdown",
        "start_load_caches",
        "take_unavailable_requests",
        "update_state_after_alloc",
    ):
        assert called.get(name), f"nobody calls {name}"


def test_a_request_is_prepared_before_its_items_are_asked_for(source: Path) -> None:
    """Offers are made for the request that `ensure_cache_available` was last called for."""
    (scheduler,) = (
        node for node in module(source, "vllm.v1.core.sched.scheduler").body if isinstance(node, ast.ClassDef)
    )
    places: dict[str, list[str]] = {}
    for function in functions(scheduler.body).values():
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.ec_connector":
                places.setdefault(node.attr, []).append(function.name)
    assert places["has_cache_item"] == ["_try_schedule_encoder_inputs"]
    assert "schedule" in places["ensure_cache_available"]


@pytest.mark.parametrize(
    ("where", "names"), READ.items(), ids=lambda value: value[1] if isinstance(value, tuple) else ""
)
def test_what_is_read_of_its_objects_is_there(source: Path, where: tuple[str, str], names: set[str]) -> None:
    found = members(class_of(module(source, where[0]), where[1]))
    assert names <= found, names - found


def test_what_is_asked_for_with_a_default_is_looked_up_here_too() -> None:
    """A name that vLLM no longer has would be missed in silence."""
    asked = {
        node.args[1].value
        for tree in ours().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and isinstance(node.args[1], ast.Constant)
    }
    assert "video_pruning_method" in asked
    assert asked <= set().union(*READ.values())
