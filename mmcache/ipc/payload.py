"""What a step says of payload: where in the arena it lies, or which bytes of the message it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmcache.errors import MissingContentError
from mmcache.fields import FieldValue
from mmcache.ipc.arena import Arena
from mmcache.ipc.messages import FieldSpec, Payload, Piece
from mmcache.ipc.regions import Region
from mmcache.ipc.values import flatten, write_tensor
from mmcache.items import MultimodalRequest
from mmcache.planning import ItemStatus, StepPlan

__all__ = ["Buffers", "Held", "HeldPiece", "missing_content", "needed_payload"]


@dataclass(slots=True)
class Buffers:
    """The buffers of one message."""

    buffers: list[bytes | memoryview] = field(default_factory=list)
    _known: dict[Hashable, int] = field(default_factory=dict)

    def add(self, buffer: bytes | memoryview) -> int:
        """Add a buffer; returns its number."""
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def add_once(self, key: Hashable, make: Callable[[], bytes | memoryview]) -> int:
        """The number of the buffer with this key, added if it is not there."""
        if key not in self._known:
            self._known[key] = self.add(make())
        return self._known[key]


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """Fields that lie together; `region`: where in the arena, or None where they found no room."""

    fields: Mapping[str, FieldValue] = field(repr=False)
    region: Region | None

    def describe(self, arena: Arena | None, attached: bool, buffers: Buffers) -> Piece:
        """For a message; to a worker that is not attached the bytes travel in it."""
        region = self.region
        if region is not None and arena is not None:
            fields = [(name, list(nest), list(leaves)) for name, nest, leaves in region.fields]
            if attached:
                return Piece(place=(region.offset, region.nbytes, region.serial), buffer=0, fields=fields)
            return Piece(place=None, buffer=buffers.add_once(region.serial, lambda: arena.read(region)), fields=fields)
        fields = []
        writes: list[tuple[int, Tensor]] = []
        end = 0
        for name, value in self.fields.items():
            nest, leaves, tensors, end = flatten(value, name, end)
            fields.append((name, nest, leaves))
            writes += zip((offset for _, _, offset in leaves), tensors)

        def write() -> bytes | memoryview:
            block = torch.empty(end, dtype=torch.uint8)
            for offset, tensor in writes:
                write_tensor(block.data_ptr() + offset, tensor)
            return block.numpy().data if end else b""

        # Items that share one field are others all the same: the buffer is the same where all of it is.
        key = tuple((name, id(value)) for name, value in self.fields.items())
        return Piece(place=None, buffer=buffers.add_once(key, write), fields=fields)


@dataclass(frozen=True, slots=True)
class Held:
    """The payload of one item for one step.

    Attributes:
        index: the item.
        embeds: whether it is client-given embeddings.
        specs: the configs of the fields.
        pieces: its own fields, and each field that it shares with others.
    """

    index: int
    embeds: bool
    specs: tuple[FieldSpec, ...]
    pieces: tuple[HeldPiece, ...]

    @property
    def regions(self) -> list[Region]:
        """What of it lies in the arena."""
        return [piece.region for piece in self.pieces if piece.region is not None]

    def describe(self, arena: Arena | None, attached: bool, buffers: Buffers) -> Payload:
        """For a message; to a worker that is not attached the bytes travel in it."""
        pieces = [piece.describe(arena, attached, buffers) for piece in self.pieces]
        return Payload(index=self.index, embeds=self.embeds, specs=list(self.specs), pieces=pieces)


def needed_payload(plan: StepPlan) -> list[int]:
    """The items whose payload a worker needs to run a plan: those to encode, and client-given embeddings."""
    if not plan.items:
        return []
    given = {item.index for item in plan.items if item.handle < 0 and item.status is ItemStatus.STORED}
    return sorted(given.union(plan.missing)) if given else list(plan.missing)


def missing_content(request: MultimodalRequest, missing: Sequence[int]) -> MissingContentError:
    """The error that names all of them, so that a client can resend them in one round."""
    return MissingContentError(
        f"items {list(missing)} have to be encoded, but only their metadata is here",
        request_id=request.request_id,
        item=missing[0],
        items=missing,
    )
