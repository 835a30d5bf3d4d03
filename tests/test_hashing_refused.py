"""What has no identity is refused, by the path to it, and changes nothing."""

import contextlib
import enum
import pathlib
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import pytest
import torch
from hashing_digests import H, equal
from torch._subclasses.fake_tensor import FakeTensorMode

from mmcache import MMCacheError, UnhashableContentError
from mmcache.hashing import ContentHasher, same_content

torch.set_num_threads(1)


@dataclass
class Size:
    width: object
    height: object


@dataclass(slots=True)
class Half:
    value: int = field(init=False)


class Thing:
    pass


class MyDict(dict):
    pass


class MyList(list):
    pass


class MyText(str):
    pass


class MyInt(int):
    pass


class MyArray(np.ndarray):
    pass


class MyTensor(torch.Tensor):
    pass


@dataclass
class Both(dict):
    x: int = 1


Pair = namedtuple("Pair", "a b")


def closed_buffer():
    view = memoryview(b"x")
    view.release()
    return view


def fake_tensor():
    with FakeTensorMode():
        return torch.ones(3)


REFUSED = {
    "object": object(),
    "instance": Thing(),
    "class": Thing,
    "dataclass itself": Size,
    "function": len,
    "module": enum,
    "set": {1, 2},
    "frozenset": frozenset("ab"),
    "generator": (x for x in [1]),
    "range": range(3),
    "path": pathlib.Path("frame.png"),
    "decimal": Decimal(1),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "slice": slice(3),
    "ellipsis": ...,
    "dict subclass": MyDict(a=1),
    "list subclass": MyList([1]),
    "str subclass": MyText("a"),
    "int subclass": MyInt(1),
    "named tuple": Pair(1, 2),
    "user mapping": UserDict(a=1),
    "dataclass that is a dict": Both(),
    "dataclass without its field": Half(),
    "array of objects": np.array([1, "a", None], dtype=object),
    "record array": np.zeros(2, dtype=[("a", "u1"), ("b", "<f4")]),
    "void": np.void(b"abc"),
    "long double": np.zeros(2, np.longdouble),
    "masked array": np.ma.masked_array([1, 2], mask=[True, False]),
    "array subclass": np.zeros(2).view(MyArray),
    "tensor subclass": torch.zeros(2).as_subclass(MyTensor),
    "meta tensor": torch.zeros(2, device="meta"),
    "sparse tensor": torch.eye(2).to_sparse(),
    "sparse rows": torch.eye(2).to_sparse_csr(),
    "quantised tensor": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "nested tensor of one shape": torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
    "four-bit tensor": torch.empty(4, dtype=torch.uint4),
    "unset keys": {object(): 1},
    "array key": {Size: 1},
    "key of a class of text": {MyText("a"): 1},
    "numpy number as a key": {np.float64(1): 1},
    "closed buffer": closed_buffer(),
    "under a key too long to print": {10**5000: Thing()},
    "fake tensor": fake_tensor(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_identity_is_refused_by_its_path(name):
    for h in (H, ContentHasher("blake3")):
        with pytest.raises(UnhashableContentError) as caught:
            h.digest(b"image", {"settings": [0, REFUSED[name]]})
        assert caught.value.path.startswith("parts[1]['settings'][1]")
        with pytest.raises(UnhashableContentError) as caught:
            h.digest(options=REFUSED[name])
        assert caught.value.path.startswith("options")
        assert caught.value.path in str(caught.value)
        with pytest.raises(UnhashableContentError) as caught:
            h.digest(REFUSED[name])
        assert caught.value.path.startswith("parts[0]")
        with pytest.raises(UnhashableContentError) as caught:
            h.digest_until(lambda: False, (REFUSED[name],), {})
        assert caught.value.path.startswith("parts[0]")
    with pytest.raises(UnhashableContentError):
        same_content(REFUSED[name], REFUSED[name])


def test_the_path_goes_through_dataclasses_enums_and_odd_keys():
    class Odd(enum.Enum):
        VALUE = object()

    for value, path in [
        (Size(1, Thing()), "parts[0].height"),
        (Odd.VALUE, "parts[0].value"),
        ({(1, "a"): Thing()}, "parts[0][(1, 'a')]"),
        ({"it's": Thing()}, 'parts[0]["it\'s"]'),
        ({2: {b"x": Thing()}}, "parts[0][2][b'x']"),
    ]:
        with pytest.raises(UnhashableContentError) as caught:
            H.digest(value)
        assert caught.value.path == path
    with pytest.raises(UnhashableContentError) as caught:
        H.digest(**{"it's": Thing()})
    assert "it's" in caught.value.path


def test_containers_that_contain_themselves_are_refused():
    ring = [1]
    ring.append(ring)
    loop = {}
    loop["self"] = [loop]
    size = Size(1, None)
    size.height = size
    for value in (ring, loop, size):
        with pytest.raises(UnhashableContentError, match="contains itself"):
            H.digest(value)
    shared = [1, 2]
    assert equal([shared, shared], [[1, 2], [1, 2]])


def test_values_nested_too_deep_are_refused_wherever_they_stand():
    chain, key = [], ()
    for _ in range(5000):
        chain, key = [chain], (key,)
    for value in (chain, {"a": chain}, {key: 1}, Size(chain, 1)):
        with pytest.raises(UnhashableContentError):
            H.digest(value)
    assert H.digest({(((1,),),): 1}) == H.digest({(((1,),),): 1})


def test_two_keys_that_cannot_be_told_apart_are_refused():
    with pytest.raises(UnhashableContentError, match="one identity"):
        H.digest({float("nan"): 1, float("nan"): 2})


def test_tensors_whose_memory_was_given_back_are_refused():
    x = torch.arange(6.0)
    digest = H.digest(x)
    x.untyped_storage().resize_(0)
    with pytest.raises(UnhashableContentError):
        H.digest(x)
    assert H.digest(torch.arange(6.0)) == digest


def test_a_refused_part_leaves_the_hasher_as_it_was():
    before = H.digest("a", 1)
    with pytest.raises(MMCacheError):
        H.digest("a", Thing())
    assert H.digest("a", 1) == before


def test_a_mode_of_torch_cannot_make_a_wrong_digest():
    x, y = torch.arange(6.0), torch.arange(6).to(torch.bfloat16)
    for value in (x, [x], y, [y], [x[::2]]):
        digest = H.digest(value)
        with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(UnhashableContentError):
            assert H.digest(value) == digest
    seen = []

    def inside(value):
        with pytest.raises(UnhashableContentError):
            H.digest(value)
        seen.append(value)
        return value.sum()

    torch.func.functionalize(inside)(torch.ones(3))
    torch.vmap(inside)(torch.ones(2, 3))
    assert len(seen) == 2
