"""Bytes of an embedding row, by modality."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Widths"]

_LEARNED = 256
"""Modalities whose width is remembered beside the configured ones. There are few, unless a caller makes them up."""


class Widths(dict[str, int]):
    """As configured, and else as the first rows had it; where too many were learned, the oldest is forgotten."""

    def __init__(self, configured: Mapping[str, int]) -> None:
        super().__init__(configured)
        self._configured = dict(configured)

    def learn(self, modality: str, nbytes: int) -> None:
        """Rows of the modality have so many bytes each, unless it is known already."""
        if modality in self:
            return
        if len(self) - len(self._configured) >= _LEARNED:
            del self[next(name for name in self if name not in self._configured)]
        self[modality] = nbytes

    def relearn(self) -> None:
        """Other weights may have other widths: what was learned is not known any more."""
        for modality in [name for name in self if name not in self._configured]:
            del self[modality]
