"""Short ways to make requests and to ask a prefix index."""

from __future__ import annotations

from collections.abc import Sequence

from mmcache import MultimodalItem, MultimodalRequest, PlaceholderRange, PrefixIndex

IMG = 9


def image(identifier: str, offset: int, length: int, is_embed: Sequence[bool] | None = None) -> MultimodalItem:
    return MultimodalItem("image", None, PlaceholderRange(offset, length, is_embed), identifier)


def ask(tokens: Sequence[int], *items: MultimodalItem, **scope: str | None) -> MultimodalRequest:
    return MultimodalRequest("r", list(tokens), items, **scope)


def matched(index: PrefixIndex, request: MultimodalRequest) -> int:
    with index.match(request) as match:
        return match.num_tokens
