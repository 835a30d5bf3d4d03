"""The field contract: splitting a processor's batch into items, and joining items into a batch again."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmcache import FieldConfig, FieldError, ItemFields, join_fields, split_fields
from mmcache.testing import SimulatedDevice

batched, flat, sizes, shared = FieldConfig.batched, FieldConfig.flat, FieldConfig.flat_from_sizes, FieldConfig.shared


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    expected = torch.as_tensor(expected)
    return found.dtype == expected.dtype and torch.equal(found, expected)


ROUND_TRIPS = {
    "batched": ({"x": torch.arange(12).view(3, 2, 2)}, {"x": batched("image")}),
    "batched scalars": ({"x": torch.arange(3)}, {"x": batched("image", keep_on_cpu=True)}),
    "batched list of unequal shapes": ({"x": [torch.ones(2), torch.ones(3, 2)]}, {"x": batched("image")}),
    "batched list of equal shapes": ({"x": [torch.ones(2), torch.zeros(2)]}, {"x": batched("image")}),
    "batched nested lists": (
        {"x": [[torch.ones(2), torch.ones(3)], [], [torch.ones(1)]]},
        {"x": batched("image")},
    ),
    "batched numbers": ({"x": [1.5, 2.5]}, {"x": batched("video", keep_on_cpu=True)}),
    "batched lists of numbers": ({"x": [[1.5], [2.5, 3.5]]}, {"x": batched("video", keep_on_cpu=True)}),
    "flat, dim 0": ({"x": torch.arange(10).view(5, 2)}, {"x": sizes("image", torch.tensor([2, 0, 3]))}),
    "flat, dim 1": ({"x": torch.arange(10).view(2, 5)}, {"x": sizes("audio", [4, 1], 1)}),
    "flat, dim 2": ({"x": torch.arange(20).view(2, 2, 5)}, {"x": sizes("audio", np.array([1, 4]), 2)}),
    "flat slices": ({"x": torch.arange(5)}, {"x": flat("image", [slice(0, 2), slice(2, 5)])}),
    "flat slices along dim": ({"x": torch.arange(10).view(2, 5)}, {"x": flat("image", [slice(0, 2), slice(2, 5)], 1)}),
    "flat tuples of slices": (
        {"x": torch.arange(10).view(2, 5)},
        {"x": flat("image", [(slice(None), slice(0, 2)), (slice(0, 2), slice(2, None))], 1)},
    ),
    "flat list": (
        {"x": [torch.ones(1), torch.ones(2), torch.ones(3)]},
        {"x": flat("image", [slice(0, 1), slice(1, 3)])},
    ),
    "shared": ({"x": torch.arange(3)}, {"x": shared("image", 4)}),
    "shared number": ({"x": 7}, {"x": shared("image", 2, keep_on_cpu=True)}),
    "no items, flat": ({"x": torch.zeros(0, 4)}, {"x": sizes("image", [])}),
    "one item": ({"x": torch.ones(1, 4)}, {"x": batched("image")}),
    "one item, flat": ({"x": torch.ones(3, 4)}, {"x": sizes("image", [3])}),
    "half precision": ({"x": torch.ones(3, 4, dtype=torch.bfloat16)}, {"x": sizes("image", [1, 2])}),
    "numpy": ({"x": np.arange(6.0).reshape(3, 2)}, {"x": batched("image")}),
    "numpy, reversed": ({"x": np.arange(6.0)[::-1]}, {"x": sizes("image", [2, 4])}),
    "numpy, big-endian": ({"x": np.arange(6, dtype=">f4")}, {"x": sizes("image", [2, 4])}),
    "not contiguous": ({"x": torch.arange(12).view(3, 4).t()}, {"x": sizes("image", [1, 3])}),
}


@pytest.mark.parametrize(("batch", "configs"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_split_then_join_gives_the_batch_back(batch: dict[str, Any], configs: dict[str, FieldConfig]) -> None:
    (items,) = split_fields(batch, configs).values()
    if not items:
        assert join_fields(items) == {}
        return
    expected = batch["x"]
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected.astype(expected.dtype.newbyteorder("="))[:].copy())
    if isinstance(expected, list) and all(isinstance(v, float) for v in expected):
        expected = torch.tensor(expected)
    assert same(join_fields(items)["x"], expected)
    # Items that lost each other's neighbourhood join to the same values.
    assert same(join_fields(pickle.loads(pickle.dumps([*items])))["x"], expected)


@given(st.data())
def test_any_flat_batch_comes_back(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 4))
    dim = data.draw(st.integers(0, rank - 1))
    parts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    shape = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    shape[dim] = sum(parts)
    batch = {"x": torch.randn(shape), "n": torch.tensor(parts)}
    items = split_fields(batch, {"x": sizes("image", batch["n"], dim), "n": batched("image", keep_on_cpu=True)})[
        "image"
    ]
    assert [item["x"].shape[dim] for item in items] == parts
    order = data.draw(st.permutations(range(len(parts))))
    shuffled = join_fields([items[i] for i in order])
    assert torch.equal(shuffled["n"], batch["n"][list(order)])
    assert torch.equal(join_fields(items)["x"], batch["x"])


def test_items_are_views_of_the_batch_and_neighbours_join_without_a_copy() -> None:
    batch = {"x": torch.randn(6, 2), "y": torch.randn(3, 4)}
    items = split_fields(batch, {"x": sizes("image", [1, 2, 3]), "y": batched("image")})["image"]
    joined = join_fields(items)
    assert items[1]["x"].data_ptr() == batch["x"][1:].data_ptr()
    assert joined["x"].data_ptr() == batch["x"].data_ptr()
    assert joined["y"].data_ptr() == batch["y"].data_ptr()
    assert join_fields(items[1:])["x"].data_ptr() == batch["x"][1:].data_ptr()
    assert join_fields([items[0], items[2]])["x"].data_ptr() != batch["x"].data_ptr()


def test_modalities_are_apart_and_unknown_names_ignored() -> None:
    batch = {
        "input_ids": torch.ones(1, 9),
        "pixel_values": torch.ones(5, 2),
        "features": torch.ones(3, 2),
        "absent": None,
    }
    configs = {
        "pixel_values": sizes("image", [2, 3]),
        "features": batched("audio"),
        "absent": batched("image"),
        "optional": batched("image"),
    }
    split = split_fields(batch, configs)
    assert {modality: len(items) for modality, items in split.items()} == {"image": 2, "audio": 3}
    assert sorted(split["image"][0]) == ["pixel_values"]
    assert split["audio"][0].config("features").modality == "audio"


def test_a_cpu_field_made_on_the_device_comes_back_once() -> None:
    with SimulatedDevice("cuda:0") as device:
        batch = {"x": torch.ones(4, 2), "grid": device.to_device(torch.tensor([[1, 2], [3, 4]]))}
        items = split_fields(batch, {"x": sizes("image", [2, 2]), "grid": batched("image", keep_on_cpu=True)})["image"]
        assert [item["grid"].device.type for item in items] == ["cpu", "cpu"]
        assert len(device.moves) <= 1
        assert items[1]["grid"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("batch", "configs", "words"),
    [
        ({"x": torch.ones(3), "y": torch.ones(2)}, {"x": batched("image"), "y": batched("image")}, "number of items"),
        ({"x": torch.ones(5)}, {"x": sizes("image", [2, 2])}, "add up"),
        ({"x": torch.ones(3)}, {"x": sizes("image", [2, 2])}, "outside"),
        ({"x": torch.ones(3)}, {"x": sizes("image", [])}, "add up"),
        ({"x": torch.ones(3)}, {"x": flat("image", [slice(1, 4)])}, "outside"),
        ({"x": torch.ones(3)}, {"x": flat("image", [slice(2, 1)])}, "outside"),
        ({"x": torch.ones(3)}, {"x": sizes("image", [3], 1)}, "dimensions"),
        ({"x": torch.tensor(1.0)}, {"x": batched("image")}, "first dimension"),
        ({"x": "text"}, {"x": batched("image")}, "str"),
        ({"x": [object()]}, {"x": batched("image")}, "object"),
        ({"x": np.array(["a"])}, {"x": batched("image")}, "numbers"),
    ],
)
def test_a_batch_that_does_not_fit_names_its_field(batch: Any, configs: Any, words: str) -> None:
    with pytest.raises(FieldError, match=words) as info:
        split_fields(batch, configs)
    assert info.value.field in ("x", None)
    assert info.value.field == "x" or "'x'" in str(info.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sizes("image", [-1]),
        lambda: sizes("image", [1.5]),
        lambda: sizes("image", [True]),
        lambda: sizes("image", torch.ones(2, 2, dtype=torch.int64)),
        lambda: sizes("image", torch.tensor(3)),
        lambda: sizes("image", [1], -1),
        lambda: flat("image", [slice(0, 4, 2)]),
        lambda: flat("image", [slice(-2, None)]),
        lambda: flat("image", [3]),
        lambda: shared("image", -1),
        lambda: shared("image", True),
        lambda: batched(""),
    ],
)
def test_a_config_that_cannot_work_is_refused(make: Any) -> None:
    with pytest.raises(FieldError):
        make()


def test_items_that_do_not_join_say_why() -> None:
    def item(value: torch.Tensor, config: FieldConfig, name: str = "x") -> ItemFields:
        return ItemFields({name: value}, {name: config})

    one = item(torch.ones(2), batched("image"))
    for other in (
        item(torch.ones(2), batched("image"), "y"),
        item(torch.ones(2), sizes("image", [2])),
        item(torch.ones(2, dtype=torch.float64), batched("image")),
        item(torch.ones(2), batched("image", keep_on_cpu=True)),
    ):
        with pytest.raises(FieldError) as info:
            join_fields([one, other])
        assert info.value.item == 1
    with pytest.raises(FieldError, match="shared"):
        join_fields([item(torch.tensor(1), shared("image", 1)), item(torch.tensor(2), shared("image", 1))])
    assert same(join_fields([item(torch.tensor(1), shared("image", 1))] * 2)["x"], 1)


def one_field(value: object, config: FieldConfig) -> ItemFields:
    return ItemFields({"x": value}, {"x": config})


@pytest.mark.parametrize("size", [1, 3, 4000])
@pytest.mark.parametrize("keep_on_cpu", [False, True])
def test_shared_values_are_one_by_their_bits_whatever_object_holds_them(size: int, keep_on_cpu: bool) -> None:
    config = shared("image", 1, keep_on_cpu=keep_on_cpu)
    value = torch.arange(float(size))
    wide = torch.stack([value, value + 1], 1)
    for equal in (value.clone(), wide[:, 0], value.numpy().copy(), value.clone().requires_grad_()):
        assert same(join_fields([one_field(value, config), one_field(equal, config)])["x"], value)
        assert one_field(value, config).join_key() == one_field(equal, config).join_key()
    nested, equal = [value, [value]], [value.clone(), [wide[:, 0]]]
    joined = join_fields([one_field(nested, config), one_field(equal, config)])["x"]
    assert same(joined[0], value)
    assert same(joined[1][0], value)
    zero = torch.zeros(size)
    for one, other in (
        (value, value + 1),
        (value, value.double()),
        (value, value[None]),
        (value, [value]),
        (zero, -zero),  # equal numbers, other bits
        (zero, torch.zeros(size, dtype=torch.int32)),
    ):
        with pytest.raises(FieldError, match="shared") as info:
            join_fields([one_field(one, config), one_field(other, config)])
        assert (info.value.item, info.value.field) == (1, "x")
        assert one_field(one, config).join_key() != one_field(other, config).join_key()


def test_a_shared_value_that_is_no_number_is_still_itself() -> None:
    nan = torch.full((2000,), float("nan"))
    assert join_fields([one_field(nan, shared("image", 1)), one_field(nan.clone(), shared("image", 1))])["x"] is nan


def test_items_of_one_modality_and_known_fields_only() -> None:
    with pytest.raises(FieldError, match="no config"):
        ItemFields({"x": torch.ones(1)}, {})
    with pytest.raises(FieldError, match="modality"):
        ItemFields({"x": torch.ones(1), "y": torch.ones(1)}, {"x": batched("image"), "y": batched("audio")})
    with pytest.raises(FieldError, match="'z'"):
        ItemFields({"x": torch.ones(1)}, {"x": batched("image")}).config("z")


@pytest.mark.parametrize(
    "use",
    [
        lambda: split_fields(None, {}),
        lambda: split_fields({}, None),
        lambda: split_fields({"x": torch.ones(1)}, {"x": "batched"}),
        lambda: ItemFields(None, {}),
        lambda: ItemFields({"x": torch.ones(1)}, None),
        lambda: ItemFields({"x": torch.ones(1)}, {"x": "batched"}),
        lambda: join_fields([{"x": torch.ones(1)}]),
        lambda: flat("image", 5),
        lambda: flat("image", [slice(np.array([0, 1]), 2)]),
        lambda: sizes("image", None),
        lambda: sizes("image", "12"),
    ],
)
def test_what_is_no_batch_and_no_config_is_refused(use: Any) -> None:
    with pytest.raises(FieldError):
        use()


def test_bytes_count_what_a_view_shows() -> None:
    item = ItemFields(
        {"x": torch.ones(4, 4)[:2], "m": torch.ones(3, dtype=torch.int64), "s": torch.ones(2)},
        {"x": batched("image"), "m": batched("image", keep_on_cpu=True), "s": shared("image", 2)},
    )
    assert (item.payload_bytes, item.kept_bytes, item.shared) == (32, 24, (("s", 8, False),))
