"""The message under a digest: a reference reader gets back what was written, and the page's vectors hold."""

import contextlib
import io
import itertools
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcache.hashing import ContentHasher

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "digest.md").read_text()
KEYS = {"blake3_keyed": ("blake3", b"k" * 32), "hmac_sha256": ("sha256", b"k" * 32)}


def hasher(scheme):
    algorithm, key = KEYS.get(scheme, (scheme, None))
    return ContentHasher(algorithm, key=key)


class Reader:
    """Reads a message as docs/digest.md describes it, without any code of the package."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, size):
        assert self.at + size <= len(self.data), "the message ends early"
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self):
        return int.from_bytes(self.take(8), "little")

    def value(self):
        tag, length = self.take(1), self.number()
        if tag == b"n":
            assert length == 0
            return None
        if tag == b"t":
            return {b"\0": False, b"\1": True}[self.take(length)]
        if tag == b"i":
            value = int.from_bytes(self.take(length), "little", signed=True)
            assert length == value.bit_length() // 8 + 1
            return value
        if tag == b"f":
            return struct.unpack("<d", self.take(length))[0]
        if tag == b"s":
            return self.take(length).decode("utf-8", "surrogatepass")
        if tag == b"b":
            return self.take(length)
        if tag == b"l":
            return [self.value() for _ in range(length)]
        if tag == b"d":
            entries, keys = {}, []
            for _ in range(length):
                start = self.at
                key = self.value()
                keys.append(self.data[start : self.at])
                entries[key] = self.value()
            assert keys == sorted(keys)
            assert len(entries) == length
            return entries
        assert tag == b"a", tag
        dtype = self.value()
        assert self.take(1) == b"l"
        shape = [self.number() for _ in range(self.number())]
        return np.frombuffer(self.take(length), np.dtype(dtype).newbyteorder("<")).reshape(shape)


def parse(message):
    reader = Reader(message)
    value = reader.value()
    assert reader.at == len(message)
    return value


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=8)
    | st.binary(max_size=8)
)
keys = st.text(max_size=4) | st.binary(max_size=4) | st.integers(2, 9) | st.none()
arrays = st.builds(
    lambda dtype, shape: np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape),
    st.sampled_from(["<f4", "<f8", "<i8", "u1", "<f2", "<i2", "<c8"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
values = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def same(a, b):
    """Equal, and of equal types throughout: 1, 1.0 and True are not the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return a == b


