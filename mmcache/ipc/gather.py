"""Payload of one step: found in the arena, or put there, else it rides in the message."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import TracebackType
from typing import cast

from mmcache.errors import ArenaFullError, FieldError
from mmcache.fields import FieldValue, ItemFields
from mmcache.fields.shared import SharedValue
from mmcache.ipc.arena import Arena
from mmcache.ipc.delta import field_spec
from mmcache.ipc.messages import FieldSpec
from mmcache.ipc.payload import Held, HeldPiece
from mmcache.ipc.regions import Region
from mmcache.ipc.values import flatten, is_plain
from mmcache.items import MultimodalItem, MultimodalRequest

__all__ = ["Gatherer"]

_EMBEDS = "embeds"
# From so many bytes on it takes less time to announce a step, write, and say so, than to write and then announce it.
_LARGE = 1 << 20


class Gatherer:
    """Holds what a step reads in the arena. A context manager, which gives it back."""

    __slots__ = ("_arena", "_held", "_later", "_pinned", "_reap")

    def __init__(self, arena: Arena | None, reap: Callable[[], bool], *, ahead: bool = False) -> None:
        """Hold nothing yet.

        Args:
            arena: where payload is put; None puts nothing.
            reap: called when the arena is full; True if it has become less full.
            ahead: whether what is large only gets its place, for `write`; else all is written at once.
        """
        self._arena = arena
        self._reap = reap
        self._held: list[Region] = []  # one reference each
        self._pinned: dict[Hashable, Region] = {}  # one more, until the item has its turn
        self._later: dict[Hashable, Region] | None = {} if ahead else None

    @property
    def unwritten(self) -> bool:
        """Whether anything waits for `write`."""
        return bool(self._later)

    def pin(self, request: MultimodalRequest, indices: Sequence[int]) -> None:
        """Keep what is there of these items until each has its turn: no room is made of what the step itself reads."""
        if self._arena is None:
            return
        for index in indices:
            key = _key_of(request, request.items[index])
            region = None if key in self._pinned else self._arena.pin(key)
            if region is not None:
                self._pinned[key] = region

    def hold(
        self, request: MultimodalRequest, indices: Sequence[int], supplied: Mapping[int, ItemFields]
    ) -> tuple[list[Held], list[int]]:
        """Hold the payload of these items.

        Args:
            request: whose items.
            indices: which.
            supplied: fields that came later than the request, by item.

        Returns:
            (held, missing): `missing` are the items whose content is nowhere.

        Raises:
            FieldError: a value cannot travel.
        """
        held: list[Held] = []
        missing = []
        for index in indices:
            try:
                one = self._hold(request, index, supplied.get(index))
            except FieldError as error:
                raise error.about(request_id=request.request_id, item=index) from None
            if one is None:
                missing.append(index)
            else:
                held.append(one)
        return held, missing

    def write(self) -> None:
        """Write what has a place only."""
        if self._arena is not None and self._later:
            for region in self._later.values():
                self._arena.write(region)

    def lend(self) -> list[Region]:
        """Hand over the references to all that is held."""
        held, self._held = self._held, []
        return held

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        arena = self._arena
        if arena is not None:
            while self._pinned:
                arena.release(self._pinned.popitem()[1])
            while self._held:
                arena.release(self._held.pop())

    def _hold(self, request: MultimodalRequest, index: int, supplied: ItemFields | None) -> Held | None:
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
        embeds = item.embeds is not None
        key = _key_of(request, item)
        kind = (item.placeholder.num_embeds, bool(shared))
        if not own and not shared:
            # It came without its content, or was stripped; perhaps the arena has what somebody of its tenant gave.
            region = self._find(key, kind)
            if region is None:
                return None
            return Held(index, embeds, cast("tuple[FieldSpec, ...]", region.note), (HeldPiece({}, region),))
        pieces = [HeldPiece(own, self._put(key, own, kind, specs))] if own else []
        for name, value in shared.items():
            # Written once for all that share the bits; those of a value on a device are unknown: it is one by itself.
            bits = None if fields is None else fields.shared_value(name).key
            bits = id(value) if isinstance(bits, SharedValue) else bits
            place = self._put((request.cache_salt, "shared", name, bits), {name: value}, None, None)
            pieces.append(HeldPiece({name: value}, place))
        return Held(index, embeds, specs, tuple(pieces))

    def _find(self, key: Hashable, kind: Hashable) -> Region | None:
        if self._arena is None:
            return None
        self._write_now(self._arena, key)
        region = self._arena.find(key, kind=kind)
        if region is not None:
            self._held.append(region)
        self._unpin(self._arena, key)
        return region

    def _put(self, key: Hashable, fields: Mapping[str, FieldValue], kind: Hashable, note: object) -> Region | None:
        arena = self._arena
        if arena is None:
            for name, value in fields.items():
                flatten(value, name)  # what cannot travel is refused here, too
            return None
        self._write_now(arena, key)  # the same content twice in a step: the second is compared with the first
        self._unpin(arena, key)  # what lies there may have to make room for it
        try:
            region = arena.reserve(key, fields, kind=kind, note=note)
        except ArenaFullError:
            if not self._reap():
                return None
            try:
                region = arena.reserve(key, fields, kind=kind, note=note)
            except ArenaFullError:
                return None
        self._held.append(region)
        if region.unwritten is None:
            return region
        # What is not plain memory may yet turn out not to be readable: an error comes before anything is sent.
        later = self._later if region.nbytes >= _LARGE else None
        if later is not None and all(is_plain(tensor) for _, tensor, _ in region.unwritten):
            later[key] = region
        else:
            arena.write(region)
        return region

    def _unpin(self, arena: Arena, key: Hashable) -> None:
        region = self._pinned.pop(key, None)
        if region is not None:
            arena.release(region)

    def _write_now(self, arena: Arena, key: Hashable) -> None:
        region = self._later.pop(key, None) if self._later else None
        if region is not None:
            arena.write(region)


def _key_of(request: MultimodalRequest, item: MultimodalItem) -> Hashable:
    # The salt is part of the key: no tenant reads what another brought by naming its digest.
    return request.cache_salt, item.embeds is not None, item.modality, item.identifier
