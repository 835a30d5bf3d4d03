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

__all__ = ["Auditor", "audit"]

_ROUNDS = 4


class _Place(StrEnum):
    CPU = "cpu"
    DEVICE = "device"
    EITHER = "either"
    BOTH = "both"


class Auditor:
    """A consumer and a batch of fields, to be audited with several configs: its runs are remembered.

    Args:
        encoder: takes fields by name (those it has parameters for), or in one mapping if it has one parameter.
        batch: name to tensor, array or nested list, all fields joined. What has no config (token ids) is passed to
            parameters of its name: on the device to `encoder`, on the CPU to the others.
        positions, lengths: what else reads fields, on the CPU: position ids; counts of patches and placeholders.
        device: the device to simulate.
    """

    def __init__(
        self,
        encoder: Callable[..., Any],
        batch: Mapping[str, Any],
        *,
        positions: Callable[..., Any] | None = None,
        lengths: Callable[..., Any] | None = None,
        device: str = "cuda:0",
    ) -> None:
        self._consumer = Consumer(encoder, positions, lengths)
        self._batch = {name: value for name, value in batch.items() if value is not None}
        self._device = device
        self._seen: dict[tuple[frozenset[str], frozenset[str]], Observation] = {}

    def audit(self, configs: Mapping[str, FieldConfig], *, only: Collection[str] | None = None) -> AuditReport:
        """Judge the places that `configs` gives the fields.

        Args:
            configs: name to config, as of `split_fields`; those that the batch lacks are ignored.
            only: the fields to judge, where not all are; each costs a run of the consumer.

        Raises:
            FieldError: a config is none, or a field's value is no tensor.
            Exception: what the consumer raises, where no other place of one field makes it run.
        """
        for name, config in configs.items():
            if not isinstance(config, FieldConfig):
                raise FieldError("a config is a FieldConfig", field=name, found=type(config).__name__)
        marks = {name: config.keep_on_cpu for name, config in configs.items() if name in self._batch}
        judged = [name for name in marks if only is None or name in only]
        reports = self._judge(marks, configs, judged)
        suggested = {**marks, **{name: report.right_mark for name, report in reports.items()}}
        for _ in range(_ROUNDS):
            # One wrong mark can hide another, or make a right one look wrong: the suggestion is audited itself until it
            # stands, and a mark is judged beside the best marks of the others that it was tried with.
            again = self._judge(suggested, configs, judged)
            reports.update((name, report) for name, report in again.items() if report.keep_on_cpu == marks[name])
            better = {**marks, **{name: report.right_mark for name, report in again.items()}}
            if better == suggested:
                break
            suggested = better
        return AuditReport(tuple(reports.values()), self._device, suggested)

    def _judge(
        self, marks: Mapping[str, bool], configs: Mapping[str, FieldConfig], names: Collection[str]
    ) -> dict[str, FieldReport]:
        base = self._run(marks)
        others = {name: self._run({**marks, name: not marks[name]}) for name in names}
        if base.error is not None and all(other.error is not None for other in others.values()):
            raise base.error[1]
        return {name: _report(name, configs[name], marks[name], base, others[name]) for name in names}

    def _run(self, marks: Mapping[str, bool]) -> Observation:
        key = frozenset(marks), frozenset(name for name, marked in marks.items() if marked)
        if key not in self._seen:
            fields = {name: as_value(self._batch[name], name, keep_on_cpu=True) for name in marks}
            text = {name: value for name, value in self._batch.items() if name not in marks}
            self._seen[key] = observe(self._consumer, fields, text, marks, self._device)
        return self._seen[key]


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
    their parameters and buffers on the device. Arguments and errors: see `Auditor` and its method `audit`.
    """
    return Auditor(encoder, batch, positions=positions, lengths=lengths, device=device).audit(configs)


def _report(name: str, config: FieldConfig, marked: bool, base: Observation, other: Observation) -> FieldReport:
    on_cpu, on_device = (base, other) if marked else (other, base)
    place, uses, reason = _place(name, on_cpu, on_device)
    phases = tuple(phase for phase, names in base.touched.items() if name in names)
    if marked and place is _Place.DEVICE:
        verdict = Verdict.MUST_MOVE
    elif marked and place is _Place.BOTH:
        verdict = Verdict.NEEDS_COPY
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
