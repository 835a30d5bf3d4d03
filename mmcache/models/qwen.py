"""Families whose images and videos are packed patches with a grid an item: Qwen-VL and those built like it."""

from __future__ import annotations

from mmcache.models.entries import B, F, Family, tables
from mmcache.models.sizes import merged, products

__all__ = ["PATCHES", "QWEN_FAMILIES"]

PATCHES = (
    F("pixel_values", "image", products("image_grid_thw")),
    F("image_embeds", "image", merged("image_grid_thw")),
    B("image_grid_thw", "image", cpu=True),
    F("pixel_values_videos", "video", products("video_grid_thw")),
    F("video_embeds", "video", merged("video_grid_thw")),
    B("video_grid_thw", "video", cpu=True),
)
"""Packed patches of images and videos, their grids on the CPU."""

_TIMESTAMPS = B("timestamps", "video", cpu=True)
_SECONDS = B("second_per_grid_ts", "video", cpu=True)

QWEN_FAMILIES = (
    Family("Qwen2-VL", ("qwen2_vl", "Qwen2VLForConditionalGeneration"), tables((*PATCHES, _TIMESTAMPS))),
    Family(
        "Qwen2.5-VL",
        ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        tables((*PATCHES, _TIMESTAMPS, _SECONDS)),
    ),
    Family(
        "Qwen3-VL",
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        tables((*PATCHES, _TIMESTAMPS)),
    ),
)
