"""The headers of all messages, as msgspec structs: decoding checks types and ranges, and constructs nothing else.

Large and repeated things are columns and buffers: a request's items are a few lists of numbers and one buffer of
metadata, so that a request of many covered items costs microseconds.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from mmcache.errors import MessageError

__all__ = [
    "Column",
    "Delta",
    "FieldSpec",
    "Hello",
    "Part",
    "Payload",
    "Piece",
    "Report",
    "Resend",
    "Step",
    "Welcome",
    "decode",
    "encode",
]

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
LeafSpec = tuple[str, tuple[Natural, ...], Natural]
Place = tuple[Natural, Natural, Natural]


class _Header(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Encoded as an array: names do not travel."""


class FieldSpec(_Header):
    """The config of one field of a schema."""

    name: str
    layout: Annotated[str, msgspec.Meta(pattern="^(batched|flat|shared)$")]
    dim: Natural
    keep_on_cpu: bool
    listed: bool
    batch_size: Natural | None


class Column(_Header):
    """The values of one `keep_on_cpu` field for all new items of one schema, in order.

    Attributes:
        schema, field: numbers of the schema and of the field within it.
        stacked: one tensor `[items, ...]` of all values, or None.
        values: otherwise each distinct value: nest and leaves.
        refs: which of the values each item has.
    """

    schema: Natural
    field: Natural
    stacked: LeafSpec | None
    values: list[tuple[list[int], list[LeafSpec]]]
    refs: list[Natural]


class Delta(_Header):
    """What of a request a worker has not acknowledged: tokens and items from some point on.

    Attributes:
        uid: the sender's number of the request; never used twice in a session.
        request_id, cache_salt, adapter: as in the request.
        tokens_from, items_from: how many of them come before.
        tokens: buffer, int32.
        identifiers, offsets, lengths: one entry an item.
        modality_of: which of `modalities` each item is of; empty where all are of the first.
        run_counts: runs of embedding positions of each item, -1 where every position is one; empty where that is all.
        runs: buffer, int32 `[runs, 2]`: start and length.
        schema_of: which of `schemas` the fields of each item have, -1 where it came without; empty where all have the
            first.
        columns: metadata.
        metadata: buffer that their leaves lie in.
    """

    uid: Natural
    request_id: Text
    cache_salt: str | None
    adapter: str | None
    tokens_from: Natural
    items_from: Natural
    tokens: Natural
    identifiers: list[Text]
    modalities: list[Text]
    modality_of: list[Natural]
    offsets: list[Natural]
    lengths: list[Natural]
    run_counts: list[Annotated[int, msgspec.Meta(ge=-1)]]
    runs: Natural
    schemas: list[list[FieldSpec]]
    schema_of: list[Annotated[int, msgspec.Meta(ge=-1)]]
    columns: list[Column]
    metadata: Natural


class Piece(_Header):
    """Fields that lie together.

    Attributes:
        place: (offset, bytes, serial) in the arena, or None.
        buffer: buffer of this message, where `place` is None.
        fields: name, nest and leaves of each.
    """

    place: Place | None
    buffer: Natural
    fields: list[tuple[str, list[int], list[LeafSpec]]]


class Payload(_Header):
    """Where the fields of an item that its encoder reads lie.

    Attributes:
        index: the item.
        embeds: whether it is the embeddings that the client gave, a single field without a config.
        specs: the configs of the fields.
        pieces: the item's own fields, and each field that it shares with others.
    """

    index: Natural
    embeds: bool
    specs: list[FieldSpec]
    pieces: list[Piece]


class Part(_Header):
    """One plan of a step.

    Attributes:
        uid: of its request.
        plan: (ledger_id, plan_id, epoch, needed_from, lookahead, num_items, first).
        window, drop, bytes, covered: as in the plan.
        items: (index, status, handle, num_rows, nbytes); statuses by their position in `ItemStatus`.
        payloads: for the items that the plan calls missing, and client-given embeddings that it needs.
    """

    uid: Natural
    plan: tuple[str, int, int, Natural, Natural, Natural, Natural]
    window: tuple[Natural, Natural]
    drop: list[int]
    bytes: tuple[Natural, Natural, Natural, Natural, Natural, Natural]
    covered: list[Natural]
    items: list[tuple[Natural, Natural, int, Natural, Natural]]
    payloads: list[Payload]


class Step(_Header):
    """What a worker does next.

    Attributes:
        step: the sender's number of the step, the same for all workers.
        ended: requests to forget, before all else.
        deltas: what is new of the requests.
        parts: the plans, of one batch.
    """

    step: Natural
    ended: list[Natural]
    deltas: list[Delta]
    parts: list[Part]


class Resend(_Header):
    """Payload of items that a worker said it lacks, for a step that it has.

    Attributes:
        sequence: of the step's message.
        payloads: (part, its payloads).
        failed: (part, item indices) of what nobody has any more.
    """

    sequence: Natural
    payloads: list[tuple[Natural, list[Payload]]]
    failed: list[tuple[Natural, list[Natural]]]


class Hello(_Header):
    """A worker starts an epoch; without a session it asks for one.

    Attributes:
        worker: its name.
        attached: whether it reads the arena; otherwise everything rides in messages.
        reads_payload: whether it runs the encoder (the first pipeline stage) or needs tokens and metadata only.
        held: the handles whose rows its store has.
    """

    worker: Text
    attached: bool
    reads_payload: bool
    held: list[int]


class Welcome(_Header):
    """The sender's answer: where its arena is."""

    path: str


class Report(_Header):
    """What a worker acknowledges: sequence numbers, each as (all up to, and these beyond).

    Attributes:
        taken: messages whose deltas it has.
        finished: steps that it has finished.
        released: steps whose payload it does not read any more.
        lost: (sequence, ((part, item indices), ...)) of rows that a plan called stored and that are not there.
    """

    taken: Natural
    finished: tuple[Natural, list[Natural]]
    released: tuple[Natural, list[Natural]]
    lost: list[tuple[Natural, list[tuple[Natural, list[Natural]]]]]


H = TypeVar("H", bound=_Header)
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[type[Any], msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Hello, Welcome, Step, Resend, Report)
}


def encode(header: _Header) -> bytes:
    """A header as MessagePack."""
    return _ENCODER.encode(header)


def decode(kind: type[H], data: memoryview) -> H:
    """A header of that kind.

    Raises:
        MessageError: it is not one.
    """
    try:
        header: H = _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the header is no {kind.__name__}", found=str(error)) from None
    return header
