"""What must be equal for two embeddings of the same content to be interchangeable, and its fingerprint.

A namespace names the encoder (model, revision or a digest of its weights, dtype), everything that happens before it
(processor settings, adapter), who may share (salt) and how contents are digested. Its fingerprint is a SHA-256 over a
framed encoding (a tag and a length before every part), the same in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from mmcache.errors import ConfigError

__all__ = ["DIGEST_SCHEMES", "Namespace", "namespace_fingerprint", "require_trusted_digests", "weights_digest"]

DIGEST_SCHEMES = ("xxh3_128", "blake3", "blake3_keyed", "sha256", "hmac_sha256")
"""Digest schemes that a namespace may declare. `xxh3_128` is fast and not collision-resistant: whoever can choose
content can make two contents collide, so it is for stores that one trust domain uses alone."""

_COLLISION_RESISTANT = frozenset(DIGEST_SCHEMES) - {"xxh3_128"}
_VERSION = b"mmcache-namespace-1"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything beside the content itself that decides what an encoder puts out.

    Args:
        model: the model's name, as the deployment names it.
        revision: revision or weights digest (`weights_digest`). A name alone does not tell two sets of weights apart.
        encoder_dtype: dtype the encoder runs in, e.g. `"bfloat16"`.
        processor: settings of the processor, as text or as a mapping of JSON values (kept as canonical JSON). Give the
            effective settings, defaults included: an omitted default and an explicit one are different texts.
        adapter: the adapter that touches the encoder, with its version; None where none does.
        salt: the tenant's salt. None (no salt) and the empty string are different.
        digest_scheme: how the identifiers were made, one of `DIGEST_SCHEMES`; None declares nothing, which a shared
            tier treats like a scheme without collision resistance.

    Raises:
        ConfigError: a value is of the wrong type, or the digest scheme is unknown.
    """

    model: str
    revision: str = ""
    encoder_dtype: str = ""
    processor: str | Mapping[str, object] = ""
    adapter: str | None = None
    salt: str | None = None
    digest_scheme: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.processor, Mapping):
            object.__setattr__(self, "processor", _canonical_settings(self.processor))
        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.name in ("adapter", "salt", "digest_scheme")
            if not (isinstance(value, str) or (optional and value is None)):
                raise ConfigError(
                    "a part of a namespace is text", field=field.name, found=type(value).__name__, expected="str"
                )
        if self.digest_scheme is not None and self.digest_scheme not in DIGEST_SCHEMES:
            raise ConfigError(
                "unknown digest scheme",
                field="digest_scheme",
                found=repr(self.digest_scheme),
                expected="one of " + ", ".join(DIGEST_SCHEMES),
            )


def namespace_fingerprint(namespace: str | Namespace, *, salt: str | None = None, adapter: str | None = None) -> str:
    """The fingerprint of a namespace under a request's salt and adapter: 64 hexadecimal digits.

    Args:
        namespace: a `Namespace`, or a name of the caller's own making (which never equals a `Namespace`'s).
        salt: the request's salt, on top of the namespace's own; None and `""` differ.
        adapter: the request's adapter, where it touches the encoder.

    Raises:
        ConfigError: an argument is neither text nor a namespace.
    """
    for name, value in (("salt", salt), ("adapter", adapter)):
        if value is not None and not isinstance(value, str):
            raise ConfigError("must be text or None", field=name, found=type(value).__name__, expected="str")
    if not isinstance(namespace, str | Namespace):
        raise ConfigError(
            "must be text or a Namespace", field="namespace", found=type(namespace).__name__, expected="Namespace"
        )
    return _fingerprint(namespace, salt, adapter)


@lru_cache(maxsize=4096)
def _fingerprint(namespace: str | Namespace, salt: str | None, adapter: str | None) -> str:
    if isinstance(namespace, str):
        parts: list[tuple[str, str | None]] = [("name", namespace)]
    else:
        parts = [(field.name, getattr(namespace, field.name)) for field in fields(namespace)]
    parts += [("request salt", salt), ("request adapter", adapter)]
    digest = hashlib.sha256(_VERSION)
    for name, value in parts:
        # surrogatepass: text that came from bytes with surrogateescape is still text, and must not be an error here
        data = b"" if value is None else value.encode("utf-8", "surrogatepass")
        tag = b"n" if value is None else b"s"
        digest.update(b"%s%d:%s%d:%s" % (tag, len(name), name.encode(), len(data), data))
    return digest.hexdigest()


def require_trusted_digests(namespace: str | Namespace, *, store: str) -> None:
    """Refuse a namespace whose identifiers can be made to collide, for a store shared beyond one trust domain.

    Args:
        namespace: the namespace that is to use the store. A plain name declares no digest scheme and is refused.
        store: what the store is called, for the error.

    Raises:
        ConfigError: the namespace declares `xxh3_128`, or nothing.
    """
    scheme = namespace.digest_scheme if isinstance(namespace, Namespace) else None
    if scheme not in _COLLISION_RESISTANT:
        raise ConfigError(
            f"{store} is shared: whoever may write to it could plant an embedding under a colliding identifier. "
            "Declare a collision-resistant digest_scheme, or one_trust_domain=True if all clients trust each other",
            field="namespace",
            found=repr(scheme),
            expected="one of " + ", ".join(sorted(_COLLISION_RESISTANT)),
        )


def weights_digest(*paths: str | Path) -> str:
    """Digest of weights files, the same in every process that loads the same weights: 64 hexadecimal digits.

    Args:
        paths: files, or directories whose weights files (`.safetensors`, `.bin`, `.pt`, `.pth`, `.gguf`, `.npz`) count,
            in subdirectories too. Where the files lie does not count, their names below the path and contents do.

    Raises:
        ConfigError: a path is missing, or a directory holds no weights.
    """
    digest = hashlib.sha256(b"mmcache-weights-1")
    names: dict[str, Path] = {}
    for path in map(Path, paths):
        found = dict(_weights_files(path))
        if not found:
            raise ConfigError("no weights files", field="paths", found=str(path), expected="files with weights")
        if clash := sorted(names.keys() & found.keys()):
            raise ConfigError("two weights files of one name", field="paths", found=clash[0], expected="distinct names")
        names |= found
    if not names:
        raise ConfigError("no weights files", field="paths", found="nothing", expected="at least one path")
    for name in sorted(names):
        data = name.encode("utf-8", "surrogatepass")
        with names[name].open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(b"%d:%s" % (len(data), data) + content)
    return digest.hexdigest()


def _weights_files(path: Path) -> Iterable[tuple[str, Path]]:
    if path.is_file():
        return [(path.name, path)]
    return [
        (file.relative_to(path).as_posix(), file)
        for file in path.rglob("*")
        if file.suffix in _WEIGHT_SUFFIXES and file.is_file()
    ]


def _canonical_settings(settings: Mapping[str, object]) -> str:
    _check_keys(settings, "processor")
    try:
        return json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_refuse)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"processor settings must be JSON values: {error}", field="processor") from None


def _check_keys(value: object, path: str) -> None:
    # json.dumps writes the key 1 like the key "1": two different settings would become one
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigError("keys of settings are text", field=path, found=repr(key), expected="str")
            _check_keys(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_keys(inner, f"{path}[{index}]")


def _refuse(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is none")
