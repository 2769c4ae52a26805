"""Reports: values go in typed, and one renderer each makes text and JSON of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.output import data_of, render
from ingot.codecs.table import CODECS
from ingot.formats.detect import FORMATS
from ingot.inspect.catalog import codecs_report, formats_report
from ingot.inspect.inspect import inspect
from ingot.reporting.report import (
    Bits,
    Bytes,
    Column,
    Counts,
    Decibels,
    Figure,
    Line,
    Ratio,
    Report,
    Seconds,
    Shape,
    Table,
    Texts,
    figures_of,
    table_of,
)


@dataclass(frozen=True)
class Row:
    name: str
    shape: Shape
    nbytes: Bytes
    error: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Done:
    """A report object of an operation."""

    path: str
    size: Bytes
    seconds: Seconds
    share: Ratio
    snr: Decibels
    bits: Bits
    ok: bool
    ops: Counts
    files: Texts
    base: str | None = None

    @property
    def double(self) -> Bytes:
        """Computed."""
        return 2 * self.size


DONE = Done("a\nb", 3 << 20, 1.25, 0.5, 30.0, 4.25, True, {"apply": 2, "same": 1}, ["x", "y"])
ROWS = [Row("m.0.w", (2, 3), 12), Row("m.1.w", (), 1 << 20, {"rms": 0.5})]


def printed(report: Report, capsys: pytest.CaptureFixture[str]) -> list[str]:
    render(report)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("path", r"a\nb"),
        ("size", "3.00 MiB"),
        ("double", "6.00 MiB"),
        ("seconds", "1.25 s"),
        ("share", "50.0 %"),
        ("snr", "30.00 dB"),
        ("bits", "4.250"),
        ("ok", "yes"),
        ("ops", "2 apply, 1 same"),
        ("files", "x, y"),
        ("base", "none"),
    ],
)
def test_a_figure_is_shown_in_the_unit_of_its_annotation(name: str, text: str, capsys) -> None:
    assert printed(Report(figures_of(DONE, "double"), [Line(f"<{{{name}}}>")]), capsys) == [f"<{text}>"]


def test_programs_get_values_and_people_lines(capsys) -> None:
    figures = [*figures_of(DONE, "double"), Figure("told", ["one {x}", "two"], "texts", data=False)]
    rows = table_of("rows", ROWS, Row, {"name": "tensor", "nbytes": "stored"})
    report = Report(figures, [Line("{size}", "size"), Line("note: {item}", items="told")], [rows], [Line("end")])
    assert data_of(report) == {
        "path": "a\nb",
        "size": 3 << 20,
        "seconds": 1.25,
        "share": 0.5,
        "snr": 30.0,
        "bits": 4.25,
        "ok": True,
        "ops": {"apply": 2, "same": 1},
        "files": ["x", "y"],
        "base": None,
        "double": 6 << 20,
        "rows": [
            {"name": "m.0.w", "shape": (2, 3), "nbytes": 12, "error": None},
            {"name": "m.1.w", "shape": (), "nbytes": 1 << 20, "error": {"rms": 0.5}},
        ],
    }
    lines = printed(report, capsys)
    assert lines[:4] == ["  size     3.00 MiB", "note: one {x}", "note: two", ""]
    assert [line.split() for line in lines[4:]][::2] == [["tensor", "stored"], ["m.0.w", "12", "B"], ["end"]]
    render(report, json=True)
    assert json.loads(capsys.readouterr().out)["rows"][0]["shape"] == [2, 3]
    render(report, quiet=True)
    assert capsys.readouterr().out == ""


def test_what_is_for_one_reader_alone_is_not_given_to_the_other(capsys) -> None:
    columns = (Column("key"), Column("", head="word"), Column("both", "error", "error"))
    hidden = Table("hidden", columns, [("k", "w", 0.0)], shown=False)
    shown = Table("", columns, [("k", "w", 0.0), ("k", "v", None), ("k", "u", 0.25)], data=False)
    report = Report(tables=[hidden, shown])
    assert data_of(report) == {"hidden": [{"key": "k", "both": 0.0}]}
    lines = [line.split() for line in printed(report, capsys)]
    assert lines[0] == ["word", "error"]
    assert lines[2:] == [["w", "exact"], ["v", "-"], ["u", "0.25"]]


@pytest.mark.parametrize(("report", "known"), [(formats_report, FORMATS), (codecs_report, CODECS)])
def test_a_report_that_is_a_table_is_a_list_for_programs(report, known) -> None:
    assert [row["name"] for row in data_of(report())] == list(known)


def test_formats_hand_over_values(tmp_path) -> None:
    """Details of a file are numbers and words, not sentences with numbers in them."""
    matrix = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    ingot.save(tmp_path / "a.safetensors", {"model.layers.0.mlp.up_proj.weight": matrix})
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "a.squizd", "int4")
    features, dispatch = inspect(tmp_path / "a.squizd").details
    found: dict[str, Any] = {row[0]: row[1] for row in features.rows}
    assert found == {name: name == "INT4" for name in found}
    assert dispatch.title == "dispatch"
