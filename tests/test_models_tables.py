"""What is known of each family: the layouts and marks that vLLM declares, and what was proved otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmcache.errors import ConfigError
from mmcache.models import FAMILIES, family, field_table
from mmcache.models.docs import render

QWEN = (
    "pixel_values F image, image_embeds F image, image_grid_thw B image cpu, "
    "pixel_values_videos F video, video_embeds F video, video_grid_thw B video cpu"
)
PACKED_AUDIO = (
    "input_audio_features F audio, feature_attention_mask B audio cpu, audio_feature_lengths B audio cpu moved"
)
MINICPM = (
    "pixel_values B image, image_sizes B image cpu, tgt_sizes B image cpu, image_embeds B image, "
    "video_pixel_values B video, video_image_sizes B video cpu, video_tgt_sizes B video cpu, video_embeds B video"
)
INTERNVL = (
    "image_num_patches B image cpu, image_embeds B image, image_token_id S image cpu, "
    "video_num_patches B video cpu, video_token_id S video cpu"
)
# Model type to the fields that vLLM declares: name, layout, modality, and whether they stay on the CPU.
VLLM = {
    "qwen2_vl": f"{QWEN}, timestamps B video cpu",
    "qwen3_vl": f"{QWEN}, timestamps B video cpu",
    "qwen2_5_vl": f"{QWEN}, timestamps B video cpu, second_per_grid_ts B video cpu",
    "qwen2_5_omni_thinker": f"{QWEN}, {PACKED_AUDIO}, second_per_grid_ts B video cpu, use_audio_in_video S video cpu",
    "qwen3_asr": PACKED_AUDIO,
    "qwen2_audio": (
        "input_features B audio, feature_attention_mask B audio, audio_embeds B audio, audio_num_tokens B audio cpu"
    ),
    "molmo2": (
        "pixel_values F image, image_token_pooling F image, image_num_crops B image cpu, "
        "image_num_pooled_patches B image cpu, image_num_patches B image cpu, num_image_tokens B image cpu, "
        "image_tokens F image, pixel_values_videos F video, video_token_pooling F video, video_num_crops B video cpu, "
        "video_num_pooled_patches B video cpu, video_num_patches B video cpu, num_video_tokens B video cpu, "
        "video_tokens F video"
    ),
    "mimo_v2_omni": (
        f"{QWEN}, timestamps B video cpu, second_per_grid_ts B video cpu, video_start_times B video cpu, "
        "audio_features B audio, audio_token_lens B audio cpu, video_audio_n_segs B video cpu, "
        "video_audio_seg_lens B video cpu, va_audio_features B va_audio"
    ),
    "NemotronH_Nano_VL_V2": (
        "pixel_values_flat F image, image_num_patches B image cpu, num_tokens_per_image B image cpu, "
        "imgs_sizes B image cpu, image_embeds B image, pixel_values_flat_video F video, video_num_patches B video cpu, "
        "frames_indices B video cpu, frame_duration_ms B video cpu, input_audio_features F audio, "
        "feature_attention_mask F audio, audio_num_clips B audio cpu"
    ),
    "hyperclovax_vlm": (
        "pixel_values_images B image, image_sizes_images B image cpu, vision_query_lengths_images B image cpu, "
        "pixel_values_videos B video, vision_query_lengths_videos B video cpu"
    ),
    "hyperclovax_vision_v2": f"{QWEN}, timestamps B video cpu",
    "minicpmv": MINICPM,
    "minicpmv4_6": (
        "pixel_values B image, tgt_sizes B image, image_embeds B image, use_vit_merger B image cpu, "
        "video_pixel_values B video, video_image_sizes B video cpu, video_tgt_sizes B video, video_embeds B video, "
        "video_use_vit_merger B video cpu"
    ),
    "minicpmv4_7": (
        "pixel_values B image, tgt_sizes B image cpu, image_embeds B image, use_vit_merger B image cpu, "
        "video_pixel_values B video, video_image_sizes B video cpu, video_tgt_sizes B video cpu, video_embeds B video, "
        "video_use_vit_merger B video cpu"
    ),
    "minicpmo": f"{MINICPM}, audio_features F audio, audio_feature_lens B audio, audio_embeds B audio",
    "KeyeVL1_5": (
        "pixel_values F image, image_embeds F image, image_grid_thw B image cpu, pixel_values_videos F video, "
        "video_embeds F video, video_grid_thw F video cpu, num_frames B video cpu"
    ),
    "llava": "pixel_values B image, image_embeds B image",
    "mistral3": "pixel_values B image, image_embeds B image, image_sizes B image cpu",
    "pixtral": "pixel_values B image, image_embeds B image, image_sizes B image cpu, images B image",
    "llava_next": "pixel_values B image, image_sizes B image cpu, image_embeds B image",
    "llava_onevision": (
        "pixel_values B image, image_sizes B image cpu, image_embeds B image, pixel_values_videos B video"
    ),
    "llava_onevision2": (
        "pixel_values F image, image_embeds F image, image_grid_thw B image cpu, patch_positions F image, "
        "pixel_values_videos F video, video_grid_thw F video cpu, patch_positions_videos F video, "
        "video_num_frames B video cpu, frame_timestamps B video cpu, video_is_codec B video cpu, codec_fps B video cpu"
    ),
    "idefics3": "pixel_values F image, pixel_attention_mask F image, image_embeds B image, num_patches B image cpu",
    "smolvlm": "pixel_values F image, pixel_attention_mask F image, image_embeds B image, num_patches B image cpu",
    "internvl": f"pixel_values F image, pixel_values_videos F video, {INTERNVL}, num_patches B image cpu",
    "internvl_chat": f"pixel_values_flat F image, pixel_values_flat_video F video, {INTERNVL}",
    "gemma3": "pixel_values F image, num_patches B image cpu, num_crops B image cpu",
    "phi4mm": (
        "input_image_embeds B image, image_attention_mask B image, image_sizes B image cpu, "
        "num_img_tokens B image cpu, input_audio_embeds B audio"
    ),
    "phi4_multimodal": (
        "image_pixel_values B image, image_attention_mask B image, image_sizes B image cpu, "
        "num_img_tokens B image cpu, "
        "audio_input_features B audio, audio_embed_sizes B audio cpu, audio_attention_mask B audio"
    ),
    "kimi_vl": "pixel_values F image, image_grid_hws B image cpu",
    "ernie4_5_vl_moe": (
        "pixel_values F image, image_grid_thw B image cpu moved, "
        "pixel_values_videos F video, video_grid_thw B video cpu moved"
    ),
    "isaac": "pixel_values F image, image_grid_thw B image cpu moved",
    "fireredlid": "input_features B audio, speech_lengths B audio, fake_token_lengths B audio",
    "moss_transcribe_diarize": (
        "input_features F audio, audio_feature_lengths F audio, audio_chunk_counts B audio cpu, "
        "audio_token_lengths B audio cpu, audio_embeds B audio"
    ),
    "transformers": (
        "pixel_values F image, image_embeds F image, num_image_patches B image cpu moved, "
        "image_grid_thw B image cpu moved, pixel_values_videos F video, video_grid_thw B video cpu moved, "
        "second_per_grid_ts B video cpu moved, input_features B audio, num_audio_tokens B audio cpu moved"
    ),
}
# Where transformers' own classes want something else than vLLM's, by the audit.
TRANSFORMERS = {
    "qwen2_5_omni_thinker": {"feature_attention_mask": False},
    "phi4_multimodal": {"image_attention_mask": True},
}


def described(model_type: str, consumer: str) -> set[str]:
    entries = field_table(model_type, consumer).fields  # type: ignore[arg-type]
    return {
        f"{e.name} {e.layout[0].upper()} {e.modality}{' cpu' if e.keep_on_cpu else ''}{' moved' if e.moved else ''}"
        for e in entries
    }


def test_every_family_is_in_this_table() -> None:
    assert {family(name).names[0] for name in VLLM} == {entry.names[0] for entry in FAMILIES}


@pytest.mark.parametrize("model_type", VLLM)
def test_vllm_layouts_and_marks(model_type: str) -> None:
    assert described(model_type, "vllm") == set(VLLM[model_type].split(", "))


@pytest.mark.parametrize("model_type", VLLM)
def test_transformers_marks_are_vllms_but_for_what_was_proved(model_type: str) -> None:
    ours = {entry.name: entry.keep_on_cpu for entry in field_table(model_type).fields}
    theirs = {entry.name: entry.keep_on_cpu for entry in field_table(model_type, "vllm").fields}
    differing = {name: ours[name] for name in theirs if name in ours and ours[name] != theirs[name]}
    assert differing == TRANSFORMERS.get(model_type, {})


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("minicpmv4_6", ["tgt_sizes", "video_tgt_sizes"]),
        ("llava_onevision2", ["patch_positions", "patch_positions_videos"]),
        ("fireredlid", ["speech_lengths"]),
        ("qwen2_audio", ["feature_attention_mask"]),
        ("moss_transcribe_diarize", ["audio_feature_lengths"]),
    ],
)
@pytest.mark.parametrize("consumer", ["transformers", "vllm"])
def test_marks_that_were_taken_back_are_not_made(model_type: str, names: list[str], consumer: str) -> None:
    marks = {entry.name: entry.keep_on_cpu for entry in field_table(model_type, consumer).fields}  # type: ignore[arg-type]
    assert [marks[name] for name in names] == [False] * len(names)


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.names[0])
def test_each_table_has_its_evidence(entry: object) -> None:
    tables = entry.tables  # type: ignore[attr-defined]
    for consumer in ("transformers", "vllm"):
        table = tables[consumer]
        evidence = table.evidence
        assert evidence.consumer == consumer
        assert evidence.version
        if evidence.kind == "proved":
            assert evidence.attention
        else:
            assert evidence.source
            assert evidence.why
        assert len({field.name for field in table.fields}) == len(table.fields)
        assert all((field.sizes is not None) == (field.layout == "flat") for field in table.fields)
        assert all(field.keep_on_cpu for field in table.fields if field.moved)


def test_eight_families_and_more_are_proved_of_every_kind() -> None:
    proved = {entry.names[0] for entry in FAMILIES if entry.tables["transformers"].evidence.kind == "proved"}
    assert {"llava", "llava_next", "idefics3", "gemma3", "internvl", "pixtral"} <= proved  # vision
    assert {"qwen2_audio", "qwen3_asr", "moss_transcribe_diarize"} <= proved  # audio
    assert {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"} <= proved  # video, its frames made by hand
    assert "qwen2_5_omni_thinker" in proved  # modalities that take turns


def test_a_family_goes_by_its_model_type_and_by_its_architecture() -> None:
    assert family("qwen2_5_vl") is family("Qwen2_5_VLForConditionalGeneration")
    names = [name for entry in FAMILIES for name in entry.names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("unknown", ["bert", "", "QWEN2_VL"])
def test_unknown_models_are_an_error_that_names_the_known_ones(unknown: str) -> None:
    with pytest.raises(ConfigError, match="qwen2_vl"):
        family(unknown)


def test_unknown_consumers_are_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"transformers.*vllm"):
        field_table("qwen2_vl", "sglang")  # type: ignore[arg-type]


def test_the_documented_table_is_up_to_date() -> None:
    page = Path(__file__).parent.parent / "docs" / "models.md"
    assert page.read_text(encoding="utf-8") == render(), "run python -m mmcache.models.docs docs/models.md"


def test_the_documented_table_has_every_family_and_its_evidence() -> None:
    page = render()
    for entry in FAMILIES:
        assert f"\n## {entry.title}\n" in page
        for name in entry.names:
            assert f"`{name}`" in page
        for table in entry.tables.values():
            assert str(table.evidence) in page
