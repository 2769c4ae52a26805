"""The ``repr`` of a report: it fits a screen, also if the report has thousands of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.matrix import matrix
from ingot.reporting.report import Report
from ingot.reporting.reportable import Reportable

SCREEN = 80 * 24


@dataclass(frozen=True, slots=True)
class Sample(Reportable):
    """A report with a value of each type."""

    text: str
    rows: Sequence[Any]
    table: dict[str, int]
    value: object

    def report(self) -> Report:
        return Report()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("a", [1, 2], {}, None), "Sample(text='a', rows=[1, 2], table={}, value=None)"),
        (("a" * 99, range(5), {"k": 1}, 2), f"Sample(text='{'a' * 57}...', rows=<5 items>, table={{'k': 1}}, value=2)"),
        (("", ["b" * 99], {"c" * 99: 1}, Report([1] * 99)),  # type: ignore[list-item]
         "Sample(text='', rows=<1 item>, table=<1 item>, value=<Report>)"),
    ],
)  # fmt: skip
def test_long_values_are_counted(values: tuple[Any, ...], expected: str) -> None:
    assert repr(Sample(*values)) == expected


def test_reports_of_many_tensors_fit_a_screen(tmp_path: Path) -> None:
    weights = {f"model.layers.{index}.mlp.up_proj.weight": np.ones((2, 32), np.float32) for index in range(200)}
    ingot.save(tmp_path / "a.zt", weights)
    converted = ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt", recipe="int8")
    for report in (converted, ingot.compare(tmp_path / "a.zt", tmp_path / "b.zt"), matrix(tmp_path / "a.zt")):
        assert "items>" in repr(report)
        assert len(repr(report)) < SCREEN
