"""How the audit calls a consumer, what it leaves alone, and what its report says."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_stubs import (
    BATCH,
    GRID,
    TAKEN_BACK,
    TOWER,
    PatchPositions,
    Tower,
    configs,
    patches,
    split_rows,
    verdicts,
)
from torch import Tensor

from mmcache.audit import Auditor, Verdict, audit
from mmcache.errors import FieldError


def test_encoders_come_as_functions_modules_methods_and_partials() -> None:
    class Engine:
        def __init__(self) -> None:
            self.tower = Tower()

        def encode(self, pixel_values: Tensor, grid: Tensor) -> list[Tensor]:
            return list(self.tower.weight(pixel_values).split(grid.prod(-1).tolist()))

    class Encoder(Tower):
        def forward(self, pixel_values: Tensor, grid: Tensor) -> list[Tensor]:
            return list(self.weight(pixel_values).split(grid.prod(-1).tolist()))

    tower = Tower()

    def closed(fields: dict[str, Tensor]) -> list[Tensor]:
        return list(tower.weight(fields["pixel_values"]).split(fields["grid"].prod(-1).tolist()))

    def bound(module: Tower, **fields: Tensor) -> list[Tensor]:
        return list(module.weight(fields["pixel_values"]).split(fields["grid"].prod(-1).tolist()))

    for encoder in (Engine().encode, Encoder(), Encoder().forward, closed, functools.partial(bound, tower)):
        report = audit(encoder, BATCH, configs(pixel_values=False, grid=True))
        assert verdicts(report) == {"pixel_values": "right", "grid": "right"}
        assert audit(encoder, BATCH, configs(pixel_values=True, grid=True))["pixel_values"].wrong
        assert audit(encoder, BATCH, configs(pixel_values=False, grid=False))["grid"].wrong


def test_nested_lists_and_arrays_are_fields_too() -> None:
    def encoder(crops: list[list[Tensor]], sizes: Tensor) -> list[Tensor]:
        return [TOWER.weight(crop)[: int(sizes[0, 0])] for image in crops for crop in image]

    batch = {"crops": [[patches(3), patches(2)], [patches(1)]], "sizes": np.array([[1, 2], [3, 4]])}
    assert verdicts(audit(encoder, batch, configs(crops=False, sizes=True))) == {"crops": "right", "sizes": "right"}
    assert [f.name for f in audit(encoder, batch, configs(crops=True, sizes=False)).wrong] == ["crops", "sizes"]


def test_an_auditor_runs_the_consumer_once_for_each_placement() -> None:
    runs = []

    def encoder(pixel_values: Tensor, grid: Tensor) -> list[Tensor]:
        runs.append((pixel_values.is_cpu, grid.is_cpu))
        return split_rows(pixel_values, grid)

    auditor = Auditor(encoder, BATCH)
    assert not auditor.audit(configs(pixel_values=False, grid=True)).wrong
    assert sorted(runs) == [(False, False), (False, True), (True, True)]
    assert auditor.audit(configs(pixel_values=False, grid=False), only=["grid"])["grid"].wrong
    assert len(runs) == 3


def test_the_batch_and_the_weights_stay_as_they_were() -> None:
    grid, weights = GRID.clone(), TOWER.weight.weight.detach().clone()

    def encoder(pixel_values: Tensor, grid: Tensor) -> Tensor:
        grid += 1
        return TOWER.weight(pixel_values)[: int(grid.sum())]

    audit(encoder, BATCH, configs(pixel_values=False, grid=True))
    assert torch.equal(BATCH["grid"], grid)
    assert torch.equal(TOWER.weight.weight, weights)
    assert TOWER.weight.weight.device == torch.device("cpu")


def test_configs_that_the_batch_lacks_are_ignored_and_only_some_may_be_judged() -> None:
    marks = configs(pixel_values=False, grid=False, missing=True)
    report = Auditor(split_rows, BATCH).audit(marks, only=["pixel_values"])
    assert verdicts(report) == {"pixel_values": "right"}
    with pytest.raises(KeyError):
        report["missing"]


def test_what_a_consumer_raises_because_of_a_place_is_a_finding() -> None:
    def encoder(pixel_values: Tensor, grid: Tensor) -> Tensor:
        if grid.device != pixel_values.device:
            raise RuntimeError("all tensors on one device, please")
        return TOWER.weight(pixel_values)

    field = audit(encoder, BATCH, configs(pixel_values=False, grid=True))["grid"]
    assert field.verdict is Verdict.MUST_MOVE
    assert "all tensors on one device, please" in field.reason


def test_what_a_consumer_raises_anyway_is_raised() -> None:
    def encoder(pixel_values: Tensor) -> Tensor:
        raise ZeroDivisionError("always")

    with pytest.raises(ZeroDivisionError, match="always"):
        audit(encoder, BATCH, configs(pixel_values=False, grid=True))


@pytest.mark.parametrize(("batch", "marks"), [(BATCH, {"grid": True}), ({"grid": "text"}, configs(grid=True))])
def test_what_is_no_field_is_an_error_that_names_it(batch: dict[str, Any], marks: Any) -> None:
    with pytest.raises(FieldError) as caught:
        audit(split_rows, batch, marks)
    assert caught.value.field == "grid"


# What a report says


def test_a_report_reads_as_text_and_as_json() -> None:
    report = audit(
        PatchPositions(), TAKEN_BACK[0][2], configs(pixel_values=False, image_grid_thw=False, patch_positions=True)
    )
    text = str(report)
    assert "patch_positions (image, batched, keep_on_cpu): MUST MOVE" in text
    assert "image_grid_thw (image, batched, to the device): SHOULD STAY" in text
    assert "pixel_values (image, batched, to the device): right" in text
    assert text.splitlines()[-1] == "wrong marks: image_grid_thw, patch_positions"
    data = json.loads(json.dumps(report.as_json()))
    assert data["ok"] is False
    assert data["suggested"] == {"pixel_values": False, "image_grid_thw": True, "patch_positions": False}
    wrong = {field["field"]: field for field in data["fields"] if field["wrong"]}
    assert wrong["patch_positions"]["verdict"] == "must move"
    use = wrong["image_grid_thw"]["uses"][0]
    assert (use["op"], use["function"], use["count"]) == ("tolist", "forward", 1)
    assert use["file"].endswith("audit_stubs.py")
    assert use["line"] > 0
    assert report.suggestion()["image_grid_thw"] == {"modality": "image", "layout": "batched", "keep_on_cpu": True}


def test_the_documented_example_runs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "audit.md").read_text(encoding="utf-8")
    source = page.split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(compile(source, "audit.md", "exec"), scope)
    assert verdicts(scope["report"]) == {"pixel_values": "right", "grid": "right"}
