"""What the scheduler's side tells the workers for a step: small, frozen, picklable."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load", "Save", "StepPlan"]


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that a worker has to put into vLLM's encoder cache.

    Attributes:
        identifier: vLLM's name for the item.
        offset: of the slot in the shared memory.
        written_in: the step that the slot's header must name.
        rows, width: shape of the rows.
    """

    identifier: str
    offset: int
    written_in: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class Save:
    """A slot for rows that this step encodes.

    Attributes:
        identifier: vLLM's name for the item.
        offset: of the slot in the shared memory.
        rows, width: shape that was expected; others are not saved.
    """

    identifier: str
    offset: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the engine. `step` counts from 1."""

    step: int
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
