"""Workloads made from a seed: the same seed gives the same requests, for as many as are asked for.

Each is endless and holds no more than the conversations that are under way. Requests arrive as a Poisson process.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from math import log

from mmcache.errors import ConfigError
from mmcache.replay.workload import PAYLOAD_BYTES_PER_ROW, Clip, Serial, Turn, tokens_from

__all__ = ["WORKLOADS", "generate"]

_OPEN = 32  # conversations under way at once
_TURNS = 26
_FRAME_ROWS = 64
_SYSTEM = Serial(1 << 30)(64)  # the system prompt that all share


def generate(name: str, requests: int, *, seed: int = 0, rate: float = 2.0, size: int | None = None) -> Iterator[Turn]:
    """A workload of that many requests.

    Args:
        name: one of `WORKLOADS`.
        requests: how many.
        seed: of everything that is drawn.
        rate: requests a second, in the mean.
        size: how large it is: images of a `growing` history, or of a `rolling` window, steps of an `agent`, number of
            `documents`, pictures of the `catalogue`, frames of a `video`; None: as usual. `unique` has none.

    Raises:
        ConfigError: an unknown name, or a rate, size or number that is not positive.
    """
    make = WORKLOADS.get(name)
    if make is None:
        raise ConfigError("unknown workload", expected=" or ".join(WORKLOADS), found=repr(name))
    if not rate > 0:
        raise ConfigError("requests arrive at some rate", expected="> 0 a second", found=rate)
    if requests < 1:
        raise ConfigError("a workload has requests", expected=">= 1", found=requests)
    if size is not None and (size < 1 or make is _unique):
        expected = "none: every picture is another" if make is _unique else ">= 1"
        raise ConfigError("a workload has a size", field="size", expected=expected, found=size)
    return islice(make(_Source(seed, rate, size)), requests)


class _Source:
    """Everything that is drawn: times, sizes, and contents that occur nowhere else."""

    def __init__(self, seed: int, rate: float, size: int | None) -> None:
        self.size = size
        self.random = random.Random(seed)
        self.tokens = Serial()
        self._rate = rate
        self._now = 0.0
        self._clips = 0
        self._prefix = f"{seed:x}-"

    def time(self) -> float:
        """The next arrival."""
        self._now -= log(1.0 - self.random.random()) / self._rate  # what `expovariate` draws, without its calls
        return self._now

    def clip(self, rows: int, modality: str = "image") -> Clip:
        """A content that was not there before."""
        self._clips += 1
        return Clip(f"{self._prefix}{self._clips}", rows, rows * PAYLOAD_BYTES_PER_ROW, modality)

    def between(self, least: int, most: int) -> int:
        """Some integer, both ends included."""
        return least + int(self.random.random() * (most - least + 1))


def _interleaved(source: _Source, conversation: Callable[[str], Iterator[Turn]]) -> Iterator[Turn]:
    """Conversations that take turns at random; one that ends gives its place to a new one."""
    started = 0
    under_way: list[Iterator[Turn]] = []
    while True:
        place = source.between(0, _OPEN - 1)
        if place >= len(under_way):
            place = len(under_way)
            under_way.append(conversation(str(started)))
            started += 1
        turn = next(under_way[place], None)
        if turn is None:
            under_way[place] = conversation(str(started))
            started += 1
            turn = next(under_way[place])
        yield turn


def _growing(source: _Source) -> Iterator[Turn]:
    turns = source.size or _TURNS

    def conversation(name: str) -> Iterator[Turn]:
        for number in range(1, turns + 1):
            head = [_SYSTEM] if number == 1 else []
            tokens, clips = tokens_from(*head, source.clip(560), source.tokens(25))
            yield Turn(name, tokens, clips, source.time(), 32, number > 1, number == turns, number)

    return _interleaved(source, conversation)


def _rolling(source: _Source) -> Iterator[Turn]:
    def conversation(name: str) -> Iterator[Turn]:
        window: deque[Clip] = deque(maxlen=source.size or 8)
        for number in range(1, _TURNS + 1):
            window.append(source.clip(560))
            tokens, clips = tokens_from(_SYSTEM, *window, source.tokens(25))
            yield Turn(name, tokens, clips, source.time(), 32, number=number)

    return _interleaved(source, conversation)


def _agent(source: _Source) -> Iterator[Turn]:
    """Steps of a computer-using agent: a screenshot after each action, the same one where nothing changed."""

    def conversation(name: str) -> Iterator[Turn]:
        screen = source.clip(1196)
        steps = source.size or source.between(10, 50)
        for number in range(1, steps + 1):
            if source.random.random() < 0.8:
                screen = source.clip(1196)
            head = [_SYSTEM] if number == 1 else []
            tokens, clips = tokens_from(*head, source.tokens(source.between(20, 200)), screen)
            output = source.between(20, 120)
            yield Turn(name, tokens, clips, source.time(), output, number > 1, number == steps, number)

    return _interleaved(source, conversation)


def _documents(source: _Source) -> Iterator[Turn]:
    """Questions of many users about few documents: the pages first, then the question."""
    documents: list[tuple[Clip, ...]] = []
    popularity = _zipf(source.size or 64)
    for number in range(10**12):
        rank = popularity(source.random)
        while len(documents) <= rank:
            documents.append(tuple(source.clip(1280) for _ in range(source.between(2, 12))))
        tokens, clips = tokens_from(_SYSTEM, *documents[rank], source.tokens(source.between(10, 60)))
        yield Turn(f"q{number}", tokens, clips, source.time(), source.between(16, 128))


def _catalogue(source: _Source) -> Iterator[Turn]:
    """Questions about one to three pictures of a shared catalogue, the text first: no prefix helps."""
    pictures: dict[int, Clip] = {}
    popularity = _zipf(source.size or 5000)
    for number in range(10**12):
        parts = []
        for rank in {popularity(source.random): None for _ in range(source.between(1, 3))}:
            if rank not in pictures:
                pictures[rank] = source.clip(source.between(64, 1024))
            parts.append(pictures[rank])
        tokens, clips = tokens_from(source.tokens(source.between(16, 64)), *parts, source.tokens(8))
        yield Turn(f"q{number}", tokens, clips, source.time(), source.between(16, 64))


def _video(source: _Source) -> Iterator[Turn]:
    """Conversations about one video each, of 16 to 256 frames."""

    def conversation(name: str) -> Iterator[Turn]:
        video = source.clip(_FRAME_ROWS * (source.size or source.between(16, 256)), "video")
        turns = source.between(1, 6)
        for number in range(1, turns + 1):
            parts = (_SYSTEM, video) if number == 1 else ()
            tokens, clips = tokens_from(*parts, source.tokens(source.between(10, 60)))
            output = source.between(30, 200)
            yield Turn(name, tokens, clips, source.time(), output, number > 1, number == turns, number)

    return _interleaved(source, conversation)


def _unique(source: _Source) -> Iterator[Turn]:
    """Every picture once: a cache cannot help, and must not hurt."""
    for number in range(10**12):
        tokens, clips = tokens_from(_SYSTEM, source.clip(source.between(64, 1024)), source.tokens(25))
        yield Turn(f"q{number}", tokens, clips, source.time(), 32)


def _zipf(number: int) -> Callable[[random.Random], int]:
    """Draws ranks from 0, rank r with a weight of 1 / (r + 1)."""
    sums = list(accumulate(1 / rank for rank in range(1, number + 1)))
    return lambda rng: min(number - 1, bisect(sums, rng.random() * sums[-1]))


WORKLOADS: dict[str, Callable[[_Source], Iterator[Turn]]] = {
    "growing": _growing,
    "rolling": _rolling,
    "agent": _agent,
    "documents": _documents,
    "catalogue": _catalogue,
    "video": _video,
    "unique": _unique,
}
"""Makers by name: a growing history, a rolling window, an agent with screenshots, questions about documents, a shared
catalogue, conversations about videos, and pictures that occur once."""
