"""The adapters of the model families that this engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcache.engines.chat import Audio, Frames, Media, Photo, decode_audio, decode_image
from mmcache.engines.transformers.adapter import Adapter, ItemTokens, Metadata
from mmcache.errors import MediaError
from mmcache.fields import FieldConfig, ItemFields
from mmcache.items import MultimodalItem
from mmcache.models import OnDevice

__all__ = ["Idefics3", "Llava", "Qwen2Audio", "QwenVL"]


class QwenVL(Adapter):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: flat patches, positions in three axes (M-RoPE), DeepStack in Qwen3-VL.

    Videos of Qwen3-VL interleave timestamps with frames and are not taken here.
    """

    def __init__(self, model: Any, tokenizer: Any, processor: Any) -> None:
        super().__init__(model, tokenizer, processor)
        self.model_type = model.config.model_type
        self.modalities = frozenset({"image"} if self.model_type == "qwen3_vl" else {"image", "video"})
        vision = model.config.vision_config
        self.merge = int(vision.spatial_merge_size) ** 2
        self.levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()) or ())

    def _process(self, media: Sequence[Media]) -> dict[str, Any]:
        photos = [part for part in media if isinstance(part, Photo)]
        clips = [part for part in media if isinstance(part, Frames)]
        batch: dict[str, Any] = {}
        if photos:
            images = [decode_image(photo.data, photo.source) for photo in photos]
            batch.update(self.processor(images=images, return_tensors="pt"))
        if clips:
            made = [self._process_frames(clip) for clip in clips]
            batch["pixel_values_videos"] = torch.cat([pixels for pixels, _ in made])
            batch["video_grid_thw"] = torch.stack([grid for _, grid in made])
            if self.model_type == "qwen2_5_vl":
                seconds = [self.processor.temporal_patch_size / clip.fps for clip in clips]
                batch["second_per_grid_ts"] = torch.tensor(seconds)
        return batch

    def _process_frames(self, clip: Frames) -> tuple[Tensor, Tensor]:
        """Frames as the image processor makes them, each `temporal_patch_size` of them joined into one patch."""
        if not clip.frames or clip.fps <= 0:
            raise MediaError(f"{clip.source} needs at least one frame and frames per second above 0", found=clip.fps)
        frames = [decode_image(frame, f"{clip.source}, frame {index}") for index, frame in enumerate(clip.frames)]
        if len({frame.size for frame in frames}) > 1:
            raise MediaError(f"{clip.source} has frames of different sizes", found=[frame.size for frame in frames])
        depth = int(self.processor.temporal_patch_size)
        frames += [frames[-1]] * (-len(frames) % depth)
        single = self.processor(images=frames, temporal_patch_size=1, return_tensors="pt")
        _, height, width = single["image_grid_thw"][0].tolist()
        steps = len(frames) // depth
        area = int(self.processor.patch_size) ** 2
        patches = single["pixel_values"].reshape(steps, depth, height * width, -1, area)
        patches = patches.permute(0, 2, 3, 1, 4).reshape(steps * height * width, -1)
        return patches.contiguous(), torch.tensor([steps, height, width])

    def item_tokens(self, fields: ItemFields) -> ItemTokens:
        """The tokens of one item; see `Adapter.item_tokens`."""
        kind = "image" if "image_grid_thw" in fields else "video"
        count = int(torch.as_tensor(fields[f"{kind}_grid_thw"]).prod()) // self.merge
        return ItemTokens(
            [self.token(f"<{kind}>")] * count, None, (self.token("<vision_start>"),), (self.token("<vision_end>"),)
        )

    def encode(self, modality: str, kwargs: Mapping[str, Any], counts: Sequence[int]) -> list[Tensor]:
        """Run the encoder; see `Adapter.encode`."""
        # The tower makes positions on the grid's device, which has to be its own.
        on_device = OnDevice(self.device)
        if modality == "image":
            output = self.model.get_image_features(kwargs["pixel_values"], on_device(kwargs["image_grid_thw"]))
        else:
            output = self.model.get_video_features(kwargs["pixel_values_videos"], on_device(kwargs["video_grid_thw"]))
        rows = list(output.pooler_output)
        if self.levels > 1:
            rows = [torch.cat(levels, dim=-1) for levels in zip(rows, *output.deepstack_features)]
        return rows

    def positions(self, token_ids: Tensor, items: Sequence[MultimodalItem], metadata: Metadata) -> Tensor:
        """M-RoPE positions `[3, len(token_ids)]`, from the grids of all items."""
        kinds = torch.zeros_like(token_ids, dtype=torch.int32)
        for item in items:
            start = item.placeholder.offset
            kinds[start : start + item.placeholder.length] = 1 if item.modality == "image" else 2
        present = {item.modality for item in items}
        grids: dict[str, Any] = {
            f"{kind}_grid_thw": torch.stack(list(metadata(f"{kind}_grid_thw"))) for kind in sorted(present)
        }
        if "video" in present and self.model_type == "qwen2_5_vl":
            grids["second_per_grid_ts"] = torch.stack(list(metadata("second_per_grid_ts")))
        positions, _ = self.model.model.get_rope_index(token_ids[None], kinds[None], **grids)
        axes: Tensor = positions[:, 0]
        return axes

    def stock_inputs(self, batch: Mapping[str, Any], token_ids: Tensor, kinds: Tensor) -> dict[str, Any]:
        """Arguments of the plain forward pass; see `Adapter.stock_inputs`."""
        return {"input_ids": token_ids, "mm_token_type_ids": kinds, **batch}

    def level_arguments(self, levels: Sequence[Tensor]) -> dict[str, Any]:
        """DeepStack levels as the text model takes them."""
        if not levels:
            return {}
        # Levels are zero where no row is, so they are added everywhere and no mask has to be read on the device.
        width = levels[0].shape[-1]
        everywhere = torch.ones(levels[0].shape[:-1], dtype=torch.bool, device=levels[0].device)
        return {
            "visual_pos_masks": everywhere,
            "deepstack_visual_embeds": [level.reshape(-1, width) for level in levels],
        }


