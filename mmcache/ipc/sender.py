"""The scheduler's side: steps go out, acknowledgements come in.

Nothing is inferred about a worker. What it has is what it acknowledged in its present epoch; everything else is said
again, which costs little, since payload lies in the arena and is named, not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from mmcache.errors import ConfigError, FieldError, MessageError, MissingContentError
from mmcache.fields import ItemFields
from mmcache.ipc.arena import Arena
from mmcache.ipc.channel import Channel
from mmcache.ipc.checks import check_pairs, check_plan, check_request, check_supplied
from mmcache.ipc.compose import Composer
from mmcache.ipc.gather import Gatherer
from mmcache.ipc.links import Links
from mmcache.ipc.messages import Hello, Payload, Report, Resend, Welcome, decode, encode
from mmcache.ipc.payload import Buffers, Held, missing_content, needed_payload
from mmcache.ipc.peers import LostRows, Peer, Sent, StepPart, WorkerReport
from mmcache.ipc.wire import Frame, Kind, body_parts, inline_frame, parse_body, parse_frame
from mmcache.items import MultimodalRequest
from mmcache.planning import StepPlan

__all__ = ["Sender", "SenderStats"]


@dataclass(frozen=True, slots=True)
class SenderStats:
    """Counters of a sender.

    Attributes:
        steps, messages, message_bytes: steps sent; messages sent through channels, and their bytes.
        resends: answers to workers that lacked rows.
        stale: messages of an epoch or session that is over.
        under_way: steps that some worker has not finished or not given back.
        quarantined: epochs that are over, but whose process may still read the arena.
    """

    steps: int
    messages: int
    message_bytes: int
    resends: int
    stale: int
    under_way: int
    quarantined: int


class Sender:
    """Sends steps to any number of workers, each with a state of its own. For one thread at a time.

    Attributes:
        arena: where payload lies.
        session: number of this sender's life, by which workers tell it from one before it.
    """

    def __init__(self, arena: Arena | None) -> None:
        """Make a sender without workers.

        Args:
            arena: shared memory for payload, which stays the caller's to close; None sends all bytes in messages.
        """
        if arena is not None and not isinstance(arena, Arena):
            raise ConfigError("payload lies in an Arena, or in none", found=type(arena).__name__)
        self.arena = arena
        self._links = Links(arena)
        self.session = self._links.session
        self._peers: dict[str, Peer] = {}
        self._requests: dict[str, tuple[MultimodalRequest, int]] = {}
        self._next_uid = 1
        self._steps = self._resends = self._stale = 0
        self._supplied: WeakKeyDictionary[MultimodalRequest, dict[int, ItemFields]] = WeakKeyDictionary()

    @property
    def workers(self) -> dict[str, bool]:
        """The workers by name, and whether each has joined."""
        return {name: peer.epoch > 0 for name, peer in self._peers.items()}

    def add(self, worker: str, channel: Channel) -> None:
        """Talk to a worker over this channel: a new one, or a known one that was started again.

        It joins when its receiver says hello. What was under way for a known worker goes to its next epoch.
        """
        if not isinstance(worker, str) or not worker:
            raise ConfigError("a worker's name is a non-empty string", found=repr(worker))
        if not isinstance(channel, Channel):
            raise ConfigError("workers are spoken to over a channel", expected="a Channel", found=repr(channel))
        peer = self._peers.get(worker)
        if peer is None:
            self._peers[worker] = Peer(worker, channel)
            return
        self._links.end_epoch(peer)
        peer.connect(channel)
        # Nothing old comes over a new channel, and on another machine epochs count from elsewhere.
        peer.newest_epoch = 0

    def remove(self, worker: str) -> None:
        """Forget a worker, and what was under way for it; memory that it may still read is kept until it cannot."""
        peer = self._peers.pop(worker, None)
        if peer is not None:
            self._links.end_epoch(peer)
            self._links.reap()

    def send(self, parts: Sequence[tuple[MultimodalRequest, StepPlan]], *, workers: Iterable[str] | None = None) -> int:
        """Send one step, the same batch to each worker. Workers that have not joined get it when they do.

        Args:
            parts: requests and the plans for them, of one batch. Keep a request's items until it is finished.
            workers: names; None sends to all.

        Returns:
            Number of the step, as `WorkerReport.finished` names it.

        Raises:
            MissingContentError: items to encode came without content, and nobody has it; names one request and all such
                items of it.
            RequestError: a plan is not of its request.
            FieldError: a field cannot travel.
            ConfigError: there is no such worker.
            (All before anything is sent or noted.)
        """
        peers = self._named(workers)
        pairs = check_pairs(parts)
        new: dict[str, tuple[MultimodalRequest, int]] = {}
        joined = [peer for peer in peers if peer.joined]
        # A worker takes the step in while its payload is copied, if none needs the bytes for its message.
        ahead = bool(joined) and all(peer.attached for peer in joined)
        with (
            Composer(self.arena, self._steps + 1) as composer,
            Gatherer(self.arena, self._links.reap, ahead=ahead) as gatherer,
        ):
            try:
                self._gather(composer, gatherer, pairs, new)
                bodies = [(peer, composer.body(peer)) for peer in joined]
                if not bodies:
                    composer.body(Peer("", None))  # nobody has joined: what cannot travel is still refused now
            except BaseException:
                for peer in peers:
                    for _, plan in pairs:
                        peer.owe(plan)
                raise
            self._steps += 1
            self._note(new)
            for peer in peers:
                if not peer.joined:
                    peer.waiting.append(Sent(self._steps, composer.parts))
            self._links.send_step(composer, bodies, gatherer)
        return self._steps

    def poll(self) -> list[WorkerReport]:
        """Take in all that has arrived, without waiting; answers workers that join or that lack rows.

        Returns:
            One report for each worker that there is news of.
        """
        reports = []
        for peer in self._peers.values():
            try:
                while peer.channel is not None and peer.poll(0):
                    self._handle(peer, parse_frame(peer.channel.recv_bytes()))
                while peer.waiting and peer.epoch:
                    self._send_again(peer, peer.waiting.popleft())
            except (OSError, EOFError):
                self._links.break_off(peer)
            except MessageError as error:
                self._links.break_off(peer)
                peer.news.error = error
            report = peer.report()
            if report is not None:
                reports.append(report)
        if self._links.quarantine:
            self._links.reap()
        return reports

    def supply(self, request: MultimodalRequest, fields: Mapping[int, ItemFields]) -> None:
        """Give the content of items that came without it, or whose content was stripped; kept as long as the request.

        Raises:
            RequestError: the request has no such item, or the fields are of another modality; nothing is taken.
            FieldError: a field cannot travel; nothing is taken.
        """
        check_supplied(request, fields)
        self._supplied.setdefault(request, {}).update(fields)

    def finish(self, request: MultimodalRequest | str) -> None:
        """The request is done, rejected or aborted: workers forget it with the next step; idempotent."""
        if not isinstance(request, str):
            check_request(request)
        request_id = request if isinstance(request, str) else request.request_id
        known = self._requests.get(request_id)
        if known is None or (not isinstance(request, str) and known[0] is not request):
            return
        del self._requests[request_id]
        self._forget(known[1])

    def flush(self) -> None:
        """Tell the workers now which requests are over, without a step. For schedulers that fall idle."""
        for peer in self._peers.values():
            if peer.epoch and peer.ended:
                with Composer(self.arena, 0) as composer, Gatherer(self.arena, self._links.reap) as gatherer:
                    self._links.send_step(composer, [(peer, composer.body(peer))], gatherer)

    def stats(self) -> SenderStats:
        """The counters."""
        return SenderStats(
            steps=self._steps,
            messages=self._links.messages,
            message_bytes=self._links.message_bytes,
            resends=self._resends,
            stale=self._stale,
            under_way=sum(len(peer.sent) + len(peer.waiting) for peer in self._peers.values()),
            quarantined=len(self._links.quarantine),
        )

    def _named(self, workers: Iterable[str] | None) -> list[Peer]:
        if workers is None:
            return list(self._peers.values())
        if isinstance(workers, str) or not isinstance(workers, Iterable):
            raise ConfigError("workers are named by a collection of their names", found=repr(workers))
        peers = []
        for name in dict.fromkeys(workers):
            if name not in self._peers:
                raise ConfigError("there is no such worker", found=repr(name), expected=f"one of {sorted(self._peers)}")
            peers.append(self._peers[name])
        return peers

    def _gather(
        self,
        composer: Composer,
        gatherer: Gatherer,
        pairs: Sequence[tuple[MultimodalRequest, StepPlan]],
        new: dict[str, tuple[MultimodalRequest, int]],
    ) -> None:
        """Check a step's parts, and hold what it brings of their items."""
        needed = []
        for request, plan in pairs:
            check_plan(request, plan)
            needed.append(needed_payload(plan))
        if sum(map(len, needed)) > 1:
            for (request, _), indices in zip(pairs, needed):
                gatherer.pin(request, indices)
        for (request, plan), indices in zip(pairs, needed):
            uid = self._uid_of(request, new)
            part = StepPart(request, plan, uid, (request.num_tokens, len(request.items)))
            held, _, error = self._hold(gatherer, request, indices) if indices else ((), (), None)
            if error is not None:
                raise error
            composer.add(part, held)

    def _hold(
        self, gatherer: Gatherer, request: MultimodalRequest, indices: Sequence[int]
    ) -> tuple[Sequence[Held], Sequence[int], MissingContentError | FieldError | None]:
        """The payload of these items; which of them nobody has or cannot travel, and the error that says so."""
        try:
            held, missing = gatherer.hold(request, indices, self._supplied.get(request, {}))
        except FieldError as error:
            return (), [index for index in indices if index == error.item], error
        return held, missing, missing_content(request, missing) if missing else None

    def _uid_of(self, request: MultimodalRequest, new: dict[str, tuple[MultimodalRequest, int]]) -> int:
        known = new.get(request.request_id) or self._requests.get(request.request_id)
        if known is not None and known[0] is request:
            return known[1]
        new[request.request_id] = (request, self._next_uid + len(new))
        return new[request.request_id][1]

    def _note(self, new: dict[str, tuple[MultimodalRequest, int]]) -> None:
        for request_id, known in new.items():
            if request_id in self._requests:
                # Another request under a known name: what workers know of the old one says nothing about this one.
                self.finish(request_id)
            self._requests[request_id] = known
        self._next_uid += len(new)

    def _forget(self, uid: int) -> None:
        peers = self._peers.values()
        told = [p for p in peers if uid in p.known or any(uid in sent.told for sent in p.sent.values())]
        for peer in told:
            peer.known.pop(uid, None)
            for sent in peer.sent.values():
                sent.told.pop(uid, None)
            peer.ended.append(uid)

    def _lives(self, part: StepPart) -> bool:
        known = self._requests.get(part.request.request_id)
        return known is not None and known[1] == part.uid

    def _handle(self, peer: Peer, frame: Frame) -> None:
        if frame.body is None:
            raise MessageError("a worker's message carries its body")
        header = parse_body(frame.body).header
        if frame.kind is Kind.HELLO:
            self._hello(peer, frame, decode(Hello, header))
        elif frame.kind is not Kind.REPORT:
            raise MessageError("a worker sends hello and reports", found=frame.kind.name)
        elif frame.session != self.session or frame.epoch != peer.epoch:
            self._stale += 1
        else:
            self._report(peer, decode(Report, header))

    def _hello(self, peer: Peer, frame: Frame, hello: Hello) -> None:
        if hello.worker != peer.name:
            raise MessageError("another worker speaks on this channel", expected=peer.name, found=hello.worker)
        if frame.session != self.session:
            welcome = encode(Welcome(path="" if self.arena is None else self.arena.path))
            answer = inline_frame(Kind.WELCOME, self.session, frame.epoch, 0, body_parts(welcome))
            self._links.put([(peer, answer)])
        elif frame.epoch <= peer.newest_epoch:
            self._stale += 1
        else:
            self._links.end_epoch(peer)
            peer.epoch = peer.newest_epoch = frame.epoch
            peer.reads_payload = hello.reads_payload
            peer.attached = hello.attached and self.arena is not None and self.arena.reader_lives(frame.epoch)
            peer.news.joined, peer.news.gone, peer.news.held = True, False, tuple(hello.held)

    def _send_again(self, peer: Peer, sent: Sent) -> None:
        """A step that was under way when the worker's last epoch ended, as far as its requests still live."""
        with Composer(self.arena, sent.step) as composer, Gatherer(self.arena, self._links.reap) as gatherer:
            try:
                for part in sent.parts:
                    lives, indices = self._lives(part), needed_payload(part.plan)
                    held, missing, error = self._hold(gatherer, part.request, indices) if lives else ((), indices, None)
                    if error is not None:
                        peer.news.lost.append(LostRows(part.request.request_id, part.plan, tuple(missing), error))
                    if error is not None or not lives:
                        peer.owe(part.plan)
                    else:
                        composer.add(part, held)
                bodies = [(peer, composer.body(peer))] if composer.parts else []
            except BaseException:
                peer.waiting.appendleft(sent)  # the next `poll` tries again
                raise
            if not bodies:
                peer.news.finished.append(sent.step)
            self._links.send_step(composer, bodies, gatherer)

    def _report(self, peer: Peer, report: Report) -> None:
        if report.taken > peer.sequence:
            raise MessageError("a worker takes what was sent", expected=f"<= {peer.sequence}", found=report.taken)
        peer.take_until(report.taken)
        for sequence, sent in list(peer.sent.items()):
            if not sent.finished and _within(report.finished, sequence):
                sent.finished = True
                if sent.step:
                    peer.news.finished.append(sent.step)
            if sent.finished and _within(report.released, sequence):
                del peer.sent[sequence]
                self._links.release(sent.regions)
        for sequence, parts in report.lost:
            lacking = peer.sent.get(sequence)
            if lacking is not None and not lacking.resent and not lacking.finished:
                self._resend(peer, sequence, lacking, parts)

    def _resend(self, peer: Peer, sequence: int, sent: Sent, lost: list[tuple[int, list[int]]]) -> None:
        """Send the payload of rows that a worker lacks, once, for the step that it holds back."""
        buffers = Buffers()
        payloads: list[tuple[int, list[Payload]]] = []
        failed: list[tuple[int, list[int]]] = []
        for number, indices in lost:
            if number >= len(sent.parts) or not {item.index for item in sent.parts[number].plan.items}.issuperset(
                indices
            ):
                raise MessageError("a worker lacks rows of its step", found=(number, indices[:8]))
            part = sent.parts[number]
            with Gatherer(self.arena, self._links.reap) as gatherer:
                held, missing, error = self._hold(gatherer, part.request, indices)
                peer.news.lost.append(LostRows(part.request.request_id, part.plan, tuple(indices), error))
                if error is not None:
                    failed.append((number, list(missing)))
                    continue
                payloads.append((number, [one.describe(self.arena, peer.attached, buffers) for one in held]))
                if peer.attached:
                    sent.regions = [*sent.regions, *gatherer.lend()]
        sent.resent = True
        self._resends += 1
        header = encode(Resend(sequence=sequence, payloads=payloads, failed=failed))
        parts = body_parts(header, buffers.buffers)
        self._links.put([(peer, inline_frame(Kind.RESEND, self.session, peer.epoch, sequence, parts))])


def _within(numbers: tuple[int, list[int]], sequence: int) -> bool:
    """Whether an acknowledgement (all up to, and these beyond) holds a number."""
    return sequence <= numbers[0] or sequence in numbers[1]
