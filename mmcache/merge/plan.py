"""`MergePlan`: the rows of a batch of lookups, at their places in the batch's embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmcache.errors import EmbeddingError, RequestError, UnresolvedItemError, WindowError
from mmcache.integers import as_int
from mmcache.items import MultimodalRequest, PlaceholderRange
from mmcache.merge.blocks import Block, evenly_spaced
from mmcache.merge.checks import check_autograd, check_readable, check_rows, is_tensor, overlap, rows_of, share_memory
from mmcache.merge.device import Places, send_places
from mmcache.merge.sources import without_neg
from mmcache.merge.write import write_blocks
from mmcache.planning import needed_items
from mmcache.staging import BITS, staging_for

__all__ = ["MergeLookup", "MergePlan"]

_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


class MergeLookup(Protocol):
    """What a merge asks of a lookup."""

    @property
    def request(self) -> MultimodalRequest:
        """The request."""

    @property
    def window(self) -> tuple[int, int]:
        """(first, end) of the tokens of this step."""

    @property
    def needed(self) -> Sequence[int]:
        """Indices of the items with rows in window or look-ahead."""

    def rows(self, index: int) -> Tensor:
        """Rows of the item, `[num_embeds, width]`; raises UnresolvedItemError where they are not here yet."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The rows of one item that a window takes."""

    lookup: MergeLookup
    index: int
    block: Block


