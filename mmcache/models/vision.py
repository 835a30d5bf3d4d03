"""Families of images and videos with crops, tiles, or one picture an item."""

from __future__ import annotations

from mmcache.models.entries import REMOTE_CODE, B, F, Family, S, declared, kept, tables
from mmcache.models.sizes import counts, first, pairs, products, where

__all__ = ["VISION_FAMILIES"]

_EMBEDS = declared(B("image_embeds", "image"))
_PICTURE = (B("pixel_values", "image"), *_EMBEDS)
_SIZED = (B("pixel_values", "image"), B("image_sizes", "image", cpu=True), *_EMBEDS)
_ONEVISION = (*_SIZED, B("pixel_values_videos", "video"))
_UNPAD = "the processor pads to the largest image of its batch: unpad by `image_sizes` before an item is kept"
_TILES = (
    F("pixel_values", "image", counts("num_patches")),
    F("pixel_attention_mask", "image", counts("num_patches")),
    *_EMBEDS,
    B("num_patches", "image", cpu=True),
)
_INTERNVL_COUNTS = (
    B("image_num_patches", "image", cpu=True),
    *_EMBEDS,
    S("image_token_id", "image", cpu=True),
    B("video_num_patches", "video", cpu=True),
    S("video_token_id", "video", cpu=True),
)
_CROPS = where("num_crops", counts("num_crops", plus=1))
_MOLMO2 = (
    F("pixel_values", "image", counts("image_num_crops")),
    F("image_token_pooling", "image", where("image_grids", pairs("image_grids"), counts("image_num_pooled_patches"))),
    B("image_num_crops", "image", cpu=True),
    *declared(
        *kept("image", "image_num_pooled_patches", "image_num_patches", "num_image_tokens"),
        F("image_tokens", "image", counts("num_image_tokens")),
    ),
    F(
        "pixel_values_videos",
        "video",
        where("video_grids", first("video_grids"), counts("video_num_crops")),
    ),
    F(
        "video_token_pooling",
        "video",
        where("video_grids", products("video_grids"), counts("video_num_pooled_patches")),
    ),
    *declared(
        *kept("video", "video_num_crops", "video_num_pooled_patches", "video_num_patches", "num_video_tokens"),
        F("video_tokens", "video", counts("num_video_tokens")),
    ),
)


VISION_FAMILIES = (
    Family("LLaVA", ("llava", "LlavaForConditionalGeneration", "LlavaModel"), tables(_PICTURE)),
    Family(
        "Mistral 3",
        ("mistral3", "Mistral3ForConditionalGeneration", "Mistral3Model"),
        tables(_SIZED, note=_UNPAD),
    ),
    Family(
        "Pixtral",
        ("pixtral", "PixtralForConditionalGeneration", "PixtralVisionModel"),
        tables(_SIZED, (*_SIZED, B("images", "image")), note=_UNPAD, vllm_note=f"`images`: Mistral's format; {_UNPAD}"),
    ),
    Family("LLaVA-NeXT", ("llava_next", "LlavaNextForConditionalGeneration", "LlavaNextModel"), tables(_SIZED)),
    Family(
        "LLaVA-OneVision",
        ("llava_onevision", "LlavaOnevisionForConditionalGeneration", "LlavaOnevisionModel"),
        tables(
            (*_ONEVISION, S("batch_num_images", "image", cpu=True)),
            _ONEVISION,
            note="`batch_num_images` counts by sample, not by image: it is shared, so process one sample at a time",
        ),
    ),
    Family(
        "Idefics3, SmolVLM",
        ("idefics3", "Idefics3ForConditionalGeneration", "smolvlm", "SmolVLMForConditionalGeneration"),
        tables(
            _TILES,
            note="`num_patches` is made by the engine; `pixel_values[0]` of a batch of one sample holds all tiles",
        ),
    ),
    Family(
        "InternVL (transformers)",
        ("internvl", "InternVLForConditionalGeneration", "InternVLModel"),
        tables(
            (
                F(
                    "pixel_values",
                    "image",
                    where("image_num_patches", counts("image_num_patches"), counts("num_patches")),
                ),
                F("pixel_values_videos", "video", counts("video_num_patches")),
                *_INTERNVL_COUNTS,
                *declared(B("num_patches", "image", cpu=True)),
            ),
            note="`image_num_patches` is the image processor's `num_patches`; its twin is made by the engine",
        ),
    ),
    Family(
        "InternVL (remote code)",
        ("internvl_chat", "InternVLChatModel"),
        tables(
            (
                F("pixel_values_flat", "image", counts("image_num_patches")),
                F("pixel_values_flat_video", "video", counts("video_num_patches")),
                *_INTERNVL_COUNTS,
            ),
            why=REMOTE_CODE,
        ),
    ),
    Family(
        "Gemma 3",
        ("gemma3", "Gemma3ForConditionalGeneration", "Gemma3Model"),
        tables(
            (
                F("pixel_values", "image", where("num_patches", counts("num_patches"), _CROPS)),
                B("num_patches", "image", cpu=True),
                *declared(B("num_crops", "image", cpu=True)),
            ),
            note="`num_patches` (crops + 1) is made by the engine",
        ),
    ),
    Family(
        "Molmo2",
        ("molmo2", "Molmo2ForConditionalGeneration", "Molmo2Model"),
        tables(
            (*_MOLMO2, B("image_grids", "image", cpu=True), B("video_grids", "video", cpu=True)),
            _MOLMO2,
            note="pooling indices count from the first patch of the processor's batch: process items one by one",
        ),
    ),
    Family(
        "HyperCLOVA X Vision v1",
        ("hyperclovax_vlm", "HCXVisionForCausalLM"),
        tables(
            (
                B("pixel_values_images", "image"),
                *kept("image", "image_sizes_images", "vision_query_lengths_images"),
                B("pixel_values_videos", "video"),
                B("vision_query_lengths_videos", "video", cpu=True),
            ),
            why=REMOTE_CODE,
        ),
    ),
)
