"""Tiny real models with seeded random weights, so that a chat runs on a laptop without downloading anything.

The classes, forward passes and image processors are those of transformers; only sizes are small and weights random.
With the usual initialisation attention is nearly uniform and a wrong position or a swapped picture does not change the
answer; matrices are therefore drawn again with a standard deviation of 0.15, after which such mistakes show at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mmcache.engines.transformers.adapter import Adapter, special_token_ids
from mmcache.engines.transformers.families import Idefics3, Llava, Qwen2Audio, QwenVL
from mmcache.errors import ConfigError

__all__ = ["FAMILIES", "tiny_adapter"]

_VOCABULARY = 320
_WEIGHT_STD = 0.15
_TEXT: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1 << 17,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def tiny_adapter(family: str, *, seed: int = 0, small_images: bool = False) -> Adapter:
    """Build a tiny model of a family, with its tokenizer and processor, ready to run.

    Args:
        family: one of `FAMILIES`, a Hugging Face `model_type`.
        seed: of the weights.
        small_images: cap the processor's resolution, for tests that care about correctness and not about sizes.

    Raises:
        ConfigError: no such family, or transformers or Pillow are not installed.
    """
    if family not in FAMILIES:
        raise ConfigError("unknown model family", found=repr(family), expected=f"one of {', '.join(FAMILIES)}")
    adapter = FAMILIES[family](small_images)
    _redraw(adapter.model, seed)
    adapter.revision = f"random weights, seed {seed}, torch {torch.__version__}"
    return adapter


def _redraw(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, _WEIGHT_STD, generator=generator)
    model.requires_grad_(False)
    model.eval()


def _transformers() -> Any:
    try:
        import PIL  # noqa: F401
        import transformers
    except ImportError as error:
        raise ConfigError("this engine needs transformers and Pillow: pip install mmcache[transformers]") from error
    return transformers


def _tokenizer() -> Any:
    """A byte-level tokenizer: the special tokens first, then one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = special_token_ids()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = dict(specials)
    vocabulary.update({letter: len(specials) + index for index, letter in enumerate(alphabet)})
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # What a user types never becomes a special token, however it is spelled.
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=list(specials), split_special_tokens=True
    )


def _qwen2_5_vl(small_images: bool) -> Adapter:
    hf = _transformers()
    ids = special_token_ids()
    text = {**_TEXT, "use_sliding_window": False, "rope_parameters": _mrope()}
    text.pop("head_dim")
    config = hf.Qwen2_5_VLConfig(
        text_config=text,
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": _TEXT["hidden_size"],
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
        vision_start_token_id=ids["<vision_start>"],
        vision_end_token_id=ids["<vision_end>"],
    )
    size = {"shortest_edge": 56 * 56, "longest_edge": (84 * 112 if small_images else 28 * 28 * 1280)}
    return QwenVL(hf.Qwen2_5_VLForConditionalGeneration(config), _tokenizer(), hf.Qwen2VLImageProcessorPil(size=size))


def _qwen3_vl(small_images: bool) -> Adapter:
    hf = _transformers()
    ids = special_token_ids()
    config = hf.Qwen3VLConfig(
        text_config={**_TEXT, "num_hidden_layers": 3, "rope_parameters": {**_mrope(), "mrope_interleaved": True}},
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": _TEXT["hidden_size"],
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<image>"],
        video_token_id=ids["<video>"],
        vision_start_token_id=ids["<vision_start>"],
        vision_end_token_id=ids["<vision_end>"],
    )
    size = {"shortest_edge": 64 * 64, "longest_edge": (96 * 128 if small_images else 1 << 20)}
    processor = hf.Qwen2VLImageProcessorPil(
        size=size, patch_size=16, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5]
    )
    return QwenVL(hf.Qwen3VLForConditionalGeneration(config), _tokenizer(), processor)


def _mrope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _llava(small_images: bool) -> Adapter:
    hf = _transformers()
    edge = 56 if small_images else 336
    config = hf.LlavaConfig(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": edge,
            "patch_size": 14,
        },
        image_token_index=special_token_ids()["<image>"],
        image_seq_length=(edge // 14) ** 2,
    )
    processor = hf.CLIPImageProcessorPil(size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge})
    return Llava(hf.LlavaForConditionalGeneration(config), _tokenizer(), processor)


def _idefics3(small_images: bool) -> Adapter:
    hf = _transformers()
    edge, patch, longest = (64, 8, 128) if small_images else (384, 16, 768)
    config = hf.Idefics3Config(
        text_config={**_TEXT, "model_type": "llama"},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": edge,
            "patch_size": patch,
        },
        scale_factor=4,
        image_token_id=special_token_ids()["<image>"],
        pad_token_id=0,
    )
    processor = hf.Idefics3ImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": edge})
    return Idefics3(hf.Idefics3ForConditionalGeneration(config), _tokenizer(), processor)


def _qwen2_audio(small_images: bool) -> Adapter:
    hf = _transformers()

    seconds = 2 if small_images else 30
    config = hf.Qwen2AudioConfig(
        text_config={**_TEXT, "model_type": "qwen2", "use_sliding_window": False},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "d_model": 64,
            "max_source_positions": 50 * seconds,
        },
        audio_token_index=special_token_ids()["<audio>"],
    )
    extractor = hf.WhisperFeatureExtractor(feature_size=32, chunk_length=seconds)
    return Qwen2Audio(hf.Qwen2AudioForConditionalGeneration(config), _tokenizer(), extractor)


FAMILIES: dict[str, Callable[[bool], Adapter]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "llava": _llava,
    "idefics3": _idefics3,
    "qwen2_audio": _qwen2_audio,
}
"""The model families of which a tiny model can be built, by Hugging Face `model_type`."""
