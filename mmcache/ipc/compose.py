"""One step's message: its body is made once for all workers that know the same, and in the arena if it is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmcache.errors import ArenaFullError, MMCacheError, RequestError
from mmcache.ipc.arena import Arena
from mmcache.ipc.delta import encode_delta
from mmcache.ipc.messages import Step, encode
from mmcache.ipc.payload import Buffers, Held, give_back
from mmcache.ipc.peers import Peer, StepPart
from mmcache.ipc.plans import encode_plan
from mmcache.ipc.regions import Region
from mmcache.ipc.wire import Kind, body_parts, inline_frame, region_frame
from mmcache.planning import StepPlan

__all__ = ["Composer", "StepBody"]

# Longer bodies are written to the arena once instead of through each worker's channel: a pipe costs two copies and,
# when its buffer is full, a change of process.
_SMALL_BODY = 4096


@dataclass(slots=True)
class StepBody:
    """A body, and what its receiver knows afterwards.

    Attributes:
        parts: pieces of the body.
        told: request to the (tokens, items) that its receiver has then.
        ended: number of requests that it tells to forget.
        owed: handles to drop that no plan of it could name.
        region: where the body lies in the arena; None: it travels in the frame.
    """

    parts: list[bytes | memoryview]
    told: dict[int, tuple[int, int]]
    ended: int
    owed: dict[str, tuple[int, ...]]
    region: Region | None = None

    def frame(self, kind: Kind, session: int, epoch: int, sequence: int) -> bytes:
        """The frame for one worker."""
        region = self.region
        if region is None:
            return inline_frame(kind, session, epoch, sequence, self.parts)
        return region_frame(kind, session, epoch, sequence, (region.offset, region.nbytes, region.serial))


@dataclass(slots=True)
class Composer:
    """Makes the bodies of one step. Holds payload and bodies until `close`, and lends them to workers.

    Attributes:
        arena: where bodies and payload lie, or None.
        step: its number.
        parts: requests and plans.
        held: the payload of each part.
    """

    arena: Arena | None
    step: int
    parts: Sequence[StepPart]
    held: Sequence[Sequence[Held]]
    _bodies: dict[object, StepBody] = field(default_factory=dict)

    def body(self, peer: Peer) -> StepBody:
        """The body for a worker, from what it acknowledged.

        Raises:
            FieldError: metadata that cannot travel.
            RequestError: text that is no Unicode.
        """
        bases = {part.uid: peer.base(part.uid) for part in self.parts}
        key = (tuple(bases.items()), tuple(peer.ended), peer.attached, peer.reads_payload, tuple(peer.owed.items()))
        body = self._bodies.get(key)
        if body is None:
            body = self._bodies[key] = self._compose(bases, peer)
            if peer.attached:
                place_body(self.arena, body)
        return body

    def lend(self, body: StepBody, peer: Peer) -> list[Region]:
        """What a worker reads in the arena for this step, with one reference of its own to each."""
        if self.arena is None or not peer.attached:
            return []
        regions = [region for own in self.held for one in own for region in one.regions]
        regions = regions if peer.reads_payload else []
        if body.region is not None:
            regions.append(body.region)
        for region in regions:
            self.arena.retain(region)
        return regions

    def close(self) -> None:
        """Give back what was held; what was lent stays."""
        for own in self.held:
            give_back(self.arena, own)
        for body in self._bodies.values():
            if self.arena is not None and body.region is not None:
                self.arena.release(body.region)
        self.held, self._bodies = (), {}

    def _compose(self, bases: dict[int, tuple[int, int]], peer: Peer) -> StepBody:
        buffers = Buffers()
        deltas = []
        told = {}
        for part in self.parts:
            request, uid = part.request, part.uid
            now = (request.num_tokens, len(request.items))
            if uid not in told:
                told[uid] = now
                if now != bases[uid] or bases[uid] == (0, 0):
                    try:
                        deltas.append(encode_delta(request, uid, *bases[uid], buffers.add))
                    except MMCacheError as error:
                        raise error.about(request_id=request.request_id) from None
        reads = peer.reads_payload
        owed = dict(peer.owed)
        parts = [
            encode_plan(
                _dropping(part.plan, owed.pop(part.plan.ledger_id, ())),
                part.uid,
                [one.describe(self.arena, peer.attached, buffers) for one in own] if reads else [],
            )
            for part, own in zip(self.parts, self.held)
        ]
        step = Step(step=self.step, ended=peer.ended, deltas=deltas, parts=parts)
        try:
            header = encode(step)
        except (UnicodeEncodeError, OverflowError) as error:
            raise RequestError("the step cannot travel", found=str(error)) from None
        return StepBody(body_parts(header, buffers.buffers), told, len(peer.ended), owed)


def _dropping(plan: StepPlan, more: tuple[int, ...]) -> StepPlan:
    return replace(plan, drop=plan.drop + more) if more else plan


def place_body(arena: Arena | None, body: StepBody) -> None:
    """Write a long body to the arena, if there is room."""
    if arena is not None and sum(map(len, body.parts)) > _SMALL_BODY:
        try:
            body.region = arena.hold_bytes(body.parts)
        except ArenaFullError:
            body.region = None  # it travels in the frame
