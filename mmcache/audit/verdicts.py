"""Where each field belongs, from runs with it in either place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from mmcache.audit.observe import Consumer, Observation, Use, observe
from mmcache.audit.report import AuditReport, FieldReport, Verdict
from mmcache.errors import FieldError
from mmcache.fields import FieldConfig
from mmcache.fields.values import as_value

__all__ = ["audit"]

_ROUNDS = 4


class _Place(StrEnum):
    CPU = "cpu"
    DEVICE = "device"
    EITHER = "either"
    NEITHER = "neither"


def audit(
    encoder: Callable[..., Any],
    batch: Mapping[str, Any],
    configs: Mapping[str, FieldConfig],
    *,
    positions: Callable[..., Any] | None = None,
    lengths: Callable[..., Any] | None = None,
    device: str = "cuda:0",
) -> AuditReport:
    """Prove where the fields of a batch belong, by running what consumes them. No GPU is needed.

    The consumer runs on the simulated device, once with the fields where `configs` places them and once for each field
    with that one in the other place. Modules that `encoder` and the other callables are, are bound to or refer to have
    their parameters and buffers on the device.

    Args:
        encoder: takes fields by name (those it has parameters for), or in one mapping if it has one parameter.
        batch: name to tensor, array or nested list, all fields joined. What has no config (token ids) is passed to
            parameters of its name: on the device to `encoder`, on the CPU to the others.
        configs: name to config, as of `split_fields`; those that the batch lacks are ignored.
        positions, lengths: what else reads fields, on the CPU: position ids; counts of patches and placeholders.
        device: the device to simulate.

    Raises:
        FieldError: a config is none, or a field's value is no tensor.
        Exception: what the consumer raises, where no other place of one field makes it run.
    """
    fields = {}
    for name, config in configs.items():
        if not isinstance(config, FieldConfig):
            raise FieldError("a config is a FieldConfig", field=name, found=type(config).__name__)
        if batch.get(name) is not None:
            fields[name] = as_value(batch[name], name, keep_on_cpu=True)
    text = {name: value for name, value in batch.items() if name not in configs and value is not None}
    consumer = Consumer(encoder, positions, lengths)

    def run(marks: Mapping[str, bool]) -> Observation:
        return observe(consumer, fields, text, marks, device)

    marks = {name: configs[name].keep_on_cpu for name in fields}
    reports = _judge(run, marks, configs)
    suggested = {name: report.right_mark for name, report in reports.items()}
    for _ in range(_ROUNDS):
        # One wrong mark can hide another: the suggestion is audited itself until it stands.
        judged = _judge(run, suggested, configs) if suggested != marks else reports
        better = {name: report.right_mark for name, report in judged.items()}
        if better == suggested:
            break
        suggested = better
    return AuditReport(tuple(reports.values()), device, suggested)


def _judge(
    run: Callable[[Mapping[str, bool]], Observation], marks: Mapping[str, bool], configs: Mapping[str, FieldConfig]
) -> dict[str, FieldReport]:
    base = run(marks)
    others = {name: run({**marks, name: not marked}) for name, marked in marks.items()}
    if base.error is not None and all(other.error is not None for other in others.values()):
        raise base.error[1]
    return {name: _report(name, configs[name], marked, base, others[name]) for name, marked in marks.items()}


def _report(name: str, config: FieldConfig, marked: bool, base: Observation, other: Observation) -> FieldReport:
    on_cpu, on_device = (base, other) if marked else (other, base)
    place, reason = _place(name, on_cpu, on_device)
    phases = tuple(phase for phase, names in base.touched.items() if name in names)
    uses: tuple[Use, ...] = ()
    if place is _Place.DEVICE and marked:
        verdict, uses = Verdict.MUST_MOVE, on_cpu.mixes.get(name, ())
    elif place is _Place.CPU and not marked:
        verdict = Verdict.SHOULD_STAY
        uses = (*on_device.mixes.get(name, ()), *on_device.reads.get(name, ()))
    else:
        verdict = Verdict.RIGHT if "encoder" in phases else Verdict.UNUSED
    return FieldReport(
        name=name,
        modality=config.modality,
        layout=config.layout,
        keep_on_cpu=marked,
        verdict=verdict,
        uses=uses,
        moves=base.moves.get(name, ()),
        reads=base.reads.get(name, ()),
        read_by=phases,
        both_right=place is _Place.EITHER,
        reason=reason,
    )


def _place(name: str, on_cpu: Observation, on_device: Observation) -> tuple[_Place, str]:
    """Where a field belongs, and why."""
    cpu_breaks, device_breaks = _breaks(name, on_cpu, on_device), _breaks(name, on_device, on_cpu)
    if cpu_breaks and device_breaks:
        return _Place.NEITHER, f"breaks in either place: on the CPU, {cpu_breaks}; on the device, {device_breaks}"
    if cpu_breaks:
        return _Place.DEVICE, cpu_breaks
    if device_breaks:
        return _Place.CPU, device_breaks
    spared = _count(on_device.reads.get(name, ())) - _count(on_cpu.reads.get(name, ()))
    if spared > 0:
        return _Place.CPU, f"the host waits for the device {spared} times to read it back, and nothing needs it there"
    if not any(name in names for names in on_cpu.touched.values()):
        return _Place.EITHER, "nothing reads it"
    moves = on_cpu.moves.get(name, ())
    if moves:
        own = "; ".join(map(str, moves))
        return _Place.EITHER, f"the consumer moves it itself where it needs it ({own}), and never reads it back"
    return _Place.EITHER, "never mixed with device tensors on the CPU, and never read back from the device"


def _breaks(name: str, here: Observation, there: Observation) -> str:
    mixes = here.mixes.get(name, ())
    if mixes:
        return f"mixed with tensors of another device: {mixes[0]}"
    if here.error is not None and there.error is None:
        phase, error = here.error
        return f"the {phase} raised {type(error).__name__}: {error}"
    return ""


def _count(uses: tuple[Use, ...]) -> int:
    return sum(use.count for use in uses)
