"""Every proved table is proved: the audit runs the real encoder of each family, and flips each of its marks."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_subjects import subject
from torch import Tensor

from mmcache.audit import Auditor, Verdict, audit_model, load_subject
from mmcache.audit.tiny import TINY
from mmcache.cli import main
from mmcache.engines.transformers.tiny import FAMILIES as ENGINE_FAMILIES
from mmcache.engines.transformers.tiny import tiny_adapter
from mmcache.errors import ConfigError
from mmcache.fields import split_fields
from mmcache.models import FAMILIES, field_configs, field_table

pytestmark = pytest.mark.engine

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

PROVED = [family for family in FAMILIES if family.tables["transformers"].evidence.kind == "proved"]
# Fields that nothing in transformers reads, so that both places are right; all other flips must be caught.
UNREAD = {
    "timestamps": "the processor writes them into the prompt",
    "image_token_id": "the engine reads it, to tell rows from other tokens",
    "video_token_id": "the engine reads it, to tell rows from other tokens",
    "padding_mask": "of the wave, not of the spectrum",
}
FAST = ("llava_next", "idefics3", "qwen2_audio", "gemma3")


def runs() -> list[Any]:
    """Each model of a proved family, with each attention of its evidence."""
    cases = []
    for family in PROVED:
        names = [name for name in family.names if name in TINY]
        assert names, f"{family.title} is called proved, but there is no model to run"
        for name in names:
            for attention in family.tables["transformers"].evidence.attention:
                marks = () if name in FAST and attention == "sdpa" else (pytest.mark.slow,)
                cases.append(pytest.param(name, attention, marks=marks))
    return cases


def test_the_evidence_names_the_version_that_runs_here() -> None:
    assert {family.tables["transformers"].evidence.version for family in PROVED} == {transformers.__version__}


@pytest.mark.parametrize(("model_type", "attention"), runs())
def test_a_proved_table_is_accepted_and_flipping_any_of_its_marks_is_reported(model_type: str, attention: str) -> None:
    tried = subject(model_type, attention)
    report = tried.audit()
    assert not report.wrong, str(report)
    proved = {entry.name for entry in field_table(model_type).fields if not entry.declared}
    assert {field.name for field in report.fields} == proved
    for name, config in tried.configs.items():
        field = tried.audit({name: not config.keep_on_cpu}, only=[name])[name]
        if name in UNREAD:
            assert (field.verdict, field.both_right, field.reason) == (Verdict.UNUSED, True, "nothing reads it")
        else:
            assert field.verdict is (Verdict.SHOULD_STAY if config.keep_on_cpu else Verdict.MUST_MOVE), name
            assert field.uses, name
            assert field.right_mark is config.keep_on_cpu


@pytest.mark.parametrize("model_type", ["idefics3", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_reports_name_the_lines_of_the_consumer(model_type: str) -> None:
    tried = subject(model_type)
    for name, config in tried.configs.items():
        for use in tried.audit({name: not config.keep_on_cpu}, only=[name])[name].uses:
            line = Path(use.where.file).read_text(encoding="utf-8").splitlines()[use.where.line - 1]
            assert line.strip(), use


@pytest.mark.slow
def test_positions_read_the_grids_of_all_items_and_the_times_of_videos() -> None:
    report = subject("qwen2_5_vl").audit(only=["second_per_grid_ts", "image_grid_thw"])
    assert report["second_per_grid_ts"].verdict is Verdict.UNUSED
    assert report["second_per_grid_ts"].read_by == ("positions",)
    assert report["image_grid_thw"].read_by == ("lengths", "positions", "encoder")
    assert [use.blocks for use in report["image_grid_thw"].moves] == [False]


@pytest.mark.slow
def test_a_modality_that_takes_turns_with_others_is_audited_with_them() -> None:
    tried = subject("qwen2_5_omni_thinker")
    assert {config.modality for config in tried.configs.values()} == {"image", "video", "audio"}
    report = tried.audit(only=["audio_feature_lengths", "use_audio_in_video"])
    assert report["audio_feature_lengths"].read_by == ("positions",)
    # a video and its sound apart in one prompt, and interleaved in another
    assert report["use_audio_in_video"].read_by == ("positions",)


def test_samples_fall_apart_into_two_items_a_modality() -> None:
    for model_type in FAST:
        tried = subject(model_type)
        assert {len(items) for items in split_fields(tried.batch, tried.configs).values()} == {2}


# Flash attention has no CPU kernels: a stand-in takes its arguments, lengths on the device among them

STAND_IN = "flash_attention_stand_in"
PACKED = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "hyperclovax_vision_v2",
    "ernie4_5_vl_moe",
    "minicpmv4_6",
    "qwen2_5_omni_thinker",
    "qwen3_asr",
)


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, cu_seq_lens_q: Tensor, **_: Any
) -> tuple[Tensor, None]:
    owner = torch.searchsorted(cu_seq_lens_q, torch.arange(query.shape[2], device=query.device), right=True)
    together = owner[:, None] == owner[None]
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=together, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


@pytest.mark.slow
@pytest.mark.parametrize("model_type", PACKED)
def test_tables_hold_for_attention_over_packed_sequences(model_type: str) -> None:
    transformers.AttentionInterface.register(STAND_IN, packed_attention)
    tried = load_subject(model_type)
    fields = {name: tried.batch[name] for name in tried.configs}
    with torch.no_grad():
        expected = [output.last_hidden_state for output in tried.encoder(**fields)]
        for module in tried.model.modules():
            # By its name transformers would look for kernels, so it is set behind its back.
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = STAND_IN
        for output, rows in zip(tried.encoder(**fields), expected):
            torch.testing.assert_close(output.last_hidden_state, rows, rtol=1e-4, atol=1e-4)
    assert not tried.audit().wrong
    for name, config in tried.configs.items():
        field = tried.audit({name: not config.keep_on_cpu}, only=[name])[name]
        assert field.wrong or name in UNREAD, name


# The engine of this package is a consumer, too


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ENGINE_FAMILIES)
def test_the_engine_s_adapters_agree_with_the_tables(model_type: str) -> None:
    adapter = tiny_adapter(model_type, small_images=True)
    made = engine_batch(model_type, adapter.model.config)
    configs = field_configs(model_type, made, strict=True)
    modality = next(iter(configs.values())).modality

    def encoder(**fields: Any) -> Any:
        return adapter.encode(modality, fields, [12, 4] if model_type == "idefics3" else [1, 1])

    def lengths(**fields: Any) -> Any:
        numbers = [fields[name].tolist() for name in ("audio_num_tokens",) if name in fields]
        return numbers, field_configs(model_type, fields)

    auditor = Auditor(encoder, made, lengths=lengths)
    shipped = auditor.audit(configs)
    assert not shipped.wrong, str(shipped)
    for name, config in configs.items():
        flipped = {**configs, name: replace(config, keep_on_cpu=not config.keep_on_cpu)}
        field = auditor.audit(flipped, only=[name])[name]
        assert field.wrong, f"{name}: {field.reason}"


def engine_batch(model_type: str, config: Any) -> dict[str, Any]:
    """A batch for the engine's tiny model of a family, whose sizes are other ones than those of the audit."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if model_type.startswith("qwen") and model_type != "qwen2_audio":
        vision = config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
        return {"pixel_values": noise(int(grid.prod(-1).sum()), width), "image_grid_thw": grid}
    if model_type == "llava":
        edge = config.vision_config.image_size
        return {"pixel_values": noise(2, 3, edge, edge)}
    if model_type == "idefics3":
        edge = config.vision_config.image_size
        mask = torch.ones(4, edge, edge, dtype=torch.int64)
        return {
            "pixel_values": noise(4, 3, edge, edge),
            "pixel_attention_mask": mask,
            "num_patches": torch.tensor([3, 1]),
        }
    audio = config.audio_config
    mask = (torch.arange(2 * audio.max_source_positions)[None] < torch.tensor([[200], [120]])).int()
    counts = ((mask.sum(-1) - 1) // 2 + 1 - 2) // 2 + 1
    return {
        "input_features": noise(2, audio.num_mel_bins, mask.shape[1]),
        "feature_attention_mask": mask,
        "audio_num_tokens": counts,
    }


# The command


def test_the_command_accepts_what_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--model", "llava_next"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"llava_next, transformers {transformers.__version__}, sdpa attention; proved")
    assert "all 2 marks are right" in out


def test_the_command_takes_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--model", "LlavaNextForConditionalGeneration", "--attention", "eager", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model_type"], report["attention"], report["ok"]) == ("llava_next", "eager", True)


