"""The namespace of an engine: everything beside an item's content that decides what its encoder puts out.

Read from vLLM's configuration and from the model's files, never from names: two folders called alike may hold other
weights, and one model may lie in two places.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from mmcache.errors import ConfigError
from mmcache.namespaces import Namespace, weights_digest

__all__ = ["cached_weights_digest", "engine_namespace", "model_files"]

_log = logging.getLogger("mmcache.vllm")
_SMALL_FILES = ("*.json", "*.py", "*.jinja", "*.txt", "*.model")
_TEXT_ONLY = ("tokenizer", "generation_config", "chat_template", "vocab", "merges", "special_tokens", "added_tokens")
_PLACE_KEYS = frozenset({"_name_or_path", "transformers_version"})


def engine_namespace(config: Any, *, salt: str | None, weights_id: str | None, scheme: str, version: str) -> Namespace:
    """The namespace of an engine.

    Args:
        config: vLLM's `VllmConfig`.
        salt: the operator's.
        weights_id: what the operator calls the weights, or None: they are hashed.
        scheme: how keys are digested.
        version: vLLM's.

    Raises:
        ConfigError: the weights are not local files, and the operator gives them no name; a file cannot be read.
    """
    model = config.model_config
    multimodal = model.multimodal_config
    folder: Path | None = None
    if config.load_config.load_format == "dummy":
        weights = f"random weights {uuid.uuid4()}"
        _log.warning("weights are random (load_format dummy): nothing is shared with other engines")
    elif weights_id is not None:
        weights = f"named {weights_id}"
    else:
        folder = model_files(model)
        weights = f"files {cached_weights_digest(folder)}"
    settings = {
        "vllm": version,
        "config": _digest(_without_places(model.hf_config.to_dict())),
        "quantization": [str(model.quantization), _plain(getattr(model, "quantization_config", None))],
        "processor files": _small_files(folder) if folder is not None else {},
        "processor settings": _plain(getattr(multimodal, "mm_processor_kwargs", None)),
        "media settings": _plain(getattr(multimodal, "media_io_kwargs", None)),
        "hash algorithm": str(getattr(multimodal, "mm_hasher_algorithm", "")),
        "encoder settings": multimodal.compute_hash() if multimodal is not None else "",
        "encoder scales": _scales(getattr(multimodal, "mm_encoder_fp8_scale_path", None)),
        "pruning": [
            str(getattr(multimodal, "video_pruning_rate", None)),
            str(getattr(multimodal, "video_pruning_method", None)),
        ],
    }
    return Namespace(
        model=type(model.hf_config).__name__,
        revision=weights,
        encoder_dtype=str(model.dtype),
        processor=settings,
        salt=salt,
        digest_scheme=scheme,
    )


def model_files(model: Any) -> Path:
    """Where the model's files lie: a folder, or one file.

    Raises:
        ConfigError: they are not on this machine.
    """
    elsewhere = str(getattr(model, "model_weights", "") or "")
    path = Path(model.model)
    if not elsewhere and path.exists():
        return path
    if not elsewhere and "://" not in model.model:
        with suppress(Exception):
            hub = import_module("huggingface_hub")
            return Path(hub.snapshot_download(model.model, revision=model.revision, local_files_only=True))
    raise ConfigError(
        "the weights are not local files, so they cannot be told apart by hashing; name them",
        field="weights_id",
        found=elsewhere or model.model,
        expected="a name that changes with the weights",
    )


def cached_weights_digest(path: Path) -> str:
    """`weights_digest`, remembered for as long as no file changes (path, size, times and inode).

    It is kept in the user's cache folder; where that cannot be written to, weights are hashed at every start.
    """
    listing = hashlib.sha256(b"mmcache-weights-cache-1")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        stat = file.stat()
        line = [str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
        listing.update(json.dumps(line).encode() + b"\n")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    note = base / "mmcache" / "weights" / listing.hexdigest()
    with suppress(OSError):
        text = note.read_text()
        if len(text) == 64:
            return text
    digest = weights_digest(path)
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd, temporary = tempfile.mkstemp(dir=note.parent)
        with os.fdopen(fd, "w") as file_:
            file_.write(digest)
        os.replace(temporary, note)
    return digest


def _small_files(folder: Path) -> dict[str, str]:
    """Digests of the files beside the weights: configuration, processor, code. Not of those that only touch text."""
    if folder.is_file():
        return {}
    found = {file for pattern in _SMALL_FILES for file in folder.glob(pattern) if file.is_file()}
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(found)
        if not file.name.startswith(_TEXT_ONLY) and not file.name.endswith(".index.json")
    }


def _scales(path: str | None) -> str:
    """What is in the file of the encoder's scales: vLLM's own digest has only its name."""
    if path is None:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error}", field="mm_encoder_fp8_scale_path", found=path) from error


def _without_places(value: Any) -> Any:
    """Settings without what depends on where the model lies."""
    if isinstance(value, Mapping):
        return {str(key): _without_places(inner) for key, inner in value.items() if key not in _PLACE_KEYS}
    if isinstance(value, list | tuple):
        return [_without_places(inner) for inner in value]
    return value


def _plain(value: Any) -> Any:
    """Settings as JSON values."""
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
