"""The connector's settings, identity, shared memory and numbers. No vLLM is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmcache.engines.vllm import CONNECTOR_NAME, Settings, register
from mmcache.engines.vllm.counts import METRICS, Interval, merge
from mmcache.engines.vllm.identity import cached_weights_digest, engine_namespace
from mmcache.engines.vllm.plugin import version_note
from mmcache.engines.vllm.region import SharedRegion, SlotHeader, slot_bytes
from mmcache.engines.vllm.settings import open_stores
from mmcache.engines.vllm.slots import SlotAllocator
from mmcache.errors import ConfigError
from mmcache.namespaces import namespace_fingerprint

ROOT = Path(__file__).resolve().parent.parent

# -- settings


def test_settings_as_an_operator_writes_them() -> None:
    settings = Settings.from_mapping({"store": "file:///tmp/x", "memory_bytes": 1 << 20, "salt": "s"})
    assert settings.store == ("file:///tmp/x",)
    assert (settings.memory_bytes, settings.salt, settings.trust_client_ids) == (1 << 20, "s", False)
    assert Settings.from_mapping({}).store == ()
    assert Settings.from_mapping({"store": ["file:///a", "redis://h:1/0"]}).store == ("file:///a", "redis://h:1/0")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"stor": "file:///x"}, "stor"),
        ({"store": "ftp://x"}, "store"),
        ({"store": "/just/a/path"}, "store"),
        ({"store": "file://host/dir"}, "store"),
        ({"store": "file:///x?budget=1"}, "store"),
        ({"store": 3}, "store"),
        ({"store": [None]}, "store"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memory_bytes": "1 GB"}, "memory_bytes"),
        ({"memory_bytes": True}, "memory_bytes"),
        ({"store_bytes": 0}, "store_bytes"),
        ({"salt": 7}, "salt"),
        ({"trust_client_ids": "no"}, "trust_client_ids"),
        ({"fetch_seconds": 0}, "fetch_seconds"),
        ({"fetch_seconds": float("nan")}, "fetch_seconds"),
        ({"weights_id": 1}, "weights_id"),
    ],
)
def test_a_setting_that_cannot_work_is_named(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings.from_mapping(wrong)
    assert error.value.field == field


def test_two_stores_of_one_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_stores(Settings(store=(f"file://{tmp_path}/a", f"file://{tmp_path}/b")))


def test_a_url_names_its_directory_as_urls_do(tmp_path: Path) -> None:
    (tier,) = open_stores(Settings(store=(f"file://{tmp_path}/two%20words",)))
    assert (tmp_path / "two words" / "objects").is_dir()
    tier.close()


# -- the plug-in


def test_registering_without_vllm_or_twice_is_harmless() -> None:
    register()
    register()


def test_importing_the_package_imports_no_engine() -> None:
    code = "import sys, mmcache.engines.vllm; print('vllm' in sys.modules, 'blake3' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("found", "known"), [("0.32.0", True), ("0.33.1", True), ("0.32.0+cpu", True), ("0.34.0", False), ("1.0", False)]
)
def test_an_unknown_version_of_vllm_is_said_so(monkeypatch: pytest.MonkeyPatch, found: str, known: bool) -> None:
    monkeypatch.setattr("mmcache.engines.vllm.plugin.version", lambda package: found)
    note = version_note()
    assert (note is None) == known
    assert known or (found in str(note) and CONNECTOR_NAME in str(note))


def test_the_extra_leaves_the_installed_vllm_alone() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert extra == ["mmcache[blake3]"]


# -- identity


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return {"_name_or_path": "/somewhere", "transformers_version": "5", "vision": {"hidden": 64}} | self.values


def engine_config(folder: Path, **changes: Any) -> Any:
    multimodal = SimpleNamespace(
        mm_processor_kwargs=changes.get("mm_processor_kwargs"),
        media_io_kwargs={},
        mm_hasher_algorithm="blake3",
        video_pruning_rate=0.5,
        video_pruning_method=changes.get("pruning", "evs"),
        mm_encoder_fp8_scale_path=changes.get("scales"),
        compute_hash=lambda: changes.get("encoder_hash", "h"),
    )
    model = SimpleNamespace(
        model=str(folder),
        revision=None,
        model_weights="",
        multimodal_config=multimodal,
        hf_config=HfConfig(**changes.get("hf", {})),
        quantization=changes.get("quantization"),
        quantization_config=changes.get("quantization_config"),
        dtype=changes.get("dtype", torch.float32),
    )
    load = SimpleNamespace(load_format=changes.get("load_format", "auto"))
    return SimpleNamespace(model_config=model, load_config=load)


def fingerprint(folder: Path, *, salt: str | None = None, weights_id: str | None = None, **changes: Any) -> str:
    return namespace_fingerprint(
        engine_namespace(
            engine_config(folder, **changes),
            salt=salt,
            weights_id=weights_id,
            scheme="blake3",
            version=changes.get("version", "0.32.0"),
        )
    )


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "preprocessor_config.json").write_text('{"size": 64}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_one_model_in_two_places_is_one_namespace(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in weights.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert fingerprint(weights) == fingerprint(copy, hf={"_name_or_path": "/other", "transformers_version": "6"})


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "fp8_per_token"}},
        {"pruning": "vidcom2"},
        {"salt": ""},
        {"salt": "tenant"},
        {"encoder_hash": "other attention"},
        {"mm_processor_kwargs": {"size": 128}},
        {"hf": {"vision": {"hidden": 65}}},
        {"version": "0.33.0"},
        {"weights_id": "v2"},
        {"load_format": "dummy"},
    ],
)
def test_whatever_changes_embeddings_changes_the_namespace(weights: Path, change: dict[str, Any]) -> None:
    assert fingerprint(weights) != fingerprint(weights, **change)


@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json", "modeling_remote.py"])
def test_other_files_are_another_namespace(weights: Path, name: str) -> None:
    before = fingerprint(weights)
    (weights / name).write_bytes(b"changed")
    assert fingerprint(weights) != before


def test_other_scales_of_the_encoder_in_a_file_of_the_same_name_are_another_namespace(weights: Path) -> None:
    scales = weights.parent / "scales.json"
    scales.write_text('{"q": 1.0}')
    before = fingerprint(weights, scales=str(scales))
    assert fingerprint(weights, scales=str(scales)) == before
    scales.write_text('{"q": 2.0}')
    assert fingerprint(weights, scales=str(scales)) != before
    scales.unlink()
    with pytest.raises(ConfigError) as error:
        fingerprint(weights, scales=str(scales))
    assert error.value.field == "mm_encoder_fp8_scale_path"


def test_files_that_only_touch_text_do_not_count(weights: Path) -> None:
    before = fingerprint(weights)
    (weights / "tokenizer.json").write_text('{"more": 1}')
    assert fingerprint(weights) == before


def test_random_weights_are_never_shared(weights: Path) -> None:
    assert fingerprint(weights, load_format="dummy") != fingerprint(weights, load_format="dummy")


def test_weights_that_are_not_local_have_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as error:
        fingerprint(tmp_path / "nowhere")
    assert error.value.field == "weights_id"
    assert fingerprint(tmp_path / "nowhere", weights_id="v1") == fingerprint(tmp_path / "nowhere", weights_id="v1")


def test_weights_are_hashed_once_and_again_when_a_file_changes(weights: Path, tmp_path: Path) -> None:
    first = cached_weights_digest(weights)
    notes = list((tmp_path / "cache/mmcache/weights").iterdir())
    assert [note.read_text() for note in notes] == [first]
    notes[0].write_text("f" * 64)
    assert cached_weights_digest(weights) == "f" * 64
    (weights / "model.safetensors").write_bytes(b"WEIGHTS")  # of the same size
    assert cached_weights_digest(weights) not in (first, "f" * 64)


# -- shared memory


def test_what_one_process_writes_another_reads_and_nothing_is_left_behind() -> None:
    name = f"test-{os.getpid()}-shared"
    region = SharedRegion(name, 1 << 16)
    code = f"""
        import torch
        from mmcache.engines.vllm.region import SharedRegion, SlotHeader
        region = SharedRegion({name!r}, 1 << 16)
        region.attach(0, loads=True)
        region.payload(128, 2, 3, torch.bfloat16).copy_(torch.arange(6).view(2, 3))
        region.write_header(128, SlotHeader(7, 2, 3, torch.bfloat16))
    """
    assert region.loading_ranks(1) is None
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert region.loading_ranks(1) == [0]
    assert region.read_header(128) == SlotHeader(7, 2, 3, torch.bfloat16)
    assert torch.equal(region.payload(128, 2, 3, torch.bfloat16), torch.arange(6).view(2, 3).to(torch.bfloat16))
    region.unlink()
    assert not [path for path in Path("/dev/shm").iterdir() if name in path.name]


def test_memory_that_is_not_there_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError) as error:
        SharedRegion(f"test-{os.getpid()}-huge", 1 << 50)
    assert error.value.field == "memory_bytes"
    assert not [path for path in Path("/dev/shm").iterdir() if f"test-{os.getpid()}-huge" in path.name]


def test_processes_of_one_engine_must_agree_on_the_size() -> None:
    region = SharedRegion(f"test-{os.getpid()}-size", 1 << 16)
    with pytest.raises(ConfigError):
        SharedRegion(f"test-{os.getpid()}-size", 1 << 17)
    region.unlink()


def test_two_engines_never_share_memory() -> None:
    region = SharedRegion(f"test-{os.getpid()}-twice", 1 << 16)
    region.claim()
    region.attach(0, loads=True)
    other = SharedRegion(f"test-{os.getpid()}-twice", 1 << 16)
    with pytest.raises(ConfigError):
        other.claim()
    with pytest.raises(ConfigError):
        other.attach(0, loads=True)
    other.attach(1, loads=True)
    region.unlink()


def test_a_slot_without_a_header_holds_nothing() -> None:
    region = SharedRegion(f"test-{os.getpid()}-empty", 1 << 16)
    region.unlink()
    assert region.read_header(0) is None
    region.write_header(0, SlotHeader(1, 2, 3, torch.float32))
    region.clear_header(0)
    assert region.read_header(0) is None


@given(st.lists(st.one_of(st.integers(1, 5000), st.just(0)), max_size=80))
def test_slots_never_overlap_and_all_memory_comes_back(sizes: list[int]) -> None:
    slots = SlotAllocator(1 << 14)
    taken: dict[int, int] = {}
    for size in sizes:
        if size == 0 and taken:
            offset = next(iter(taken))
            slots.give_back(offset)
            del taken[offset]
        elif size and (offset := slots.take(size)) is not None:
            assert offset % 64 == 0
            assert offset + size <= 1 << 14
            assert all(offset + size <= other or other + taken[other] <= offset for other in taken)
            taken[offset] = size
    for offset in taken:
        slots.give_back(offset)
    assert slots.used == 0
    assert slots.take(1 << 14) == 0


def test_a_slot_has_room_for_its_header() -> None:
    assert slot_bytes(3, 4, torch.bfloat16) == 64 + 24


# -- numbers


def test_intervals_add_up_and_gauges_show_the_last_value() -> None:
    interval = Interval()
    one = interval.take({"loads": 2, "memory_used_bytes": 10})
    two = interval.take({"loads": 5, "memory_used_bytes": 7})
    assert (one, two) == ({"loads": 2, "memory_used_bytes": 10}, {"loads": 3, "memory_used_bytes": 7})
    assert merge(one, two) == {"loads": 5, "memory_used_bytes": 7}
    assert interval.take({"loads": 5, "memory_used_bytes": 7}) == {}


def test_every_metric_says_what_it_counts() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.help.endswith(".") for metric in METRICS)


# -- the page for operators


def page_names(column: str) -> set[str]:
    """Names in the first column of the page's table with this heading."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    (table,) = re.findall(rf"^\| {re.escape(column)} \|[^\n]*\n((?:\|[^\n]*\n)+)", page, re.MULTILINE)
    cells = [line.split("|")[1] for line in table.splitlines()[1:]]
    return {name for cell in cells for name in re.findall(r"`([a-z_]+)", cell)}


def test_it_lists_every_setting_every_metric_and_every_reason() -> None:
    spec = find_spec("mmcache.engines.vllm")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    source = "".join(file.read_text() for file in Path(folder).glob("*.py"))
    reasons = re.findall(r'"refused\.([a-z_]+)"|Refusal\("([a-z_]+)"\)', source)
    assert page_names("setting") == {field.name for field in fields(Settings)}
    assert page_names("metric (`vllm:mmcache_...`)") == {metric.name for metric in METRICS}
    assert page_names("reason") == {first or second for first, second in reasons}
