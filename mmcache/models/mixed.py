"""Families that see and hear, those whose frames are packed column by column, and the generic adapter."""

from __future__ import annotations

from mmcache.models.audio import PACKED_AUDIO
from mmcache.models.entries import (
    NOT_IN_TRANSFORMERS,
    REMOTE_CODE,
    B,
    F,
    Family,
    FieldEntry,
    S,
    Table,
    declared,
    kept,
    tables,
)
from mmcache.models.qwen import PATCHES, PATCHES_MOVED
from mmcache.models.sizes import columns, counts, entries, merged, products, sums, unless, where

__all__ = ["MIXED_FAMILIES"]

_SECONDS = B("second_per_grid_ts", "video", cpu=True)
_SOUND_INSIDE = S("use_audio_in_video", "video", cpu=True)


def _minicpm(sizes_on_cpu: bool, *, picture_sizes: bool, switch: bool) -> tuple[FieldEntry, ...]:
    fields = []
    for prefix, modality in (("", "image"), ("video_", "video")):
        fields += [B(f"{prefix}pixel_values", modality), B(f"{prefix}tgt_sizes", modality, cpu=sizes_on_cpu)]
        fields.append(B(f"{prefix}image_embeds" if not prefix else "video_embeds", modality))
        if picture_sizes or prefix:
            fields.append(B(f"{prefix}image_sizes", modality, cpu=True))
        if switch:
            fields.append(B(f"{prefix}use_vit_merger", modality, cpu=True))
    return tuple(fields)


_MINICPM = _minicpm(True, picture_sizes=True, switch=False)
_CROPS = where("num_patches_per_image", counts("num_patches_per_image"))
_FRAMES = where("num_frames_per_video", sums("num_patches_per_frame", "num_frames_per_video"))
# As transformers takes them: crops side by side in one row of patches, their grids on the CPU.
_MINICPM_PACKED = (
    F("pixel_values", "image", where("target_sizes", columns("target_sizes", _CROPS)), dim=3),
    F("target_sizes", "image", _CROPS, cpu=True),
    B("num_patches_per_image", "image", cpu=True),
    F("pixel_values_videos", "video", columns("target_sizes_videos", _FRAMES), dim=3),
    F("target_sizes_videos", "video", _FRAMES, cpu=True),
    B("num_frames_per_video", "video", cpu=True),
    F("num_patches_per_frame", "video", counts("num_frames_per_video"), cpu=True),
    *declared(
        B("grids", "image", cpu=True),
        F("grids_videos", "video", counts("num_frames_per_video"), cpu=True),
    ),
)
_MINICPM_NOTE = "the tower reads the grids on the CPU and copies what it makes of them"
_PHI4_VLLM = (
    B("image_pixel_values", "image"),
    B("image_attention_mask", "image"),
    *kept("image", "image_sizes", "num_img_tokens"),
    B("audio_input_features", "audio"),
    B("audio_embed_sizes", "audio", cpu=True),
    B("audio_attention_mask", "audio"),
)


def _packed(version: str, vllm: tuple[FieldEntry, ...], vllm_note: str) -> Family:
    """MiniCPM-V of a version that transformers has."""
    known = {entry.name for entry in _MINICPM_PACKED}
    fields = (*_MINICPM_PACKED, *declared(*(entry for entry in vllm if entry.name not in known)))
    name = version.replace(".", "_")
    return Family(
        f"MiniCPM-V {version}",
        (f"minicpmv{name}", *(f"MiniCPMV{name}{kind}" for kind in ("ForConditionalGeneration", "Model", ""))),
        tables(fields, vllm, note=_MINICPM_NOTE, vllm_note=vllm_note),
    )