class Llava(Adapter):
    """LLaVA: batched images of one size, as many rows each."""

    model_type = "llava"
    modalities = frozenset({"image"})

    def _process(self, media: Sequence[Media]) -> dict[str, Any]:
        images = [decode_image(photo.data, photo.source) for photo in media if isinstance(photo, Photo)]
        return dict(self.processor(images=images, return_tensors="pt"))

    def item_tokens(self, fields: ItemFields) -> ItemTokens:
        """The tokens of one item; see `Adapter.item_tokens`."""
        return ItemTokens([self.token("<image>")] * int(self.model.config.image_seq_length))

    def encode(self, modality: str, kwargs: Mapping[str, Any], counts: Sequence[int]) -> list[Tensor]:
        """Run the encoder; see `Adapter.encode`."""
        return list(self.model.get_image_features(kwargs["pixel_values"]).pooler_output)


class Idefics3(Adapter):
    """Idefics3 and SmolVLM: an image is cut into tiles; row, column and separator tokens stand between their rows."""

    modalities = frozenset({"image"})

    def __init__(self, model: Any, tokenizer: Any, processor: Any) -> None:
        super().__init__(model, tokenizer, processor)
        self.model_type = model.config.model_type
        vision = model.config.vision_config
        self.rows_per_tile = (vision.image_size // vision.patch_size) ** 2 // model.config.scale_factor**2

    def _process(self, media: Sequence[Media]) -> dict[str, Any]:
        images = [decode_image(photo.data, photo.source) for photo in media if isinstance(photo, Photo)]
        made = self.processor(images=[images], return_row_col_info=True, return_tensors="pt")
        rows, columns = torch.tensor(made["rows"][0]), torch.tensor(made["cols"][0])
        return {
            # The processor's batch is one sample with all tiles of all images behind each other.
            "pixel_values": made["pixel_values"][0],
            "pixel_attention_mask": made["pixel_attention_mask"][0],
            "num_patches": rows * columns + 1,
            "rows": rows,
            "cols": columns,
        }

    def configs(self, batch: Mapping[str, Any]) -> dict[str, FieldConfig]:
        """The family's configs, and those of the tile counts."""
        known = super().configs({name: batch[name] for name in batch if name not in ("rows", "cols")})
        # How the tiles lie decides which tokens stand between them: this engine's own metadata.
        own = {name: FieldConfig.batched("image", keep_on_cpu=True) for name in ("rows", "cols")}
        return {**known, **own}

    def item_tokens(self, fields: ItemFields) -> ItemTokens:
        """The tokens of one item; see `Adapter.item_tokens`."""
        (rows, columns) = (int(fields[name]) for name in ("rows", "cols"))  # type: ignore[arg-type]
        newline = self.text_ids("\n")
        image, fake = [self.token("<image>")] * self.rows_per_tile, self.token("<fake_token_around_image>")
        body: list[int] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                body += [fake, self.token(f"<row_{row}_col_{column}>"), *image]
            body += newline
        body += [*(newline if rows else ()), fake, self.token("<global-img>"), *image, fake]
        return ItemTokens(body, torch.tensor(body) == image[0])

    def encode(self, modality: str, kwargs: Mapping[str, Any], counts: Sequence[int]) -> list[Tensor]:
        """Run the encoder; see `Adapter.encode`."""
        output = self.model.get_image_features(kwargs["pixel_values"][None], kwargs["pixel_attention_mask"][None])
        (rows,) = output.pooler_output
        return list(rows.split(list(counts)))

    def stock_inputs(self, batch: Mapping[str, Any], token_ids: Tensor, kinds: Tensor) -> dict[str, Any]:
        """Arguments of the plain forward pass; see `Adapter.stock_inputs`."""
        pixels = {name: batch[name][None] for name in ("pixel_values", "pixel_attention_mask") if name in batch}
        return {"input_ids": token_ids, **pixels}


class Qwen2Audio(Adapter):
    """Qwen2-Audio: log-mel spectra padded to one length, with a mask that says how much of each is sound."""

    model_type = "qwen2_audio"
    modalities = frozenset({"audio"})

    def _process(self, media: Sequence[Media]) -> dict[str, Any]:
        waves = []
        rate = int(self.processor.sampling_rate)
        for part in (part for part in media if isinstance(part, Audio)):
            samples, found = decode_audio(part.data, part.source)
            if found != rate:
                # Linear interpolation: this engine shows what a cache does, not how audio is best resampled.
                times = np.arange(int(len(samples) * rate / found)) * (found / rate)
                samples = np.interp(times, np.arange(len(samples)), samples).astype(np.float32)
            waves.append(samples)
        made = self.processor(
            waves, sampling_rate=rate, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        mask = made["attention_mask"]
        counts = ((mask.sum(-1) - 1) // 2 + 1 - 2) // 2 + 1
        if int(counts.min()) < 1:
            raise MediaError(f"{media[int(counts.argmin())].source} is too short to make one audio token")
        return {
            "input_features": made["input_features"],
            "feature_attention_mask": mask,
            "audio_num_tokens": counts,
        }

    def item_tokens(self, fields: ItemFields) -> ItemTokens:
        """The tokens of one item; see `Adapter.item_tokens`."""
        count = int(fields["audio_num_tokens"])  # type: ignore[arg-type]
        body = [self.token("<audio>")] * count
        return ItemTokens(body, None, (self.token("<audio_bos>"),), (self.token("<audio_eos>"),))

    def encode(self, modality: str, kwargs: Mapping[str, Any], counts: Sequence[int]) -> list[Tensor]:
        """Run the encoder; see `Adapter.encode`."""
        from transformers.masking_utils import create_bidirectional_mask

        model = self.model.model
        features, mask = kwargs["input_features"], kwargs["feature_attention_mask"]
        lengths = (mask.sum(-1) - 1) // 2 + 1
        longest = (features.shape[-1] - 2) // 2 + 1
        heard = torch.arange(longest, device=mask.device)[None] < lengths[:, None]
        attention = create_bidirectional_mask(
            config=model.audio_tower.config,
            inputs_embeds=features.new_zeros((len(features), longest, 1)),
            attention_mask=heard.long(),
        )
        rows = model.multi_modal_projector(model.audio_tower(features, attention_mask=attention).last_hidden_state)
        return [clip[:count] for clip, count in zip(rows, counts)]

    def stock_inputs(self, batch: Mapping[str, Any], token_ids: Tensor, kinds: Tensor) -> dict[str, Any]:
        """Arguments of the plain forward pass; see `Adapter.stock_inputs`."""
        sound = {name: batch[name] for name in ("input_features", "feature_attention_mask") if name in batch}
        return {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), **sound}
