"""Small batches as the processors of real families make them: two items a modality, of different sizes.

Sizes follow from the model's config, values are noise. Videos are made by hand, so that no video processor is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["SAMPLES", "Batch"]

Batch = dict[str, Any]


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _tokens(*runs: tuple[int, int, int], around: tuple[int, int] = (1, 2)) -> Batch:
    """Token ids and kinds of a prompt with runs of `(id, kind, length)`, each between two other tokens."""
    ids, kinds = [1], [0]
    for token, kind, length in runs:
        ids += [around[0], *[token] * length, around[1], 1]
        kinds += [0, *[kind] * length, 0, 0]
    return {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([kinds], dtype=torch.int32)}


def _grids(config: Any, *, depth: int = 2, videos: bool = True) -> Batch:
    vision = config.vision_config
    channels: int = getattr(vision, "in_channels", 0) or getattr(vision, "in_chans", 3)
    width = channels * depth * vision.patch_size**2
    merge = vision.spatial_merge_size**2
    images = torch.tensor([[1, 4, 4], [1, 4, 8]])
    clips = torch.tensor([[2, 4, 4], [4, 4, 4]])
    batch = {
        "pixel_values": _noise(int(images.prod(-1).sum()), width),
        "image_grid_thw": images,
        "pixel_values_videos": _noise(int(clips.prod(-1).sum()), width),
        "video_grid_thw": clips,
    }
    runs = [(config.image_token_id, 1, n // merge) for n in images.prod(-1).tolist()]
    return {**batch, **_tokens(*runs, *_clip_runs(config, clips, merge))}


def _clip_runs(config: Any, clips: Tensor, merge: int) -> list[tuple[int, int, int]]:
    if config.model_type.startswith("qwen3_vl"):
        # One run a frame: timestamps stand between them.
        return [(config.video_token_id, 2, h * w // merge) for t, h, w in clips.tolist() for _ in range(t)]
    frames = getattr(config.vision_config, "temporal_merge_size", 1) if config.model_type.startswith("ernie") else 1
    return [(config.video_token_id, 2, n // merge // frames) for n in clips.prod(-1).tolist()]


def _qwen2_5(config: Any) -> Batch:
    return {**_timed(config), "second_per_grid_ts": torch.tensor([1.0, 0.5])}


def _timed(config: Any) -> Batch:
    return {**_grids(config), "timestamps": torch.tensor([[0.5, 1.5], [0.5, 1.5]])}


def _ernie(config: Any) -> Batch:
    return _grids(config, depth=1)


def _pictures(config: Any) -> Batch:
    edge = config.vision_config.image_size
    return {"pixel_values": _noise(2, 3, edge, edge)}


def _any_resolution(config: Any) -> Batch:
    edge = config.vision_config.image_size
    sizes = torch.tensor([[edge, 2 * edge], [2 * edge, 2 * edge - 3]])
    return {"pixel_values": _noise(2, 5, 3, edge, edge), "image_sizes": sizes}


def _onevision(config: Any) -> Batch:
    edge = config.vision_config.image_size
    return {
        **_any_resolution(config),
        "batch_num_images": torch.tensor([1, 1]),
        "pixel_values_videos": _noise(2, 2, 3, edge, edge),
    }


def _padded(config: Any) -> Batch:
    patch = config.vision_config.patch_size * 2
    sizes = torch.tensor([[2 * patch, 4 * patch], [4 * patch, 2 * patch]])
    return {"pixel_values": _noise(2, 3, 4 * patch, 4 * patch), "image_sizes": sizes}


def _tiles(config: Any) -> Batch:
    edge = config.vision_config.image_size
    mask = torch.ones(4, edge, edge, dtype=torch.int64)
    mask[3, edge // 2 :] = 0
    return {
        "pixel_values": _noise(4, 3, edge, edge),
        "pixel_attention_mask": mask,
        "num_patches": torch.tensor([3, 1]),
    }


def _internvl(config: Any) -> Batch:
    height, width = config.vision_config.image_size
    return {
        "pixel_values": _noise(3, 3, height, width),
        "image_num_patches": torch.tensor([2, 1]),
        "image_token_id": torch.tensor(config.image_token_id),
        "pixel_values_videos": _noise(4, 3, height, width),
        "video_num_patches": torch.tensor([3, 1]),
        "video_token_id": torch.tensor(4),
    }


def _crops(config: Any) -> Batch:
    edge = config.vision_config.image_size
    return {"pixel_values": _noise(3, 3, edge, edge), "num_patches": torch.tensor([2, 1])}


def _molmo2(config: Any) -> Batch:
    vision = config.vision_config
    patches = vision.num_position_embeddings
    width = vision.num_channels * vision.patch_size**2
    pooling = torch.arange(3 * 4).reshape(3, 4)
    # Indices count from the first patch of the batch; the first item has two crops, or frames.
    second = 2 * patches
    return {
        "pixel_values": _noise(3, patches, width),
        "image_token_pooling": torch.cat([pooling, pooling[:2] + second]),
        "image_grids": torch.tensor([[1, 1, 1, 2], [1, 1, 1, 1]]),
        "image_num_crops": torch.tensor([2, 1]),
        "pixel_values_videos": _noise(3, patches, width),
        "video_token_pooling": torch.cat([pooling[:2], pooling[:1] + second]),
        "video_grids": torch.tensor([[2, 1, 1], [1, 1, 1]]),
    }


def _minicpm(config: Any) -> Batch:
    patch = config.vision_config.patch_size
    sizes = torch.tensor([[4, 8], [4, 4], [8, 4]], dtype=torch.int32)
    columns = int(sizes.prod(-1).sum()) * patch
    batch = {
        "pixel_values": _noise(1, 3, patch, columns),
        "target_sizes": sizes,
        "num_patches_per_image": torch.tensor([2, 1]),
        "num_frames_per_video": torch.tensor([1, 1]),
        "num_patches_per_frame": torch.tensor([1, 1]),
        "pixel_values_videos": _noise(1, 3, patch, int(sizes[1:].prod(-1).sum()) * patch),
        "target_sizes_videos": sizes[1:].clone(),
    }
    if config.model_type != "minicpmv4_7":
        return batch
    # Positions are anchored on the markers: <image> thumbnail </image> <slice> crop </slice>, then a whole image.
    start, end, first, last = (
        config.image_start_id,
        config.image_end_id,
        config.slice_start_id,
        config.slice_end_id,
    )
    rows = (sizes.prod(-1) // 16).tolist()
    ids, kinds = [1], [0]
    for opening, token, kind, count, closing in (
        (start, config.image_token_id, 1, rows[0], end),
        (first, config.image_token_id, 1, rows[1], last),
        (start, config.image_token_id, 1, rows[2], end),
        (start, config.video_token_id, 2, rows[1], end),
        (start, config.video_token_id, 2, rows[2], end),
    ):
        ids += [opening, *[token] * count, closing]
        kinds += [0, *[kind] * count, 0]
        if closing in (end, last) and opening != first and count != rows[0]:
            ids.append(1)
            kinds.append(0)
    tokens = {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([kinds], dtype=torch.int32)}
    return {**batch, **tokens}


def _spectra(bins: int, frames: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    mask = (torch.arange(frames)[None] < torch.tensor(lengths)[:, None]).to(torch.int32)
    return _noise(len(lengths), bins, frames), mask


def _qwen2_audio(config: Any) -> Batch:
    audio = config.audio_config
    features, mask = _spectra(audio.num_mel_bins, 2 * audio.max_source_positions, (32, 20))
    return {
        "input_features": features,
        "feature_attention_mask": mask,
        "audio_num_tokens": ((mask.sum(-1) - 1) // 2 + 1 - 2) // 2 + 1,
    }


def _qwen3_asr(config: Any) -> Batch:
    features, mask = _spectra(config.audio_config.num_mel_bins, 4 * config.audio_config.n_window, (200, 130))
    return {"input_features": features, "input_features_mask": mask}


def _moss(config: Any) -> Batch:
    audio = config.audio_config
    features, mask = _spectra(audio.num_mel_bins, 2 * audio.max_source_positions, (32, 20, 32))
    return {
        "input_features": features,
        "input_features_mask": mask,
        "audio_chunk_counts": torch.tensor([2, 1]),
        "padding_mask": torch.ones(2, 640, dtype=torch.int32),
    }


def _omni(config: Any) -> Batch:
    features, mask = _spectra(config.audio_config.num_mel_bins, 32, (32, 20))
    seen, seconds = _grids(config), torch.tensor([2.0, 1.0])
    del seen["mm_token_type_ids"]
    images, clips = seen["image_grid_thw"].tolist(), seen["video_grid_thw"].tolist()
    heard = (((mask.sum(-1) - 1) // 2 + 1 - 2) // 2 + 1).tolist()
    start, end = config.vision_start_token_id, config.vision_end_token_id
    listen, stop = config.audio_start_token_id, config.audio_end_token_id
    # Modalities take turns: an image, a clip of sound, a video; or an image, and a video with its sound inside.
    apart, interleaved = [1], [1]
    for (_, height, width), clip, second, sound in zip(images, clips, seconds.tolist(), heard):
        picture = [start, *[config.image_token_id] * (height * width // 4), end, 1]
        film = [config.video_token_id] * (math.prod(clip) // 4)
        apart += [*picture, listen, *[config.audio_token_id] * sound, stop, 1, start, *film, end, 1]
        interleaved += [*picture, start, listen, *_chunks(config, clip, second, sound), stop, end, 1]
    interleaved += [0] * (len(apart) - len(interleaved))
    ids = torch.tensor([apart, interleaved])
    return {
        **seen,
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "input_features": features,
        "feature_attention_mask": mask,
        "audio_feature_lengths": mask.sum(-1),
        "video_second_per_grid": seconds,
        "use_audio_in_video": torch.tensor(True),
    }


def _chunks(config: Any, clip: Sequence[int], seconds: float, sound: int) -> list[int]:
    """Tokens of a video and its sound as the processor lays them out: by chunks of time, what is seen first."""
    length = int(config.position_id_per_seconds * config.seconds_per_chunk)
    frames, rows = clip[0], clip[1] * clip[2] // 4
    seen = [int(frame * seconds * config.position_id_per_seconds) // length for frame in range(frames)]
    heard = [position // length for position in range(sound)]
    ids = []
    for chunk in range(max(*seen, *heard) + 1):
        ids += [config.video_token_id] * (rows * seen.count(chunk)) + [config.audio_token_id] * heard.count(chunk)
    return ids


def _phi4(config: Any) -> Batch:
    edge = config.vision_config.crop_size
    side = edge // config.vision_config.patch_size
    rows = side // 2
    tokens = [rows * (rows * crops + 1) + 1 + rows * (rows + 1) for crops in (1, 2)]
    frames, heard = 32, (4, 2)
    ids = [1, *[config.vision_config.image_token_id] * sum(tokens), *[config.audio_config.audio_token_id] * sum(heard)]
    return {
        "image_pixel_values": _noise(2, 3, 3, edge, edge),
        "image_sizes": torch.tensor([[edge, edge], [edge, 2 * edge]]),
        "image_attention_mask": torch.ones(2, 3, side, side, dtype=torch.int64),
        "num_img_tokens": torch.tensor(tokens),
        "audio_input_features": _noise(2, frames, config.audio_config.input_size),
        "audio_embed_sizes": torch.tensor(heard),
        "audio_attention_mask": torch.arange(frames)[None] < torch.tensor([[32], [16]]),
        "input_ids": torch.tensor([ids]),
    }


SAMPLES: dict[str, Callable[[Any], Batch]] = {
    "qwen2_vl": _timed,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _timed,
    "qwen3_vl_moe": _timed,
    "ernie4_5_vl_moe": _ernie,
    "hyperclovax_vision_v2": _timed,
    "llava": _pictures,
    "llava_next": _any_resolution,
    "llava_onevision": _onevision,
    "pixtral": _padded,
    "mistral3": _padded,
    "idefics3": _tiles,
    "smolvlm": _tiles,
    "internvl": _internvl,
    "gemma3": _crops,
    "molmo2": _molmo2,
    "minicpmv4_6": _minicpm,
    "minicpmv4_7": _minicpm,
    "qwen2_audio": _qwen2_audio,
    "qwen3_asr": _qwen3_asr,
    "moss_transcribe_diarize": _moss,
    "qwen2_5_omni_thinker": _omni,
    "phi4_multimodal": _phi4,
}
"""What makes a batch for a config, by `model_type`; what is no field (token ids) is the text around the items."""
