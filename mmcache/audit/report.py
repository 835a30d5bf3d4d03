"""What an audit found, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mmcache.audit.observe import Use

__all__ = ["AuditReport", "FieldReport", "Verdict"]


class Verdict(StrEnum):
    """What an audit says of a field's mark."""

    MUST_MOVE = "must move"
    SHOULD_STAY = "should stay"
    NEEDS_COPY = "needs a copy"
    UNUSED = "unused"
    RIGHT = "right"


@dataclass(frozen=True, slots=True)
class FieldReport:
    """What an audit found about one field.

    Attributes:
        name, modality, layout, keep_on_cpu: the field, as it was configured.
        verdict: "must move" and "should stay" say that the mark is wrong; "needs a copy" that the mark is right and
            the consumer, which needs the field in both places, is not; "unused" that the encoder does not read it.
        uses: of a wrong mark or a missing copy, the consumer's lines that show it.
        moves: moves to the device that the consumer makes itself, with the field as configured.
        reads: reads by the host that remain, with the field as configured.
        read_by: phases that read its values: "lengths", "positions", "encoder".
        right_mark: `keep_on_cpu` as it should be.
        both_right: the other mark would be right as well; `reason` says why.
        reason: why it belongs where it does.
    """

    name: str
    modality: str
    layout: str
    keep_on_cpu: bool
    verdict: Verdict
    uses: tuple[Use, ...]
    moves: tuple[Use, ...]
    reads: tuple[Use, ...]
    read_by: tuple[str, ...]
    right_mark: bool
    both_right: bool
    reason: str

    @property
    def wrong(self) -> bool:
        """Whether the mark is wrong."""
        return self.verdict in (Verdict.MUST_MOVE, Verdict.SHOULD_STAY)

    @property
    def ok(self) -> bool:
        """Whether the mark is right and the consumer runs with it on a real device."""
        return not self.wrong and self.verdict is not Verdict.NEEDS_COPY

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "field": self.name,
            "modality": self.modality,
            "layout": self.layout,
            "keep_on_cpu": self.keep_on_cpu,
            "verdict": str(self.verdict),
            "wrong": self.wrong,
            "uses": [_use(use) for use in self.uses],
            "moves": [_use(use) for use in self.moves],
            "reads": [_use(use) for use in self.reads],
            "read_by": list(self.read_by),
            "right_mark": self.right_mark,
            "both_right": self.both_right,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        fields: one report a field, each beside the right marks of the others: another's wrong mark is not its fault.
        device: the device that was simulated.
        suggested: field name to the `keep_on_cpu` that would be right; audited itself.
    """

    fields: tuple[FieldReport, ...]
    device: str
    suggested: dict[str, bool]

    def __getitem__(self, name: str) -> FieldReport:
        """The report of field `name`."""
        for report in self.fields:
            if report.name == name:
                return report
        raise KeyError(name)

    @property
    def wrong(self) -> tuple[FieldReport, ...]:
        """Fields whose mark is wrong."""
        return tuple(report for report in self.fields if report.wrong)

    @property
    def ok(self) -> bool:
        """Whether all marks are right and the consumer runs with them on a real device."""
        return all(report.ok for report in self.fields)

    @property
    def exit_status(self) -> int:
        """1 if a mark is wrong or the consumer lacks a copy of a field, else 0."""
        return 0 if self.ok else 1

    def suggestion(self) -> dict[str, dict[str, Any]]:
        """The config that would be right, as plain data: field name to modality, layout and `keep_on_cpu`."""
        return {
            report.name: {
                "modality": report.modality,
                "layout": report.layout,
                "keep_on_cpu": self.suggested[report.name],
            }
            for report in self.fields
        }

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "device": self.device,
            "ok": self.ok,
            "fields": [report.as_json() for report in self.fields],
            "suggested": dict(self.suggested),
        }

    def __str__(self) -> str:
        lines = []
        for report in self.fields:
            mark = "keep_on_cpu" if report.keep_on_cpu else "to the device"
            verdict = str(report.verdict) if report.ok else str(report.verdict).upper()
            lines.append(f"{report.name} ({report.modality}, {report.layout}, {mark}): {verdict}")
            lines += [f"    {line}" for line in _details(report)]
        wrong = ", ".join(report.name for report in self.wrong)
        lines.append(f"wrong marks: {wrong}" if wrong else f"all {len(self.fields)} marks are right")
        uncopied = ", ".join(report.name for report in self.fields if report.verdict is Verdict.NEEDS_COPY)
        if uncopied:
            lines.append(f"the consumer has to copy: {uncopied}")
        return "\n".join(lines)


def _details(report: FieldReport) -> list[str]:
    lines = []
    if not report.ok:
        lines += [str(use) for use in report.uses]
    else:
        others = [phase for phase in report.read_by if phase != "encoder"]
        if report.verdict is Verdict.UNUSED:
            lines.append(f"not read by the encoder; read by {' and '.join(others) if others else 'nothing else'}")
        lines += [f"the consumer moves it: {use}{', the host waits' if use.blocks else ''}" for use in report.moves]
        lines += [f"the host waits for the device: {use}" for use in report.reads]
    if report.both_right or not report.ok:
        lines.append(("either place is right: " if report.both_right else "because: ") + report.reason)
    return lines


def _use(use: Use) -> dict[str, Any]:
    return {
        "phase": use.phase,
        "op": use.op,
        "file": use.where.file,
        "line": use.where.line,
        "function": use.where.function,
        "count": use.count,
        "blocks": use.blocks,
    }
