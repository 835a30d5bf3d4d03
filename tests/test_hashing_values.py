"""Content digests of text, numbers and containers: what is in an identity."""

import array
import enum
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from hashing_digests import H, distinct, equal

from mmcache import FieldConfig, split_fields
from mmcache.hashing import same_content


def test_bytes_of_any_owner_are_bytes():
    data = b"\x00\x01\x02\x03"
    assert equal(data, bytearray(data), memoryview(data), memoryview(bytearray(data)), array.array("B", data))
    assert equal(memoryview(b"0a1b2c")[::2], b"012")
    assert distinct(b"012", "012", list(b"012"))


def test_a_typed_buffer_is_an_array():
    floats = np.arange(6, dtype=np.float32)
    assert equal(memoryview(floats), floats, array.array("f", floats))
    assert equal(memoryview(floats.reshape(2, 3)), floats.reshape(2, 3))
    assert distinct(memoryview(floats), floats.tobytes())


def test_numpy_scalars_are_arrays_without_dimensions():
    assert equal(np.float32(2), np.array(2, np.float32))
    assert distinct(np.float64(2), 2.0, np.float32(2), np.int64(2), 2)
    assert distinct(np.bool_(True), True)
    assert equal(np.str_("a"), "a")
    assert equal(np.bytes_(b"a"), b"a")


def test_dates_and_text_in_arrays_keep_their_unit():
    times = np.arange(3).astype("M8[s]")
    assert distinct(times, times.view("M8[ms]"), times.view("m8[s]"), times.view("i8"))
    assert distinct(np.array(["a", "b"]), np.array(["a", "b"], "U2"), np.array([b"a", b"b"]), ["a", "b"])


def test_numbers_of_any_size():
    assert distinct(
        *(sign * 2**power + d for power in (7, 8, 15, 63, 64, 1000) for d in (-1, 0, 1) for sign in (1, -1))
    )
    assert distinct(1, 1.0, 1 + 0j, True, "1", b"1", [1])
    assert distinct(1j, -1j, complex(0.0, -0.0), complex(-0.0, 0.0), 0j)


class Mode(enum.Enum):
    FAST = "fast"
    ONE = 1


class Level(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    FAST = "fast"


class Flags(enum.IntFlag):
    A = 1
    B = 2


def test_enum_members_are_themselves():
    assert distinct(Mode.FAST, Mode.ONE, Level.ONE, Word.FAST, Flags.A, Flags.B, Flags.A | Flags.B, 1, "fast", 3)
    assert distinct({Level.ONE: 0}, {1: 0})
    assert equal(Flags.A | Flags.B, Flags.B | Flags.A)


@dataclass
class Size:
    width: object
    height: object


@dataclass
class Shape:
    width: object
    height: object


@dataclass
class Photo:
    data: bytes
    source: str = field(default="", metadata={"content": False})


def test_dataclasses_are_class_and_fields():
    assert distinct(Size(1, 2), Shape(1, 2), Size(2, 1), Size(1, None), {"width": 1, "height": 2}, [1, 2])
    assert equal(Size(np.arange(3), [1]), Size(torch.arange(3), (1,)))
    assert equal(Photo(b"x", "a.png"), Photo(b"x", "b.png"))
    assert distinct(Photo(b"x"), Photo(b"y"))


def test_mappings_are_their_entries():
    entries = {"b": 1, "a": [2]}
    assert equal(
        entries, OrderedDict(entries), defaultdict(list, entries), MappingProxyType(entries), {"a": [2], "b": 1}
    )


def test_fields_of_an_item_are_a_mapping():
    configs = {"pixels": FieldConfig.batched("image"), "grid": FieldConfig.batched("image", keep_on_cpu=True)}
    batch = {"pixels": torch.arange(8.0).view(2, 4), "grid": torch.tensor([[1, 2], [3, 4]])}
    (a, b), (c, _) = split_fields(batch, configs)["image"], split_fields(batch, configs)["image"]
    assert H.digest(a) == H.digest(c) == H.digest(dict(a)) != H.digest(b)
    assert same_content(a, c)
    assert not same_content(a, b)


def test_long_keys_are_keys():
    assert distinct(*({key * n: 1} for key in ("x", b"x") for n in (5, 4999, 5000, 100_000)), {("x" * 100_000,): 1})


def test_any_text_is_text():
    assert distinct("\ud800", "\udc00", "\ud800\udc00", "\U00010000", "?", "")
