"""One image, video or audio clip of a request."""

from __future__ import annotations

import torch
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
                is not stored. None: the field `image_embeds` (`video_embeds`, ... by modality) where there is one, as
                processors name it; items without run the encoder.

        Raises:
            UnsupportedError: there is no placeholder: a cross-attention model's item.
            RequestError: an argument has the wrong type, or fields of another modality.
            EmbeddingError: `embeds` is not a floating-point `[placeholder.num_embeds, width]`.
        """
        if (
            type(placeholder) is not PlaceholderRange
            or type(identifier) is not str
            or type(modality) is not str
            or not identifier
            or not modality
        ):
            _check_kinds(modality, placeholder, identifier)
        if fields is not None:
            if type(fields) is not ItemFields or fields.modality != modality:
                _check_fields(fields, modality)
            if embeds is None:
                embeds = fields.embeds  # type: ignore[assignment]  # checked below
        if embeds is not None:
            embeds = _checked_embeds(embeds, placeholder)
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


def _check_kinds(modality: object, placeholder: object, identifier: object) -> None:
    if placeholder is None:
        raise UnsupportedError(
            "an item without placeholder tokens, as cross-attention models have them, is out of scope",
            expected="a PlaceholderRange",
            found="None",
        )
    if not isinstance(placeholder, PlaceholderRange):
        raise RequestError("an item's placeholder is a PlaceholderRange", found=type(placeholder).__name__)
    for name, value in (("identifier", identifier), ("modality", modality)):
        if not isinstance(value, str) or not value:
            raise RequestError(f"an item's {name} is a non-empty string", found=repr(value))


def _check_fields(fields: object, modality: str) -> None:
    if not isinstance(fields, ItemFields):
        raise RequestError("an item's fields are an ItemFields or None", found=type(fields).__name__)
    if fields.modality != modality and fields.modality is not None:
        raise RequestError("the fields belong to another modality", expected=modality, found=fields.modality)


def _checked_embeds(embeds: Tensor, placeholder: PlaceholderRange) -> Tensor:
    dense = (
        isinstance(embeds, Tensor) and embeds.layout is torch.strided and not embeds.is_nested and not embeds.is_meta
    )
    if not dense or embeds.dim() != 2 or not embeds.shape[1] or not embeds.is_floating_point():
        found = f"{embeds.dtype} {tuple(embeds.shape)}" if dense else f"a {type(embeds).__name__}"
        raise EmbeddingError("client-given embeddings are a dense floating-point [rows, width]", found=found)
    if embeds.shape[0] != placeholder.num_embeds:
        raise EmbeddingError(
            "client-given embeddings have one row for each embedding position",
            expected=placeholder.num_embeds,
            found=embeds.shape[0],
        )
    return embeds.detach() if embeds.requires_grad else embeds