MIXED_FAMILIES: tuple[Family, ...] = (
    Family(
        "Qwen2.5-Omni thinker",
        (
            "qwen2_5_omni_thinker",
            "qwen2_5_omni",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen2_5OmniModel",
        ),
        tables(
            (
                *PATCHES_MOVED,
                B("input_features", "audio"),
                B("feature_attention_mask", "audio"),
                B("audio_feature_lengths", "audio", cpu=True),
                B("video_second_per_grid", "video", cpu=True),
                _SOUND_INSIDE,
                *declared(F("input_audio_features", "audio", counts("audio_feature_lengths"), dim=1), _SECONDS),
            ),
            (*PATCHES, *PACKED_AUDIO, _SECONDS, _SOUND_INSIDE),
            note="the class takes `input_features` with a mask, on the device; the packed names are those of vLLM;"
            " audited with videos and their sound apart, and interleaved",
            vllm_note="the consumer copies `audio_feature_lengths` to the device: the tower places tensors by it",
        ),
    ),
    Family(
        "MiMo-V2-Omni",
        ("mimo_v2_omni", "MiMoV2OmniForCausalLM", "MiMoV2OmniForConditionalGeneration"),
        tables(
            (
                *PATCHES,
                *kept("video", "timestamps", "second_per_grid_ts", "video_start_times"),
                B("audio_features", "audio"),
                B("audio_token_lens", "audio", cpu=True),
                *kept("video", "video_audio_n_segs", "video_audio_seg_lens"),
                B("va_audio_features", "va_audio"),
            ),
            why=NOT_IN_TRANSFORMERS,
        ),
    ),
    Family(
        "Nano-Nemotron-VL",
        ("NemotronH_Nano_VL_V2", "nemotron_nano_vl", "NemotronH_Nano_Omni_Reasoning_V3"),
        tables(
            (
                F("pixel_values_flat", "image", unless("imgs_sizes", counts("image_num_patches"))),
                *kept("image", "image_num_patches", "num_tokens_per_image", "imgs_sizes"),
                B("image_embeds", "image"),
                F("pixel_values_flat_video", "video", counts("video_num_patches")),
                *kept("video", "video_num_patches", "frames_indices", "frame_duration_ms"),
                F("input_audio_features", "audio", counts("audio_num_clips")),
                F("feature_attention_mask", "audio", counts("audio_num_clips")),
                B("audio_num_clips", "audio", cpu=True),
            ),
            why=REMOTE_CODE,
            note="images of dynamic resolution come with `imgs_sizes`, one entry an image",
        ),
    ),
    Family(
        "MiniCPM-V 2.x to 4.5",
        ("minicpmv", "MiniCPMV"),
        tables(_MINICPM, why=REMOTE_CODE),
    ),
    _packed(
        "4.6",
        _minicpm(False, picture_sizes=False, switch=True),
        "`tgt_sizes` and its twin were marked once and taken back: the resampler uses them on the device",
    ),
    _packed(
        "4.7",
        _minicpm(True, picture_sizes=False, switch=True),
        "positions need `tgt_sizes` and its twin after a prefix hit",
    ),
    Family(
        "MiniCPM-O",
        ("minicpmo", "MiniCPMO"),
        tables(
            (
                *_MINICPM,
                F("audio_features", "audio", entries("audio_feature_lens")),
                B("audio_feature_lens", "audio"),
                B("audio_embeds", "audio"),
            ),
            why=REMOTE_CODE,
        ),
    ),
    Family(
        "Phi-4 multimodal (remote code)",
        ("phi4mm", "Phi4MMForCausalLM"),
        tables(
            (
                B("input_image_embeds", "image"),
                B("image_attention_mask", "image"),
                *kept("image", "image_sizes", "num_img_tokens"),
                B("input_audio_embeds", "audio"),
            ),
            why=REMOTE_CODE,
        ),
    ),
    Family(
        "Phi-4 multimodal (transformers)",
        ("phi4_multimodal", "Phi4MultimodalForCausalLM", "Phi4MultimodalModel"),
        tables(
            tuple(
                B("image_attention_mask", "image", cpu=True) if entry.name == "image_attention_mask" else entry
                for entry in _PHI4_VLLM
            ),
            _PHI4_VLLM,
            note="the class measures each image by its mask on the CPU, and copies the mask to the device itself",
        ),
    ),
    Family(
        "any model, by the generic transformers adapter",
        ("transformers", "TransformersMultiModalForCausalLM", "TransformersMultiModalForConditionalGeneration"),
        {
            consumer: Table(
                table.fields,
                table.evidence,
                "what else the processor makes goes to the device; before `get_image_features` the adapter copies every"
                " other tensor there, without waiting",
                others="image",
            )
            for consumer, table in tables(
                (
                    F(
                        "pixel_values",
                        "image",
                        where(
                            "num_image_patches",
                            counts("num_image_patches"),
                            where("image_grid_thw", products("image_grid_thw")),
                        ),
                    ),
                    F("image_embeds", "image", where("image_grid_thw", merged("image_grid_thw"))),
                    B("num_image_patches", "image", cpu=True, moved=True),
                    B("image_grid_thw", "image", cpu=True, moved=True),
                    F("pixel_values_videos", "video", where("video_grid_thw", products("video_grid_thw"))),
                    B("video_grid_thw", "video", cpu=True, moved=True),
                    B("second_per_grid_ts", "video", cpu=True, moved=True),
                    B("input_features", "audio"),
                    B("num_audio_tokens", "audio", cpu=True, moved=True),
                ),
                why="it is no one model",
            ).items()
        },
    ),
)
