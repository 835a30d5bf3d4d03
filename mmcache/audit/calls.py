"""Calling a consumer with fields: which it takes, and which modules it is made of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, ModuleType
from typing import Any

import torch

__all__ = ["call", "modules_of"]

_MAX_DEPTH = 6
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call(function: Callable[..., Any], fields: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """Call `function` with the fields it takes.

    By name, if it has parameters of these names; all fields by name, if it takes `**kwargs`; or all in one mapping, if
    it has one parameter, of another name. `extra` is passed only where a parameter has its very name.
    """
    parameters = _signature(function)
    known = {p.name for p in parameters if p.kind in _NAMED}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return function(**fields, **{name: value for name, value in extra.items() if name in known})
    offered = {**extra, **fields}
    taken = {name: value for name, value in offered.items() if name in known}
    if not taken and len([p for p in parameters if p.default is p.empty]) == 1:
        return function(dict(offered))
    return function(**taken)


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    return list(inspect.signature(target).parameters.values())


def modules_of(consumer: Callable[..., Any] | None) -> Iterator[torch.nn.Module]:
    """The modules that a callable is, is bound to, holds in attributes or arguments, or refers to by name.

    Functions that it refers to are followed in turn.
    """
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(consumer, 0)]
    while waiting:
        value, depth = waiting.pop()
        if value is None or id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            yield value
        else:
            waiting += [(part, depth + 1) for part in _parts(value, depth)]


def _parts(value: Any, depth: int) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if inspect.ismethod(value):
        return (value.__self__, value.__func__)
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        named = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        return (*cells, *named, getattr(value, "__wrapped__", None))
    # The object that a method is bound to, or a callable object: its attributes, but not theirs in turn.
    if depth <= 1 and not isinstance(value, (type, ModuleType)):
        return (*getattr(value, "__dict__", {}).values(), vars(type(value)).get("__call__"))
    return ()


def _names(code: CodeType) -> set[str]:
    """Names that a function's code refers to, inner functions and comprehensions included."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def _filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
