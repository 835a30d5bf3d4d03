"""The sender's links: what goes out to a worker, and what comes back of the arena when a worker is no more."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from mmcache.ipc.arena import Arena
from mmcache.ipc.compose import Composer, StepBody
from mmcache.ipc.gather import Gatherer
from mmcache.ipc.peers import Peer, Sent
from mmcache.ipc.regions import Region
from mmcache.ipc.wire import Kind, inline_frame, region_frame

__all__ = ["Links"]


class Links:
    """Sends frames, and keeps what workers of past epochs may still read.

    Attributes:
        arena: where payload lies, or None.
        session: number of the sender's life.
        messages, message_bytes: sent so far.
        quarantine: (epoch, regions) of epochs that are over, but whose process may still read the arena.
    """

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self.session = secrets.randbits(63) | 1
        self.messages = self.message_bytes = 0
        self.quarantine: list[tuple[int, list[Region]]] = []

    def send_step(self, composer: Composer, bodies: Sequence[tuple[Peer, StepBody]], gatherer: Gatherer) -> None:
        """Send a step to workers that have joined, lend them what they read, and write what is not written yet.

        A signal's exception costs nobody else the step: who was being spoken to is given up, the others get both
        messages. Where the copy was interrupted they find that it is not there, and get it when they join again.
        """
        composer.lend()
        frames = []
        written = []
        session = self.session
        ahead = gatherer.unwritten
        for peer, body in bodies:
            number = peer.sequence = peer.sequence + 1
            peer.sent[number] = Sent(composer.step, composer.parts, body.told, body.regions)
            peer.ended, peer.owed = [], body.owed
            waits = ahead and peer.reads_payload
            if body.place:
                frame = region_frame(Kind.STEP, session, peer.epoch, number, body.place, waits)
            else:
                frame = inline_frame(Kind.STEP, session, peer.epoch, number, body.parts, waits)
            frames.append((peer, frame))
            if waits:
                written.append((peer, inline_frame(Kind.WRITTEN, session, peer.epoch, number)))
        if not ahead:
            self.put(frames)
            return
        try:
            self.put(frames)
        finally:
            try:
                gatherer.write()
            finally:
                self.put(written)

    def put(self, frames: Sequence[tuple[Peer, bytes]]) -> None:
        """Send each worker its frame; a channel that is broken ends the worker's epoch."""
        for position, (peer, frame) in enumerate(frames, 1):
            if peer.channel is None:
                continue
            try:
                peer.say(frame)
            except (OSError, EOFError):
                self.break_off(peer)
                continue
            except BaseException:
                # Nobody knows how much of the message went out, and the others must not lack theirs.
                self.break_off(peer)
                self.put(frames[position:])
                raise
            self.messages += 1
            self.message_bytes += len(frame)

    def break_off(self, peer: Peer) -> None:
        """The worker's channel is broken: its steps wait until it joins again."""
        self.end_epoch(peer)
        peer.connect(None)
        peer.news.gone = True

    def end_epoch(self, peer: Peer) -> None:
        """What the worker read stays untouched until nobody can read it any more."""
        epoch = peer.epoch
        regions = peer.leave()
        if regions:
            self.quarantine.append((epoch, regions))

    def reap(self) -> bool:
        """Release what epochs held that nobody reads under any more; whether there were any."""
        if self.arena is None:
            return False
        before = len(self.quarantine)
        alive = []
        for epoch, regions in self.quarantine:
            if self.arena.reader_lives(epoch):
                alive.append((epoch, regions))
            else:
                self.release(regions)
        self.quarantine = alive
        return len(alive) < before

    def release(self, regions: Sequence[Region]) -> None:
        """Give back one reference to each."""
        if self.arena is not None:
            for region in regions:
                self.arena.release(region)
