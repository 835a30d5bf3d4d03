"""The fingerprint of a namespace tells apart everything that may not share embeddings, and nothing else."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest

from mmcache.errors import ConfigError
from mmcache.namespaces import DIGEST_SCHEMES, Namespace, namespace_fingerprint, weights_digest
from mmcache.tiers import MemoryTier, TieredStore

BASE = Namespace(
    "qwen",
    revision="abc",
    encoder_dtype="bfloat16",
    processor={"max_pixels": 1003520, "norm": [0.5, 0.5]},
    adapter="a",
    salt="s",
    digest_scheme="sha256",
)


def test_every_part_counts():
    others = [replace(BASE, **{f.name: "blake3" if f.name == "digest_scheme" else "other"}) for f in fields(BASE)]
    prints = {namespace_fingerprint(n) for n in [BASE, *others]}
    assert len(prints) == len(fields(BASE)) + 1


def test_parts_are_framed_so_that_no_two_namespaces_are_written_alike():
    pairs = [
        (Namespace("ab", revision="c"), Namespace("a", revision="bc")),
        (Namespace("m", adapter="x"), Namespace("m", salt="x")),
        (Namespace("m", salt=None), Namespace("m", salt="")),
        (Namespace("m"), "m"),
    ]
    for left, right in pairs:
        assert namespace_fingerprint(left) != namespace_fingerprint(right)


def test_salt_and_adapter_of_a_request_count_on_top():
    prints = {
        namespace_fingerprint(BASE),
        namespace_fingerprint(BASE, salt=""),
        namespace_fingerprint(BASE, salt="t"),
        namespace_fingerprint(BASE, adapter="t"),
        namespace_fingerprint(BASE, salt="t", adapter="t"),
        namespace_fingerprint("plain", salt="t"),
    }
    assert len(prints) == 6
    assert namespace_fingerprint(BASE, salt="t") == namespace_fingerprint(BASE, salt="t")


def test_settings_are_canonical():
    one = Namespace("m", processor={"b": 1, "a": {"y": 2.0, "x": [1, 2]}})
    two = Namespace("m", processor={"a": {"x": [1, 2], "y": 2.0}, "b": 1})
    assert namespace_fingerprint(one) == namespace_fingerprint(two)
    assert replace(one, salt="s").processor == one.processor
    different = [
        {"a": 1},
        {"a": 1.5},
        {"a": "1"},
        {"a": True},
        {"a": None},
        {"a": [1]},
        {"a": {"b": 1}},
        {"a.b": 1},
        {},
    ]
    assert len({namespace_fingerprint(Namespace("m", processor=p)) for p in different}) == len(different)


@pytest.mark.parametrize(
    "settings", [{"a": object()}, {"a": {1: 2}}, {1: 2}, {"a": float("nan")}, {"a": {3}}, {"a": b"x"}]
)
def test_settings_without_a_defined_identity_are_refused(settings):
    with pytest.raises(ConfigError):
        Namespace("m", processor=settings)


@pytest.mark.parametrize(
    "parts", [{"model": None}, {"model": "m", "revision": 3}, {"model": "m", "digest_scheme": "md5"}]
)
def test_parts_of_the_wrong_kind_are_refused(parts):
    with pytest.raises(ConfigError):
        Namespace(**parts)


def test_fingerprints_are_the_same_in_every_process_and_version():
    golden = "815228da9abefcc14fe7080d"
    assert namespace_fingerprint(BASE, salt="tenant").startswith(golden)
    code = (
        "from mmcache.namespaces import *;"
        "print(namespace_fingerprint(Namespace('qwen', revision='abc', encoder_dtype='bfloat16',"
        "processor={'norm': [0.5, 0.5], 'max_pixels': 1003520}, adapter='a', salt='s', digest_scheme='sha256'),"
        "salt='tenant'))"
    )
    # The other process hashes text otherwise (PYTHONHASHSEED), and takes the settings in another order
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"}
    )
    assert out.stdout.strip() == namespace_fingerprint(BASE, salt="tenant")


class TestWeights:
    def test_one_digest_wherever_the_files_lie(self, tmp_path):
        for where in ("a", "b/deep"):
            (tmp_path / where / "part").mkdir(parents=True)
            (tmp_path / where / "one.safetensors").write_bytes(b"1" * 1000)
            (tmp_path / where / "part" / "two.bin").write_bytes(b"2")
        (tmp_path / "a" / "README.md").write_text("not weights")
        assert weights_digest(tmp_path / "a") == weights_digest(str(tmp_path / "b" / "deep"))

    def test_content_names_and_framing_count(self, tmp_path):
        digests = set()
        for number, files in enumerate(
            [{"a.pt": b"1"}, {"a.pt": b"2"}, {"b.pt": b"1"}, {"a.pt": b"", "1.pt": b""}, {"a.pt": b"1", "b.pt": b""}]
        ):
            folder = tmp_path / str(number)
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            digests.add(weights_digest(folder))
        assert len(digests) == 5

    def test_no_weights_is_an_error_and_not_a_digest(self, tmp_path):
        for paths in [(), (tmp_path,), (tmp_path / "missing",)]:
            with pytest.raises(ConfigError):
                weights_digest(*paths)


class _Shared(MemoryTier):
    shared = True


class TestTrust:
    @pytest.mark.parametrize("scheme", DIGEST_SCHEMES)
    def test_a_shared_tier_refuses_digests_that_can_be_made_to_collide(self, scheme):
        namespace = Namespace("m", digest_scheme=scheme)
        if scheme == "xxh3_128":
            with pytest.raises(ConfigError, match="one_trust_domain"):
                TieredStore([_Shared(100)], namespace=namespace)
        else:
            TieredStore([_Shared(100)], namespace=namespace).close()

    @pytest.mark.parametrize("namespace", ["plain", Namespace("m")])
    def test_a_namespace_that_declares_nothing_is_refused_too(self, namespace):
        with pytest.raises(ConfigError):
            TieredStore([_Shared(100)], namespace=namespace)

    def test_a_tier_of_ones_own_takes_any(self):
        TieredStore([MemoryTier(100)], namespace="plain").close()
