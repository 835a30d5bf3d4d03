"""How much memory is worth it: what a cache of each capacity would save on a workload."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmcache.planning import needed_items
from mmcache.prefix import PrefixIndex
from mmcache.replay.costs import CostModel, EngineModel
from mmcache.replay.simulate import simulate
from mmcache.replay.stack import LruStack
from mmcache.replay.workload import Conversations, Turn

__all__ = ["GRID", "CurvePoint", "Sizing", "knee_of", "size_workload"]

GRID = tuple(round(2 ** (power / 4)) for power in range(4 * 20, 4 * 44 + 1))
"""Capacities, in bytes, from 1 MiB to 16 TiB, four to a doubling."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What one capacity saves.

    Attributes:
        capacity_bytes: room for embeddings.
        hit_ratio: of the contents that requests need and no prefix covers, the share that is held.
        seconds_saved: encoder seconds of these.
        bytes_saved: processor output that does not move for them.
    """

    capacity_bytes: int
    hit_ratio: float
    seconds_saved: float
    bytes_saved: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """What capacities save on a workload.

    Attributes:
        requests: how many.
        needed: contents that requests need and no prefix covers, each once a request.
        covered_seconds, covered_bytes: saved by the prefix cache, whatever the capacity.
        needed_seconds, needed_bytes: encoder seconds and processor output of what is needed.
        working_set_bytes: the capacity beyond which nothing is gained.
        lru: the exact curve of LRU. It begins where what any one request needs fits.
        simulated: points of other policies and of tiers, by name.
        knee_bytes: the capacity after which more of it gains least, or None where no capacity gains anything.
        target: the hit ratio that was asked for, or None.
        target_bytes: the least capacity of the curve that reaches it, or None.
        tier: behind a device of `knee_bytes`: what a second place of each capacity saves on top, under LRU.
        skipped_lines: lines of the trace that could not be read.
    """

    requests: int
    needed: int
    covered_seconds: float
    covered_bytes: int
    needed_seconds: float
    needed_bytes: int
    working_set_bytes: int
    lru: tuple[CurvePoint, ...]
    simulated: dict[str, tuple[CurvePoint, ...]]
    knee_bytes: int | None
    target: float | None
    target_bytes: int | None
    tier: tuple[CurvePoint, ...]
    skipped_lines: int = 0

    def with_skipped(self, lines: int) -> Sizing:
        """The same, of a trace that had so many bad lines."""
        return replace(self, skipped_lines=lines)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON can say it."""

        def points(curve: Iterable[CurvePoint]) -> list[dict[str, float]]:
            return [{name: getattr(point, name) for name in CurvePoint.__slots__} for point in curve]

        plain = {name: getattr(self, name) for name in Sizing.__slots__ if name not in ("lru", "simulated", "tier")}
        curves = {name: points(curve) for name, curve in self.simulated.items()}
        return {**plain, "lru": points(self.lru), "simulated": curves, "tier": points(self.tier)}


@dataclass(frozen=True, slots=True)
class _Needs:
    """What one request needs: of each content bytes of its rows, bytes of its payload, and encoder seconds."""

    contents: dict[Hashable, int]
    payloads: list[int]
    seconds: list[float]
    covered_bytes: int
    covered_seconds: float


class _Curve:
    """Hits by the capacity that they take, in one pass; memory does not grow with what is deeper than the grid."""

    def __init__(self, grid: Sequence[int]) -> None:
        self._grid = grid
        self._stack = LruStack(grid[-1])
        self._hits: list[list[float]] = [[0, 0.0, 0] for _ in grid]
        self.asked = 0
        self.asked_seconds = 0.0
        self.asked_bytes = 0
        self.deepest = 0
        self.widest = 0

    def add(self, contents: dict[Hashable, int], payloads: Sequence[int], seconds: Sequence[float]) -> list[int | None]:
        """Count the contents of one request; their distances."""
        distances = self._stack.use(contents)
        self.widest = max(self.widest, sum(contents.values()))
        for distance, payload, cost in zip(distances, payloads, seconds):
            self.asked += 1
            self.asked_seconds += cost
            self.asked_bytes += payload
            if distance is not None and distance <= self._grid[-1]:
                self.deepest = max(self.deepest, distance)
                hits = self._hits[bisect_left(self._grid, distance)]
                hits[0] += 1
                hits[1] += cost
                hits[2] += payload
        return distances

    def points(self) -> tuple[CurvePoint, ...]:
        """The curve, from the first capacity that holds any one request to the first that gains nothing more."""
        points = []
        count, seconds, payload = 0.0, 0.0, 0.0
        for capacity, hits in zip(self._grid, self._hits):
            count, seconds, payload = count + hits[0], seconds + hits[1], payload + hits[2]
            if capacity >= self.widest:
                points.append(CurvePoint(capacity, count / max(1, self.asked), seconds, int(payload)))
                if capacity >= self.deepest:
                    break
        return tuple(points)


