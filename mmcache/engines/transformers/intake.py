"""From chats to requests: identity first, and no decoding or processing of what is not needed again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from cachetools import LRUCache

from mmcache.engines.chat import Media, Message, media_of
from mmcache.engines.transformers.adapter import Adapter
from mmcache.engines.transformers.plain import Generation
from mmcache.engines.transformers.prompt import build_prompt
from mmcache.features import FeatureCache
from mmcache.fields import ItemFields, split_fields
from mmcache.hashing import ContentHasher
from mmcache.items import MultimodalItem, MultimodalRequest

__all__ = ["Intake"]

_KNOWN_CONTENTS = 1 << 16


class Intake:
    """Makes requests of chats.

    Processed features come from `features`. Of everything that was ever processed the metadata is kept besides, small:
    enough to lay out a prompt whose pixels are gone, which is all that a covered or stored item needs.

    Args:
        adapter: of the model.
        features: processed fields by content.
        hasher: makes the identifiers.
    """

    def __init__(self, adapter: Adapter, features: FeatureCache, hasher: ContentHasher) -> None:
        self.adapter = adapter
        self.features = features
        self.hasher = hasher
        # Part of every identity: what the processor's settings make of a medium.
        self._settings = hasher.digest(adapter.model_type, settings=adapter.settings)
        self._metadata: LRUCache[str, ItemFields] = LRUCache(_KNOWN_CONTENTS)

    def identifier(self, media: Media) -> str:
        """Content digest of a medium: of its encoded bytes and of the settings it is processed with."""
        return self.hasher.digest(media, settings=self._settings)

    def request(
        self, messages: Sequence[Message], *, request_id: str, cache_salt: str | None, generation: Generation
    ) -> tuple[MultimodalRequest, set[int]]:
        """The request of a chat, and the indices of its bare items: those of which only metadata is at hand.

        Raises:
            MediaError: a medium cannot be decoded, or the model does not take its kind.
        """
        media = media_of(messages)
        for part in media:
            self.adapter.check(part)
        identifiers = [self.identifier(part) for part in media]
        fields: dict[str, ItemFields] = {}
        bare = set()
        for identifier, part in zip(identifiers, media):
            if identifier in fields:
                continue
            key = self._key(identifier, cache_salt)
            held, known = self.features.get(key), self._metadata.get(key)
            if held is not None:
                fields[identifier] = held
            elif known is not None:
                fields[identifier] = known
                bare.add(identifier)
            else:
                fields[identifier] = self._process(part, key, generation)
        tokens, ranges = build_prompt(self.adapter, messages, [fields[identifier] for identifier in identifiers])
        items = [
            MultimodalItem(part.modality, fields[identifier], placeholder, identifier)
            for part, identifier, placeholder in zip(media, identifiers, ranges)
        ]
        request = MultimodalRequest(request_id, tokens, items, cache_salt=cache_salt)
        return request, {index for index, identifier in enumerate(identifiers) if identifier in bare}

    def completed(
        self, request: MultimodalRequest, gone: Iterable[int], media: Sequence[Media], generation: Generation
    ) -> MultimodalRequest:
        """The same request with the bare items `gone` processed again, and all others of their contents."""
        contents = {request.items[index].identifier: media[index] for index in gone}
        fields = {
            identifier: self._process(part, self._key(identifier, request.cache_salt), generation)
            for identifier, part in contents.items()
        }
        items = [
            MultimodalItem(item.modality, fields.get(item.identifier, item.fields), item.placeholder, item.identifier)
            for item in request.items
        ]
        return MultimodalRequest(
            request.request_id, request.token_ids, items, cache_salt=request.cache_salt, adapter=request.adapter
        )

    def _key(self, identifier: str, salt: str | None) -> str:
        # Requests of different salts share nothing, so that no tenant learns from the time what another has shown.
        return identifier if salt is None else self.hasher.digest(identifier, salt=salt)

    def _process(self, media: Media, key: str, generation: Generation) -> ItemFields:
        def process() -> ItemFields:
            generation.preprocessed += 1
            batch = self.adapter.process([media])
            (fields,) = split_fields(batch, self.adapter.configs(batch))[media.modality]
            return fields

        fields = self.features.get_or_process(key, process)
        self._metadata[key] = _metadata_of(fields)
        return fields


def _metadata_of(fields: ItemFields) -> ItemFields:
    """The `keep_on_cpu` fields alone, in memory of their own."""
    kept = {name: fields.config(name) for name in fields if fields.config(name).keep_on_cpu}
    return ItemFields({name: copy.deepcopy(fields[name]) for name in kept}, kept)
