"""Families that hear and do not see."""

from __future__ import annotations

from mmcache.models.entries import NOT_IN_TRANSFORMERS, B, F, Family, declared, tables
from mmcache.models.sizes import counts, where

__all__ = ["AUDIO_FAMILIES", "PACKED_AUDIO"]

PACKED_AUDIO = (
    F("input_audio_features", "audio", counts("audio_feature_lengths"), dim=1),
    B("feature_attention_mask", "audio", cpu=True),
    B("audio_feature_lengths", "audio", cpu=True, moved=True),
)
"""Spectra of all clips one behind the other, their lengths on the CPU; the consumer copies these itself."""

_CHUNKS = where("audio_chunk_counts", counts("audio_chunk_counts"))
_MOSS = (
    F("input_features", "audio", _CHUNKS),
    B("audio_chunk_counts", "audio", cpu=True),
    *declared(
        F("audio_feature_lengths", "audio", _CHUNKS),
        B("audio_token_lengths", "audio", cpu=True),
        B("audio_embeds", "audio"),
    ),
)
_TAKEN_BACK = "was marked once and taken back: the tower masks with it on the device"

AUDIO_FAMILIES = (
    Family(
        "Qwen2-Audio",
        ("qwen2_audio", "Qwen2AudioForConditionalGeneration", "Qwen2AudioModel"),
        tables(
            (
                B("input_features", "audio"),
                B("feature_attention_mask", "audio"),
                *declared(B("audio_embeds", "audio")),
                B("audio_num_tokens", "audio", cpu=True),
            ),
            note=f"`feature_attention_mask` {_TAKEN_BACK}",
        ),
    ),
    Family(
        "Qwen3-ASR",
        ("qwen3_asr", "Qwen3ASRForConditionalGeneration", "Qwen3ASRModel"),
        tables(
            (B("input_features", "audio"), B("input_features_mask", "audio"), *declared(*PACKED_AUDIO)),
            PACKED_AUDIO,
            note="the class takes `input_features` and their mask; the packed names are those of vLLM",
            vllm_note="the consumer copies `audio_feature_lengths` to the device, without waiting",
        ),
    ),
    Family(
        "MOSS-Transcribe-Diarize",
        (
            "moss_transcribe_diarize",
            "MossTranscribeDiarizeForConditionalGeneration",
            "MossTranscribeDiarizeModel",
        ),
        tables(
            (
                *_MOSS,
                F("input_features_mask", "audio", _CHUNKS),
                B("padding_mask", "audio", cpu=True),
            ),
            _MOSS,
            note="`audio_chunk_counts` is made by the engine; the class takes a mask in place of lengths",
            vllm_note=f"`audio_feature_lengths` {_TAKEN_BACK}",
        ),
    ),
    Family(
        "FireRedLID",
        ("fireredlid", "firered_lid", "FireRedLIDForConditionalGeneration"),
        tables(
            (
                B("input_features", "audio"),
                B("speech_lengths", "audio"),
                B("fake_token_lengths", "audio"),
            ),
            why=NOT_IN_TRANSFORMERS,
            note=f"`speech_lengths` {_TAKEN_BACK}",
        ),
    ),
)
