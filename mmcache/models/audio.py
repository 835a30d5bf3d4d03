"""Families that hear and do not see."""

from __future__ import annotations

from mmcache.models.entries import B, Family, tables

__all__ = ["AUDIO_FAMILIES"]

AUDIO_FAMILIES = (
    Family(
        "Qwen2-Audio",
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
        tables(
            (
                B("input_features", "audio"),
                B("feature_attention_mask", "audio"),
                B("audio_embeds", "audio"),
                B("audio_num_tokens", "audio", cpu=True),
            )
        ),
    ),
)
