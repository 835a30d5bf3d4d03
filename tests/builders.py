"""Small requests for the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmcache import FieldConfig, ItemFields, MultimodalItem, MultimodalRequest, PlaceholderRange, split_fields

WIDTH = 4
ROW_BYTES = WIDTH * 4


def image_fields(num: int, patches: int = 4) -> list[ItemFields]:
    """`num` images as Qwen lays them out: `pixel_values` `[patches, 2]` flat, `image_grid_thw` kept on the CPU."""
    grid = torch.tensor([[1, 2, patches // 2]] * num).reshape(num, 3)
    batch = {"pixel_values": torch.arange(num * patches * 2, dtype=torch.float32).view(-1, 2), "image_grid_thw": grid}
    configs = {
        "pixel_values": FieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": FieldConfig.batched("image", keep_on_cpu=True),
    }
    return split_fields(batch, configs).get("image", [])


def images(
    *spans: tuple[int, int] | tuple[int, int, Sequence[bool]], ids: Sequence[str] | str = "abcdefghij"
) -> list[MultimodalItem]:
    """One image for each (offset, length[, is_embed]); named a, b, c, ... unless told otherwise."""
    fields = image_fields(len(spans))
    return [
        MultimodalItem("image", fields[i], PlaceholderRange(*span), ids[i])  # type: ignore[arg-type]
        for i, span in enumerate(spans)
    ]


def request(
    name: str,
    num_tokens: int,
    items: Sequence[MultimodalItem] = (),
    *,
    salt: str | None = None,
    adapter: str | None = None,
) -> MultimodalRequest:
    return MultimodalRequest(name, list(range(num_tokens)), items, cache_salt=salt, adapter=adapter)


def rows_of(identifier: str, num_rows: int, width: int = WIDTH) -> Tensor:
    """Rows `[num_rows, width]` that no other content has."""
    seed = sum(ord(char) * 257**place for place, char in enumerate(identifier)) % (2**31)
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
