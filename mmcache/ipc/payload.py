"""Finding the payload of a step's items: in the arena, else in the message."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from torch import Tensor

from mmcache.errors import ArenaFullError, FieldError, MissingContentError
from mmcache.fields import FieldValue, ItemFields
from mmcache.fields.shared import SharedValue
from mmcache.ipc.arena import Arena
from mmcache.ipc.delta import field_spec
from mmcache.ipc.messages import FieldSpec, Payload, Piece
from mmcache.ipc.regions import Region
from mmcache.ipc.values import flatten, is_plain, write_tensor
from mmcache.items import MultimodalRequest
from mmcache.planning import ItemStatus, StepPlan

__all__ = ["Buffers", "Held", "Later", "give_back", "hold_payload", "missing_content", "needed_payload"]

Later: TypeAlias = dict[Hashable, Region]
"""What a step names in the arena and what is written when its workers have been told of it, by key."""

_EMBEDS = "embeds"
# From so many bytes on it takes less time to announce a step, write, and say so, than to write and then announce it.
_LARGE = 1 << 20


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
    """The payload of one item for one step; the holder has one reference to each piece's region.

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


def hold_payload(
    arena: Arena | None,
    request: MultimodalRequest,
    indices: Sequence[int],
    supplied: Mapping[int, ItemFields],
    reap: Callable[[], bool],
    later: Later | None = None,
) -> tuple[list[Held], list[int]]:
    """Hold the payload of these items.

    Args:
        arena: where it is put; None puts nothing.
        request: whose items.
        indices: which.
        supplied: fields that came later than the request, by item.
        reap: called when the arena is full; True if it has become less full.
        later: gets what is large, which the caller writes; None: all is written at once.

    Returns:
        (held, missing): `missing` are the items whose content is nowhere.

    Raises:
        FieldError: a value cannot travel; nothing is held then.
    """
    held: list[Held] = []
    missing = []
    try:
        for index in indices:
            one = _hold(arena, request, index, supplied.get(index), reap, later)
            if one is None:
                missing.append(index)
            else:
                held.append(one)
    except FieldError as error:
        give_back(arena, held)
        raise error.about(request_id=request.request_id, item=index) from None
    except BaseException:
        give_back(arena, held)
        raise
    return held, missing


def give_back(arena: Arena | None, held: Sequence[Held]) -> None:
    """Release what was held."""
    if arena is not None:
        for one in held:
            for region in one.regions:
                arena.release(region)


def missing_content(request: MultimodalRequest, missing: Sequence[int]) -> MissingContentError:
    """The error that names all of them, so that a client can resend them in one round."""
    return MissingContentError(
        f"items {list(missing)} have to be encoded, but only their metadata is here",
        request_id=request.request_id,
        item=missing[0],
        items=missing,
    )


def _hold(
    arena: Arena | None,
    request: MultimodalRequest,
    index: int,
    supplied: ItemFields | None,
    reap: Callable[[], bool],
    later: Later | None,
) -> Held | None:
    item = request.items[index]
    fields = item.fields if supplied is None else supplied
    own: dict[str, FieldValue] = {}
    shared: dict[str, FieldValue] = {}
    specs: tuple[FieldSpec, ...] = ()
    if item.embeds is not None:
        own = {_EMBEDS: item.embeds}
    elif fields is not None:
        specs = tuple(field_spec(name, fields) for name in fields if not fields.config(name).keep_on_cpu)
        for spec in specs:
            (shared if spec.layout == "shared" else own)[spec.name] = fields[spec.name]
    # The salt is part of the key: no tenant reads what another brought by naming its digest.
    salt, embeds = request.cache_salt, item.embeds is not None
    key = (salt, embeds, item.modality, item.identifier)
    kind = (item.placeholder.num_embeds, bool(shared))
    if not own and not shared:
        # It came without its content, or was stripped; perhaps the arena still has what somebody of its tenant gave.
        if arena is not None and later:
            _write_now(arena, key, later)
        region = None if arena is None else arena.find(key, kind=kind)
        if region is None:
            return None
        return Held(index, embeds, cast("tuple[FieldSpec, ...]", region.note), (HeldPiece({}, region),))
    pieces = [HeldPiece(own, _put(arena, key, own, kind, specs, reap, later))] if own else []
    for name, value in shared.items():
        # Written once for all that share the bits; those of a value on a device are unknown, so it is one by itself.
        bits = None if fields is None else fields.shared_value(name).key
        bits = id(value) if isinstance(bits, SharedValue) else bits
        place = _put(arena, (salt, "shared", name, bits), {name: value}, None, None, reap, later)
        pieces.append(HeldPiece({name: value}, place))
    return Held(index, embeds, specs, tuple(pieces))


def _put(
    arena: Arena | None,
    key: Hashable,
    fields: Mapping[str, FieldValue],
    kind: Hashable,
    note: object,
    reap: Callable[[], bool],
    later: Later | None,
) -> Region | None:
    if arena is None:
        return None
    if later:
        _write_now(arena, key, later)  # the same content twice in a step: the second is compared with the first
    try:
        region = arena.reserve(key, fields, kind=kind, note=note)
    except ArenaFullError:
        if not reap():
            return None
        try:
            region = arena.reserve(key, fields, kind=kind, note=note)
        except ArenaFullError:
            return None
    if region.unwritten is None:
        return region
    # What is not plain memory may yet turn out not to be readable: an error comes before anything is sent.
    if later is not None and region.nbytes >= _LARGE and all(is_plain(tensor) for _, tensor, _ in region.unwritten):
        later[key] = region
        return region
    try:
        arena.write(region)
    except BaseException:
        arena.release(region)
        raise
    return region


def _write_now(arena: Arena, key: Hashable, later: Later) -> None:
    region = later.pop(key, None)
    if region is not None:
        arena.write(region)
