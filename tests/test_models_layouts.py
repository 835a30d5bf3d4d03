"""Layouts are proved as well: an item that a config cut out of a batch gives alone the rows it gives in the batch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from audit_subjects import rows, subject
from PIL import Image
from torch import Tensor

from mmcache.audit.tiny import TINY
from mmcache.fields import join_fields, split_fields
from mmcache.models import field_configs

pytestmark = pytest.mark.engine

pytest.importorskip("transformers")
torch.set_num_threads(1)

# Merges on the way and has no rows of its own; its fields are all batched.
NO_ROWS = {"phi4_multimodal"}
# Pooling indices count from the first patch of the batch, so a later item needs them shifted.
BATCH_RELATIVE = {"molmo2": {"image": "image_token_pooling", "video": "video_token_pooling"}}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected)


@pytest.mark.parametrize("model_type", TINY)
def test_a_batch_falls_apart_and_joins_again(model_type: str) -> None:
    tried = subject(model_type)
    items = split_fields(tried.batch, tried.configs)
    assert {len(parts) for parts in items.values()} == {2}
    joined = join_fields([item for parts in items.values() for item in parts])
    assert set(joined) == set(tried.configs)
    assert all(same(joined[name], torch.as_tensor(tried.batch[name])) for name in joined)


@pytest.mark.parametrize("model_type", [name for name in TINY if name not in NO_ROWS])
def test_an_item_gives_alone_the_rows_that_it_gives_in_its_batch(model_type: str) -> None:
    tried = subject(model_type)
    for modality, items in split_fields(tried.batch, tried.configs).items():
        with torch.no_grad():
            together = torch.cat(list(rows(tried.encoder(**join_fields(items)))))
            alone = []
            for item in items:
                fields = dict(join_fields([item]))
                relative = BATCH_RELATIVE.get(model_type, {}).get(modality)
                if relative is not None and item is not items[0]:
                    fields[relative] = torch.as_tensor(fields[relative]) - first_patch(items[0], modality)
                alone += rows(tried.encoder(**fields))
        assert len(together) == sum(map(len, alone)) > 0
        torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-4)


def first_patch(previous: Mapping[str, Any], modality: str) -> int:
    pixels: Tensor = previous["pixel_values" if modality == "image" else "pixel_values_videos"]
    return pixels.shape[0] * pixels.shape[1]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "idefics3", "minicpmv4_6"])
def test_rows_of_swapped_items_are_told_apart(model_type: str) -> None:
    tried = subject(model_type)
    items = split_fields(tried.batch, tried.configs)["image"]
    with torch.no_grad():
        there = torch.cat(list(rows(tried.encoder(**join_fields(items)))))
        back = torch.cat(list(rows(tried.encoder(**join_fields(items[::-1])))))
    assert there.shape == back.shape
    assert not torch.allclose(there, back, rtol=1e-2, atol=1e-2)


PROCESSORS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeImageProcessorPil"),
    "llava": ("clip", "CLIPImageProcessorPil"),
    "llava_next": ("llava_next", "LlavaNextImageProcessorPil"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
    "pixtral": ("pixtral", "PixtralImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil"),
    "minicpmv4_6": ("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"),
}


@pytest.mark.parametrize("model_type", PROCESSORS)
def test_what_real_image_processors_make_is_all_listed_and_falls_apart_by_image(model_type: str) -> None:
    module, name = PROCESSORS[model_type]
    found = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    images = [Image.new("RGB", (120, 200), "red"), Image.new("RGB", (300, 160), "blue")]
    processor = getattr(found, name)()
    batch = processor(images=images, return_tensors="pt")
    configs = field_configs(model_type, batch, strict=True)
    assert set(configs) == set(batch)
    items = split_fields(batch, configs)
    assert [(modality, len(parts)) for modality, parts in items.items()] == [("image", 2)]
    if model_type in PADDED:
        return
    for image, item in zip(images, items["image"]):
        alone = processor(images=[image], return_tensors="pt")
        (single,) = split_fields(alone, field_configs(model_type, alone))["image"]
        assert all(same(item[field], single[field]) for field in single)


# These pad all images of a batch to the largest.
PADDED = {"llava_next", "llava_onevision", "pixtral"}
