"""Content digests of arrays and tensors, algorithms and keys, and the comparison byte by byte."""

import math
import mmap
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from hashing_digests import H, distinct, equal
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcache import ConfigError, UnhashableContentError
from mmcache.hashing import ContentHasher, same_content
from mmcache.testing import SimulatedDevice

torch.set_num_threads(1)


# -- arrays and tensors


def test_shape_dtype_and_bits_count():
    base = np.arange(24, dtype=np.float32)
    assert distinct(
        base,
        base.reshape(6, 4),
        base.reshape(4, 6),
        base.reshape(1, 24),
        base.reshape(2, 3, 4),
        base.view(np.uint8),
        base.view(np.int32),
        base.view(np.uint32),
        base.view(np.complex64),
        base.astype(np.float64),
        base.tobytes(),
        base.tolist(),
    )
    seventy_two = bytes(range(72))
    assert distinct(
        np.frombuffer(seventy_two, np.uint8).reshape(6, 4, 3), np.frombuffer(seventy_two, np.uint8).reshape(4, 6, 3)
    )


def test_dimensions_of_one_value_count():
    assert distinct(*(np.full(shape, 3.0, np.float32) for shape in [(), (1,), (1, 1), (1, 1, 1)]), 3.0)


def test_empty_arrays_differ_by_shape_and_dtype():
    assert distinct(*(np.zeros(s, np.float32) for s in [(0,), (0, 3), (3, 0), (1, 0)]), np.zeros(0, np.uint8), b"", [])
    assert equal(np.zeros((0, 3), np.float32), torch.zeros(0, 3), torch.zeros(3, 0).t())


@pytest.mark.parametrize(
    "dtype",
    [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype) and hasattr(np, name)],
)
def test_numpy_and_torch_of_equal_dtype_shape_and_bits_are_one(dtype):
    values = (np.arange(12) % 2 if dtype == "bool" else np.arange(12)).astype(dtype).reshape(3, 4)
    tensor = torch.from_numpy(values)
    assert equal(values, tensor, values[::-1][::-1], np.asfortranarray(values), tensor.t().contiguous().t())
    assert equal(values[1, 2], values[1:2, 2:3].reshape(()), tensor[1, 2])


def test_layout_in_memory_does_not_count():
    x = torch.arange(70 * 90, dtype=torch.float32).reshape(70, 90)
    assert equal(x.t(), x.t().contiguous(), x.numpy().T, np.ascontiguousarray(x.numpy().T))
    assert equal(x[::2, 1::3], x[::2, 1::3].contiguous())
    assert equal(x.numpy()[::-1, ::-1], x.flip(0, 1))
    row = torch.arange(3.0)
    assert equal(row.expand(5, 3), row.repeat(5, 1))
    assert distinct(x, x.t(), x.flip(0))


