"""What the simulated engine is like: how long things take, how much fits, what waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from mmcache.errors import ConfigError
from mmcache.policies import make_policy

__all__ = ["CostModel", "EngineModel", "TierModel", "parse_costs", "parse_size", "parse_tier"]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds and bytes a second. The defaults are round numbers of the order of one large GPU: set your own.

    Attributes:
        item: seconds that the encoder takes for any item.
        row: and for each of its embedding rows.
        link: bytes a second from the CPU to the encoder.
        prefill: tokens a second.
        decode: seconds for each generated token.
    """

    item: float = 0.005
    row: float = 2e-5
    link: float = 12e9
    prefill: float = 20_000.0
    decode: float = 0.01

    def __post_init__(self) -> None:
        for name in ("item", "row", "decode"):
            _check(name, getattr(self, name), least=0.0)
        for name in ("link", "prefill"):
            _check(name, getattr(self, name), above=0.0)

    def encode(self, rows: int) -> float:
        """Seconds of the encoder for one item."""
        return self.item + rows * self.row


@dataclass(frozen=True, slots=True)
class TierModel:
    """A slower place where embeddings lie: all that are encoded are written there, least recently used out first.

    Attributes:
        name: for the report.
        capacity_bytes: its size.
        bandwidth: bytes a second, read.
        latency: seconds until the first byte.
    """

    name: str
    capacity_bytes: int
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _check("capacity_bytes", self.capacity_bytes, least=0.0)
        _check("bandwidth", self.bandwidth, above=0.0)
        _check("latency", self.latency, least=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The engine that is simulated.

    Attributes:
        capacity_bytes: budget for embeddings.
        policy: "queue-aware", "gdsf" or "lru".
        row_bytes: bytes of one embedding row; 8,192 are 4,096 values of bf16.
        block_size: tokens of a KV block.
        prefix_blocks: KV blocks that can be kept for reuse; 0: no prefix cache.
        slots: requests that run at once.
        queue: requests that wait at most and are known to the cache; those behind them wait outside.
        saturate: whether requests come as soon as the queue has room, whatever their times.
        tiers: fastest first.
        costs: how long things take.
    """

    capacity_bytes: int = 8_000_000_000
    policy: str = "queue-aware"
    row_bytes: int = 8192
    block_size: int = 16
    prefix_blocks: int = 65536
    slots: int = 16
    queue: int = 256
    saturate: bool = False
    tiers: tuple[TierModel, ...] = ()
    costs: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        bounds = (
            ("capacity_bytes", 0),
            ("row_bytes", 1),
            ("block_size", 1),
            ("prefix_blocks", 0),
            ("slots", 1),
            ("queue", 1),
        )
        for name, least in bounds:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is an integer >= {least}", field=name, found=repr(value))
        make_policy(self.policy)


def _check(name: str, value: float, *, least: float | None = None, above: float | None = None) -> None:
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    if not number or (least is not None and value < least) or (above is not None and value <= above):
        expected = f"at least {least:g}" if least is not None else f"more than {above:g}"
        raise ConfigError("is out of range", field=name, expected=expected, found=repr(value))


_UNITS = {
    **{unit: 1024 ** (i + 1) for i, unit in enumerate("KMGT")},
    **{f"{unit}B": 1000 ** (i + 1) for i, unit in enumerate("KMGT")},
    **{f"{unit}IB": 1024 ** (i + 1) for i, unit in enumerate("KMGT")},
    "B": 1,
}


def parse_size(text: str) -> int:
    """Bytes from `8GB` (10^9), `8GiB` or `8G` (2^30), or a plain number.

    Raises:
        ConfigError: it is no size.
    """
    letters = text.strip().lstrip("0123456789.")
    digits = text.strip()[: len(text.strip()) - len(letters)]
    unit = 1 if not letters else _UNITS.get(letters.strip().upper())
    try:
        if unit is None:
            raise ValueError
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise ConfigError("not a size", expected="bytes, or 500MB, 8GiB", found=repr(text)) from None


def parse_tier(text: str) -> TierModel:
    """A tier from `name:capacity:bandwidth[:microseconds]`, such as `host:64GB:20GB:50`.

    Raises:
        ConfigError: it is none.
    """
    name, *numbers = text.split(":")
    try:
        if not name or not 2 <= len(numbers) <= 3:
            raise ValueError
        latency = float(numbers[2]) / 1e6 if len(numbers) == 3 else 0.0
    except ValueError:
        raise ConfigError(
            "not a tier", expected="name:capacity:bytes a second[:microseconds], as host:64GB:20GB:50", found=repr(text)
        ) from None
    return TierModel(name, parse_size(numbers[0]), float(parse_size(numbers[1])), latency)


def parse_costs(text: str) -> CostModel:
    """A cost model from `name=value,...`, such as `item=0.01,prefill=5000`; what is not named keeps its default.

    Raises:
        ConfigError: an unknown name, or no number.
    """
    names = [cost.name for cost in fields(CostModel)]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.partition("=")
        try:
            if not equals or name.strip() not in names:
                raise ValueError
            values[name.strip()] = float(number)
        except ValueError:
            raise ConfigError("not a cost", expected=f"name=number of {', '.join(names)}", found=repr(part)) from None
    return CostModel(**values)
