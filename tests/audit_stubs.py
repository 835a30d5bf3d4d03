"""Consumers with the kinds of use that made engines take marks back, and with those that made them keep them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmcache.audit import AuditReport
from mmcache.fields import FieldConfig


class Tower(nn.Module):
    """The least encoder: patches to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 8)
        self.table = nn.Embedding(64, 8)


class PatchPositions(Tower):
    """LLaVA-OneVision2: positions of patches are looked up in a table on the device."""

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor, patch_positions: Tensor) -> list[Tensor]:
        rows = self.weight(pixel_values) + self.table(patch_positions).sum(1)
        return list(rows.split(image_grid_thw.prod(-1).tolist()))


class SpeechLengths(Tower):
    """FireRedLID: lengths mask the spectrum, on the spectrum's device."""

    def forward(self, input_features: Tensor, speech_lengths: Tensor) -> Tensor:
        steps = torch.arange(input_features.shape[1], device=input_features.device)
        return self.weight(input_features) * (steps[None] < speech_lengths[:, None])[..., None]


class ChunkLengths(Tower):
    """MOSS-Transcribe-Diarize, as vLLM runs it: lengths of chunks become an attention mask."""

    def forward(self, input_features: Tensor, audio_feature_lengths: Tensor) -> Tensor:
        hidden = self.weight(input_features)
        steps = torch.arange(hidden.shape[1], device=hidden.device).expand(len(hidden), -1)
        scores = hidden @ hidden.transpose(1, 2)
        return (
            scores.masked_fill((steps >= audio_feature_lengths[:, None])[:, None], float("-inf")).softmax(-1) @ hidden
        )


class AudioMask(Tower):
    """Qwen2-Audio, as vLLM runs it: the mask's sums are compared with positions on the device."""

    def forward(self, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
        hidden = self.weight(input_features)
        lengths = (feature_attention_mask.sum(-1) - 1) // 2 + 1
        heard = torch.arange(hidden.shape[1], device=hidden.device)[None] < lengths[:, None]
        return hidden * heard[..., None]


class Resampler(Tower):
    """MiniCPM-V 4.6, as vLLM runs it: target sizes gather from a table of positions on the device."""

    def forward(self, pixel_values: Tensor, tgt_sizes: Tensor) -> Tensor:
        steps = torch.arange(pixel_values.shape[1], device=pixel_values.device)
        columns = steps[None] % tgt_sizes[:, 1:]
        return self.weight(pixel_values) + self.table(columns)


class MovedGrid(Tower):
    """ERNIE 4.5 VL and Isaac: patches are counted on the CPU, and a copy of the grid goes to the device on the way."""

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> list[Tensor]:
        counts = image_grid_thw.prod(-1).tolist()
        sides = image_grid_thw.pin_memory() if image_grid_thw.device.type == "cpu" else image_grid_thw
        sides = sides.to(pixel_values.device, non_blocking=True)[:, 1:].int()
        index = torch.repeat_interleave(
            torch.arange(len(counts), device=pixel_values.device), sides.prod(-1), output_size=sum(counts)
        )
        return list((self.weight(pixel_values) + self.table(index)).split(counts))


class Guarded(Tower):
    """Control flow that depends on data: blank patches are dropped before anything is computed."""

    def forward(self, pixel_values: Tensor, mask: Tensor, limit: Tensor) -> Tensor:
        if not bool(mask.any()):
            return pixel_values.new_zeros((0, 8))
        rows = self.weight(pixel_values[mask.bool()])
        while rows.abs().max() > int(limit):
            rows = rows / 2
        return rows


def patches(count: int = 10) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0))


def sound() -> Tensor:
    return torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


GRID = torch.tensor([[1, 2, 3], [1, 2, 2]])
# Family, the consumer with its kind of use, a batch, and the field whose mark was taken back.
TAKEN_BACK: list[tuple[str, nn.Module, dict[str, Any], str]] = [
    (
        "llava_onevision2",
        PatchPositions(),
        {"pixel_values": patches(), "image_grid_thw": GRID, "patch_positions": torch.arange(30).reshape(10, 3)},
        "patch_positions",
    ),
    (
        "fireredlid",
        SpeechLengths(),
        {"input_features": sound(), "speech_lengths": torch.tensor([6, 3])},
        "speech_lengths",
    ),
    (
        "moss_transcribe_diarize",
        ChunkLengths(),
        {
            "input_features": sound(),
            "audio_feature_lengths": torch.tensor([6, 3]),
            "audio_chunk_counts": torch.tensor([1, 1]),
        },
        "audio_feature_lengths",
    ),
    (
        "qwen2_audio",
        AudioMask(),
        {"input_features": sound(), "feature_attention_mask": torch.tensor([[1] * 12, [1] * 6 + [0] * 6])},
        "feature_attention_mask",
    ),
    (
        "minicpmv4_6",
        Resampler(),
        {"pixel_values": sound(), "tgt_sizes": torch.tensor([[2, 3], [3, 2]])},
        "tgt_sizes",
    ),
]

# An encoder that needs each of its two fields in one place, and how reports are asked

TOWER = Tower()
BATCH: dict[str, Any] = {"pixel_values": patches(), "grid": GRID}


def split_rows(pixel_values: Tensor, grid: Tensor) -> list[Tensor]:
    """Reads the grid for sizes only."""
    return list(TOWER.weight(pixel_values).split(grid.prod(-1).tolist()))


def configs(**kept: bool) -> dict[str, FieldConfig]:
    return {name: FieldConfig.batched("image", keep_on_cpu=mark) for name, mark in kept.items()}


def verdicts(report: AuditReport) -> dict[str, str]:
    return {field.name: str(field.verdict) for field in report.fields}
