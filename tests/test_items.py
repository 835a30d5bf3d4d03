"""Placeholder ranges and items: what they are, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from builders import image_fields, images
from hypothesis import given
from hypothesis import strategies as st

from mmcache import (
    EmbeddingError,
    MultimodalItem,
    MultimodalRequest,
    PlaceholderError,
    PlaceholderRange,
    RequestError,
    UnsupportedError,
)
from mmcache.models import field_configs

# -- ranges --------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 5), st.data())
def test_rows_of_a_masked_range_are_counted_one_by_one(mask: list[bool], offset: int, data: st.DataObject) -> None:
    place = PlaceholderRange(offset, len(mask), torch.tensor(mask, dtype=torch.bool))
    assert place.num_embeds == sum(mask)
    start = data.draw(st.integers(0, len(mask)))
    end = data.draw(st.integers(start, len(mask)))
    assert place.embed_rows(start, end) == (sum(mask[:start]), sum(mask[:end]))
    here = data.draw(st.integers(0, offset + len(mask) + 2))
    rows = [offset + i for i, flag in enumerate(mask) if flag and offset + i >= here]
    assert place.next_row(here) == (rows[0] if rows else None)
    again = pickle.loads(pickle.dumps(place))
    assert again == place
    assert hash(again) == hash(place)
    kept = place.is_embed
    assert (kept is None) == all(mask)
    assert kept is None or kept.tolist() == mask


def test_a_slice_of_a_mask() -> None:
    place = PlaceholderRange(0, 12, [bool(int(c)) for c in "110111011101"])
    assert (place.num_embeds, place.embed_rows(5, 9)) == (9, (4, 7))


def test_a_mask_of_all_true_is_no_mask() -> None:
    assert PlaceholderRange(3, 4, [True] * 4) == PlaceholderRange(3, 4)
    assert PlaceholderRange(3, 4, np.ones(4, bool)).is_embed is None


def test_a_mask_is_copied() -> None:
    mask = torch.tensor([True, False])
    place = PlaceholderRange(0, 2, mask)
    mask[1] = True
    assert place.num_embeds == 1


@pytest.mark.parametrize(
    "arguments",
    [(-1, 2), (0, -2), (0.5, 2), ("0", 2), (True, 2), (0, 2, [True]), (0, 2, [1, 2]), (0, 2, torch.ones(1, 2).bool())],
)
def test_bad_ranges(arguments: Any) -> None:
    with pytest.raises(PlaceholderError):
        PlaceholderRange(*arguments)


@pytest.mark.parametrize("offsets", [(-1, 2), (3, 2), (0, 5)])
def test_offsets_outside_a_range(offsets: tuple[int, int]) -> None:
    with pytest.raises(PlaceholderError, match="found"):
        PlaceholderRange(9, 4).embed_rows(*offsets)


def test_values_do_not_change() -> None:
    place = PlaceholderRange(0, 4)
    item = images((0, 4))[0]
    for owner, name in ((place, "offset"), (place, "runs"), (item, "identifier"), (item, "placeholder")):
        with pytest.raises(AttributeError):
            setattr(owner, name, None)


# -- items ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("image", None, (0, 4), "a"), RequestError),
        (("image", None, PlaceholderRange(0, 4), ""), RequestError),
        (("image", None, PlaceholderRange(0, 4), b"a"), RequestError),
        (("", None, PlaceholderRange(0, 4), "a"), RequestError),
        (("image", {"x": torch.ones(1)}, PlaceholderRange(0, 4), "a"), RequestError),
        (("audio", image_fields(1)[0], PlaceholderRange(0, 4), "a"), RequestError),
    ],
)
def test_bad_items(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        MultimodalItem(*arguments)


def test_what_is_out_of_scope_says_so() -> None:
    with pytest.raises(UnsupportedError, match="cross-attention"):
        MultimodalItem("image", None, None, "a")  # type: ignore[arg-type]
    for embeds in (torch.ones(3, 4, dtype=torch.bfloat16), np.ones((3, 4), np.float32), [[0.5, 1.0]]):
        with pytest.raises(UnsupportedError, match="prompt embeddings"):
            MultimodalRequest("r", embeds)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="mllama"):
        field_configs("mllama", {})


@pytest.mark.parametrize(
    "embeds",
    [
        torch.ones(3, 2),
        torch.ones(4),
        torch.ones(4, 0),
        torch.ones(4, 2).long(),
        torch.ones(4, 2).to_sparse(),
        torch.ones(4, 2, device="meta"),
        [[1.0]] * 4,
    ],
)
def test_given_embeddings_fit_their_placeholder(embeds: Any) -> None:
    with pytest.raises(EmbeddingError):
        MultimodalItem("image", None, PlaceholderRange(0, 4), "a", embeds=embeds)


@pytest.mark.parametrize("mask", [[1, 1, 0, 1], np.array([1, 1, 0, 1], np.uint8), torch.tensor([1, 1, 0, 1])])
def test_a_mask_of_zeros_and_ones(mask: object) -> None:
    assert PlaceholderRange(0, 4, mask).runs == ((0, 2), (3, 1))


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([1, 1, 0, 2], "0 to 2"),
        ([-1, 1, 0, 1], "-1 to 1"),
        ([1.0, 1.0, 0.0, 1.0], "dtype float64"),
        (["1", "1", "0", "1"], "dtype <U1"),
    ],
)
def test_a_mask_of_anything_else_is_refused(mask: object, found: str) -> None:
    with pytest.raises(PlaceholderError, match=f"is_embed.*{found}"):
        PlaceholderRange(0, 4, mask)
