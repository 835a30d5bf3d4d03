"""One step's message: its body is made once for all workers that know the same, and in the arena if it is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import msgspec

from mmcache.errors import ArenaFullError, MMCacheError, RequestError
from mmcache.ipc.arena import Arena
from mmcache.ipc.delta import encode_delta
from mmcache.ipc.messages import Delta, Step, encode
from mmcache.ipc.payload import Buffers, Held
from mmcache.ipc.peers import Peer, StepPart
from mmcache.ipc.plans import encode_plan
from mmcache.ipc.regions import Region
from mmcache.ipc.wire import body_parts, place_of

__all__ = ["Composer", "StepBody"]

# Longer bodies are written to the arena once instead of through each worker's channel: a pipe costs two copies and,
# when its buffer is full, a change of process.
_SMALL_BODY = 4096
_NOTHING = (0, 0)


class StepBody(msgspec.Struct):
    """A body, and what its receivers know afterwards.

    Attributes:
        parts: pieces of the body.
        told: request to the (tokens, items) that its receivers have then.
        owed: handles to drop that no plan of it could name.
        region: where the body lies in the arena, until it is lent.
        place: the same, for frames; empty: the body travels in them.
        regions: all that its receivers read in the arena.
        readers: how many there are that read it there.
    """

    parts: list[bytes | memoryview]
    told: dict[int, tuple[int, int]]
    owed: dict[str, tuple[int, ...]]
    region: Region | None = None
    place: bytes = b""
    regions: Sequence[Region] = ()
    readers: int = 0


class Composer:
    """Makes the bodies of one step, and lends them and payload to workers. A context manager: gives back the rest.

    Attributes:
        step: its number.
        parts: requests and plans.
    """

    __slots__ = ("_arena", "_bodies", "_held", "parts", "step")

    def __init__(self, arena: Arena | None, step: int) -> None:
        self._arena = arena
        self._bodies: dict[object, StepBody] = {}
        self._held: list[Sequence[Held]] = []
        self.parts: list[StepPart] = []
        self.step = step

    def add(self, part: StepPart, held: Sequence[Held] = ()) -> None:
        """One request's part, and its payload, which the caller holds until the step is sent."""
        self.parts.append(part)
        self._held.append(held)

    def body(self, peer: Peer) -> StepBody:
        """The body for a worker, from what it acknowledged.

        Raises:
            FieldError: metadata that cannot travel.
            RequestError: text that is no Unicode.
        """
        known = [peer.known.get(part.uid, _NOTHING) for part in self.parts]
        ended, owed = peer.ended, peer.owed
        key = (
            (peer.attached, peer.reads_payload, *known, *ended, *owed.items())
            if ended or owed
            else (peer.attached, peer.reads_payload, *known)
        )
        body = self._bodies.get(key)
        if body is None:
            body = self._bodies[key] = self._compose(known, peer)
        body.readers += peer.attached
        return body

    def lend(self) -> None:
        """Give each worker that reads in the arena one reference of its own to what it reads there for this step."""
        arena = self._arena
        if arena is None:
            return
        for body in self._bodies.values():
            for region in body.regions:
                # Of a body's own region the composer's reference becomes that of the first reader.
                more = body.readers - (region is body.region)
                if more:
                    arena.retain(region, more)
            body.region = None

    def __enter__(self) -> Composer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._arena is not None:
            for body in self._bodies.values():
                region, body.region = body.region, None
                if region is not None:
                    self._arena.release(region)
        self._held, self._bodies = [], {}

    def _compose(self, known: Sequence[tuple[int, int]], peer: Peer) -> StepBody:
        buffers = Buffers()
        deltas: list[Delta] = []
        told: dict[int, tuple[int, int]] = {}
        for part, base in zip(self.parts, known):
            request, uid = part.request, part.uid
            if uid not in told:
                now = told[uid] = part.extent
                if now != base or base == _NOTHING:
                    try:
                        deltas.append(encode_delta(request, uid, base, now, buffers.buffers))
                    except MMCacheError as error:
                        raise error.about(request_id=request.request_id) from None
        owed = peer.owed
        parts = []
        for part, held in zip(self.parts, self._held):
            plan = part.plan
            if owed and plan.ledger_id in owed:
                owed = dict(owed)
                plan = replace(plan, drop=plan.drop + owed.pop(plan.ledger_id))
            reads = held and peer.reads_payload
            payloads = [one.describe(self._arena, peer.attached, buffers) for one in held] if reads else []
            parts.append(encode_plan(plan, part.uid, payloads))
        try:
            header = encode(Step(step=self.step, ended=peer.ended, deltas=deltas, parts=parts))
        except (UnicodeEncodeError, OverflowError) as error:
            raise RequestError("the step cannot travel", found=str(error)) from None
        body = StepBody(body_parts(header, buffers.buffers), told, owed)
        if self._arena is not None and peer.attached:
            regions = [region for held in self._held for one in held for region in one.regions]
            body.regions = regions if peer.reads_payload else []
            _place(self._arena, body)
        return body


def _place(arena: Arena, body: StepBody) -> None:
    """Write a long body to the arena, if there is room."""
    if sum(map(len, body.parts)) > _SMALL_BODY:
        try:
            region = body.region = arena.hold_bytes(body.parts)
        except ArenaFullError:
            return  # it travels in the frame
        body.place = place_of(region.offset, region.nbytes, region.serial)
        body.regions = [*body.regions, region]
