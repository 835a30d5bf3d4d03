"""The worker's side: steps in order, what is lacking asked for, what was read given back.

Messages may come out of order or twice; those of an epoch that is over are dropped. A receiver that has lost track
starts a new epoch, and the scheduler says everything again.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from torch import Tensor

from mmcache.errors import ConfigError, MessageError
from mmcache.fields import FieldValue
from mmcache.ipc.channel import Channel, listener, waiter
from mmcache.ipc.messages import Hello, Part, Payload, Piece, Report, Resend, Step, Welcome, decode, encode
from mmcache.ipc.mirror import ItemPayload, Mirror
from mmcache.ipc.plans import decode_plan
from mmcache.ipc.reader import ArenaReader
from mmcache.ipc.step import RowStore, WorkerPart, WorkerStep
from mmcache.ipc.unpack import Watermark, unpack_fields
from mmcache.ipc.values import Bytes
from mmcache.ipc.wire import Body, Frame, Kind, body_parts, inline_frame, parse_body, parse_frame
from mmcache.planning import ItemStatus

__all__ = ["Receiver"]

# More messages ahead of one that has not come than this mean that it was lost.
_MAX_EARLY = 4096


class Receiver:
    """Receives the steps of one scheduler. For one thread at a time; tensors may be dropped in any thread.

    Attributes:
        worker: the worker's name, as the scheduler added it.
        epoch: number of this receiver's present life, growing on one host.
        stale: messages dropped because they were of another epoch, or came twice.
    """

    def __init__(
        self, channel: Channel, worker: str, *, store: RowStore | None = None, reads_payload: bool = True
    ) -> None:
        """Make a receiver and say hello.

        Args:
            channel: to the scheduler.
            worker: its name.
            store: where rows are kept; plans are applied to it in order. None for a worker that keeps none.
            reads_payload: False for later pipeline stages, which need tokens, plans and metadata only.

        Raises:
            ConfigError: a store without payload: rows that it lacks could not be made; no channel, or no name.
        """
        if not isinstance(channel, Channel):
            raise ConfigError("the scheduler is spoken to over a channel", expected="a Channel", found=repr(channel))
        if not isinstance(worker, str) or not worker:
            raise ConfigError("a worker's name is a non-empty string", found=repr(worker))
        asked = ("handles", "apply", "rows")
        if store is not None and (isinstance(store, type) or not all(hasattr(store, name) for name in asked)):
            raise ConfigError("rows are kept in a store", expected="an EmbeddingStore", found=repr(store))
        if store is not None and not reads_payload:
            raise ConfigError("a worker that keeps rows reads payload", found="a store and reads_payload=False")
        self.worker = worker
        self.epoch = 0
        self.stale = 0
        self._channel = channel
        self._store = store
        self._reads_payload = reads_payload
        self._session = 0
        self._arena_path = ""
        self.reset(channel)

    def reset(self, channel: Channel | None = None) -> None:
        """Start a new epoch: forget all requests and steps, and join again.

        Args:
            channel: to a scheduler that was started anew; None: the same as before.
        """
        self.epoch = max(self.epoch + 1, time.monotonic_ns())
        self._reader: ArenaReader | None = None
        self._mirrors: dict[int, Mirror] = {}
        self._over: list[Mirror] = []  # of requests that are over; freed when nobody waits for a step
        self._expected = 1
        self._early: dict[int, Frame] = {}
        self._waiting: WorkerStep | None = None
        self._unwritten = 0  # message of the step that waits for its payload to be written
        self._unchecked: list[tuple[int, int, int]] = []  # places of that payload
        self._written: set[int] = set()  # messages whose payload was written before they were taken in
        self._lost: list[tuple[int, list[tuple[int, list[int]]]]] = []
        self._promised: dict[int, set[int]] = {}  # step's message to the handles that it encodes
        self._finished, self._released = Watermark(), Watermark()
        self._reading: dict[int, int] = {}  # step's message to the regions that tensors still show
        self._gone: deque[int] = deque()  # one entry a region that no tensor shows any more
        if channel is not None:
            self._channel = channel
            self._wait, self._listen = waiter(channel), listener(channel)
            self._session = 0
        if self._session:
            self._join()
        else:
            self._say(Kind.HELLO, self._hello())

    def next(self, timeout: float | None = 0.0) -> WorkerStep | None:
        """The next step, in the order in which they were sent.

        Args:
            timeout: seconds to wait for one; None waits for ever.

        Returns:
            The step, or None where none is ready in time.

        Raises:
            MessageError: a message is malformed or contradicts what is here, or its payload was not written; it is
                dropped. `reset` starts anew.
            EOFError, OSError: the scheduler is gone; `reset` with a channel to the next one.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._gone:
                self.acknowledge()
            if self._early or self._waiting is not None:
                step = self._advance()
                if step is not None:
                    return step
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait(left):
                return None
            self._handle(parse_frame(self._listen()))

    def acknowledge(self) -> None:
        """Give back what no tensor shows any more; `next` does it too."""
        changed = False
        while self._gone:
            sequence = self._gone.popleft()
            self._reading[sequence] -= 1
            changed |= self._release(sequence)
        if changed:
            self._report()

    def _release(self, sequence: int) -> bool:
        if self._reading.get(sequence, 0) or sequence not in self._finished:
            return False
        self._reading.pop(sequence, None)
        self._released.add(sequence)
        return True

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.WELCOME:
            if frame.epoch == self.epoch and not self._session:
                self._session = frame.session
                self._arena_path = decode(Welcome, _inline(frame).header).path
                self._join()
        elif frame.session != self._session or frame.epoch != self.epoch:
            self.stale += 1
        elif frame.kind is Kind.STEP:
            if frame.sequence < self._expected or frame.sequence in self._early:
                self.stale += 1
            elif len(self._early) >= _MAX_EARLY:
                raise MessageError("a message was lost", expected=self._expected, found=frame.sequence)
            else:
                self._early[frame.sequence] = frame
        elif frame.kind is Kind.WRITTEN:
            self._take_written(frame.sequence)
        elif frame.kind is Kind.RESEND:
            self._take_resend(frame)
        else:
            raise MessageError("a scheduler sends steps", found=frame.kind.name)

    def _join(self) -> None:
        if self._arena_path:
            try:
                self._reader = ArenaReader(self._arena_path, self.epoch)
            except ConfigError:
                self._reader = None  # no shared memory with the scheduler: its messages carry the bytes
        self._say(Kind.HELLO, self._hello())

    def _hello(self) -> Hello:
        held = () if self._store is None else self._store.handles()
        attached = self._reader is not None
        return Hello(worker=self.worker, attached=attached, reads_payload=self._reads_payload, held=list(held))

    def _advance(self) -> WorkerStep | None:
        while self._waiting is None and self._expected in self._early:
            # A message that raises is gone, and never acknowledged: only a new epoch goes on.
            number = self._expected
            frame = self._early.pop(number)
            ahead = frame.ahead and number not in self._written
            self._written.discard(number)
            body = self._body(frame)
            step = self._begin(number, decode(Step, body.header), body, ahead)
            self._expected += 1
            if not step.parts:
                step.done()
            elif self._lost or ahead:
                self._waiting = step
                self._unwritten = number if ahead else 0
                if self._lost:
                    self._report()
            else:
                return step
        if self._waiting is not None and not self._lost and not self._unwritten:
            step, self._waiting = self._waiting, None
            return step
        return None

    def _begin(self, sequence: int, message: Step, body: Body, ahead: bool) -> WorkerStep:
        """Take a step's message in, perhaps ahead of its payload; nothing is taken or applied if it raises."""
        self._unchecked = []
        if message.ended:
            self._over += [self._mirrors.pop(uid) for uid in message.ended if uid in self._mirrors]
        for delta in message.deltas:
            mirror = self._mirrors.get(delta.uid) or Mirror(delta)
            mirror.extend(delta, body)
            self._mirrors[delta.uid] = mirror
        values: dict[object, dict[str, FieldValue]] = {}
        parts = [self._part(sequence, part, body, values, ahead) for part in message.parts]
        epoch = self.epoch

        def done() -> None:
            if self.epoch == epoch:
                self._finish(sequence)

        step = WorkerStep(message.step, parts, done)
        if self._store is not None:
            self._lost = self._lacking(sequence, parts, self._store)
        return step

    def _lacking(
        self, sequence: int, parts: list[WorkerPart], store: RowStore
    ) -> list[tuple[int, list[tuple[int, list[int]]]]]:
        """Apply the plans; what of their rows is not here and comes from no step before this one, for a report."""
        promised = {handle for handles in self._promised.values() for handle in handles}
        lost = []
        for number, part in enumerate(parts):
            missing = {item.handle for item in part.plan.items if item.status is ItemStatus.MISSING}
            # An encode that is in flight is one of this worker's own steps, or was, in an epoch that is over.
            indices = part.lack(set(store.apply(part.expecting()).lost) - promised)
            if indices:
                lost.append((number, indices))
            promised |= missing
        self._promised[sequence] = {
            item.handle for part in parts for item in part.plan.items if item.status is ItemStatus.MISSING
        }
        return [(sequence, lost)] if lost else []

    def _part(
        self, sequence: int, part: Part, body: Body, values: dict[object, dict[str, FieldValue]], ahead: bool
    ) -> WorkerPart:
        mirror = self._mirrors.get(part.uid)
        if mirror is None:
            raise MessageError("a plan is for a request that is here", found=f"request number {part.uid}")
        plan = decode_plan(part, mirror)
        payload = {}
        for one in part.payloads:
            if one.index >= plan.num_items:
                raise MessageError("payload is for an item", request_id=plan.request_id, found=one.index)
            payload[one.index] = self._payload(sequence, one, body, values, ahead)
        if plan.items and self._reads_payload:
            missing = sorted(set(plan.missing) - payload.keys())
            if missing:
                raise MessageError("a step brings the payload to encode", request_id=plan.request_id, found=missing)
        return WorkerPart(plan, mirror, self._store, payload)

    def _payload(
        self,
        sequence: int,
        payload: Payload,
        body: Body,
        values: dict[object, dict[str, FieldValue]],
        ahead: bool = False,
    ) -> ItemPayload:
        fields: dict[str, FieldValue] = {}
        for piece in payload.pieces:
            key = piece.place if piece.place is not None else piece.buffer
            if key not in values:
                values[key] = unpack_fields(piece.fields, self._block(sequence, piece, body, ahead))
            fields.update(values[key])
        if not payload.embeds:
            if {spec.name for spec in payload.specs} != fields.keys():
                raise MessageError("payload is the fields that its configs name", found=sorted(fields))
            return ItemPayload(fields, payload.specs)
        (value,) = fields.values() if len(fields) == 1 else (None,)
        if not isinstance(value, Tensor) or value.dim() != 2:
            raise MessageError("client-given embeddings are one tensor [rows, width]", found=sorted(fields))
        return ItemPayload({}, [], value)

    def _block(self, sequence: int, piece: Piece, body: Body, ahead: bool) -> Bytes:
        if piece.place is None:
            return np.frombuffer(bytearray(body.buffer(piece.buffer)), np.uint8)
        if self._reader is None:
            raise MessageError("payload lies in an arena that this worker does not read")
        gone = self._gone
        if ahead:
            block = self._reader.array_ahead(*piece.place[:2], lambda: gone.append(sequence))
            self._unchecked.append(piece.place)
        else:
            block = self._reader.array(*piece.place, lambda: gone.append(sequence))
        self._reading[sequence] = self._reading.get(sequence, 0) + 1
        return block

    def _take_written(self, sequence: int) -> None:
        """The payload of a step is written."""
        if sequence == self._unwritten:
            if self._reader is not None:
                for place in self._unchecked:
                    self._reader.check(*place)
            self._unwritten = 0
        elif self._expected <= sequence < self._expected + _MAX_EARLY:
            self._written.add(sequence)
        else:
            self.stale += 1

    def _take_resend(self, frame: Frame) -> None:
        step = self._waiting
        if step is None or not self._lost or self._lost[0][0] != frame.sequence:
            self.stale += 1
            return
        body = self._body(frame)
        message = decode(Resend, body.header)
        values: dict[object, dict[str, FieldValue]] = {}
        answers = dict(message.payloads)
        failed = dict(message.failed)
        for number, indices in self._lost[0][1]:
            if number in failed:
                continue
            payloads = {p.index: self._payload(frame.sequence, p, body, values) for p in answers.get(number, ())}
            if sorted(payloads) != indices:
                raise MessageError("what was lost comes again", expected=indices, found=sorted(payloads))
            step.parts[number].supply(payloads)
        for number in sorted(failed, reverse=True):
            if number < len(step.parts):
                part = step.parts.pop(number)
                step.failed[part.request_id] = tuple(failed[number])
        self._lost = []

    def _body(self, frame: Frame) -> Body:
        if frame.region is None:
            return _inline(frame)
        if self._reader is None:
            raise MessageError("a message lies in an arena that this worker does not read")
        return parse_body(self._reader.view(*frame.region))

    def _finish(self, sequence: int) -> None:
        self._finished.add(sequence)
        self._promised.pop(sequence, None)
        self._release(sequence)
        self._report()
        self._over.clear()

    def _report(self) -> None:
        report = Report(
            taken=self._expected - 1,
            finished=(self._finished.upto, sorted(self._finished.beyond)),
            released=(self._released.upto, sorted(self._released.beyond)),
            lost=self._lost,
        )
        self._say(Kind.REPORT, report)

    def _say(self, kind: Kind, header: Hello | Report) -> None:
        frame = inline_frame(kind, self._session, self.epoch, 0, body_parts(encode(header)))
        self._channel.send_bytes(frame)


def _inline(frame: Frame) -> Body:
    if frame.body is None:
        raise MessageError("the message carries its body", found=frame.kind.name)
    return parse_body(frame.body)
