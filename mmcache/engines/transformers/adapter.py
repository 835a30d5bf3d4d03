"""What the engine needs to know of a model family, beside the model itself.

An adapter wraps one loaded model of transformers with its tokenizer and processor, and answers: which tokens stand for
an item, which tensors the processor makes of it, which rows the encoder makes of those, and at which positions the
tokens of a prompt lie. Everything else (what is cached, what moves, what is merged) is the same for every family.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmcache.engines.chat import Media
from mmcache.errors import ConfigError, MediaError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.items import MultimodalItem
from mmcache.models import field_configs

__all__ = ["Adapter", "ItemTokens", "Metadata", "processor_settings", "special_token_ids"]

Metadata = Callable[[str], Sequence[Tensor]]
"""`lookup.metadata`, or anything that gives a `keep_on_cpu` field of all items of a request, in order."""

_SPECIAL_TOKENS = (
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<video>",
    "<audio>",
    "<vision_start>",
    "<vision_end>",
    "<audio_bos>",
    "<audio_eos>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
# Settings that say nothing about what a processor makes of an image.
_NOT_SETTINGS = frozenset({"_name_or_path", "processor_class", "auto_map", "transformers_version", "return_tensors"})


def special_token_ids() -> dict[str, int]:
    """The 64 special tokens of the tiny models' tokenizer and their ids; the bytes follow behind them."""
    names = [*_SPECIAL_TOKENS, *(f"<unused_{index}>" for index in range(64 - len(_SPECIAL_TOKENS)))]
    return {name: index for index, name in enumerate(names)}


