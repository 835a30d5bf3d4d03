"""One image, video or audio clip of a request."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmcache.errors import EmbeddingError, RequestError, UnsupportedError
from mmcache.fields import ItemFields
from mmcache.items.placeholders import PlaceholderRange

__all__ = ["MultimodalItem"]


class MultimodalItem:
    """One image, video or audio clip of a request. Immutable."""

    __slots__ = ("_embeds", "_fields", "_identifier", "_modality", "_placeholder")

    def __init__(
        self,
        modality: str,
        fields: ItemFields | None,
        placeholder: PlaceholderRange,
        identifier: str,
        *,
        embeds: Tensor | None = None,
    ) -> None:
        """Make an item.

        Args:
            modality: "image", "video", "audio", or the model's own word.
            fields: what the processor made of it, or None where only metadata travels.
            placeholder: the tokens that stand for it.
            identifier: digest of its content and of all that the encoder's output depends on (see `ContentHasher`).
            embeds: embeddings that the client gave, `[placeholder.num_embeds, width]`; such an item runs no encoder and
                is not stored. None for all others.

        Raises:
            UnsupportedError: there is no placeholder: a cross-attention model's item.
            RequestError: an argument has the wrong type, or fields of another modality.
            EmbeddingError: `embeds` is not a floating-point `[placeholder.num_embeds, width]`.
        """
        if placeholder is None:
            raise UnsupportedError(
                "an item without placeholder tokens, as cross-attention models have them, is out of scope",
                expected="a PlaceholderRange",
                found="None",
            )
        if type(placeholder) is not PlaceholderRange:
            raise RequestError("an item's placeholder is a PlaceholderRange", found=type(placeholder).__name__)
        if type(identifier) is not str or not identifier:
            raise RequestError("an item's identifier is a non-empty string", found=repr(identifier))
        if type(modality) is not str or not modality:
            raise RequestError("an item's modality is a non-empty string", found=repr(modality))
        if fields is not None and type(fields) is not ItemFields:
            raise RequestError("an item's fields are an ItemFields or None", found=type(fields).__name__)
        if fields is not None and fields.modality != modality and fields.modality is not None:
            raise RequestError("the fields belong to another modality", expected=modality, found=fields.modality)
        if embeds is not None:
            _check_embeds(embeds, placeholder)
        self._modality = modality
        self._fields = fields
        self._placeholder = placeholder
        self._identifier = identifier
        self._embeds = embeds

    @property
    def modality(self) -> str:
        """The item's modality, as in its fields' configs."""
        return self._modality

    @property
    def fields(self) -> ItemFields | None:
        """What the processor made of the item, or None where only metadata travels."""
        return self._fields

    @property
    def placeholder(self) -> PlaceholderRange:
        """The tokens that stand for the item."""
        return self._placeholder

    @property
    def identifier(self) -> str:
        """Digest of the item's content and of all that the encoder's output depends on."""
        return self._identifier

    @property
    def embeds(self) -> Tensor | None:
        """Embeddings that the client gave, `[placeholder.num_embeds, width]`, or None."""
        return self._embeds

    def __repr__(self) -> str:
        return f"MultimodalItem({self.modality!r}, {self.identifier[:16]!r}, {self.placeholder!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_item, (self.modality, self.fields, self.placeholder, self.identifier, self.embeds)


def _check_embeds(embeds: Tensor, placeholder: PlaceholderRange) -> None:
    if not isinstance(embeds, Tensor) or embeds.dim() != 2 or not embeds.is_floating_point():
        found = f"{embeds.dtype} {tuple(embeds.shape)}" if isinstance(embeds, Tensor) else type(embeds).__name__
        raise EmbeddingError("client-given embeddings are a floating-point [rows, width]", found=found)
    if embeds.shape[0] != placeholder.num_embeds:
        raise EmbeddingError(
            "client-given embeddings have one row for each embedding position",
            expected=placeholder.num_embeds,
            found=embeds.shape[0],
        )


def _rebuild_item(
    modality: str, fields: ItemFields | None, placeholder: PlaceholderRange, identifier: str, embeds: Tensor | None
) -> MultimodalItem:
    return MultimodalItem(modality, fields, placeholder, identifier, embeds=embeds)
