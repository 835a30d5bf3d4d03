"""What each capacity of an LRU cache saves: one pass gives the whole curve."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass

from mmcache.replay.stack import LruStack

__all__ = ["GRID", "Curve", "CurvePoint", "Needs", "knee_of", "spread"]

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
class Needs:
    """What one request needs.

    Attributes:
        contents: bytes of the rows of each content.
        payloads, seconds: for each of them bytes of its payload, and encoder seconds.
    """

    contents: dict[Hashable, int]
    payloads: Sequence[int]
    seconds: Sequence[float]

    def only(self, places: Sequence[int]) -> Needs:
        """The contents of these places."""
        contents = list(self.contents.items())
        return Needs(
            dict(contents[i] for i in places), [self.payloads[i] for i in places], [self.seconds[i] for i in places]
        )


class Curve:
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

    def add(self, needs: Needs, counted: Container[int] | None = None) -> list[int | None]:
        """Use the contents of one request; their distances, in order.

        Args:
            needs: the contents.
            counted: places of those that are asked for here; None: of all. The others are kept, too.
        """
        distances = self._stack.use(needs.contents)
        self.widest = max(self.widest, sum(needs.contents.values()))
        for place, distance in enumerate(distances):
            if counted is not None and place not in counted:
                continue
            payload, cost = needs.payloads[place], needs.seconds[place]
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


def spread(points: Sequence[CurvePoint], number: int) -> list[int]:
    """Capacities spread over the curve, both ends included."""
    if len(points) <= number:
        return [point.capacity_bytes for point in points]
    places = {round(i * (len(points) - 1) / max(1, number - 1)) for i in range(number)}
    return [points[place].capacity_bytes for place in sorted(places)]
