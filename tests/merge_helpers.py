"""What the tests of merges share: rows, items, requests, lookups that hold rows in a dict, and what PyTorch runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Operations(TorchDispatchMode):
    """Counts operations, and the bytes of the storages that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result
