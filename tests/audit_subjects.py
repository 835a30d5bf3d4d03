"""Models that audits run, built once a process, and the rows of what their encoders return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from mmcache.audit import Subject, load_subject


def subject(model_type: str, attention: str = "sdpa") -> Subject:
    return _subject(model_type, attention)


@cache
def _subject(model_type: str, attention: str) -> Subject:
    return load_subject(model_type, attention=attention)


def rows(output: Any) -> Iterator[Tensor]:
    """All rows, in order, with DeepStack levels behind them."""
    if isinstance(output, Tensor):
        yield output.reshape(-1, output.shape[-1])
    elif isinstance(output, (list, tuple)) and not hasattr(output, "pooler_output"):
        for part in output:
            yield from rows(part)
    elif isinstance(output, Mapping) or hasattr(output, "pooler_output"):
        pooled = getattr(output, "pooler_output", None)
        yield from rows(output.last_hidden_state if pooled is None else pooled)