class MergePlan:
    """Where the rows of a batch's items go: made once a step, used for any number of destinations.

    The destination has one row for each token of the windows, in the order of the lookups; rows beyond (padding) stay
    untouched. Placeholder ranges decide, tokens are never looked at. Making a plan copies nothing and needs no rows
    yet: they are asked for when they are written.

    Attributes:
        num_rows: tokens in all windows, so rows that a destination has at least.
    """

    def __init__(self, lookups: Sequence[MergeLookup], *, shift: int = 0, skip_unresolved: bool = False) -> None:
        """Plan the merge of these lookups' windows.

        Args:
            lookups: in the order in which their tokens lie in the batch.
            shift: row j of a window stands for token j + shift, for a draft model that reads ahead. Look up with a
                `lookahead` of as much, so that items which begin there are resolved too. Rows whose token lies beyond
                the request are left alone.
            skip_unresolved: leave the destination as it is (the text embedding) where an item's rows are not here yet,
                instead of raising.

        Raises:
            WindowError: a negative shift.
            RequestError: something that is no lookup, as a `StepPlan` by itself, which holds no rows.
        """
        ahead = as_int(shift)
        if ahead is None or ahead < 0:
            raise WindowError("a merge is shifted by an integer >= 0", found=repr(shift))
        if not isinstance(lookups, Iterable):
            raise RequestError("a merge is of a sequence of lookups", found=type(lookups).__name__)
        self._skip_unresolved = skip_unresolved
        self._parts: list[_Part] = []
        self._places: dict[torch.device, Places] = {}
        base = 0
        for lookup in lookups:
            if not hasattr(lookup, "needed"):
                raise RequestError(
                    "a merge is of lookups, or of what has their request, window, needed and rows(index)",
                    found=type(lookup).__name__,
                )
            start, end = lookup.window
            if ahead:
                request = lookup.request
                first, last = start + ahead, min(end + ahead, request.num_tokens)
                needed: Sequence[int] = needed_items(request, first, last)[2] if first < last else ()
            else:
                first, last, needed = start, end, lookup.needed
            if needed:
                items = lookup.request.items
                for index in needed:
                    block = _block(items[index].placeholder, first, last, base)
                    if block is not None:
                        self._parts.append(_Part(lookup, index, block))
            base += end - start
        self.num_rows = base

    @property
    def is_multimodal(self) -> Tensor:
        """Which rows receive an embedding: bool `[num_rows]`, on the CPU; True also where an item is not here yet."""
        mask = torch.zeros(self.num_rows, dtype=torch.bool)
        for part in self._parts:
            for start, length in part.block.runs or ():
                mask[start : start + length] = True
        return mask

    def safe_token_ids(self, token_ids: Tensor, token_id: int = 0) -> Tensor:
        """A copy of the windows' token ids with `token_id` wherever an embedding row goes.

        Placeholder ids may lie outside the vocabulary of the embedding table; look this copy up instead.

        Args:
            token_ids: integers `[rows]` (or `[1, rows]`) with at least `num_rows` rows, on any device.
            token_id: any id that the table has.

        Raises:
            EmbeddingError: there are fewer ids than `num_rows`, they are no dense tensor of integers, or `token_id` is
                none of that dtype.
        """
        if is_tensor(token_ids) and (token_ids.is_nested or token_ids.layout is not torch.strided):
            raise EmbeddingError("token ids are a dense tensor", found=f"a nested or sparse one of {token_ids.dtype}")
        shape = tuple(token_ids.shape) if isinstance(token_ids, Tensor) else ()
        if not shape or shape[-1] < self.num_rows or any(size != 1 for size in shape[:-1]):
            raise EmbeddingError(
                "token ids have one entry for each token of the windows",
                expected=f"[{self.num_rows}] or more",
                found=shape if isinstance(token_ids, Tensor) else type(token_ids).__name__,
            )
        if token_ids.dtype not in _INTEGERS:
            raise EmbeddingError("token ids are integers", found=token_ids.dtype)
        bounds, filler = torch.iinfo(token_ids.dtype), as_int(token_id)
        if filler is None or not bounds.min <= filler <= bounds.max:
            raise EmbeddingError(
                f"token_id is one of {token_ids.dtype}", expected=f"{bounds.min} to {bounds.max}", found=repr(token_id)
            )
        safe = token_ids.clone(memory_format=torch.contiguous_format)
        if not self._parts:
            return safe
        # As signed integers of that size: of unsigned ones PyTorch fills the smallest only.
        flat = safe.view(-1).view(BITS[safe.element_size()])
        if filler > torch.iinfo(flat.dtype).max:
            filler -= 1 << bounds.bits
        if flat.is_cpu:
            flat[: self.num_rows].masked_fill_(self.is_multimodal, filler)
            return safe
        for part, place in zip(self._parts, self._places_on(flat.device)):
            if place is not None:
                flat.index_fill_(0, place, filler)
            else:
                for start, length, count, pitch in evenly_spaced(part.block.runs or ()):
                    step = pitch or length
                    flat.as_strided((count, length), (step, 1), flat.storage_offset() + start).fill_(filler)
        return safe

    def merge_into(self, inputs_embeds: Tensor, *levels: Tensor) -> Tensor:
        """Write the windows' rows, in place; all is checked before anything is written.

        Rows of width `(1 + len(levels)) * hidden` hold `hidden` columns for each destination, in order (DeepStack);
        rows of width `hidden` are written to `inputs_embeds` alone. In each level the rows of the windows that receive
        nothing become zero. Rows of another floating-point dtype or device are converted and moved. Autograd sees
        what is written as with `merge_embeddings`.

        Args:
            inputs_embeds: `[rows, hidden]` with at least `num_rows` rows (or `[1, rows, hidden]`).
            levels: further destinations of the same hidden size, for DeepStack models. No two destinations have memory
                in common; columns of one buffer, side by side, do not.

        Returns:
            `inputs_embeds`.

        Raises:
            UnresolvedItemError: an item's rows are not here (unless `skip_unresolved`). Names request and item.
            EmbeddingError: a destination is too small, of the wrong kind, overlaps another one or is not to be written
                to (see `merge_embeddings`), or an item's rows are not as many as its slots or not as wide as the
                destinations. Names request and item.
        """
        if not self._parts and not levels:
            self._check_length(inputs_embeds)
            return inputs_embeds
        target = self._destination(inputs_embeds)
        hidden = target.shape[1]
        targets = [target]
        for number, level in enumerate(levels):
            rest = self._destination(level)
            if rest.shape[1] != hidden:
                raise EmbeddingError(
                    f"level {number} is as wide as inputs_embeds", expected=hidden, found=rest.shape[1]
                )
            if any(share_memory(rest, other) for other in targets):
                raise EmbeddingError(
                    f"level {number} is a tensor of its own", found="memory that is written for another destination"
                )
            targets.append(rest)
        resolved = list(self._resolved(targets))
        for number, destination in enumerate(targets):
            check_autograd(destination, [rows for _, rows, _ in resolved if rows.shape[1] > number * hidden])
        if any(t.is_inference() for t in targets) and not torch.is_inference_mode_enabled():
            with torch.inference_mode():  # elsewhere PyTorch refuses to write to it
                self._write_all(targets, resolved)
        else:
            self._write_all(targets, resolved)
        return inputs_embeds

    def _write_all(self, targets: Sequence[Tensor], resolved: Sequence[tuple[_Part, Tensor, int]]) -> None:
        hidden = targets[0].shape[1]
        for level, target in enumerate(targets):
            if level:
                taken = [part.block for part, rows, _ in resolved if rows.shape[1] > hidden]
                _zero_between(target[: self.num_rows], taken)
            self._write(target, resolved, level)

    def _resolved(self, targets: Sequence[Tensor]) -> Iterator[tuple[_Part, Tensor, int]]:
        """The parts whose rows are here, their rows, and their number among all parts.

        Rows that share memory with a destination are copied: they are read before anything is written.
        """
        hidden, num_levels = targets[0].shape[1], len(targets) - 1
        for number, part in enumerate(self._parts):
            try:
                rows = part.lookup.rows(part.index)
            except UnresolvedItemError:
                if self._skip_unresolved:
                    continue
                raise
            request = part.lookup.request
            where: dict[str, Any] = {"request_id": request.request_id, "item": part.index}
            slots = request.items[part.index].placeholder.num_embeds
            if not is_tensor(rows) or rows.is_nested:
                raise EmbeddingError(
                    "an item's rows are a dense tensor",
                    expected=f"[{slots}, width]",
                    found="a nested tensor" if is_tensor(rows) else type(rows).__name__,
                    **where,
                )
            if rows.dim() != 2 or rows.shape[0] != slots:
                raise EmbeddingError(
                    f"the item has {rows.shape[0] if rows.dim() else 0} rows for {slots} slots",
                    expected=f"[{slots}, width]",
                    found=tuple(rows.shape),
                    **where,
                )
            wide = hidden * (1 + num_levels)
            if rows.shape[1] != hidden and rows.shape[1] != wide:
                levels = f" or {wide} ({num_levels} levels)" if num_levels else " (no levels given)"
                raise EmbeddingError(
                    "the item's rows are as wide as the destinations",
                    expected=f"{hidden}{levels}",
                    found=rows.shape[1],
                    **where,
                )
            check_readable(rows, **where)
            check_rows(rows, rows.shape[1], **where)
            rows = without_neg(rows)
            if any(overlap(rows, target) for target in targets):
                rows = rows.clone()
            yield part, rows, number

    def _write(self, target: Tensor, resolved: Sequence[tuple[_Part, Tensor, int]], level: int) -> None:
        hidden = target.shape[1]
        columns = slice(level * hidden, (level + 1) * hidden)
        mine = [entry for entry in resolved if entry[1].shape[1] > columns.start]
        blocks = [(rows if rows.shape[1] == hidden else rows[:, columns], part.block) for part, rows, _ in mine]
        if target.is_cpu:
            write_blocks(target, blocks)
            return
        places = self._places_on(target.device)
        write_blocks(target, blocks, [places[number] for _, _, number in mine])

    def _places_on(self, device: torch.device) -> Sequence[Tensor | None]:
        """Row numbers on a device, sent once for all levels, destinations and steps there."""
        staging = staging_for(device)
        places = self._places.get(device)
        if places is not None:
            return places.on_this_stream(staging)
        places = self._places[device] = send_places([part.block for part in self._parts], staging)
        return places.of

    def _destination(self, tensor: Tensor) -> Tensor:
        self._check_length(tensor)
        return rows_of(tensor)

    def _check_length(self, tensor: Tensor) -> None:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
        if len(shape) < 2 or shape[-2] < self.num_rows or any(size != 1 for size in shape[:-2]):
            raise EmbeddingError(
                "a destination has one row for each token of the windows",
                expected=f"[{self.num_rows} or more, hidden]",
                found=shape if isinstance(tensor, Tensor) else type(tensor).__name__,
            )


def _block(place: PlaceholderRange, start: int, end: int, base: int) -> Block | None:
    """The rows of an item within the tokens `[start, end)`, which lie at `base` and after; None if there are none."""
    offset = place.offset
    low, high = max(start - offset, 0), min(end - offset, place.length)
    if low >= high:
        return None
    first, last = place.embed_rows(low, high)
    if first == last:
        return None
    shift = base + offset - start
    if place.num_embeds == place.length:
        return Block(first, last - first, ((low + shift, high - low),))
    runs = []
    for begin, length in place.runs:
        cut, stop = max(begin, low), min(begin + length, high)
        if cut < stop:
            runs.append((cut + shift, stop - cut))
    return Block(first, last - first, runs)


def _zero_between(target: Tensor, blocks: Sequence[Block]) -> None:
    """Zero the rows of `target` that the blocks leave out."""
    if not target.is_cpu:
        target.zero_()
        return
    done = 0
    for start, length in sorted(run for block in blocks for run in block.runs or ()):
        if start > done:
            target[done:start].zero_()
        done = start + length
    if done < target.shape[0]:
        target[done:].zero_()
