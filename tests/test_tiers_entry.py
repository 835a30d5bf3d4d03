"""The entry format: bit for bit what was stored under this key, or a reason why not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tier_helpers import key_of, rows_of, same_bits

from mmcache.errors import ConfigError, DamagedEntryError, EmbeddingError
from mmcache.tiers import Entry, Expected, Key, decode_entry, encode_entry, read_header

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def reason(key, entry, expected=None):
    with pytest.raises(DamagedEntryError) as caught:
        decode_entry(key, entry, expected)
    return caught.value.reason


def writable(entry):
    return bytearray(entry.header), entry.payload.clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 16), (1, 1), (3, 7), (0, 16), (2, 0)])
def test_rows_come_back_bit_for_bit(dtype, shape):
    key, rows = key_of("x"), rows_of("x", *shape, dtype=dtype)
    back = decode_entry(key, encode_entry(key, rows))
    assert same_bits(back, rows)
    assert back.device.type == "cpu"


def test_special_values_and_strides_survive():
    key = key_of("x")
    rows = torch.tensor([[float("nan"), -0.0, float("inf")], [1e-45, -1.0, 0.0]])
    rows.view(torch.int32)[0, 0] = 0x7FC12345  # a NaN with a payload
    for given_rows in (rows, rows.t().contiguous().t(), rows.repeat(1, 2)[:, ::2], rows.clone().requires_grad_()):
        back = decode_entry(key, encode_entry(key, given_rows))
        assert same_bits(back, given_rows.detach())
        assert not back.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_rows_that_are_negated_lazily_are_stored_as_what_they_are(dtype):
    numbers = torch.arange(1, 13).view(3, 4).to(dtype)
    back = decode_entry(key_of("x"), encode_entry(key_of("x"), torch._neg_view(numbers)))
    assert torch.equal(back, -numbers)


def test_the_header_says_everything():
    key = key_of("image-1")
    info = read_header(encode_entry(key, rows_of("a", 4, 12, torch.bfloat16), levels=3).header)
    assert (info.key, info.rows, info.width, info.dtype, info.levels) == (key, 4, 12, torch.bfloat16, 3)
    assert info.nbytes == encode_entry(key, rows_of("a", 4, 12, torch.bfloat16)).nbytes


def test_the_format_does_not_change_unnoticed():
    key = Key("0f" * 32, "picture", "image")
    header = encode_entry(key, torch.arange(6, dtype=torch.float32).view(2, 3)).header
    assert header.hex() == GOLDEN


@pytest.mark.parametrize(
    ("rows", "levels"),
    [
        (torch.zeros(4), 1),
        (torch.zeros(2, 2, 2), 1),
        (torch.zeros(2, 2, dtype=torch.int64), 1),
        (torch.zeros(2, 2, dtype=torch.complex64), 1),
        (torch.zeros(2, 4), 3),
        (torch.zeros(2, 4), 0),
        (torch.zeros(2, 4, device="meta"), 1),
    ],
)
def test_what_cannot_be_stored_is_an_error(rows, levels):
    with pytest.raises(EmbeddingError):
        encode_entry(key_of("x"), rows, levels=levels)


class TestKeys:
    @pytest.mark.parametrize("identifier", ["../escaped", "/etc/passwd", "a/b", "nul\0l", "é" * 2000, "x" * 4096, "A"])
    def test_any_text_is_an_identifier_and_names_are_digests(self, identifier):
        key = key_of(identifier)
        assert len(key.name) == 64
        assert not key.name.strip("0123456789abcdef")
        rows = rows_of(identifier)
        assert same_bits(decode_entry(key, encode_entry(key, rows)), rows)

    def test_names_tell_keys_apart(self):
        keys = [key_of("a"), key_of("A"), key_of("a", salt="s"), key_of("a", salt=""), key_of("a\0")]
        keys += [key_of("a", "video"), key_of("a", ""), key_of("ea", "imag"), key_of("imagea", "")]
        assert len({key.name for key in keys}) == len(keys)

    @pytest.mark.parametrize("identifier", ["", "x" * 4097, "é" * 2049])
    def test_identifiers_are_bounded(self, identifier):
        with pytest.raises(ConfigError):
            key_of(identifier)

    @pytest.mark.parametrize("modality", ["x" * 256, "é" * 128, None, 3])
    def test_modalities_are_short_text(self, modality):
        with pytest.raises(ConfigError, match="modality"):
            key_of("a", modality)

    def test_the_longest_parts_fit_into_a_header(self):
        key = key_of("é" * 2048, "é" * 127)
        assert read_header(encode_entry(key, rows_of("a")).header).key == key

    @pytest.mark.parametrize("namespace", ["", "plain", "0" * 63, "G" * 64, "A" * 64])
    def test_a_namespace_is_a_fingerprint(self, namespace):
        with pytest.raises(ConfigError):
            Key(namespace, "x")


class TestDamage:
    key = key_of("image")
    entry = encode_entry(key, rows_of("image"))

    def test_another_key(self):
        assert reason(key_of("other"), self.entry) == "identifier"
        assert reason(key_of("image", salt="s"), self.entry) == "namespace"
        assert reason(key_of("image", "video"), self.entry) == "modality"

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_any_flipped_bit_of_the_header_or_payload(self, data):
        header, payload = writable(self.entry)
        bit = data.draw(st.integers(0, 8 * (len(header) + payload.numel()) - 1))
        byte = bit // 8
        if byte < len(header):
            header[byte] ^= 1 << bit % 8
        else:
            payload[byte - len(header)] ^= 1 << bit % 8
        damaged = Entry(bytes(header), payload)
        padding = len(b"".join([self.entry.header]).rstrip(b"\0"))
        if padding <= byte < len(header):
            assert same_bits(decode_entry(self.key, damaged), rows_of("image"))  # padding says nothing
        else:
            assert reason(self.key, damaged) in {"foreign", "version", "truncated", "checksum"}

    @settings(max_examples=100, deadline=None)
    @given(st.integers(0, 10_000))
    def test_any_truncation(self, cut):
        whole = bytearray(self.entry.header) + bytes(self.entry.payload.numpy())
        cut %= len(whole)
        size = len(self.entry.header)
        part = Entry(bytes(whole[: min(cut, size)]), torch.tensor(list(whole[size:cut]), dtype=torch.uint8))
        assert reason(self.key, part) in {"truncated", "foreign"}

    def test_grown_foreign_and_empty(self):
        header, payload = writable(self.entry)
        assert reason(self.key, Entry(bytes(header), torch.cat([payload, payload[:1]]))) == "truncated"
        assert reason(self.key, Entry(b"\x80\x04" + bytes(200), payload)) == "foreign"
        assert reason(self.key, Entry(b"", payload[:0])) == "truncated"

    def test_another_version(self):
        header, payload = writable(self.entry)
        header[8] += 1
        assert reason(self.key, Entry(bytes(header), payload)) == "version"

    @pytest.mark.parametrize(
        "expected", [Expected(rows=5), Expected(width=15), Expected(dtype=torch.bfloat16), Expected(4, 16, torch.half)]
    )
    def test_rows_of_another_kind_than_the_asker_needs(self, expected):
        assert reason(self.key, self.entry, expected) == "mismatch"

    def test_rows_as_expected(self):
        for expected in (None, Expected(), Expected(4, 16, torch.float32), Expected(rows=4)):
            assert same_bits(decode_entry(self.key, self.entry, expected), rows_of("image"))


GOLDEN = (
    "4d4d43454d424544020080000700010501000200000000000000030000000000000018000000000000000f0f0f0f0f0f"
    "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f2d0408b485dd77b108c27fcd95d1fea5509634e56f3e"
    "770c1ca7b08a371cead3696d6167657069637475726500000000000000000000"
)