@st.composite
def views(draw):
    """An array of any layout: cut with steps of either sign, turned, broadcast, of either byte order."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(["u1", "i2", "<f4", ">f4", "<i8", ">i8", "<c16", ">c16", "?", ">M8[ms]", ">U2"]))
    array = (np.arange(math.prod(shape)) % 251).astype("i8" if "M" in dtype else dtype).astype(dtype).reshape(shape)
    steps = st.sampled_from([slice(None), slice(None, None, -1), slice(1, None), slice(None, None, 2), slice(3, 0, -2)])
    array = array[(*(draw(steps) for _ in shape), ...)].transpose(draw(st.permutations(range(len(shape)))))
    return np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape)) if draw(st.booleans()) else array


@given(views())
@settings(max_examples=200)
def test_any_view_is_its_values(view):
    plain = np.array(view, order="C").astype(view.dtype.newbyteorder("<"))
    for h in (H, ContentHasher("sha256")):
        assert h.digest(view) == h.digest(plain)
        assert h.digest([view]) == h.digest([plain])
    assert same_content(view, plain)
    if view.dtype.kind in "uifcb":
        tensor = torch.from_numpy(plain.copy())
        assert H.digest(view) == H.digest(tensor)
        turned = tensor.permute(tuple(reversed(range(tensor.ndim))))
        assert H.digest(turned) == H.digest(view.T)
    assert H.digest(view) != H.digest(view[None])


def test_large_strided_arrays_are_read_block_by_block():
    x = np.arange(3 * 700 * 1300, dtype=np.float64).reshape(3, 700, 1300)  # 21.8 MB
    for view in (x.T, x[:, ::-1], x.transpose(1, 0, 2), x[:, :, ::7], np.broadcast_to(x[0, 0], (4000, 1300))):
        assert H.digest(view) == H.digest(np.ascontiguousarray(view))


def test_byte_order_in_memory_does_not_count():
    for dtype in ("i2", "i8", "f4", "c16", "U3", "M8[us]"):
        little = np.arange(6).astype("<" + dtype if dtype[0] != "M" else "<i8")
        little = little.view("<M8[us]") if dtype[0] == "M" else little
        assert equal(little, little.astype(little.dtype.newbyteorder(">")))


def test_raw_bits_count():
    assert distinct(np.array([0.0]), np.array([-0.0]))
    nans = np.array([0x7FF8000000000000, 0x7FF8000000000001, 0xFFF8000000000000], np.uint64).view(np.float64)
    assert distinct(*(nans[i : i + 1] for i in range(3)))
    assert distinct(*(float(x) for x in nans))
    assert equal(nans, nans.copy(), torch.from_numpy(nans.copy()))
    assert distinct(torch.tensor([True]), torch.tensor([1], dtype=torch.uint8))


NARROW = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", NARROW)
def test_dtypes_that_numpy_lacks(name):
    dtype = getattr(torch, name)
    size = dtype.itemsize
    raw = (torch.arange(4096, dtype=torch.int32) % 251).to(torch.uint8)
    x = raw.view(dtype).reshape(-1, 64)
    assert equal(x, x.clone(), x.t().contiguous().t(), x.detach())
    assert H.digest(x[::2]) == H.digest(x[::2].clone())
    changed = raw.clone()
    changed[-1] += 1
    assert distinct(x, x.flatten(), changed.view(dtype).reshape(-1, 64), x[1:])
    others = [getattr(torch, other) for other in NARROW if getattr(torch, other).itemsize == size and other != name]
    assert distinct(x, x.view(torch.int16 if size == 2 else torch.uint8), *(x.view(other) for other in others))
    assert distinct(torch.zeros(70000, dtype=dtype), torch.zeros(80000, dtype=dtype))


def test_arrays_of_ml_dtypes_are_torch_s():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        x = np.arange(6).astype(getattr(ml_dtypes, name))
        assert equal(x, torch.arange(6).float().to(getattr(torch, name)), np.repeat(x, 2)[::2])
    with pytest.raises(UnhashableContentError):
        H.digest(np.arange(6).astype(ml_dtypes.int4))


def test_complex_halves_and_packed_fours():
    z = torch.arange(8, dtype=torch.float16).view(torch.complex32)
    assert equal(z, z.clone())
    assert distinct(z, z.view(torch.int32), z.view(2, 2))
    f = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert equal(f, f.clone())
    assert distinct(f, f.view(torch.uint8))


def test_lazy_conjugates_and_negatives_are_their_values():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert equal(z.conj(), z.conj().resolve_conj())
    assert distinct(z, z.conj())
    negative = torch._neg_view(torch.arange(3.0))
    assert equal(negative, -torch.arange(3.0))
    assert equal(z.conj().imag, z.conj().resolve_conj().imag.clone())
    assert equal(torch._efficientzerotensor(3), torch.zeros(3))


def test_gradients_ownership_and_device_do_not_count():
    x = torch.arange(6.0)
    assert equal(x, x.clone().requires_grad_(), torch.nn.Parameter(x), x.requires_grad_() * 1, x.detach().numpy())
    view = np.arange(100.0)[10:16]
    frozen = view.copy()
    frozen.flags.writeable = False
    assert equal(view, frozen, np.frombuffer(frozen.tobytes()))
    simulated = SimulatedDevice()
    on_device = simulated.to_device(x.detach())
    with simulated:
        assert H.digest(on_device) == H.digest(x.detach())


def test_memory_maps_are_their_values(tmp_path):
    np.arange(5.0).tofile(tmp_path / "x")
    assert equal(np.memmap(tmp_path / "x", np.float64, "r"), np.arange(5.0))
    with (tmp_path / "x").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert equal(mapped, np.arange(5.0).tobytes())


def test_nothing_is_remembered_of_what_can_change():
    x = torch.zeros(1000)
    before = H.digest(x)
    x[-1] = 1
    assert H.digest(x) != before
    data = bytearray(200_000)
    before = H.digest(data)
    data[-1] = 1
    assert H.digest(data) != before


@pytest.mark.parametrize("position", [0, 100_000, -1])
def test_every_byte_counts(position):
    data = bytearray(200_000)
    data[position] = 1
    for algorithm in ("xxh3_128", "blake3", "sha256"):
        h = ContentHasher(algorithm)
        assert h.digest(data) != h.digest(bytes(200_000))
        assert h.digest(np.frombuffer(data, np.uint8)) != h.digest(np.zeros(200_000, np.uint8))


def test_a_nested_array_has_the_digest_parts_of_a_bare_one():
    # one array alone takes a shorter way through the code; the message is the same
    for h in (H, ContentHasher("blake3"), ContentHasher("sha256", key=b"k")):
        for x in (np.arange(6), torch.arange(6), torch.arange(6).to(torch.bfloat16), np.zeros((0, 2))):
            assert h.digest(x) == h.digest(*[x]) != h.digest([x])
            frame = h.frame(x)
            assert h.digest(x) == h.digest(x.copy() if isinstance(x, np.ndarray) else x.clone())
            assert frame.startswith(h.frame()[:20])


def test_large_buffers_are_not_copied():
    x = np.zeros((2000, 4000))  # 64 MB
    calls = [(x,), (x, {"x": x}), (memoryview(x).cast("B"),), (bytearray(32 << 20),)]
    for h in (H, ContentHasher("blake3"), ContentHasher("sha256")):
        for parts in calls:
            tracemalloc.start()
            h.digest(*parts)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 20
    tracemalloc.start()
    H.digest(x.T)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20  # copied block by block
    tracemalloc.stop()


# -- algorithms and keys


@pytest.mark.parametrize(("algorithm", "digits"), [("xxh3_128", 32), ("blake3", 64), ("sha256", 64)])
def test_digests_are_whole(algorithm, digits):
    h = ContentHasher(algorithm)
    assert h.algorithm == h.scheme == algorithm
    digests = [h.digest(i) for i in range(300)]
    assert all(type(d) is str and len(d) == digits and set(d) <= set("0123456789abcdef") for d in digests)
    assert len({d[-8:] for d in digests}) == len({d[:8] for d in digests}) == 300


def test_schemes_and_keys_are_domains_of_their_own():
    hashers = [
        ContentHasher(),
        ContentHasher("blake3"),
        ContentHasher("sha256"),
        ContentHasher("blake3", key=b"a" * 32),
        ContentHasher("blake3", key=b"b" * 32),
        ContentHasher("sha256", key=b"a" * 32),
        ContentHasher("sha256", key=b"a"),
    ]
    assert len({h.digest(b"x") for h in hashers}) == len(hashers) == len(set(hashers))
    assert [h.scheme for h in hashers[3:6]] == ["blake3_keyed", "blake3_keyed", "hmac_sha256"]


def test_equal_hashers_are_equal_also_after_a_journey():
    for h in (ContentHasher(), ContentHasher("blake3", key=b"k" * 32), ContentHasher("sha256", key=b"k")):
        again = pickle.loads(pickle.dumps(h))
        assert again == h
        assert hash(again) == hash(h)
        assert again.digest(b"x") == h.digest(b"x")
    assert "kkk" not in repr(ContentHasher("sha256", key=b"kkk"))


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("md5", None),
        ("xxh3", None),
        ("", None),
        (None, None),
        ("xxh3_128", b"k" * 32),
        ("blake3", b"short"),
        ("blake3", b""),
        ("sha256", b""),
        ("sha256", "text"),
        ("blake3", bytearray(32)),
    ],
)
def test_what_cannot_work_is_a_config_error(algorithm, key):
    with pytest.raises(ConfigError):
        ContentHasher(algorithm, key=key)


def test_blake3_missing_is_said_plainly(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ConfigError, match=r"pip install mmcache\[blake3\]"):
        ContentHasher("blake3")


# -- comparison byte by byte


def test_same_content_is_what_a_perfect_digest_would_say():
    x = torch.arange(3_000_000, dtype=torch.float32)
    y = x.clone()
    y[-1] += 1
    assert same_content(x, x.clone())
    assert not same_content(x, y)
    assert not same_content(x, x.view(-1, 2))
    assert not same_content(x, x.view(torch.int32))
    assert same_content(x.view(1000, -1).t(), x.view(1000, -1).t().contiguous())
    assert same_content({"a": [x, 1], "b": None}, {"b": None, "a": (x.numpy(), 1)})
    assert not same_content({"a": x}, {"b": x})
    assert not same_content([x], [x, x])
    assert not same_content(1, True)
    assert same_content(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_content(np.zeros(3), -np.zeros(3))
