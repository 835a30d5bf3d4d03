"""Calling a consumer with fields: which it takes, and which modules it is made of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["call", "modules_of"]

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


def modules_of(function: Callable[..., Any] | None) -> Iterator[torch.nn.Module]:
    """The modules that a callable is, is bound to, holds as attributes, arguments or closed-over or global names."""
    if function is None:
        return
    seen: list[Any] = [function]
    while isinstance(seen[-1], functools.partial):
        bound = seen[-1]
        seen += [*bound.args, *bound.keywords.values(), bound.func]
    owner = getattr(seen[-1], "__self__", None) or (None if inspect.isroutine(seen[-1]) else seen[-1])
    if owner is not None and not isinstance(owner, torch.nn.Module):
        seen += [*getattr(owner, "__dict__", {}).values()]
    seen.append(owner)
    plain = inspect.unwrap(getattr(seen[len(seen) - 1], "__func__", function))
    for candidate in {id(f): f for f in (plain, inspect.unwrap(function)) if inspect.isfunction(f)}.values():
        names = inspect.getclosurevars(candidate)
        seen += [*names.nonlocals.values(), *names.globals.values()]
    for value in seen:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        yield from (part for part in parts if isinstance(part, torch.nn.Module))
