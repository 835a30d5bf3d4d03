"""What every peer is asked: requests of a workload one after the other, with the prefix that an index of KV blocks has.

Nothing here is timed. All peers see the same requests, and those that are about embeddings the same prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np

from mmcache import MultimodalRequest, PrefixIndex
from mmcache.replay.workload import Clip, Conversations, Serial, Turn

BLOCK = 16
_FIRST_OUTPUT = (1 << 30) + (1 << 20)  # no tokens of a prompt


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it comes to a scheduler.

    Attributes:
        request: with its items; it is the same object for all turns of a conversation.
        clips: (offset, clip) of its whole prompt.
        num_computed_tokens: length of the prefix whose KV exists.
        output: tokens that the model will answer.
    """

    request: MultimodalRequest
    clips: list[tuple[int, Clip]]
    num_computed_tokens: int
    output: np.ndarray[Any, np.dtype[np.int32]]

    def needed(self) -> list[Clip]:
        """Clips that no prefix covers."""
        return [clip for offset, clip in self.clips if offset + clip.rows > self.num_computed_tokens]


@dataclass(slots=True)
class Tally:
    """What a peer did.

    Attributes:
        asked, found: of what its hit ratio is about.
        ships: whether its decisions say which bytes have to move.
        shipped: these bytes.
        times: nanoseconds of its own calls, of each request.
        remark: what its columns are about.
    """

    name: str
    remark: str
    asked: int = 0
    found: int = 0
    ships: bool = True
    shipped: int = 0
    times: list[int] = field(default_factory=list)

    def row(self) -> str:
        """As a line of the table."""
        ratio = f"{self.found / self.asked:.1%}" if self.asked else "-"
        shipped = f"{self.shipped / 1e9:,.2f}" if self.ships else "-"
        return f"{self.name:<42} {ratio:>7} {shipped:>10} {median(self.times) / 1000:>9.1f}   {self.remark}"


class Peer(Protocol):
    """Somebody's own cache classes."""

    def serve(self, ask: Ask) -> None:
        """Do what a scheduler would do for a request, from its arrival to its end, and tally it."""

    def tallies(self) -> list[Tally]:
        """Rows of the table."""


class Unavailable(Exception):
    """A peer cannot be asked here; says why."""


def asks(turns: Iterable[Turn], prefix_blocks: int) -> Iterator[Ask]:
    """Requests with the prefix that is known when they come, one after the other."""
    conversations, index, outputs = Conversations(), PrefixIndex(BLOCK, prefix_blocks), Serial(_FIRST_OUTPUT)
    clips_of: dict[str, list[tuple[int, Clip]]] = {}
    for turn in turns:
        known = clips_of.pop(turn.conversation, []) if turn.follows else []
        request = conversations.request(turn)
        start = request.num_tokens - len(turn.token_ids)
        clips = [*known, *((start + offset, clip) for offset, clip in turn.clips)]
        with index.match(request) as match:
            computed = match.num_tokens
        output = outputs(turn.output_tokens)
        yield Ask(request, clips, computed, output)
        if not turn.last:
            clips_of[turn.conversation] = clips
        request.extend(output)
        index.insert(request, request.num_tokens)


def timed(tally: Tally, work: Callable[[], Any]) -> Any:
    """The result of some work, whose time is tallied."""
    start = time.perf_counter_ns()
    result = work()
    tally.times.append(time.perf_counter_ns() - start)
    return result
