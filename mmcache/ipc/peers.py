"""What a sender keeps in mind of each worker. Plain records; `Sender` is the one that acts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from mmcache.errors import FieldError, MessageError, MissingContentError
from mmcache.ipc.channel import Channel, speaker, waiter
from mmcache.ipc.regions import Region
from mmcache.items import MultimodalRequest
from mmcache.planning import StepPlan

__all__ = ["LostRows", "News", "Peer", "Sent", "StepPart", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class LostRows:
    """Rows that a plan called stored and that a worker did not have.

    Attributes:
        request_id: of the plan's request.
        plan: the plan.
        items: their indices; the payload of these was sent again.
        error: names those of them that nobody has any more, or one that cannot travel; the worker runs the step without
            this request.
    """

    request_id: str
    plan: StepPlan
    items: tuple[int, ...]
    error: MissingContentError | FieldError | None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """News of one worker.

    Attributes:
        worker: its name.
        epoch: number of its present life; 0 before it joined and after its channel broke.
        joined: whether it started this epoch since the last report: it knows no request of before.
        gone: whether its channel broke; give it a new one with `add`, or `remove` it.
        held: when it joined, the handles whose rows its store had; None in other reports.
        finished: numbers of the steps that it has finished.
        lost: what it did not have.
        error: the malformed message for which its channel was given up, or None.
    """

    worker: str
    epoch: int
    joined: bool = False
    gone: bool = False
    held: tuple[int, ...] | None = None
    finished: tuple[int, ...] = ()
    lost: tuple[LostRows, ...] = ()
    error: MessageError | None = None


class StepPart(msgspec.Struct, frozen=True):
    """One request in a step.

    Attributes:
        request, plan: as they were given.
        uid: the sender's number of the request.
        extent: the (tokens, items) that the request had; it may have grown since.
    """

    request: MultimodalRequest
    plan: StepPlan
    uid: int
    extent: tuple[int, int]


class Sent(msgspec.Struct):
    """A step on its way to one worker.

    Attributes:
        step: the caller's number.
        parts: its requests and plans.
        told: request to the (tokens, items) that the worker has once it took the message; shared with other workers.
        regions: what lies in the arena for it; one reference each, until the worker gives it back.
        finished: whether the worker said that it is done.
        resent: whether what it lacked was sent again.
    """

    step: int
    parts: list[StepPart]
    told: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    regions: Sequence[Region] = ()
    finished: bool = False
    resent: bool = False


@dataclass(slots=True)
class News:
    """What the next report says of a worker."""

    joined: bool = False
    gone: bool = False
    held: tuple[int, ...] | None = None
    finished: list[int] = field(default_factory=list)
    lost: list[LostRows] = field(default_factory=list)
    error: MessageError | None = None


def never(timeout: float | None) -> bool:
    """Whether a message has come where there is no channel."""
    return False


def nobody(message: bytes) -> None:
    """Say something where there is no channel."""


@dataclass(slots=True)
class Peer:
    """One worker.

    Attributes:
        name, channel: as added; no channel after it broke.
        epoch: of its present life; 0 while it has not joined.
        newest_epoch: the largest that it had over this channel.
        attached: whether it reads the arena.
        reads_payload: whether it runs the encoder.
        sequence: number of the last message of this epoch.
        taken: number of the last message that it acknowledged.
        known: request to the (tokens, items) that it acknowledged.
        ended: requests that it knows, or may know, and has to forget.
        sent: by sequence number, steps that are not finished or not given back.
        waiting: steps for a worker that has not joined.
        owed: by ledger, handles to drop that plans named which were not sent.
        news: since the last report.
        poll: whether the channel has a message.
        say: send a message.
    """

    name: str
    channel: Channel | None
    epoch: int = 0
    newest_epoch: int = 0
    attached: bool = False
    reads_payload: bool = True
    sequence: int = 0
    taken: int = 0
    known: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    sent: dict[int, Sent] = field(default_factory=dict)
    waiting: deque[Sent] = field(default_factory=deque)
    owed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    news: News = field(default_factory=News)
    poll: Callable[[float | None], bool] = never
    say: Callable[[bytes], None] = nobody

    def __post_init__(self) -> None:
        self.connect(self.channel)

    @property
    def joined(self) -> bool:
        """Whether the next step can go out to it: it has joined, and all steps before have gone out."""
        return self.epoch > 0 and not self.waiting

    def base(self, uid: int) -> tuple[int, int]:
        """The (tokens, items) of a request that the worker acknowledged."""
        return self.known.get(uid, (0, 0))

    def connect(self, channel: Channel | None) -> None:
        """Speak over another channel, or none."""
        self.channel = channel
        self.poll, self.say = (never, nobody) if channel is None else (waiter(channel), speaker(channel))

    def owe(self, plan: StepPlan) -> None:
        """A plan is not sent; what it tells to drop goes with the next one, or it would be held for ever."""
        if plan.drop:
            self.owed = {**self.owed, plan.ledger_id: self.owed.get(plan.ledger_id, ()) + plan.drop}

    def take_until(self, sequence: int) -> None:
        """The worker acknowledged all messages up to this one."""
        for number in range(self.taken + 1, min(sequence, self.sequence) + 1):
            sent = self.sent.get(number)
            if sent is not None:
                self.known.update(sent.told)
        self.taken = max(self.taken, min(sequence, self.sequence))

    def report(self) -> WorkerReport | None:
        """The news, once."""
        news = self.news
        if not (news.joined or news.gone or news.finished or news.lost):
            return None
        self.news = News()
        return WorkerReport(
            self.name,
            self.epoch,
            news.joined,
            news.gone,
            news.held,
            tuple(news.finished),
            tuple(news.lost),
            news.error,
        )

    def leave(self) -> list[Region]:
        """End the epoch: what was under way waits for the next; returns what lies in the arena for it."""
        regions = [region for sent in self.sent.values() for region in sent.regions]
        under_way = [Sent(sent.step, sent.parts) for sent in self.sent.values() if sent.parts and not sent.finished]
        self.waiting.extendleft(reversed(under_way))
        self.epoch = self.sequence = self.taken = 0
        self.known, self.ended, self.sent = {}, [], {}
        return regions
