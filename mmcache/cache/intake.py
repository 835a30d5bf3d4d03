"""Rows that come into a cache: whether they are those that a lookup asked for, and like those that came before."""

from __future__ import annotations

import torch
from torch import Tensor

from mmcache.errors import EmbeddingError
from mmcache.ledger import EncoderLedger, Ticket
from mmcache.planning import ItemStatus
from mmcache.store import Embeddings, asked_for, check_rows
from mmcache.tiers import Expected

__all__ = ["Embeddings", "Intake"]

_MODALITIES = 256
"""Whose dtypes are remembered. There are a handful, unless a caller makes them up."""


class Intake:
    """Checks rows before anything is stored, and remembers each modality's dtype; its row's bytes the ledger knows."""

    def __init__(self, ledger: EncoderLedger) -> None:
        self._ledger = ledger
        self._dtypes: dict[str, torch.dtype] = {}

    def forget(self) -> None:
        """Other weights may have another dtype."""
        self._dtypes.clear()

    def fits(self, modality: str, rows: Tensor) -> bool:
        """Whether rows from a tier have the width and dtype of those that the encoder makes."""
        row_bytes = self._ledger.row_bytes.get(modality)
        return (
            row_bytes in (None, rows.shape[1] * rows.element_size())
            and self._dtypes.get(modality, rows.dtype) is rows.dtype
        )

    def expected(self, modality: str, num_rows: int) -> Expected:
        """What rows from a tier must be, as far as it is known."""
        row_bytes, dtype = self._ledger.row_bytes.get(modality), self._dtypes.get(modality)
        width = row_bytes // dtype.itemsize if row_bytes is not None and dtype is not None else None
        return Expected(num_rows, width, dtype)

    def check(self, ticket: Ticket, embeddings: Embeddings) -> dict[int, Tensor]:
        """The rows by item index.

        Raises:
            EmbeddingError: an index is not the lookup's to encode, or rows do not fit.
        """
        request, entries = ticket.request, ticket.entries
        missing = ticket.with_status(ItemStatus.MISSING)
        by_index = asked_for(embeddings, missing, request.request_id)
        row_bytes, dtypes = dict(self._ledger.row_bytes), dict(self._dtypes)
        for index, rows in by_index.items():
            item = request.items[index]
            check_rows(rows, item.placeholder.num_embeds, request.request_id, index)
            entry = entries.get(index)
            if entry is None or entry.detached:
                continue  # for this lookup alone, of an encoder before `invalidate` perhaps: no measure for others
            width = rows.shape[1]
            expected = row_bytes.setdefault(item.modality, width * rows.element_size())
            if width * rows.element_size() != expected:
                raise EmbeddingError(
                    f"rows of modality {item.modality!r} have another width or dtype than before or than configured",
                    request_id=request.request_id,
                    item=index,
                    expected=f"{expected} bytes a row",
                    found=f"{width * rows.element_size()} bytes a row ({width} x {rows.dtype})",
                )
            if dtypes.setdefault(item.modality, rows.dtype) is not rows.dtype:
                raise EmbeddingError(
                    f"rows of modality {item.modality!r} have another dtype than before",
                    request_id=request.request_id,
                    item=index,
                    expected=dtypes[item.modality],
                    found=rows.dtype,
                )
        self._dtypes.update(dtypes)
        while len(self._dtypes) > _MODALITIES:
            self._dtypes.pop(next(iter(self._dtypes), ""), None)  # another thread may be at it, too
        return by_index
