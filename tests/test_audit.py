"""The audit: where each field of a consumer belongs, shown by running it. The consumers here are made by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from audit_stubs import (
    BATCH,
    GRID,
    TAKEN_BACK,
    TOWER,
    Guarded,
    MovedGrid,
    configs,
    patches,
    split_rows,
    verdicts,
)
from torch import Tensor, nn

from mmcache.audit import AuditReport, Verdict, audit
from mmcache.models import field_configs
from mmcache.testing.recorder import Recorder

# Verdicts


def test_marks_that_are_right_are_right() -> None:
    report = audit(split_rows, BATCH, configs(pixel_values=False, grid=True))
    assert verdicts(report) == {"pixel_values": "right", "grid": "right"}
    assert (report.exit_status, report.wrong) == (0, ())
    assert report.suggested == {"pixel_values": False, "grid": True}


def test_a_marked_field_that_meets_device_tensors_must_move() -> None:
    report = audit(split_rows, BATCH, configs(pixel_values=True, grid=True))
    field = report["pixel_values"]
    assert (field.verdict, field.wrong, field.right_mark) == (Verdict.MUST_MOVE, True, False)
    assert field.uses[0].op == "addmm"
    assert field.uses[0].where.file.endswith("audit_stubs.py")
    assert "split_rows" in str(field.uses[0])
    assert not report["grid"].wrong
    assert report.exit_status == 1
    assert report.suggested == {"pixel_values": False, "grid": True}


def test_an_unmarked_field_that_is_only_read_back_should_stay() -> None:
    report = audit(split_rows, BATCH, configs(pixel_values=False, grid=False))
    field = report["grid"]
    assert (field.verdict, field.right_mark) == (Verdict.SHOULD_STAY, True)
    assert [(use.op, use.count, use.blocks) for use in field.uses] == [("tolist", 1, True)]
    assert field.uses[0].where.function == "split_rows"
    assert report.exit_status == 1


def test_reads_are_counted_by_line() -> None:
    def encoder(pixel_values: Tensor, grid: Tensor) -> int:
        TOWER.weight(pixel_values)
        return sum(int(side) for row in grid for side in row)

    field = audit(encoder, BATCH, configs(pixel_values=False, grid=False))["grid"]
    assert [(use.op, use.count) for use in field.uses] == [("item", 6)]


def test_both_marks_wrong_at_once_are_both_reported_and_both_mended() -> None:
    report = audit(split_rows, BATCH, configs(pixel_values=True, grid=False))
    assert verdicts(report) == {"pixel_values": "must move", "grid": "should stay"}
    assert report.suggested == {"pixel_values": False, "grid": True}


def test_two_marked_fields_that_meet_the_device_together_must_both_move() -> None:
    def encoder(pixel_values: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return TOWER.weight(pixel_values) * (a + b)

    batch = {"pixel_values": patches(), "a": torch.ones(8), "b": torch.ones(8)}
    report = audit(encoder, batch, configs(pixel_values=False, a=True, b=True))
    assert verdicts(report) == {"pixel_values": "right", "a": "must move", "b": "must move"}
    assert report.suggested == {"pixel_values": False, "a": False, "b": False}


def test_a_wrong_mark_is_not_blamed_on_the_field_it_meets() -> None:
    def encoder(pixel_values: Tensor, shift: Tensor) -> Tensor:
        return TOWER.weight(pixel_values + shift)

    batch = {"pixel_values": patches(), "shift": torch.ones(4)}
    report = audit(encoder, batch, configs(pixel_values=False, shift=True))
    assert verdicts(report) == {"pixel_values": "right", "shift": "must move"}


def test_values_are_followed_through_python_and_through_the_device_a_tensor_names() -> None:
    def encoder(pixel_values: Tensor, grid: Tensor) -> Tensor:
        positions = torch.arange(sum(a * b * c for a, b, c in grid.tolist()), device=grid.device)
        return TOWER.weight(pixel_values) + TOWER.table(positions)

    assert audit(encoder, BATCH, configs(pixel_values=False, grid=True))["grid"].verdict is Verdict.MUST_MOVE


def test_an_unmarked_field_that_meets_the_consumers_own_cpu_tensors_should_stay() -> None:
    def encoder(pixel_values: Tensor, grid: Tensor) -> Tensor:
        sizes = torch.ones(3, dtype=torch.int64) * grid
        return TOWER.weight(pixel_values)[: len(sizes)]

    assert audit(encoder, BATCH, configs(pixel_values=False, grid=False))["grid"].verdict is Verdict.SHOULD_STAY


def test_an_unused_field_is_not_wrong_in_either_place() -> None:
    batch = {**BATCH, "timestamps": torch.ones(2)}
    for mark in (True, False):
        field = audit(split_rows, batch, configs(pixel_values=False, grid=True, timestamps=mark))["timestamps"]
        assert (field.verdict, field.read_by, field.both_right) == (Verdict.UNUSED, (), True)
        assert "nothing reads it" in field.reason


def test_fields_that_only_positions_or_lengths_read_are_unused_by_the_encoder_and_should_stay() -> None:
    def rope(input_ids: Tensor, seconds: Tensor) -> Tensor:
        return torch.arange(input_ids.numel()) * seconds.sum()

    def count(counts: Tensor) -> list[int]:
        numbers: list[int] = counts.tolist()
        return numbers

    batch = {**BATCH, "seconds": torch.tensor([1.0, 2.0]), "counts": torch.tensor([6, 4]), "input_ids": torch.ones(9)}

    def run(mark: bool) -> AuditReport:
        marks = configs(pixel_values=False, grid=True, seconds=mark, counts=mark)
        return audit(split_rows, batch, marks, positions=rope, lengths=count)

    kept, sent = run(True), run(False)
    assert (kept["seconds"].verdict, kept["seconds"].read_by) == (Verdict.UNUSED, ("positions",))
    assert (kept["counts"].verdict, kept["counts"].read_by) == (Verdict.UNUSED, ("lengths",))
    assert sent["seconds"].verdict is Verdict.SHOULD_STAY
    assert sent["counts"].verdict is Verdict.SHOULD_STAY


def test_positions_run_on_the_cpu_and_the_encoder_gets_text_on_the_device() -> None:
    seen = {}

    def encoder(pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        seen["encoder"] = input_ids.device.type
        return TOWER.weight(pixel_values) + TOWER.table(input_ids)

    def positions(input_ids: Tensor) -> Tensor:
        seen["positions"] = input_ids.device.type
        return input_ids + torch.ones(10, dtype=torch.int64)

    batch = {"pixel_values": patches(), "input_ids": torch.arange(10)}
    report = audit(encoder, batch, configs(pixel_values=False), positions=positions)
    assert seen == {"encoder": "cuda", "positions": "cpu"}
    assert not report.wrong


def test_a_field_that_is_needed_in_both_places_stays_and_the_consumer_has_to_copy_it() -> None:
    def encoder(pixel_values: Tensor, lengths: Tensor) -> Tensor:
        return TOWER.weight(pixel_values) * lengths[:, None]

    def positions(lengths: Tensor) -> Tensor:
        return torch.arange(10) + lengths

    def careful(pixel_values: Tensor, lengths: Tensor) -> Tensor:
        there = (lengths.pin_memory() if lengths.is_cpu else lengths).to(pixel_values.device, non_blocking=True)
        return encoder(pixel_values, there)

    batch = {"pixel_values": patches(), "lengths": torch.arange(10)}
    for mark, verdict in ((True, Verdict.NEEDS_COPY), (False, Verdict.SHOULD_STAY)):
        report = audit(encoder, batch, configs(pixel_values=False, lengths=mark), positions=positions)
        field = report["lengths"]
        assert (field.verdict, field.wrong, field.right_mark) == (verdict, not mark, True)
        assert "let the consumer copy it" in field.reason
        assert (report.ok, report.exit_status, report.suggested["lengths"]) == (False, 1, True)
        assert any(use.op == "mul" for use in field.uses)
    kept = audit(encoder, batch, configs(pixel_values=False, lengths=True), positions=positions)
    assert kept.wrong == ()
    assert str(kept).endswith("all 2 marks are right\nthe consumer has to copy: lengths")
    assert audit(careful, batch, configs(pixel_values=False, lengths=True), positions=positions).ok


def test_a_right_mark_is_not_called_wrong_for_what_another_field_s_wrong_mark_does_to_it() -> None:
    def positions(grid: Tensor, seconds: Tensor) -> Tensor:
        start = grid.sum() + 1  # of the device if the grid is
        return torch.ones(2) * (start * seconds)

    batch = {**BATCH, "seconds": torch.tensor([1.0, 2.0])}
    for marks in ({"grid": False}, {"grid": False, "seconds": False}, {"seconds": False}):
        given = configs(**{"pixel_values": False, "grid": True, "seconds": True, **marks})
        report = audit(split_rows, batch, given, positions=positions)
        assert {field.name for field in report.wrong} == set(marks)
        assert report.suggested == {"pixel_values": False, "grid": True, "seconds": True}
        assert f"wrong marks: {', '.join(marks)}" in str(report)
        assert "NEEDS" not in str(report)


def test_a_wrong_mark_that_another_hides_is_reported_too() -> None:
    def encoder(pixel_values: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if not a.is_cpu:
            raise RuntimeError("the kernel takes CPU tensors")
        return TOWER.weight(pixel_values) * b

    batch = {"pixel_values": patches(), "a": torch.ones(8), "b": torch.ones(8)}
    report = audit(encoder, batch, configs(pixel_values=False, a=False, b=True))
    assert verdicts(report) == {"pixel_values": "right", "a": "should stay", "b": "must move"}
    assert report["b"].uses
    assert report.suggested == {"pixel_values": False, "a": True, "b": False}


# Moves that the consumer makes itself


def test_a_copy_that_the_consumer_makes_without_waiting_is_right_and_told() -> None:
    batch = {"pixel_values": patches(), "image_grid_thw": GRID}
    report = audit(MovedGrid(), batch, field_configs("isaac", batch, strict=True))
    field = report["image_grid_thw"]
    assert field.verdict is Verdict.RIGHT
    assert [(use.op, use.blocks, use.where.function) for use in field.moves] == [("to", False, "forward")]
    flipped = audit(MovedGrid(), batch, configs(pixel_values=False, image_grid_thw=False))
    assert flipped["image_grid_thw"].verdict is Verdict.SHOULD_STAY


def test_a_copy_that_blocks_and_spares_no_read_is_a_wrong_mark() -> None:
    def encoder(pixel_values: Tensor, lengths: Tensor) -> Tensor:
        return TOWER.weight(pixel_values) * lengths.to(pixel_values.device)[:, None]

    batch = {"pixel_values": patches(), "lengths": torch.arange(10)}
    field = audit(encoder, batch, configs(pixel_values=False, lengths=True))["lengths"]
    assert field.verdict is Verdict.MUST_MOVE
    assert [use.op for use in field.uses] == ["to"]
    assert not audit(encoder, batch, configs(pixel_values=False, lengths=False)).wrong


def test_either_place_is_right_where_the_copy_waits_for_nothing_and_nobody_reads_it_back() -> None:
    def encoder(pixel_values: Tensor, lengths: Tensor) -> Tensor:
        there = lengths.to(pixel_values.device, non_blocking=True)
        return TOWER.weight(pixel_values) * there[:, None]

    batch = {"pixel_values": patches(), "lengths": torch.arange(10)}
    for mark in (True, False):
        field = audit(encoder, batch, configs(pixel_values=False, lengths=mark))["lengths"]
        assert (field.verdict, field.both_right) == (Verdict.RIGHT, True)
        assert "without waiting" in field.reason


# Data-dependent control flow


def test_control_flow_that_depends_on_data_runs_and_its_reads_are_told() -> None:
    batch = {"pixel_values": patches(), "mask": torch.tensor([1] * 7 + [0] * 3), "limit": torch.tensor(1)}
    report = audit(Guarded(), batch, configs(pixel_values=False, mask=False, limit=True))
    assert verdicts(report)["pixel_values"] == "right"
    assert verdicts(report)["limit"] == "right"
    ops = {use.op for use in report["pixel_values"].reads}
    assert "item" in ops  # the loop's condition; no other place would spare it
    assert audit(Guarded(), batch, configs(pixel_values=False, mask=True, limit=False))["limit"].wrong


def test_a_mask_is_best_where_indexing_with_it_waits_for_nothing() -> None:
    batch = {"pixel_values": patches(), "mask": torch.tensor([1] * 7 + [0] * 3), "limit": torch.tensor(1)}
    report = audit(Guarded(), batch, configs(pixel_values=False, mask=False, limit=True))
    assert report["mask"].verdict is Verdict.SHOULD_STAY
    assert report.suggested["mask"] is True


# Marks that engines had to take back


@pytest.mark.parametrize(("model_type", "consumer", "batch", "name"), TAKEN_BACK, ids=[case[0] for case in TAKEN_BACK])
def test_marks_that_were_taken_back_are_caught(
    model_type: str, consumer: nn.Module, batch: dict[str, Any], name: str
) -> None:
    shipped = field_configs(model_type, batch, consumer="vllm", strict=True)
    assert not audit(consumer, batch, shipped).wrong
    wrong = audit(consumer, batch, {**shipped, name: replace(shipped[name], keep_on_cpu=True)})
    assert [(field.name, field.verdict) for field in wrong.wrong] == [(name, Verdict.MUST_MOVE)]
    assert wrong[name].uses[0].where.file.endswith("audit_stubs.py")
    assert not wrong.suggested[name]


# A blinded audit


def blind(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let the simulated device see nothing of one kind, as if it were allowed silently."""
    monkeypatch.setattr(Recorder, kind, lambda *arguments, **named: None)


MUST_MOVE = [
    test_a_marked_field_that_meets_device_tensors_must_move,
    test_values_are_followed_through_python_and_through_the_device_a_tensor_names,
    functools.partial(test_marks_that_were_taken_back_are_caught, *TAKEN_BACK[0]),
]
SHOULD_STAY = [test_an_unmarked_field_that_is_only_read_back_should_stay, test_reads_are_counted_by_line]
MOVES = [test_a_copy_that_the_consumer_makes_without_waiting_is_right_and_told]


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        *(("mixed", check) for check in MUST_MOVE),
        *(("read", check) for check in SHOULD_STAY),
        *(("moved", check) for check in MOVES),
    ],
)
def test_a_blinded_audit_fails_these_tests(
    monkeypatch: pytest.MonkeyPatch, kind: str, check: Callable[[], None]
) -> None:
    check()
    blind(monkeypatch, kind)
    with pytest.raises((AssertionError, IndexError)):
        check()
