"""Under which key an item's rows are stored, or why they are not.

vLLM's identifier names content only by word of others: it may be a client's id, a digest of a client's id and some
settings (which looks like a digest of content), or rest on an id inside an image file. So the key is made from what the
encoder will see, the item's processed tensors, unless the operator trusts identifiers. Hashing runs on a thread.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mmcache.errors import MMCacheError
from mmcache.hashing import ContentHasher
from mmcache.tiers import Key

__all__ = ["PENDING", "EmbeddingFields", "Feature", "Keyer", "Refusal"]

_DIGEST = re.compile(r"[0-9a-f]{64}\Z|[0-9a-f]{128}\Z")
_MEMO = 4096
_DESCRIPTOR = "address"
"""A field of items of vLLM's shared-memory processor cache: where tensors lie, not what they are."""


class Feature(Protocol):
    """What is read of vLLM's `MultiModalFeatureSpec`."""

    identifier: str
    modality: str
    data: Any
    mm_position: Any


@dataclass(frozen=True, slots=True)
class EmbeddingFields:
    """How a modality's embeddings travel where a client or an encoder engine gives them.

    Attributes:
        metadata: fields that only size the placeholders. An item that has nothing else cannot be encoded.
        values: fields that hold embeddings. An item that has one runs no encoder.
    """

    metadata: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an item is neither loaded nor saved."""

    reason: str


class _Pending:
    """The key is being made."""


PENDING = _Pending()


class Keyer:
    """Keys of items. For one thread; `hash_later` runs its argument on another.

    Args:
        namespace: fingerprint.
        trust: identifiers name their content.
        adapters_encode: adapters change what the encoder puts out.
        hasher: for processed tensors.
        embedding_fields: by modality.
        hash_later: runs a function soon, on another thread.
    """

    def __init__(
        self,
        namespace: str,
        *,
        trust: bool,
        adapters_encode: bool,
        hasher: ContentHasher,
        embedding_fields: Callable[[str], EmbeddingFields],
        hash_later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._namespace = namespace
        self._trust = trust
        self._adapters_encode = adapters_encode
        self._hasher = hasher
        self._embedding_fields = embedding_fields
        self._hash_later = hash_later
        # Processed items are objects that vLLM's own cache hands out again: hash each once
        self._memo: OrderedDict[int, tuple[weakref.ref[Any], list[Key | Refusal]]] = OrderedDict()

    def encodable(self, feature: Feature) -> bool:
        """Whether the engine could run its encoder on this item."""
        if feature.data is None:
            return False
        names = set(feature.data)
        return not names <= self._embedding_fields(feature.modality).metadata

    def key(self, request: Any, feature: Feature, *, start: bool = True) -> Key | Refusal | _Pending:
        """The key of an item, the reason why it has none, or `PENDING`: ask again.

        Args:
            request: vLLM's request that the item belongs to.
            feature: the item.
            start: have it hashed if need be.
        """
        if self._adapters_encode and getattr(request, "lora_request", None) is not None:
            return Refusal("adapter")  # vLLM puts the adapter's name into the identifier, not its weights
        if feature.data is not None:
            names = set(feature.data)
            if names & self._embedding_fields(feature.modality).values:
                return Refusal("given")
        if self._trust:
            try:
                return Key(self._namespace, f"id:{feature.identifier}", feature.modality)
            except MMCacheError:
                return Refusal("client_id")
        if not _DIGEST.match(feature.identifier):
            return Refusal("client_id")
        if not self.encodable(feature) or _DESCRIPTOR in feature.data:
            return Refusal("no_content")
        return self._content_key(feature, start)

    def _content_key(self, feature: Feature, start: bool) -> Key | Refusal | _Pending:
        data, token = feature.data, id(feature.data)
        memo = self._memo.get(token)
        if memo is not None and memo[0]() is data:
            self._memo.move_to_end(token)
            return memo[1][0] if memo[1] else PENDING
        if not start:
            return PENDING
        try:
            alive = weakref.ref(data)
        except TypeError:
            return Refusal("unhashable")
        answer: list[Key | Refusal] = []
        self._memo[token] = (alive, answer)
        while len(self._memo) > _MEMO:
            self._memo.popitem(last=False)
        modality = feature.modality
        self._hash_later(lambda: answer.append(self._hash(modality, data)))
        return PENDING

    def _hash(self, modality: str, data: Any) -> Key | Refusal:
        try:
            fields: Mapping[str, object] = data.get_data()
            if not any(isinstance(value, Tensor | list | tuple) for value in fields.values()):
                return Refusal("unhashable")  # whatever this is, it is not what an encoder sees
            if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in fields.values()):
                return Refusal("on_device")  # hashing it would make this process wait for the device
            return Key(self._namespace, f"content:{self._hasher.digest('vllm-item-1', dict(fields))}", modality)
        except Exception:  # whatever a model's processor puts there, it must not end the thread, or wait for ever
            return Refusal("unhashable")