def test_wrong_marks_of_a_file_are_exit_status_1_and_the_suggestion_mends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, right = tmp_path / "wrong.json", tmp_path / "right.json"
    wrong.write_text(json.dumps({"image_sizes": False, "pixel_values": {"keep_on_cpu": True}}))
    arguments = ["audit", "--model", "llava_next", "--config"]
    assert main([*arguments, str(wrong), "--json", "--suggest", str(right)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {field["field"]: field["verdict"] for field in report["fields"]} == {
        "pixel_values": "must move",
        "image_sizes": "should stay",
    }
    assert main([*arguments, str(right)]) == 0
    capsys.readouterr()
    assert main([*arguments, str(wrong), "--suggest"]) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(right.read_text())


def test_a_folder_with_a_config_and_no_weights_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.AutoConfig.for_model("gemma3", **TINY["gemma3"]).save_pretrained(tmp_path)
    assert main(["audit", "--model", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("gemma3, ")


def test_a_folder_with_weights_is_audited_with_them(tmp_path: Path) -> None:
    model = subject("llava").model
    model.save_pretrained(tmp_path)
    loaded, report = audit_model(tmp_path)
    assert not report.wrong
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nobody"], "nobody"),
        (["--model", "isaac"], "no tiny model"),
        (["--model", "."], "config"),
        (["--model", "./nodir"], "'./nodir'"),
        (["--model", "some/model"], "does not exist"),
        (["--model", "nodir"], "no such folder"),
        (["--model", "llava", "--config", "missing.json"], "missing.json"),
    ],
)
def test_what_cannot_be_audited_is_one_line_and_exit_status_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["audit", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("model", ["./nodir", "a/b.json"])
def test_a_path_that_does_not_exist_is_said_so_without_a_list_of_models(model: str) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        load_subject(model)
    assert "qwen2_vl" not in str(caught.value)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no folder"):
        load_subject(tmp_path / "config.json")


@pytest.mark.parametrize("model", ["nobody", "minicpmv", "phi4mm", "transformers", "isaac"])
def test_the_models_that_are_offered_are_those_that_can_be_audited(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_subject(model)
    offered = str(caught.value).partition("one of ")[2].partition(", found")[0]
    assert offered.split(", ") == sorted(TINY)


def test_a_folder_of_a_family_s_name_without_a_config_does_not_hide_the_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llava").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_subject("llava").model_type == "llava"


PAGE = Path(__file__).parents[1] / "docs" / "audit.md"


def test_the_page_lists_the_models_that_can_be_audited() -> None:
    listed = PAGE.read_text(encoding="utf-8").partition("batch for:\n\n")[2].partition("\n\n")[0]
    assert listed.replace("\n", " ").split(", ") == sorted(TINY)


def test_the_page_shows_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marks = tmp_path / "marks.json"
    marks.write_text('{"image_grid_thw": false}')
    assert main(["audit", "--model", "qwen2_5_vl", "--config", str(marks)]) == 1
    printed = capsys.readouterr().out
    page = PAGE.read_text(encoding="utf-8")
    start = page.partition("same kind):\n\n")[2].partition("\n\n")[0]
    ending = page.partition("and ends with:\n\n")[2].partition("\n\n")[0]
    assert printed.endswith("\n" + textwrap.dedent(ending) + "\n")
    for line in textwrap.dedent(start).splitlines():
        assert all(part in printed for part in line.split("...")), line


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llava", "vision_config": 3},
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "hidden_size": 33}},
        {"model_type": "bert"},
        {"model_type": "mllama"},
        {},
        "[",
    ],
    ids=repr,
)
def test_a_folder_with_a_config_that_makes_no_model_is_one_line_and_exit_status_2(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert main(["audit", "--model", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_with_damaged_weights_is_one_line_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.AutoConfig.for_model("gemma3", **TINY["gemma3"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    assert main(["audit", "--model", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot build gemma3" in line


@pytest.mark.parametrize("content", ["[1]", '{"image_sizes": 3}', "{", '{"nobody": true}'])
def test_a_config_file_that_is_none_is_an_error(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert main(["audit", "--model", "llava_next", "--config", str(path)]) == 2
    assert "mmcache: " in capsys.readouterr().err


def test_marks_of_unknown_fields_are_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        audit_model("llava", marks={"nobody": True})
    assert caught.value.field == "nobody"
