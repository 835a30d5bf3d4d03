"""Joining the tensors of a field and sending them to a device: one pass over the bytes on the host, one copy over.

Joining and staging are one: each tensor is written straight to its place in a region of the pinned ring, and the region
goes to its place in the joined device tensor. Large fields go in pieces, so that filling one overlaps sending another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from mmcache.fields import FieldConfig, FieldValue
from mmcache.staging import Event, Staging, fill

__all__ = ["Sender", "leaves"]

# A piece is large enough for full speed on the bus and small enough to overlap with filling the next.
_PIECE_BYTES = 16 << 20
# Alignment of the tensors of a list in their common buffer, in bytes; what device allocators give.
_ALIGNMENT = 512


def leaves(value: FieldValue) -> Iterator[Tensor]:
    """The tensors of a field's value, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for entry in value:
            yield from leaves(entry)


def _rebuilt(value: FieldValue, tensors: Iterator[Tensor]) -> FieldValue:
    if isinstance(value, Tensor):
        return next(tensors)
    return [_rebuilt(entry, tensors) for entry in value]


class Sender:
    """Sends fields, on the side stream; the current stream is made to wait for what it gets, the host is not.

    What is on the device already is joined on the current stream, behind whatever made it.

    Attributes:
        moved_bytes: bytes sent over from the host.
        pageable_bytes: those of them that found no pinned memory.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._streams = staging.streams
        self.device = staging.device
        self.moved_bytes = 0
        self.pageable_bytes = 0

    def join(self, values: Sequence[FieldValue], config: FieldConfig, *, listed: bool) -> FieldValue:
        """The field of several items as the model takes it, on the device.

        Args:
            values: one an item, of shapes that join (`ItemFields.join_key`).
            config: the field's config, batched or flat.
            listed: the processor gave the field as a list, and the model takes one.

        Returns:
            as `join_fields`: batched fields stacked, flat ones concatenated along their `dim`, lists kept.
        """
        if config.layout == "flat" and all(isinstance(value, list) for value in values):
            return self.move([entry for value in values for entry in value])
        tensors = [value for value in values if isinstance(value, Tensor)]
        if listed or len(tensors) < len(values):
            return self.move(list(values))
        if config.layout == "batched":
            tensors, dim = [tensor.unsqueeze(0) for tensor in tensors], 0
        else:
            dim = config.dim
        if all(tensor.is_cpu for tensor in tensors):
            return self._send_joined(tensors, dim)
        there = [tensor if tensor.device == self.device else self.move(tensor) for tensor in tensors]
        return _only_tensor(there[0]) if len(there) == 1 else torch.cat([_only_tensor(t) for t in there], dim)

    def move(self, value: FieldValue) -> FieldValue:
        """The value on the device, nested as it was; its host tensors go over in one copy."""
        tensors = list(leaves(value))
        here = [tensor for tensor in tensors if tensor.is_cpu]
        sent = iter([self._send_joined(here, 0)] if len(here) == 1 else self._send_packed(here) if here else [])
        moved = [next(sent) if t.is_cpu else t.to(self.device, non_blocking=True) for t in tensors]
        return _rebuilt(value, iter(moved))

    def _send_joined(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        first = tensors[0]
        if len(tensors) == 1 and first.is_contiguous() and first.is_pinned():
            with self._streams.side():
                sent = first.detach().to(self.device, non_blocking=True)
                sent_by = self._streams.record()
            self.moved_bytes += first.numel() * first.element_size()
            return self._arrived(sent, sent_by)
        if not first.dim():
            tensors, shape = [first.reshape(1)], ()
        else:
            shape = (*first.shape[:dim], sum(tensor.shape[dim] for tensor in tensors), *first.shape[dim + 1 :])
        with self._streams.side():
            target = torch.empty(shape, dtype=first.dtype, device=self.device)
            flat = target.view(-1)
            event: Event | None = None
            if dim and len(tensors) > 1:
                # The parts of each tensor lie apart in the joined one: stage it whole.
                event = self._send(flat, lambda staged: _write_along(staged.view(shape), tensors, dim))
            else:
                done = 0
                for pieces in _batches(_pieces(tensors)):
                    count = sum(piece.numel() for piece in pieces)
                    event = self._send(flat[done : done + count], partial(_write_behind, tensors=pieces))
                    done += count
        return self._arrived(target, event)

    def _send_packed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of any shapes and dtypes, sent as one buffer of bytes and seen as what they are over there."""
        offsets, total = [], 0
        for tensor in tensors:
            offsets.append(total)
            total += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT

        def seen(buffer: Tensor) -> list[Tensor]:
            return [
                buffer[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
                for start, t in zip(offsets, tensors)
            ]

        def write(staged: Tensor) -> None:
            for part, tensor in zip(seen(staged), tensors):
                fill(part, tensor)

        with self._streams.side():
            target = torch.empty(total, dtype=torch.uint8, device=self.device)
            event = self._send(target, write)
        return seen(self._arrived(target, event))

    def _arrived(self, target: Tensor, event: Event | None) -> Tensor:
        """Hand a tensor that the side stream made over to the current stream."""
        if event is not None:
            self._streams.wait(event)
        self._streams.used(target)
        return target

    def _send(self, target: Tensor, write: Callable[[Tensor], None]) -> Event | None:
        """Let `write` fill a staged tensor, copy that to the one-dimensional `target`, and return the event behind."""
        count = target.shape[0]
        if not count:
            return None
        staged, region = self._staging.take((count,), target.dtype)
        nbytes = count * target.element_size()
        event = None
        try:
            write(staged)
            target.copy_(staged, non_blocking=True)
            event = self._streams.record()
        finally:
            if region is not None:
                region.release(event)
        self.moved_bytes += nbytes
        if region is None:
            self.pageable_bytes += nbytes
        return event


def _write_along(staged: Tensor, tensors: Sequence[Tensor], dim: int) -> None:
    for part, tensor in zip(torch.split(staged, [tensor.shape[dim] for tensor in tensors], dim), tensors):
        fill(part, tensor)


def _write_behind(staged: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        fill(staged[start : start + tensor.numel()].view(tensor.shape), tensor)
        start += tensor.numel()


def _only_tensor(value: FieldValue) -> Tensor:
    return value if isinstance(value, Tensor) else torch.cat(list(leaves(value)))


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors in pieces of at most `_PIECE_BYTES`, where they can be cut without a copy."""
    for tensor in tensors:
        size = max(1, _PIECE_BYTES // tensor.element_size())
        if tensor.is_contiguous() and tensor.numel() > size:
            yield from torch.split(tensor.view(-1), size)
        else:
            yield tensor


def _batches(pieces: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive pieces that together have at most `_PIECE_BYTES`, or one."""
    batch: list[Tensor] = []
    size = 0
    for piece in pieces:
        nbytes = piece.numel() * piece.element_size()
        if batch and size + nbytes > _PIECE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += nbytes
    if batch:
        yield batch