def size_workload(
    make_turns: Callable[[], Iterable[Turn]],
    engine: EngineModel,
    *,
    target: float | None = None,
    policies: Sequence[str] = (),
    num_points: int = 4,
    capacities: Sequence[int] = (),
) -> Sizing:
    """What capacities save on a workload: LRU exactly in one pass, other policies by simulation at some capacities.

    The exact curve takes requests one after the other; simulations have the engine's queue and concurrency.

    Args:
        make_turns: gives the workload anew, each time the same.
        engine: the engine; its capacity, policy and tiers do not matter here.
        target: a hit ratio to reach.
        policies: to simulate beside.
        num_points: at so many capacities, spread over the curve.
        capacities: bytes; more points of the exact curve, and the simulated ones instead of the spread ones.
    """
    grid = sorted({*GRID, *(capacity for capacity in capacities if capacity > 0)})
    curve = _Curve(grid)
    requests = covered_bytes = 0
    covered_seconds = 0.0
    for needs in _needs(make_turns(), engine):
        requests += 1
        covered_bytes += needs.covered_bytes
        covered_seconds += needs.covered_seconds
        curve.add(needs.contents, needs.payloads, needs.seconds)
    points = curve.points()
    knee = knee_of(points)
    reached = [point.capacity_bytes for point in points if target is not None and point.hit_ratio >= target]
    chosen = sorted(capacities) or _spread(points, num_points)
    simulated = {}
    for policy in policies:
        simulated[policy] = tuple(
            _simulated(make_turns(), replace(engine, policy=policy, capacity_bytes=capacity, tiers=()))
            for capacity in chosen
        )
    return Sizing(
        requests=requests,
        needed=curve.asked,
        covered_seconds=covered_seconds,
        covered_bytes=covered_bytes,
        needed_seconds=curve.asked_seconds,
        needed_bytes=curve.asked_bytes,
        working_set_bytes=max(curve.deepest, curve.widest),
        lru=points,
        simulated=simulated,
        knee_bytes=knee,
        target=target,
        target_bytes=reached[0] if reached else None,
        tier=() if knee is None else _second(make_turns(), engine, knee, grid),
    )


def knee_of(points: Sequence[CurvePoint]) -> int | None:
    """The capacity where the curve of encoder seconds saved is farthest above the line between its ends.

    After Satopaa et al., "Finding a 'Kneedle' in a Haystack" (2011), without smoothing.
    """
    gaining = [point for point in points if point.seconds_saved > 0]
    if not gaining:
        return None
    first, last = points[0], points[-1]
    width = last.capacity_bytes - first.capacity_bytes
    height = last.seconds_saved - first.seconds_saved
    if width <= 0 or height <= 0:
        return gaining[0].capacity_bytes

    def above(point: CurvePoint) -> float:
        gained = (point.seconds_saved - first.seconds_saved) / height
        return gained - (point.capacity_bytes - first.capacity_bytes) / width

    return max(gaining, key=above).capacity_bytes


def _needs(turns: Iterable[Turn], engine: EngineModel) -> Iterator[_Needs]:
    """What each request needs beyond the prefix that is known, one request after the other."""
    conversations = Conversations()
    prefix = PrefixIndex(engine.block_size, engine.prefix_blocks) if engine.prefix_blocks else None
    sums: dict[str, tuple[int, float]] = {}  # of all items of conversations that go on
    for turn in turns:
        request = conversations.request(turn)
        start = 0
        if prefix is not None:
            with prefix.match(request) as match:
                start = match.num_tokens
            prefix.insert(request, request.num_tokens)
        _, _, needed = needed_items(request, start, request.num_tokens)
        contents: dict[Hashable, int] = {}
        payloads, seconds = [], []
        needed_bytes, needed_seconds = 0, 0.0
        for index in needed:
            item = request.items[index]
            payload = item.fields.payload_bytes if item.fields is not None else 0
            rows = item.placeholder.num_embeds
            needed_bytes += payload
            needed_seconds += engine.costs.encode(rows)
            content = (request.cache_salt, item.identifier)
            if content not in contents:
                contents[content] = rows * engine.row_bytes
                payloads.append(payload)
                seconds.append(engine.costs.encode(rows))
        all_bytes, all_seconds = _of_all(turn, sums, engine.costs)
        yield _Needs(contents, payloads, seconds, all_bytes - needed_bytes, max(0.0, all_seconds - needed_seconds))


def _of_all(turn: Turn, sums: dict[str, tuple[int, float]], costs: CostModel) -> tuple[int, float]:
    """Payload bytes and encoder seconds of all items of a turn's request."""
    nbytes, seconds = sums.pop(turn.conversation, (0, 0.0)) if turn.follows else (0, 0.0)
    nbytes += sum(clip.payload_bytes for _, clip in turn.clips)
    seconds += sum(costs.encode(clip.rows) for _, clip in turn.clips)
    if not turn.last:
        sums[turn.conversation] = (nbytes, seconds)
    return nbytes, seconds


def _second(
    turns: Iterable[Turn], engine: EngineModel, first_bytes: int, grid: Sequence[int]
) -> tuple[CurvePoint, ...]:
    """The curve of a place behind a device of `first_bytes`: it is asked for what the device does not have."""
    device, curve = LruStack(first_bytes), _Curve(grid)
    for needs in _needs(turns, engine):
        distances = device.use(needs.contents)
        missed = [i for i, distance in enumerate(distances) if distance is None or distance > first_bytes]
        contents = list(needs.contents.items())
        curve.add(
            dict(contents[i] for i in missed), [needs.payloads[i] for i in missed], [needs.seconds[i] for i in missed]
        )
    return curve.points()


def _spread(points: Sequence[CurvePoint], number: int) -> list[int]:
    """Capacities spread over the curve, both ends included."""
    if len(points) <= number:
        return [point.capacity_bytes for point in points]
    places = {round(i * (len(points) - 1) / max(1, number - 1)) for i in range(number)}
    return [points[place].capacity_bytes for place in sorted(places)]


def _simulated(turns: Iterable[Turn], engine: EngineModel) -> CurvePoint:
    result = simulate(turns, engine)
    saved = result.bytes["stored"] + result.bytes["in_flight"]
    seconds = result.needed_seconds - result.encode_seconds
    return CurvePoint(engine.capacity_bytes, result.hit_ratio, max(0.0, seconds), saved)
