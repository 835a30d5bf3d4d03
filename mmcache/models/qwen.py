"""Families whose images and videos are packed patches with a grid an item: Qwen-VL and those built like it."""

from __future__ import annotations

from mmcache.models.entries import NOT_IN_TRANSFORMERS, B, F, Family, FieldEntry, declared, kept, tables
from mmcache.models.sizes import counts, grouped, merged, merged_groups, products

__all__ = ["PATCHES", "PATCHES_MOVED", "QWEN_FAMILIES"]


def _patches(moved: bool) -> tuple[FieldEntry, ...]:
    return (
        F("pixel_values", "image", products("image_grid_thw")),
        *declared(F("image_embeds", "image", merged("image_grid_thw"))),
        B("image_grid_thw", "image", cpu=True, moved=moved),
        F("pixel_values_videos", "video", products("video_grid_thw")),
        *declared(F("video_embeds", "video", merged("video_grid_thw"))),
        B("video_grid_thw", "video", cpu=True, moved=moved),
    )


PATCHES = _patches(moved=False)
"""Packed patches of images and videos, their grids on the CPU."""

PATCHES_MOVED = _patches(moved=True)
"""The same for towers that make positions on the grid's device: who calls them copies the grid there."""

_TOWER = "the tower makes positions on the grid's device: who calls it copies the grid there, without waiting"
_TIMESTAMPS = B("timestamps", "video", cpu=True)
_SECONDS = B("second_per_grid_ts", "video", cpu=True)

QWEN_FAMILIES = (
    Family(
        "Qwen2-VL",
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VLModel"),
        tables((*PATCHES_MOVED, _TIMESTAMPS), (*PATCHES, _TIMESTAMPS), note=_TOWER),
    ),
    Family(
        "Qwen2.5-VL",
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLModel"),
        tables((*PATCHES_MOVED, _TIMESTAMPS, _SECONDS), (*PATCHES, _TIMESTAMPS, _SECONDS), note=_TOWER),
    ),
    Family(
        "Qwen3-VL",
        (
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLModel",
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3VLMoeModel",
        ),
        tables((*PATCHES_MOVED, _TIMESTAMPS), (*PATCHES, _TIMESTAMPS), note=_TOWER),
    ),
    Family(
        "HyperCLOVA X Vision v2",
        ("hyperclovax_vision_v2", "HyperCLOVAXVisionV2ForConditionalGeneration", "HCXVisionV2ForCausalLM"),
        tables((*PATCHES_MOVED, _TIMESTAMPS), (*PATCHES, _TIMESTAMPS), note=_TOWER),
    ),
    Family(
        "ERNIE 4.5 VL",
        (
            "ernie4_5_vl_moe",
            "ernie4_5_moe_vl",
            "Ernie4_5_VLMoeForConditionalGeneration",
            "Ernie4_5_VL_MoeForConditionalGeneration",
        ),
        tables(
            tuple(entry for entry in PATCHES_MOVED if not entry.declared),
            note="patches are counted from the CPU copy; the grid goes to the device without waiting",
        ),
    ),
    Family(
        "Isaac",
        ("isaac", "IsaacForConditionalGeneration"),
        tables(
            (
                F("pixel_values", "image", products("image_grid_thw")),
                B("image_grid_thw", "image", cpu=True, moved=True),
            ),
            why=NOT_IN_TRANSFORMERS,
            note="the consumer makes `grid[:, 1:3]` int32 on the device, without waiting",
        ),
    ),
    Family(
        "Keye-VL 1.5",
        ("KeyeVL1_5", "keye_vl1_5", "KeyeVL1_5ForConditionalGeneration"),
        tables(
            (
                F("pixel_values", "image", products("image_grid_thw")),
                F("image_embeds", "image", merged("image_grid_thw")),
                B("image_grid_thw", "image", cpu=True),
                F("pixel_values_videos", "video", grouped("video_grid_thw", "num_frames")),
                F("video_embeds", "video", merged_groups("video_grid_thw", "num_frames")),
                F("video_grid_thw", "video", counts("num_frames"), cpu=True),
                B("num_frames", "video", cpu=True),
            ),
            why=NOT_IN_TRANSFORMERS,
        ),
    ),
    Family(
        "LLaVA-OneVision2",
        (
            "llava_onevision2",
            "llava_onevision_2",
            "LlavaOnevision2ForConditionalGeneration",
            "LlavaOneVision2ForConditionalGeneration",
        ),
        tables(
            (
                F("pixel_values", "image", products("image_grid_thw")),
                F("image_embeds", "image", merged("image_grid_thw")),
                B("image_grid_thw", "image", cpu=True),
                F("patch_positions", "image", products("image_grid_thw")),
                F("pixel_values_videos", "video", grouped("video_grid_thw", "video_num_frames")),
                F("video_grid_thw", "video", counts("video_num_frames"), cpu=True),
                F("patch_positions_videos", "video", grouped("video_grid_thw", "video_num_frames")),
                *kept("video", "video_num_frames", "frame_timestamps", "video_is_codec", "codec_fps"),
            ),
            why=NOT_IN_TRANSFORMERS,
            note="`patch_positions` and its twin were marked once and taken back: the tower embeds them on the device",
        ),
    ),
    Family(
        "Kimi-VL",
        ("kimi_vl", "KimiVLForConditionalGeneration"),
        tables(
            (F("pixel_values", "image", products("image_grid_hws")), B("image_grid_hws", "image", cpu=True)),
            why=NOT_IN_TRANSFORMERS,
        ),
    ),
)