@given(parts=st.lists(values, max_size=3), named=st.dictionaries(st.text(max_size=4), values, max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_message_reads_back_as_what_was_written(parts, named):
    hasher = ContentHasher()
    assert same(parse(hasher.frame(*parts, **named)), ["mmcache-digest", 1, "xxh3_128", named, parts])


def test_large_parts_stand_in_their_place():
    parts = ["head", b"x" * 10_000, [b"y" * 4097, "between", np.arange(30_000.0), 7], "z" * 100_000, {"k": b"w" * 5000}]
    assert same(parse(ContentHasher().frame(*parts)), ["mmcache-digest", 1, "xxh3_128", {}, parts])
    big = np.arange(1_200_000.0).reshape(3, 400_000).T  # written block by block
    assert same(parse(ContentHasher().frame(big, "tail"))[4], [np.ascontiguousarray(big), "tail"])


@pytest.mark.parametrize("scheme", ["xxh3_128", "blake3", "blake3_keyed", "sha256", "hmac_sha256"])
def test_the_digest_is_the_hash_of_the_message(scheme):
    import hashlib
    import hmac

    import blake3
    import xxhash

    h = hasher(scheme)
    cases = [(), (1,), (np.arange(6.0),), (np.zeros((0, 3)),), (b"x" * 70000, [b"y" * 5000] * 30), ("a", {"b": [None]})]
    for parts in cases:
        message = h.frame(*parts)
        assert h.digest(*parts) == {
            "xxh3_128": lambda m: xxhash.xxh3_128_hexdigest(m),
            "blake3": lambda m: blake3.blake3(m).hexdigest(),
            "blake3_keyed": lambda m: blake3.blake3(m, key=b"k" * 32).hexdigest(),
            "sha256": lambda m: hashlib.sha256(m).hexdigest(),
            "hmac_sha256": lambda m: hmac.new(b"k" * 32, m, "sha256").hexdigest(),
        }[scheme](message)


def random_value(rng, depth=3):
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.randrange(-300, 300)
    if kind == 3:
        return rng.choice([0.0, -0.0, 1.0, 0.5])
    if kind == 4:
        return "".join(rng.choice("ab.0") for _ in range(rng.randrange(4)))
    if kind == 5:
        return bytes(rng.choice(b"ab.0\0") for _ in range(rng.randrange(4)))
    if kind == 6:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["a", "b", "a.b", "0", 0, b"a"]): random_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def edited(rng, value):
    """`value` after one edit: another type, a split, a join, one level more or less, another length."""
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        change = rng.randrange(6)
        if change == 0:
            return [*value[:index], edited(rng, value[index]), *value[index + 1 :]]
        if change == 1:
            return value[:index] + value[index + 1 :]
        if change == 2:
            return [*value[:index], value[index], *value[index:]]
        if change == 3:
            return [value[:index], value[index:]]
        if change == 4:
            return [*value[:index], [value[index]], *value[index + 1 :]]
        inner = value[index]
        return value[:index] + (inner if isinstance(inner, list) else [inner, None]) + value[index + 1 :]
    if isinstance(value, dict) and value and rng.random() < 0.7:
        key = rng.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        change = rng.randrange(4)
        if change == 0:
            return rest
        if change == 1:
            return {**value, key: edited(rng, value[key])}
        if change == 2:
            return {**rest, str(key) + ".": value[key]}
        return {**rest, key: {key: value[key]}}
    if isinstance(value, str | bytes) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        change = rng.randrange(4)
        if change == 0:
            return value[:at] + value[at + 1 :]
        if change == 1:
            return [value[:at], value[at:]]
        if change == 2:
            return value + value[:1]
        return value.encode() if isinstance(value, str) else value.decode()
    others = [None, [], {}, "", b"", 0, 0.0, False, [value], {"a": value}, {"0": value}, [value, None], str(value)]
    others += [repr(value).encode(), float(value)] if isinstance(value, int) else []
    return rng.choice(others)


def test_a_hundred_thousand_pairs_one_edit_apart_differ():
    rng = random.Random(5)
    hasher = ContentHasher()
    pairs = 0
    while pairs < 100_000:
        value = random_value(rng)
        digest = hasher.digest(value)
        for _ in range(8):
            other = edited(rng, value)
            if not same(value, other):
                assert hasher.digest(other) != digest, (value, other)
                pairs += 1


AMBIGUOUS = [
    ([[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5]]),
    ({"a": {"b": 1}}, {"a.b": 1}),
    (["x"], {"0": "x"}),
    (["x"], {0: "x"}),
    ({"k": None}, {"k": b""}),
    ({"k": None}, {}),
    ({"k": []}, {}),
    ({"k": []}, {"k": {}}),
    ({"k": ""}, {"k": b""}),
    ([], [[]]),
    ([None], []),
    (b"12", "12"),
    ("1", 1),
    (1, 1.0),
    (1, True),
    (0, False),
    (0, None),
    (0.0, -0.0),
    (1, -1),
    (255, -1),
    (2**64, 0),
    (1, 1 + 2**64),
    ({1: "x"}, {"1": "x"}),
    ({True: "x"}, {1: "x"}),
    ({1.0: "x"}, {1: "x"}),
    ({b"a": "x"}, {"a": "x"}),
    ({(1, 2): "x"}, {"(1, 2)": "x"}),
    ({(1, (2,)): "x"}, {((1, 2),): "x"}),
    ("\ud800\udc00", "\U00010000"),
    ("\ud800", "?"),
    ("é", "e\u0301"),
    ("a\0", "a"),
    ("A", "A", "a"),
]


@pytest.mark.parametrize("pair", AMBIGUOUS, ids=repr)
def test_what_is_often_confused_differs(pair):
    hasher = ContentHasher()
    a, b = pair[0], pair[-1]
    assert hasher.digest(a) != hasher.digest(b)
    assert hasher.digest([a]) != hasher.digest([b])
    assert hasher.digest(x=a) != hasher.digest(x=b)


def test_positional_and_named_parts_are_apart():
    h = ContentHasher()
    calls = [
        h.digest(),
        h.digest(b"x"),
        h.digest(b"x", b"y"),
        h.digest([b"x", b"y"]),
        h.digest(b"xy"),
        h.digest(b"x", size=504),
        h.digest(b"x", {"size": 504}),
        h.digest(b"xsize504"),
        h.digest(b"x", "size", 504),
        h.digest(size=504),
        h.digest({"size": 504}),
        h.digest(h.frame(b"x", size=504)),
        h.digest(b"x", self=1),
        h.digest(b"x", parts=1),
        h.digest(b"x", **{"": 1}),
    ]
    assert len(set(calls)) == len(calls)


def test_content_cannot_imitate_content_with_options():
    # an image whose bytes end as the message of another image's options begins or ends
    h = ContentHasher()
    with_option = h.frame(b"X", size=504)
    for cut in range(len(with_option)):
        assert h.digest(b"X" + with_option[cut:]) != h.digest(b"X", size=504)


def test_order_counts_in_lists_and_not_in_dicts():
    h = ContentHasher()
    assert h.digest("A", "B") != h.digest("B", "A")
    assert h.digest("A", "A") != h.digest("A")
    digests = {h.digest({k: i for i, k in order}) for order in itertools.permutations(enumerate(["b", 1, "a", b"a"]))}
    assert len(digests) == 1
    assert h.digest(a=1, b=2) == h.digest(b=2, a=1)


def test_lists_and_tuples_are_one():
    h = ContentHasher()
    assert h.digest([1, (2, [3])]) == h.digest((1, [2, (3,)]))


VECTORS = [
    ("xxh3_128", call, digest) for call, digest in re.findall(r"^\| `(digest\(.*\))` \| `([0-9a-f]+)` \|$", PAGE, re.M)
] + [
    (scheme, call, digest)
    for call, scheme, digest in re.findall(r"^\| `(digest\(.*\))` \| `(\w+)` \| `([0-9a-f]+)` \|$", PAGE, re.M)
]


def test_the_page_has_vectors_of_every_scheme():
    assert {scheme for scheme, _, _ in VECTORS} == {"xxh3_128", "blake3", "blake3_keyed", "sha256", "hmac_sha256"}
    assert len({digest for _, _, digest in VECTORS}) == len(VECTORS) > 30


@pytest.mark.parametrize(("scheme", "call", "digest"), VECTORS)
def test_golden_vectors(scheme, call, digest):
    assert eval(call, {"np": np, "digest": hasher(scheme).digest}) == digest


def test_the_page_shows_the_message():
    shown = "".join(re.findall(r"^    ([0-9a-f]{20,})$", PAGE, re.M))
    assert bytes.fromhex(shown) == ContentHasher().frame(1)


CHILD = """
import enum
from dataclasses import dataclass
import numpy as np, torch
from PIL import Image
from mmcache.hashing import ContentHasher, ImageSource, VideoSource

class Color(enum.Flag):
    RED = 1
    BLUE = 2

@dataclass
class Size:
    width: int
    height: int

for algorithm in ("xxh3_128", "blake3", "sha256"):
    h = ContentHasher(algorithm)
    print(h.digest({"zeta": 1, "alpha": [2.5, None], 3: b"x", "n": {"b": 1, "a": 2}}, resample="bicubic", size=504))
    print(h.digest([h.digest("A"), h.digest("B"), h.digest("C")], Color.RED | Color.BLUE, Size(3, 4)))
    print(h.digest(torch.arange(12, dtype=torch.bfloat16).view(3, 4), np.arange(5)[::2], np.arange(3, dtype=">i4")))
    print(h.digest(Image.new("P", (3, 2)), VideoSource([b"a", b"b"], fps=2, indices=(0, 3))))
"""


@pytest.mark.slow
def test_digests_agree_between_processes_of_any_hash_seed():
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(CHILD, {"__name__": "__main__"})
    assert child.stdout == here.getvalue()
    assert len(set(child.stdout.split())) == 12
