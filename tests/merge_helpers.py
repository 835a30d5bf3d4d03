"""What the tests of merge plans share: rows, items, requests and lookups that hold rows in a dict."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from mmcache.errors import UnresolvedItemError
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange


def rows(count: int, width: int = 4, dtype: torch.dtype = torch.float32, start: int = 1) -> Tensor:
    return torch.arange(start, start + count * width, dtype=torch.float32).reshape(count, width).to(dtype)


def item(offset: int, length: int, name: str = "a", is_embed: Sequence[bool] | None = None) -> MultimodalItem:
    return MultimodalItem("image", None, PlaceholderRange(offset, length, is_embed), name)


def lookup_of(
    request: MultimodalRequest, window: tuple[int, int], held: dict[int, Tensor], lookahead: int = 0
) -> SimpleNamespace:
    """What a merge asks of a lookup, with rows from a dict."""
    horizon = window[1] + lookahead

    def rows_for(index: int) -> Tensor:
        if index not in held:
            raise UnresolvedItemError("the rows are not here", request_id=request.request_id, item=index)
        return held[index]

    needed = tuple(
        i
        for i, it in enumerate(request.items)
        if (row := it.placeholder.next_row(window[0])) is not None and row < horizon
    )
    return SimpleNamespace(request=request, window=window, needed=needed, rows=rows_for)


def request_of(items: Sequence[MultimodalItem], length: int = 40, name: str = "r") -> MultimodalRequest:
    return MultimodalRequest(name, list(range(length)), items)
