"""Tiny configs of real families, so that their encoders run in milliseconds: the classes are real, the sizes small."""

from __future__ import annotations

from typing import Any

__all__ = ["TINY"]

_TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MROPE_TEXT = {**_TEXT, "rope_parameters": _MROPE}
_IDS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 32}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_CLIP = {**_TOWER, "model_type": "clip_vision_model"}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_LLAMA = {**_TEXT, "model_type": "llama"}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_WINDOWED = {
    **_QWEN_VISION,
    "intermediate_size": 32,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 64,
}
_QWEN3_VISION = {
    **_QWEN_VISION,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_IDEFICS3 = {"text_config": _LLAMA, "vision_config": _TOWER, "scale_factor": 2, "image_token_id": 3, "pad_token_id": 0}
_MINICPM = {
    "text_config": {
        **_TEXT,
        "model_type": "qwen3_5_text",
        "layer_types": ["full_attention"],
        "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    },
    "vision_config": {**_TOWER, "image_size": 32, "insert_layer_id": 0},
    "insert_layer_id": 0,
    "image_token_id": 3,
    "video_token_id": 4,
    "patch_size": 4,
}

TINY: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": _MROPE_TEXT,
        "vision_config": {"depth": 2, "num_heads": 2, "patch_size": 4, "embed_dim": 32, "hidden_size": 64},
        **_IDS,
    },
    "qwen2_5_vl": {"text_config": _MROPE_TEXT, "vision_config": _WINDOWED, **_IDS},
    "qwen3_vl": {
        "text_config": {**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        "vision_config": _QWEN3_VISION,
        **_IDS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_TEXT,
            "rope_parameters": {**_MROPE, "mrope_interleaved": True},
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "vision_config": _QWEN3_VISION,
        **_IDS,
    },
    "llava": {"text_config": _LLAMA, "vision_config": _CLIP, "image_token_index": 3},
    "llava_next": {
        "text_config": _LLAMA,
        "vision_config": _CLIP,
        "image_token_index": 3,
        "image_grid_pinpoints": _PINPOINTS,
    },
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": _SIGLIP,
        "image_token_index": 3,
        "video_token_index": 4,
        "image_grid_pinpoints": _PINPOINTS,
    },
    "pixtral": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
        "image_token_index": 3,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
        "image_token_index": 3,
    },
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": 3,
        "image_seq_length": 4,
    },
    "gemma3": {
        "text_config": {**_TEXT, "model_type": "gemma3_text"},
        "vision_config": _SIGLIP,
        "image_token_index": 3,
        "mm_tokens_per_image": 4,
    },
    "molmo2": {
        "text_config": {**_TEXT, "additional_vocab_size": 8},
        "vision_config": {
            **_TOWER,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "image_size": [16, 16],
            "num_position_embeddings": 16,
        },
        "adapter_config": {
            "vision_feature_layer": [1, 0],
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "text_hidden_size": 64,
        },
        "image_patch_id": 3,
    },
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": {
        **_MINICPM,
        "image_start_id": 5,
        "image_end_id": 6,
        "slice_start_id": 7,
        "slice_end_id": 8,
        "newline_id": 9,
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            **_TEXT,
            "moe_intermediate_size": [16, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
            "rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]},
        },
        "vision_config": {**_QWEN_VISION, "intermediate_size": 32},
        "image_token_id": 3,
        "video_token_id": 4,
        "image_start_token_id": 5,
        "image_end_token_id": 6,
        "video_start_token_id": 7,
        "video_end_token_id": 8,
    },
    "hyperclovax_vision_v2": {
        "text_config": _TEXT,
        "vision_config": {**_WINDOWED, "model_type": "qwen2_5_vl_vision"},
        "image_token_id": 3,
        "video_token_id": 4,
    },
    "qwen2_audio": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 8,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "max_source_positions": 16,
        },
        "audio_token_index": 3,
    },
    "qwen3_asr": {
        "text_config": {**_TEXT, "model_type": "qwen3"},
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "output_dim": 64,
            "n_window": 50,
            "n_window_infer": 100,
            "downsample_hidden_size": 8,
        },
        "audio_token_id": 3,
    },
    "moss_transcribe_diarize": {
        "text_config": {**_TEXT, "model_type": "qwen3"},
        "audio_config": {
            "num_mel_bins": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "hidden_size": 32,
            "max_source_positions": 16,
        },
        "audio_token_id": 3,
        "audio_merge_size": 2,
        "audio_chunk_size": 320,
    },
    "qwen2_5_omni_thinker": {
        "text_config": _MROPE_TEXT,
        "vision_config": _WINDOWED,
        "audio_config": {
            "num_mel_bins": 8,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "d_model": 32,
            "output_dim": 64,
            "n_window": 4,
            "max_source_positions": 32,
        },
        "image_token_index": 3,
        "video_token_index": 4,
        "audio_token_index": 10,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "audio_start_token_id": 11,
        "audio_end_token_id": 12,
    },
    "phi4_multimodal": {
        **{name: value for name, value in _TEXT.items() if name != "head_dim"},
        "pad_token_id": 0,
        "vision_config": {**_TOWER, "image_size": 32, "crop_size": 32, "image_token_id": 3},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "input_size": 16,
            "nemo_conv_channels": 16,
            "nemo_final_size": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "audio_token_id": 10,
            "feature_layer": -1,
        },
    },
}
"""Keyword arguments of a family's config class, by `model_type`."""
