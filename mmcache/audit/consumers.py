"""The real encoder paths of models of transformers, as something that an audit can run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmcache.audit.report import AuditReport
from mmcache.audit.samples import SAMPLES, Batch
from mmcache.audit.tiny import TINY
from mmcache.audit.verdicts import Auditor
from mmcache.errors import ConfigError, MMCacheError, UnsupportedError
from mmcache.models import OnDevice, family, field_configs, field_table

__all__ = ["Subject", "audit_model", "load_subject"]

_AUDITED = f"one of {', '.join(sorted(TINY))}"
_FEATURES = ("get_image_features", "get_video_features", "get_audio_features")


class Subject:
    """A model of transformers with a batch that its encoder takes.

    Attributes:
        model_type: the family.
        model: the model without its language head, in evaluation mode.
        batch: fields and the text around them, on the CPU.
        configs: the family's field configs for the batch.
    """

    def __init__(self, model_type: str, model: Any, batch: Batch) -> None:
        self.model_type = model_type
        self.model = model
        self.batch = batch
        self.configs = field_configs(model_type, batch, strict=True)
        self._auditor = Auditor(self.encoder, batch, positions=self.positions, lengths=self.lengths)
        self.moved = {entry.name for entry in field_table(model_type).fields if entry.moved}

    def encoder(self, *, input_ids: Any = None, **fields: Any) -> Any:
        """Run the encoder over a batch of fields, all modalities; `input_ids` for those that merge on the way.

        What the family's table says the tower's caller copies to the device is copied here.
        """
        on_device = OnDevice(self.model.device)
        fields = {name: on_device(value) if name in self.moved else value for name, value in fields.items()}
        special = _ENCODERS.get(self.model_type)
        if special is not None:
            return special(self.model, {"input_ids": input_ids, **fields})
        return [getattr(self.model, name)(**taken) for name, taken in self._calls(fields)]

    def positions(self, **fields: Any) -> Any:
        """Position ids of the batch's text, computed on the CPU from the fields of all items."""
        rope: Callable[..., Any] | None = getattr(self.model, "get_rope_index", None)
        text = {name: value for name, value in self.batch.items() if name not in self.configs}
        if rope is None or "input_ids" not in text:
            return None
        given = {**text, **fields}
        names = inspect.signature(rope).parameters
        prompts = _PROMPTS[self.model_type](given) if self.model_type in _PROMPTS else [{}]
        calls = [{**given, **prompt} for prompt in prompts]
        return [rope(**{name: value for name, value in call.items() if name in names}) for call in calls]

    def lengths(self, **fields: Any) -> Any:
        """Count what each item owns and how many rows it makes, as whoever cuts the batch into items does."""
        return field_configs(self.model_type, fields), [fields[n].tolist() for n in _ROW_COUNTS if n in fields]

    def audit(self, marks: Mapping[str, bool] | None = None, *, only: Collection[str] | None = None) -> AuditReport:
        """Audit the family's configs, with other `keep_on_cpu` marks where `marks` has a field's name."""
        configs = {
            name: replace(config, keep_on_cpu=(marks or {}).get(name, config.keep_on_cpu))
            for name, config in self.configs.items()
        }
        return self._auditor.audit(configs, only=only)

    def _calls(self, fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        calls = []
        for name in _FEATURES:
            method = getattr(self.model, name, None)
            if method is None:
                continue
            parameters = inspect.signature(method).parameters.values()
            taken = {p.name: fields[p.name] for p in parameters if p.name in fields}
            needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            if needed and all(name in taken for name in needed):
                calls.append((name, taken))
        return calls


def audit_model(
    model: str | Path, *, marks: Mapping[str, bool] | None = None, attention: str = "sdpa"
) -> tuple[Subject, AuditReport]:
    """Audit the field configs of a model of transformers.

    Args:
        model: a folder with a `config.json` and, if there are any, weights; or a `model_type`, of which a tiny model
            with random weights is built.
        marks: field name to `keep_on_cpu`, in place of the family's own marks.
        attention: the attention implementation to run.

    Raises:
        ConfigError: transformers is missing, the model or a field of `marks` is unknown, the model cannot be built or
            its encoder does not run.
    """
    subject = load_subject(model, attention=attention)
    listed = {entry.name for entry in field_table(subject.model_type).fields}
    for name in marks or {}:
        if name not in listed:
            raise ConfigError("the family has no such field", field=name, expected=f"one of {sorted(listed)}")
    try:
        return subject, subject.audit(marks or {})
    except MMCacheError:
        raise
    except Exception as error:  # the model's own, wherever its fields lie
        raise ConfigError(f"the encoder of {subject.model_type} does not run: {_said(error)}") from error


def load_subject(model: str | Path, *, attention: str = "sdpa") -> Subject:
    """Build the model and a batch for it; see `audit_model`."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("the audit of a model needs transformers: pip install mmcache[transformers]") from error
    folder = Path(model)
    weights = None
    if folder.is_dir() and (str(model) not in TINY or (folder / "config.json").is_file()):
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # a config that does not validate raises almost anything
            raise ConfigError(f"{folder} holds no config that transformers knows: {_said(error)}") from error
        model_type = _model_type(config)
        if any((*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))):
            weights = folder
    else:
        model_type = _tiny_type(model)
        config = transformers.AutoConfig.for_model(_CLASS_OF.get(model_type, model_type), **TINY[model_type])
    if model_type not in SAMPLES:
        _names_of(model_type)
        raise ConfigError("no sample batch for this family", found=repr(model_type), expected=_AUDITED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = _build(transformers, config, weights, attention)
    return Subject(model_type, built.eval(), SAMPLES[model_type](config))


def _tiny_type(model: str | Path) -> str:
    """The `model_type` of the tiny model that a name stands for."""
    name = str(model)
    if name in TINY:
        return name
    if isinstance(model, Path) or Path(name).exists() or "/" in name or "\\" in name:
        what = "is no folder" if Path(name).exists() else "does not exist, and nothing is downloaded"
        raise ConfigError(
            f"the model {what}", found=repr(name), expected="a folder with a config.json, or a model_type"
        )
    names = _names_of(name)
    tiny = next((known for known in names if known in TINY), None)
    if tiny is None:
        what = "no tiny model of this family" if names else "no such folder, and no such model"
        raise ConfigError(what, found=repr(name), expected=_AUDITED if names else f"a folder, or {_AUDITED}")
    return tiny


def _names_of(name: str) -> tuple[str, ...]:
    """All names of a family; none if there is no such family."""
    try:
        return family(name).names
    except UnsupportedError:
        raise
    except ConfigError:
        return ()


def _build(transformers: Any, config: Any, weights: Path | None, attention: str) -> Any:
    try:
        if weights is not None:
            return transformers.AutoModel.from_pretrained(weights, attn_implementation=attention, local_files_only=True)
        text = config.get_text_config()
        if getattr(text, "num_hidden_layers", 1) > 1:
            # Encoders are what is audited: of a language model with random weights one layer is plenty.
            text.num_hidden_layers = 1
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:1]
        return transformers.AutoModel.from_config(config, attn_implementation=attention)
    except Exception as error:  # damaged weights and sizes that do not fit, in whatever way it is said
        raise ConfigError(f"transformers cannot build {config.model_type}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """An error of another library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _model_type(config: Any) -> str:
    if config.model_type == "llava" and config.vision_config.model_type == "pixtral":
        return "pixtral"
    return str(config.model_type)


# Fields that say how many rows an item makes.
_ROW_COUNTS = ("audio_num_tokens", "num_img_tokens", "audio_embed_sizes", "num_patches")

# A vision tower by its own name, and the model of transformers that it is the tower of.
_CLASS_OF = {"pixtral": "llava"}


def _tiled(model: Any, fields: Mapping[str, Any]) -> Any:
    # Its processor's batch is one sample with all tiles of all images behind each other.
    return model.get_image_features(fields["pixel_values"][None], fields["pixel_attention_mask"][None])


def _frames_as_images(model: Any, fields: Mapping[str, Any]) -> Any:
    return [
        model.get_image_features(pixel_values=fields[name])
        for name in ("pixel_values", "pixel_values_videos")
        if name in fields
    ]


def _heard(model: Any, fields: Mapping[str, Any]) -> Any:
    """Qwen2-Audio's tower and projector, called as its forward pass calls them on one device."""
    from transformers.masking_utils import create_bidirectional_mask

    features, mask = fields["input_features"], fields["feature_attention_mask"]
    lengths, _ = model.audio_tower._get_feat_extract_output_lengths(mask.sum(-1))
    longest = (features.shape[-1] - 2) // 2 + 1
    heard: Tensor = torch.arange(longest, device=lengths.device)[None] < lengths[:, None]
    attention = create_bidirectional_mask(
        config=model.audio_tower.config,
        inputs_embeds=features.new_zeros((len(features), longest, 1)),
        attention_mask=heard.long(),
    )
    return model.multi_modal_projector(model.audio_tower(features, attention_mask=attention).last_hidden_state)


def _whole(model: Any, fields: Mapping[str, Any]) -> Any:
    names = inspect.signature(model.forward).parameters
    return model(**{name: value for name, value in fields.items() if name in names})


_ENCODERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "idefics3": _tiled,
    "smolvlm": _tiled,
    "internvl": _frames_as_images,
    "qwen2_audio": _heard,
    "phi4_multimodal": _whole,
}


def _omni_prompts(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A prompt in which videos and their sound lie apart, and one in which they are interleaved."""
    named = {"audio_seqlens": given["audio_feature_lengths"], "second_per_grids": given["video_second_per_grid"]}
    apart, interleaved = (
        {**named, "input_ids": ids[None], "attention_mask": mask[None]}
        for ids, mask in zip(given["input_ids"], given["attention_mask"])
    )
    return [{**apart, "use_audio_in_video": False}, {**interleaved, "use_audio_in_video": given["use_audio_in_video"]}]


# Prompts of which `get_rope_index` makes positions, with those of its arguments that are not named like fields.
_PROMPTS: dict[str, Callable[[Mapping[str, Any]], list[dict[str, Any]]]] = {"qwen2_5_omni_thinker": _omni_prompts}
