"""Families of images and videos with crops, tiles, or one picture an item."""

from __future__ import annotations

from mmcache.models.entries import B, F, Family, S, tables
from mmcache.models.sizes import counts, either

__all__ = ["VISION_FAMILIES"]

_PICTURE = (B("pixel_values", "image"), B("image_embeds", "image"))
_SIZED = (B("pixel_values", "image"), B("image_sizes", "image", cpu=True), B("image_embeds", "image"))
_ONEVISION = (*_SIZED, B("pixel_values_videos", "video"))
_TILES = (
    F("pixel_values", "image", counts("num_patches")),
    F("pixel_attention_mask", "image", counts("num_patches")),
    B("image_embeds", "image"),
    B("num_patches", "image", cpu=True),
)

VISION_FAMILIES = (
    Family("LLaVA", ("llava", "LlavaForConditionalGeneration"), tables(_PICTURE)),
    Family(
        "Pixtral",
        ("pixtral", "PixtralForConditionalGeneration", "PixtralVisionModel"),
        tables(_SIZED, (*_PICTURE, B("images", "image"))),
    ),
    Family("LLaVA-NeXT", ("llava_next", "LlavaNextForConditionalGeneration"), tables(_SIZED)),
    Family(
        "LLaVA-OneVision",
        ("llava_onevision", "LlavaOnevisionForConditionalGeneration"),
        tables((*_ONEVISION, S("batch_num_images", "image", cpu=True)), _ONEVISION),
    ),
    Family(
        "Idefics3, SmolVLM",
        ("idefics3", "Idefics3ForConditionalGeneration", "smolvlm", "SmolVLMForConditionalGeneration"),
        tables(_TILES),
    ),
    Family(
        "InternVL (transformers)",
        ("internvl", "InternVLForConditionalGeneration"),
        tables(
            (
                F("pixel_values", "image", counts("image_num_patches")),
                B("image_num_patches", "image", cpu=True),
                B("image_embeds", "image"),
                S("image_token_id", "image", cpu=True),
                F("pixel_values_videos", "video", counts("video_num_patches")),
                B("video_num_patches", "video", cpu=True),
                S("video_token_id", "video", cpu=True),
            )
        ),
    ),
    Family(
        "Gemma 3",
        ("gemma3", "Gemma3ForConditionalGeneration"),
        tables(
            (
                F("pixel_values", "image", either("num_patches", counts("num_crops", plus=1))),
                B("num_patches", "image", cpu=True),
                B("num_crops", "image", cpu=True),
            )
        ),
    ),
)
