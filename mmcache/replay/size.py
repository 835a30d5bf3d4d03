"""How much memory is worth it: what a cache of each capacity would save on a workload."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmcache.planning import needed_items
from mmcache.prefix import PrefixIndex
from mmcache.replay.costs import CostModel, EngineModel
from mmcache.replay.curves import GRID, Curve, CurvePoint, Needs, knee_of, spread
from mmcache.replay.measures import Simulation
from mmcache.replay.simulate import simulate
from mmcache.replay.stack import LruStack
from mmcache.replay.workload import Conversations, Turn

__all__ = ["Sizing", "TierCurve", "size_workload"]


@dataclass(frozen=True, slots=True)
class TierCurve:
    """What each capacity of a tier saves of what all before it miss."""

    name: str
    points: tuple[CurvePoint, ...]


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
        simulated: points of other policies, by name; with the tiers that were given, what these save is not in it.
        simulated_tiers: what each tier saves at these points, by policy and tier; the capacity is the device's.
        knee_bytes: the capacity after which more of it gains least, or None where no capacity gains anything.
        target: the hit ratio that was asked for, or None.
        target_bytes: the least capacity of the curve that reaches it, or None.
        tiers: of the engine, behind a device of `knee_bytes`, each behind the tiers before it at their own capacities:
            what a tier of each capacity saves on top, under LRU.
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
    simulated_tiers: dict[str, dict[str, tuple[CurvePoint, ...]]]
    knee_bytes: int | None
    target: float | None
    target_bytes: int | None
    tiers: tuple[TierCurve, ...]
    skipped_lines: int = 0

    def with_skipped(self, lines: int) -> Sizing:
        """The same, of a trace that had so many bad lines."""
        return replace(self, skipped_lines=lines)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON can say it."""

        def points(curve: Iterable[CurvePoint]) -> list[dict[str, float]]:
            return [{name: getattr(point, name) for name in CurvePoint.__slots__} for point in curve]

        curved = ("lru", "simulated", "simulated_tiers", "tiers")
        return {
            **{name: getattr(self, name) for name in Sizing.__slots__ if name not in curved},
            "lru": points(self.lru),
            "simulated": {policy: points(curve) for policy, curve in self.simulated.items()},
            "simulated_tiers": {
                policy: {name: points(curve) for name, curve in tiers.items()}
                for policy, tiers in self.simulated_tiers.items()
            },
            "tiers": [{"name": tier.name, "points": points(tier.points)} for tier in self.tiers],
        }


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
        engine: the engine; its capacity and policy do not matter here.
        target: a hit ratio to reach.
        policies: to simulate beside.
        num_points: at so many capacities, spread over the curve.
        capacities: bytes; more points of the exact curve, and the simulated ones instead of the spread ones.
    """
    wanted = (*capacities, *(tier.capacity_bytes for tier in engine.tiers))
    grid = sorted({*GRID, *(size for size in wanted if size > 0)})
    curve = Curve(grid)
    requests = covered_bytes = 0
    covered_seconds = 0.0
    for covered, needs in _needs(make_turns(), engine):
        requests += 1
        covered_bytes += covered[0]
        covered_seconds += covered[1]
        curve.add(needs)
    points = curve.points()
    knee = knee_of(points)
    reached = [point.capacity_bytes for point in points if target is not None and point.hit_ratio >= target]
    chosen = sorted(capacities) or spread(points, num_points)
    simulated: dict[str, tuple[CurvePoint, ...]] = {}
    simulated_tiers: dict[str, dict[str, tuple[CurvePoint, ...]]] = {}
    for policy in policies:
        runs = [simulate(make_turns(), replace(engine, policy=policy, capacity_bytes=size)) for size in chosen]
        simulated[policy] = tuple(map(_device_point, runs))
        simulated_tiers[policy] = {
            tier.name: tuple(_tier_point(run, tier.name) for run in runs) for tier in engine.tiers
        }
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
        simulated_tiers=simulated_tiers,
        knee_bytes=knee,
        target=target,
        target_bytes=reached[0] if reached else None,
        tiers=() if knee is None or not engine.tiers else _behind(make_turns(), engine, knee, grid),
    )


def _needs(turns: Iterable[Turn], engine: EngineModel) -> Iterator[tuple[tuple[int, float], Needs]]:
    """What the known prefix saves of each request, in bytes and seconds, and what the request needs beyond it."""
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
        covered = (all_bytes - needed_bytes, max(0.0, all_seconds - needed_seconds))
        yield covered, Needs(contents, payloads, seconds)


def _of_all(turn: Turn, sums: dict[str, tuple[int, float]], costs: CostModel) -> tuple[int, float]:
    """Payload bytes and encoder seconds of all items of a turn's request."""
    nbytes, seconds = sums.pop(turn.conversation, (0, 0.0)) if turn.follows else (0, 0.0)
    nbytes += sum(clip.payload_bytes for _, clip in turn.clips)
    seconds += sum(costs.encode(clip.rows) for _, clip in turn.clips)
    if not turn.last:
        sums[turn.conversation] = (nbytes, seconds)
    return nbytes, seconds


def _behind(turns: Iterable[Turn], engine: EngineModel, first_bytes: int, grid: Sequence[int]) -> tuple[TierCurve, ...]:
    """The curves of tiers behind a device of `first_bytes`, each with the ones before it at their capacities.

    Whatever the device does not have comes into all of them; a tier is asked for what those before it do not have.
    """
    device, curves = LruStack(first_bytes), [Curve(grid) for _ in engine.tiers]
    for _, needs in _needs(turns, engine):
        distances = device.use(needs.contents)
        missed = needs.only([i for i, far in enumerate(distances) if far is None or far > first_bytes])
        asked = set(range(len(missed.payloads)))
        for tier, curve in zip(engine.tiers, curves):
            found = curve.add(missed, asked)
            asked -= {i for i, far in enumerate(found) if far is not None and far <= tier.capacity_bytes}
    return tuple(TierCurve(tier.name, curve.points()) for tier, curve in zip(engine.tiers, curves))


def _device_point(run: Simulation) -> CurvePoint:
    seconds = run.needed_seconds - run.encode_seconds - sum(run.tier_seconds.values())
    nbytes = run.bytes["stored"] + run.bytes["in_flight"] - sum(run.tier_bytes.values())
    held = run.items["stored"] + run.items["in_flight"]
    return CurvePoint(run.capacity_bytes, held / max(1, run.needed), max(0.0, seconds), nbytes)


def _tier_point(run: Simulation, tier: str) -> CurvePoint:
    ratio = run.tier_hits.get(tier, 0) / max(1, run.needed)
    return CurvePoint(run.capacity_bytes, ratio, run.tier_seconds.get(tier, 0.0), run.tier_bytes.get(tier, 0))