def processor_settings(processor: Any, overrides: Mapping[str, object] | None = None) -> dict[str, object]:
    """The effective settings of an image processor or feature extractor, for the identity of what it makes.

    Defaults are resolved: a setting given explicitly with its default value, by whatever name or in whatever form the
    processor takes it (`max_pixels`, or a number as size), and one left out, are equal.

    Args:
        processor: any processor of transformers with `to_dict()`.
        overrides: settings of one call, as its keyword arguments; None values do not override.

    Raises:
        ConfigError: the processor refuses an override.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    known = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    resolved = {name: given.pop(name) for name in list(given) if name in known}
    if resolved:
        try:
            processor = type(processor)(**{**copy.deepcopy(processor.to_dict()), **copy.deepcopy(resolved)})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{type(processor).__name__} refuses these settings: {error}", found=resolved) from error
    settings = {name: value for name, value in processor.to_dict().items() if name not in _NOT_SETTINGS}
    settings.update(given)
    # Filter banks follow from the other settings and are large.
    settings.pop("mel_filters", None)
    return {name: _plain(value) for name, value in sorted(settings.items())}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            # Members of enumerations, of resampling filters say, equal their values; so do numpy's own numbers.
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, torch.dtype):
        return str(value)
    # transformers' own size type behaves like a mapping without being one. Whatever else there is stays as it is: who
    # digests it refuses what has no identity.
    keys = getattr(value, "keys", None)
    return value if keys is None else _plain({key: value[key] for key in keys()})  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class ItemTokens:
    """The tokens that stand for an item.

    Attributes:
        before, after: tokens around the placeholder range (a start and an end marker, say).
        body: the tokens of the range.
        is_embed: which tokens of the body receive a row, bool `[len(body)]`; None: all.
    """

    body: list[int]
    is_embed: Tensor | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class Adapter(ABC):
    """Base of the families: the parts that they share. Subclasses say what is special to a family.

    Attributes:
        model: a `...ForConditionalGeneration` of transformers, in evaluation mode.
        levels: how many vectors of the text model's width make one row: 1, or more for DeepStack models.
        revision: what tells its weights from others of the family; part of the cache's namespace.
    """

    model_type: str
    modalities: frozenset[str]

    def __init__(self, model: Any, tokenizer: Any, processor: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.processor = processor
        self.levels = 1
        self.revision = ""

    @property
    def device(self) -> torch.device:
        """Where the model's weights are."""
        return torch.device(self.model.device)

    @property
    def hidden_size(self) -> int:
        """Width of the text model."""
        return int(self.model.config.get_text_config().hidden_size)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of an encoder output."""
        return self.hidden_size * self.levels * int(self.model.dtype.itemsize)

    @cached_property
    def special_ids(self) -> Tensor:
        """Ids that greedy decoding must not choose, int64 on the model's device."""
        return torch.tensor(sorted(self.tokenizer.all_special_ids), device=self.device)

    def token(self, name: str) -> int:
        """Id of a special token."""
        return int(self.tokenizer.convert_tokens_to_ids(name))

    def text_ids(self, text: str) -> list[int]:
        """Tokens of plain text; special tokens that it spells stay text."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def settings(self) -> dict[str, object]:
        """The processor's effective settings, part of every item's identity."""
        return processor_settings(self.processor)

    def process(self, media: Sequence[Media]) -> dict[str, Any]:
        """Decode and preprocess media of one modality into one batch of tensors on the CPU.

        Raises:
            MediaError: one of them cannot be decoded, the processor refuses it, or the family does not take its kind.
        """
        for part in media:
            self.check(part)
        try:
            return self._process(media)
        except MediaError:
            raise
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Processors say so in their own ways, e.g. of an image a hundred times wider than high.
            sources = ", ".join(part.source for part in media)
            raise MediaError(f"{sources} cannot be preprocessed: {error}") from error

    @abstractmethod
    def _process(self, media: Sequence[Media]) -> dict[str, Any]:
        """What the family's processor makes of media that it takes."""

    def check(self, media: Media) -> None:
        """Raise `MediaError` for a modality that the family does not take."""
        if media.modality not in self.modalities:
            raise MediaError(
                f"{self.model_type} takes no {media.modality}: {media.source}",
                found=media.modality,
                expected=" or ".join(sorted(self.modalities)),
            )

    def configs(self, batch: Mapping[str, Any]) -> dict[str, FieldConfig]:
        """Field configs of a batch that `process` made."""
        return dict(field_configs(self.model_type, batch, consumer="transformers"))

    @abstractmethod
    def item_tokens(self, fields: ItemFields) -> ItemTokens:
        """The tokens that stand for an item with these fields."""

    @abstractmethod
    def encode(self, modality: str, kwargs: Mapping[str, Any], counts: Sequence[int]) -> list[Tensor]:
        """Run the model's encoder over joined items.

        Args:
            modality: of all items.
            kwargs: the joined fields, as `encoder_inputs` gives them.
            counts: rows of each item.

        Returns:
            One tensor `[counts[i], hidden_size * levels]` an item, on the model's device.
        """

    def positions(self, token_ids: Tensor, items: Sequence[MultimodalItem], metadata: Metadata) -> Tensor:
        """Positions of all tokens of a prompt, int64 `[axes, len(token_ids)]` on the CPU."""
        return torch.arange(token_ids.numel()).unsqueeze(0)

    def stock_inputs(self, batch: Mapping[str, Any], token_ids: Tensor, kinds: Tensor) -> dict[str, Any]:
        """Arguments of the model's own forward pass for one prompt with all its media, for the run without a cache.

        Args:
            batch: the fields of all media, joined over modalities.
            token_ids: int64 `[1, T]`.
            kinds: int32 `[1, T]`: 0 for text, 1 for an image's, 2 for a video's row token.
        """
        return {"input_ids": token_ids, **batch}

    def embed(self, token_ids: Tensor) -> Tensor:
        """Text embeddings `[..., hidden_size]` of int64 tokens."""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def decode(
        self, inputs_embeds: Tensor, positions: Tensor, past: Any, mask: Tensor | None, levels: Sequence[Tensor]
    ) -> Tensor:
        """Run the text model over a batch of windows.

        Args:
            inputs_embeds: `[B, W, hidden_size]`, rows merged.
            positions: int64 `[axes, B, W]` on the model's device.
            past: the transformers cache to attend to and to extend.
            mask: int64 `[B, past + W]`, 0 where nothing is; None where nothing is padded.
            levels: DeepStack destinations, `self.levels - 1` of `[B, W, hidden_size]`.

        Returns:
            Hidden states `[B, W, hidden_size]`.
        """
        output = self.model.get_decoder()(
            inputs_embeds=inputs_embeds,
            position_ids=positions[0] if positions.shape[0] == 1 else positions,
            cache=past,
            attention_mask=mask,
            use_cache=True,
            **self.level_arguments(levels),
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def level_arguments(self, levels: Sequence[Tensor]) -> dict[str, Any]:
        """How this family's text model takes its DeepStack levels."""
        return {}

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 of hidden states `[..., hidden_size]`."""
        projected: Tensor = self.model.lm_head(hidden)
        return projected.float()
