"""What a step needs, by brute force: token by token, item by item, field by field.

It shares no code with the package's planning: only the values of items are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmcache import MultimodalRequest


def positions(request: MultimodalRequest, index: int) -> list[int]:
    """Positions of the item's embedding rows in the request, one by one."""
    place = request.items[index].placeholder
    mask = place.is_embed
    flags = [True] * place.length if mask is None else mask.tolist()
    return [place.offset + i for i, flag in enumerate(flags) if flag]


@dataclass
class Expected:
    status: list[str] = field(default_factory=list)
    action: dict[tuple[int, str], str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    merged: dict[int, tuple[int, int]] = field(default_factory=dict)  # window position -> (item, row)
    bytes: dict[str, int] = field(default_factory=dict)


def expect(
    request: MultimodalRequest,
    start: int,
    end: int,
    needed_from: int,
    lookahead: int,
    resident: Mapping[str, str],
) -> Expected:
    """The decision for a window, given which identifiers are "stored" or "in_flight"."""
    result = Expected()
    groups: dict[str, str] = {}
    for index, item in enumerate(request.items):
        ahead = [p for p in positions(request, index) if p >= needed_from]
        if not ahead:
            result.status.append("covered")
        elif min(ahead) >= end + lookahead:
            result.status.append("later")
        else:
            if item.identifier not in groups:
                groups[item.identifier] = resident.get(item.identifier, "missing")
                if groups[item.identifier] == "missing":
                    result.missing.append(index)
            result.status.append(groups[item.identifier])
    for index in range(len(request.items)):
        if result.status[index] in ("covered", "later"):
            continue
        for row, position in enumerate(positions(request, index)):
            if start <= position < end:
                assert position not in result.merged
                result.merged[position] = (index, row)
    _bytes(request, result)
    return result


def _bytes(request: MultimodalRequest, result: Expected) -> None:
    sums = dict.fromkeys(("transfer", "kept_on_cpu", "covered", "stored", "in_flight", "later"), 0)
    shared: dict[int, list[tuple[int, str, int]]] = {}
    for index, item in enumerate(request.items):
        for name in item.fields or ():
            assert item.fields is not None
            config = item.fields.config(name)
            value = item.fields[name]
            size = _size(value)
            status = result.status[index]
            if config.keep_on_cpu:
                action, category = "keep_on_cpu", "kept_on_cpu"
            elif status == "missing":
                first = index in result.missing
                action, category = ("transfer", "transfer") if first else ("skip_stored", "stored")
            else:
                action, category = f"skip_{status}", status
            result.action[index, name] = action
            if config.layout == "shared":
                shared.setdefault(id(value), []).append((index, category, size))
            else:
                sums[category] += size
    for uses in shared.values():
        category, size = next(((c, s) for _, c, s in uses if c == "transfer"), (uses[0][1], uses[0][2]))
        sums[category] += size
    result.bytes = sums


def _size(value: object) -> int:
    if isinstance(value, list):
        return sum(_size(entry) for entry in value)
    return value.numel() * value.element_size()  # type: ignore[attr-defined]
