"""Field configs by family: layouts from the batch itself, strictness, and copies to the device on demand."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from mmcache.errors import ConfigError, FieldError, MMCacheError
from mmcache.fields import FieldConfig, join_fields, split_fields
from mmcache.models import OnDevice, field_configs
from mmcache.testing import SimulatedDevice

GRIDS = torch.tensor([[1, 4, 4], [1, 2, 6]])
FRAMES = [[1, 2, 4], [1, 2, 4], [1, 2, 2]]


def sizes(model_type: str, batch: dict[str, Any], field: str, consumer: Any = "vllm") -> list[int]:
    config = field_configs(model_type, batch, consumer, strict=True)[field]
    assert config.slices is not None
    return [cut[config.dim].stop - cut[config.dim].start for cut in config.slices]


def qwen(**others: Any) -> dict[str, Any]:
    return {"pixel_values": torch.arange(28.0 * 2).reshape(28, 2), "image_grid_thw": GRIDS, **others}


# Sizes of flat fields


def test_patches_belong_to_the_item_whose_grid_counts_them() -> None:
    assert sizes("qwen2_vl", qwen(), "pixel_values") == [16, 12]


@pytest.mark.parametrize(
    "grids", [GRIDS.tolist(), GRIDS.numpy(), GRIDS.to(torch.int32), list(GRIDS), GRIDS[:, None], tuple(GRIDS.tolist())]
)
def test_grids_come_as_tensors_arrays_and_lists(grids: Any) -> None:
    assert sizes("qwen2_vl", qwen(image_grid_thw=grids), "pixel_values") == [16, 12]


def test_given_embeddings_are_cut_by_merged_patches_whatever_the_merge_size() -> None:
    assert sizes("qwen2_vl", qwen(image_embeds=torch.zeros(7, 8)), "image_embeds") == [4, 3]
    assert sizes("qwen2_vl", qwen(image_embeds=torch.zeros(28, 8)), "image_embeds") == [16, 12]


def test_given_embeddings_that_do_not_fit_the_grids_are_an_error() -> None:
    with pytest.raises(FieldError) as caught:
        field_configs("qwen2_vl", qwen(image_embeds=torch.zeros(5, 8)))
    assert (caught.value.field, caught.value.found) == ("image_embeds", 5)


@pytest.mark.parametrize(
    ("model_type", "batch", "field", "expected"),
    [
        ("kimi_vl", {"pixel_values": torch.zeros(10, 3), "image_grid_hws": [[2, 3], [2, 2]]}, "pixel_values", [6, 4]),
        ("idefics3", {"pixel_values": torch.zeros(4, 3), "num_patches": torch.tensor([3, 1])}, "pixel_values", [3, 1]),
        ("gemma3", {"pixel_values": torch.zeros(4, 3), "num_patches": [1, 3]}, "pixel_values", [1, 3]),
        ("gemma3", {"pixel_values": torch.zeros(4, 3), "num_crops": [0, 2]}, "pixel_values", [1, 3]),
        ("internvl", {"pixel_values": torch.zeros(3, 3), "image_num_patches": [2, 1]}, "pixel_values", [2, 1]),
        (
            "KeyeVL1_5",
            {"pixel_values_videos": torch.zeros(20, 3), "num_frames": [2, 1], "video_grid_thw": FRAMES},
            "pixel_values_videos",
            [16, 4],
        ),
        (
            "llava_onevision2",
            {"patch_positions_videos": np.zeros((20, 3)), "video_num_frames": [2, 1], "video_grid_thw": FRAMES},
            "patch_positions_videos",
            [16, 4],
        ),
        (
            "qwen3_asr",
            {"input_audio_features": torch.zeros(8, 50), "audio_feature_lengths": torch.tensor([30, 20])},
            "input_audio_features",
            [30, 20],
        ),
        (
            "NemotronH_Nano_VL_V2",
            {"pixel_values_flat": torch.zeros(5, 3), "image_num_patches": [4, 1]},
            "pixel_values_flat",
            [4, 1],
        ),
        (
            "minicpmo",
            {"audio_features": torch.zeros(3, 8), "audio_feature_lens": [torch.tensor([9, 9]), torch.tensor([5])]},
            "audio_features",
            [2, 1],
        ),
        (
            "moss_transcribe_diarize",
            {"input_features": torch.zeros(3, 8), "audio_chunk_counts": [2, 1]},
            "input_features",
            [2, 1],
        ),
        (
            "molmo2",
            {"image_token_pooling": torch.zeros(9, 4), "num_image_tokens": [6, 3], "image_num_pooled_patches": [5, 4]},
            "image_token_pooling",
            [5, 4],
        ),
    ],
)  # fmt: skip
def test_sizes_come_from_the_family_s_own_fields(
    model_type: str, batch: dict[str, Any], field: str, expected: list[int]
) -> None:
    assert sizes(model_type, batch, field) == expected


def test_transformers_packs_minicpm_crops_side_by_side_and_molmo2_by_grids() -> None:
    batch = {
        "pixel_values": torch.zeros(1, 3, 4, 4 * (8 + 4 + 6)),
        "target_sizes": torch.tensor([[2, 4], [2, 2], [2, 3]]),
        "num_patches_per_image": [2, 1],
    }
    assert sizes("minicpmv4_6", batch, "pixel_values", "transformers") == [48, 24]
    assert sizes("minicpmv4_6", batch, "target_sizes", "transformers") == [2, 1]
    frames = {
        "pixel_values_videos": torch.zeros(1, 3, 4, 4 * (8 + 4 + 4 + 6)),
        "target_sizes_videos": torch.tensor([[2, 4], [2, 2], [2, 2], [2, 3]]),
        "num_patches_per_frame": torch.tensor([2, 1, 1]),
        "num_frames_per_video": [2, 1],
        "grids_videos": torch.zeros(3, 2),
    }
    assert sizes("minicpmv4_6", frames, "pixel_values_videos", "transformers") == [64, 24]
    assert sizes("minicpmv4_6", frames, "target_sizes_videos", "transformers") == [3, 1]
    assert sizes("minicpmv4_6", frames, "num_patches_per_frame", "transformers") == [2, 1]
    del batch["num_patches_per_image"]
    assert sizes("minicpmv4_6", batch, "pixel_values", "transformers") == [32, 16, 24]
    grids = {"image_grids": torch.tensor([[1, 2, 2, 3], [1, 1, 1, 1]]), "image_token_pooling": torch.zeros(10, 4)}
    assert sizes("molmo2", grids, "image_token_pooling", "transformers") == [8, 2]
    video = {"video_grids": torch.tensor([[3, 2, 2], [1, 2, 2]]), "pixel_values_videos": torch.zeros(4, 9, 5)}
    assert sizes("molmo2", video, "pixel_values_videos", "transformers") == [3, 1]


def test_a_flat_field_is_batched_where_there_is_one_entry_an_item() -> None:
    audio = {"audio_features": torch.zeros(2, 8), "audio_feature_lens": [torch.tensor([9, 9]), torch.tensor([5])]}
    assert field_configs("minicpmo", audio, "vllm")["audio_features"].layout == "batched"
    dynamic = {"pixel_values_flat": [torch.zeros(3, 4, 8), torch.zeros(3, 8, 8)], "imgs_sizes": [[4, 8], [8, 8]]}
    assert field_configs("NemotronH_Nano_VL_V2", dynamic, "vllm")["pixel_values_flat"].layout == "batched"


def test_images_that_nobody_counted_crops_of_are_one_crop_each() -> None:
    assert field_configs("gemma3", {"pixel_values": torch.zeros(2, 3, 4, 4)})["pixel_values"].layout == "batched"
    chunks = {"input_features": torch.zeros(2, 8, 4), "input_features_mask": torch.ones(2, 4)}
    assert field_configs("moss_transcribe_diarize", chunks)["input_features"].layout == "batched"


def test_a_batch_of_no_items_is_a_batch() -> None:
    batch = {
        "pixel_values": torch.zeros(0, 4),
        "image_embeds": torch.zeros(0, 8),
        "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64),
    }
    assert sizes("qwen2_vl", batch, "pixel_values") == []
    assert sizes("qwen2_vl", batch, "image_embeds") == []
    assert field_configs("qwen2_vl", {}) == {}


def test_sizes_of_internvl_come_from_the_engine_or_from_the_image_processor() -> None:
    for name in ("image_num_patches", "num_patches"):
        assert sizes("internvl", {"pixel_values": torch.zeros(3, 3), name: [2, 1]}, "pixel_values") == [2, 1]


def test_missing_sizes_are_an_error_that_names_them() -> None:
    with pytest.raises(FieldError, match="image_grid_thw") as caught:
        field_configs("qwen2_vl", {"pixel_values": torch.zeros(4, 2)})
    assert caught.value.field == "pixel_values"


@pytest.mark.parametrize("bad", [torch.tensor(4), "abc", 3, [[1.5, 2]], torch.tensor([[1.0, 2.0, 2.0]]), [[True, 2]]])
def test_malformed_sizes_are_an_error_that_names_their_field(bad: Any) -> None:
    with pytest.raises(FieldError) as caught:
        field_configs("qwen2_vl", {"pixel_values": torch.zeros(4, 2), "image_grid_thw": bad})
    assert caught.value.field == "image_grid_thw"


def test_counts_that_do_not_add_up_are_an_error() -> None:
    with pytest.raises(FieldError, match="video_num_frames"):
        field_configs(
            "llava_onevision2",
            {"pixel_values_videos": torch.zeros(8, 2), "video_grid_thw": [[1, 2, 4]], "video_num_frames": [2]},
        )
    batch = {"pixel_values": torch.zeros(5, 2), "num_patches": [3, 1]}
    with pytest.raises(FieldError, match="add up"):
        split_fields(batch, field_configs("idefics3", batch))


# What the configs give


def test_a_batch_falls_apart_and_joins_again() -> None:
    batch = qwen(input_ids=torch.zeros(1, 9), pixel_values_videos=None)
    items = split_fields(batch, field_configs("qwen2_vl", batch))
    assert list(items) == ["image"]
    assert torch.equal(items["image"][1]["pixel_values"], batch["pixel_values"][16:])  # type: ignore[arg-type]
    joined = join_fields(items["image"])
    assert all(torch.equal(joined[name], batch[name]) for name in ("pixel_values", "image_grid_thw"))  # type: ignore[arg-type]


def test_modalities_are_apart_and_shared_fields_are_everyones() -> None:
    batch = {
        **qwen(),
        "pixel_values_videos": torch.zeros(8, 2),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
        "second_per_grid_ts": [0.5],
        "use_audio_in_video": torch.tensor(True),
        "input_audio_features": torch.zeros(8, 50),
        "audio_feature_lengths": torch.tensor([30, 20]),
        "feature_attention_mask": torch.ones(2, 30),
    }
    configs = field_configs("qwen2_5_omni", batch, "vllm", strict=True)
    items = split_fields(batch, configs)
    assert {modality: len(parts) for modality, parts in items.items()} == {"image": 2, "video": 1, "audio": 2}
    assert configs["use_audio_in_video"].batch_size == 1
    assert items["audio"][1]["input_audio_features"].shape == (8, 20)  # type: ignore[union-attr]


def test_fields_of_the_text_and_missing_ones_are_left_out_even_when_strict() -> None:
    text = {"input_ids": 1, "attention_mask": 1, "token_type_ids": 1, "mm_token_type_ids": 1, "position_ids": 1}
    assert set(field_configs("qwen2_vl", {**qwen(), **text, "video_grid_thw": None}, strict=True)) == set(qwen())


def test_what_a_processor_gives_need_not_be_a_dict() -> None:
    assert set(field_configs("qwen2_vl", UserDict(qwen()))) == set(qwen())


def test_the_default_consumer_is_transformers() -> None:
    batch = {"feature_attention_mask": torch.ones(2, 4)}
    assert not field_configs("qwen2_5_omni", batch)["feature_attention_mask"].keep_on_cpu
    assert field_configs("qwen2_5_omni", batch, consumer="vllm")["feature_attention_mask"].keep_on_cpu


@pytest.mark.parametrize(("model", "consumer"), [("nobody", "vllm"), ("qwen2_vl", "nobody"), (None, "vllm")])
def test_unknown_models_and_consumers_are_errors(model: Any, consumer: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        field_configs(model, qwen(), consumer)
    assert isinstance(caught.value, MMCacheError)


# Fields that nobody listed


def test_an_unlisted_field_is_an_error_when_strict() -> None:
    with pytest.raises(FieldError, match="mystery") as caught:
        field_configs("qwen2_vl", qwen(mystery=torch.zeros(2)), strict=True)
    assert caught.value.field == "mystery"


def test_unlisted_fields_go_to_the_device_with_one_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        configs = field_configs("qwen2_vl", qwen(mystery=torch.zeros(2, 5), rows=torch.zeros(28), one=torch.zeros(3)))
    assert len(caught) == 1
    assert all(name in str(caught[0].message) for name in ("mystery", "rows", "one", "qwen2_vl"))
    assert caught[0].filename == __file__
    assert configs["mystery"] == FieldConfig.batched("image")
    assert (configs["rows"].layout, configs["rows"].slices) == ("flat", configs["pixel_values"].slices)
    assert (configs["one"].layout, configs["one"].batch_size) == ("shared", 2)
    assert not any(configs[name].keep_on_cpu for name in ("mystery", "rows", "one"))


def test_an_unlisted_field_belongs_to_the_modality_that_it_names() -> None:
    batch = qwen(video_mystery=torch.zeros(1), video_grid_thw=torch.tensor([[1, 2, 2]]))
    with pytest.warns(UserWarning, match="video_mystery"):
        assert field_configs("qwen2_vl", batch)["video_mystery"] == FieldConfig.batched("video")


def test_what_is_no_tensor_is_left_out_with_the_warning() -> None:
    with pytest.warns(UserWarning, match="words"):
        assert "words" not in field_configs("qwen2_vl", qwen(words=["a", "b"]))


def test_the_generic_adapter_takes_what_comes() -> None:
    batch = {"pixel_values": torch.zeros(5, 2), "num_image_patches": torch.tensor([3, 2]), "aspect": torch.zeros(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configs = field_configs("TransformersMultiModalForCausalLM", batch, "vllm")
    assert (configs["pixel_values"].layout, configs["aspect"].layout) == ("flat", "batched")
    assert not configs["aspect"].keep_on_cpu
    whole = {"pixel_values": torch.zeros(2, 3, 4, 4)}
    assert field_configs("transformers", whole, "vllm")["pixel_values"].layout == "batched"


# Copies to the device, on demand


def test_a_kept_field_goes_to_the_device_once_and_without_waiting() -> None:
    with SimulatedDevice("cuda:0") as sim:
        on_device = OnDevice("cuda:0")
        assert sim.moves == []
        first, second = on_device(GRIDS), on_device(GRIDS)
        assert first is second
        assert first.device == sim.device
        assert [move.blocks for move in sim.moves] == [False]
        assert sim.host_reads == []
        assert torch.equal(first, sim.to_device(GRIDS))


def test_what_lies_on_the_device_already_is_not_copied() -> None:
    with SimulatedDevice("cuda:0") as sim:
        there = sim.to_device(GRIDS)
        assert OnDevice("cuda")(there) is there
        assert sim.moves == []
    assert OnDevice("cpu")(GRIDS) is GRIDS


def test_tensors_of_inference_mode_are_copied_once_too() -> None:
    with SimulatedDevice("cuda:0") as sim, torch.inference_mode():
        on_device, lengths = OnDevice("cuda:0"), torch.tensor([1, 2])
        assert on_device(lengths) is on_device(lengths)
        assert len(sim.moves) == 1


def test_what_was_written_to_since_is_copied_again() -> None:
    with SimulatedDevice("cuda:0") as sim:
        on_device, lengths = OnDevice("cuda:0"), torch.tensor([1, 2])
        before = on_device(lengths)
        lengths[0] = 7
        assert torch.equal(on_device(lengths), sim.to_device(lengths))
        assert torch.equal(before, sim.to_device(torch.tensor([1, 2])))
