"""Where each field belongs, from runs with it in either place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from mmcache.audit.observe import Consumer, Observation, Use, counted, observe, only_in
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
    BOTH = "both"


def audit(
    encoder: Callable[..., Any],
    batch: Mapping[str, Any],
    configs: Mapping[str, FieldConfig],
    *,
    positions: Callable[..., Any] | None = None,
    lengths: Callable[..., Any] | None = None,
    only: Collection[str] | None = None,
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
        only: the fields to judge, where not all are; each costs a run of the consumer.
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

    seen: dict[frozenset[str], Observation] = {}

    def run(marks: Mapping[str, bool]) -> Observation:
        kept = frozenset(name for name, marked in marks.items() if marked)
        if kept not in seen:
            seen[kept] = observe(consumer, fields, text, marks, device)
        return seen[kept]

    marks = {name: configs[name].keep_on_cpu for name in fields}
    judged = [name for name in fields if only is None or name in only]
    reports = _judge(run, marks, configs, judged)
    suggested = {**marks, **{name: report.right_mark for name, report in reports.items()}}
    for _ in range(_ROUNDS):
        # One wrong mark can hide another: the suggestion is audited itself until it stands.
        again = _judge(run, suggested, configs, judged) if suggested != marks else reports
        better = {**marks, **{name: report.right_mark for name, report in again.items()}}
        if better == suggested:
            break
        suggested = better
    return AuditReport(tuple(reports.values()), device, suggested)


def _judge(
    run: Callable[[Mapping[str, bool]], Observation],
    marks: Mapping[str, bool],
    configs: Mapping[str, FieldConfig],
    names: Collection[str],
) -> dict[str, FieldReport]:
    base = run(marks)
    others = {name: run({**marks, name: not marks[name]}) for name in names}
    if base.error is not None and all(other.error is not None for other in others.values()):
        raise base.error[1]
    return {name: _report(name, configs[name], marks[name], base, others[name]) for name in names}


def _report(name: str, config: FieldConfig, marked: bool, base: Observation, other: Observation) -> FieldReport:
    on_cpu, on_device = (base, other) if marked else (other, base)
    place, uses, reason = _place(name, on_cpu, on_device)
    phases = tuple(phase for phase, names in base.touched.items() if name in names)
    if marked and place in (_Place.DEVICE, _Place.BOTH):
        verdict = Verdict.MUST_MOVE
    elif not marked and place in (_Place.CPU, _Place.BOTH):
        verdict = Verdict.SHOULD_STAY
    else:
        verdict, uses = (Verdict.RIGHT if "encoder" in phases else Verdict.UNUSED), ()
    return FieldReport(
        name=name,
        modality=config.modality,
        layout=config.layout,
        keep_on_cpu=marked,
        verdict=verdict,
        uses=uses,
        moves=only_in(on_cpu.moves, on_device.moves) if marked else (),
        reads=counted(read.use for read in base.reads if name in read.names),
        read_by=phases,
        right_mark={_Place.CPU: True, _Place.BOTH: True, _Place.DEVICE: False, _Place.EITHER: marked}[place],
        both_right=place is _Place.EITHER,
        reason=reason,
    )


class _Finding(NamedTuple):
    """Where a field belongs, the lines that show it, and why."""

    place: _Place
    uses: tuple[Use, ...]
    reason: str


def _place(name: str, on_cpu: Observation, on_device: Observation) -> _Finding:
    """Where a field belongs.

    Two runs are compared that differ in the place of this field alone, so what happens in one of them only is because
    of that place, however the field's values got there (through Python numbers, or the device that a tensor names).
    """
    for run, other, place in ((on_cpu, on_device, _Place.DEVICE), (on_device, on_cpu, _Place.CPU)):
        if run.error is not None and other.error is None:
            phase, error = run.error
            return _Finding(
                place, only_in(run.mixes, other.mixes), f"else the {phase} raises {type(error).__name__}: {error}"
            )
    cpu_mixes, device_mixes = only_in(on_cpu.mixes, on_device.mixes), only_in(on_device.mixes, on_cpu.mixes)
    spared = only_in(on_device.reads, on_cpu.reads)
    # On the device it may be mixed just with another field, whose own mark is wrong; that says nothing about this one.
    own = {mix.use for mix in on_device.mixes if name in mix.names}
    if cpu_mixes and any(replace(use, count=1) in own for use in device_mixes):
        reason = "needed on the CPU and on the device: keep it, and let the consumer copy it to where it needs it"
        return _Finding(_Place.BOTH, (*cpu_mixes, *device_mixes), reason)
    if cpu_mixes:
        return _Finding(_Place.DEVICE, cpu_mixes, "on the CPU it is mixed with tensors on the device")
    if device_mixes:
        return _Finding(_Place.CPU, (*device_mixes, *spared), "on the device it is mixed with tensors on the CPU")
    if spared:
        return _Finding(_Place.CPU, spared, "on the device it is only read back, and each read waits for the device")
    waits = only_in((m for m in on_cpu.moves if m.waits), (m for m in on_device.moves if m.waits))
    if waits:
        return _Finding(_Place.DEVICE, waits, "nothing reads it on the CPU, and the consumer's own copy of it blocks")
    if not any(name in names for names in on_cpu.touched.values()):
        return _Finding(_Place.EITHER, (), "nothing reads it")
    if only_in(on_cpu.moves, on_device.moves):
        reason = "the consumer copies it to where it needs it, without waiting, and never reads it back"
    else:
        reason = "never mixed with device tensors on the CPU, and never read back from the device"
    return _Finding(_Place.EITHER, (), reason)
