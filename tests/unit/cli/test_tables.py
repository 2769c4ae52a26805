"""Tables and lines at the width of a terminal: nothing wider, no word broken, names told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.output import line, shortened, table
from ingot.codecs.table import CODECS
from ingot.model.layouts.table import codec_name
from ingot.naming.names import equal_layers

NAMES = [f"model.layers.{i}.{kind}_layernorm.weight" for i in range(12) for kind in ("input", "post")]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("narrow")
def test_names_are_shortened_and_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(name, "x" * 20, "y" * 14, "123") for name in NAMES]
    table(("tensor", "what", "more", "bytes"), rows, text_columns=3)
    lines = printed(capsys)
    assert len(lines) == 2 + len(NAMES)
    assert max(map(len, lines)) == 80
    assert len({row.split()[0] for row in lines[2:]}) == len(NAMES)
    assert not any(row.startswith("model.layers.10") for row in lines)


@pytest.mark.usefixtures("narrow")
def test_names_that_a_cut_would_make_equal_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{'x' * 90}{i}{'x' * 90}" for i in range(3)]
    table(("tensor", "bytes"), [(name, "1") for name in names])
    assert [row.split()[0] for row in printed(capsys)[2:]] == names


def test_nothing_is_cut_where_a_program_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table(("tensor", "what"), [(NAMES[0] * 9, "some words " * 50)], text_columns=2)
    assert NAMES[0] * 9 in printed(capsys)[2]


@pytest.mark.usefixtures("narrow")
def test_optional_columns_go_first_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    table(
        ("tensor", "role", "dtype", "bytes"), [(NAMES[0], "r" * 24, "d" * 24, "1")], text_columns=3, optional=("role",)
    )
    lines = printed(capsys)
    assert lines[0].split() == ["tensor", "dtype", "bytes"]
    assert "role" in lines[-1]


@pytest.mark.usefixtures("narrow")
def test_text_is_wrapped_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = "one codec of several words " * 8
    table(("name", "what"), [("codec", text)], text_columns=2)
    line(f"  note     {text}")
    lines = printed(capsys)
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines[2:]).split()).count("one codec of several words") == 16


@pytest.mark.parametrize("width", range(5, 30))
def test_a_shortened_name_keeps_its_end(width: int) -> None:
    short = shortened(NAMES[0], width)
    assert len(short) == width
    assert NAMES[0].endswith(short.split("…")[1])


def test_columns_without_content_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    table(("tensor", "detail", "n"), [("a", "", "1"), ("b", "", "")], text_columns=2)
    assert printed(capsys)[0].split() == ["tensor", "n"]


def test_layers_that_differ_in_more_than_their_number_stay_apart() -> None:
    items = [("h.0.w", 1), ("h.1.w", 1), ("h.2.w", 2), ("lm_head", 1)]
    groups = equal_layers(items, lambda item: item[0], lambda item: item[1])
    assert [(name, len(group)) for name, group in groups] == [("h.*.w", 2), ("h.2.w", 1), ("lm_head", 1)]


@pytest.mark.parametrize(("bits", "group", "text"), [(4, 32, "int4 g32"), (8, None, "int8 row")])
def test_a_codec_in_a_few_words(bits: int, group: int | None, text: str) -> None:
    options = {"bits": bits, **({"group": group} if group else {})}
    encoder = CODECS["affine"].encoder((64, 64), "f32", options)
    assert codec_name(encoder.codec, encoder.params, ["raw"]) == text
    assert codec_name("dense", {}, ["raw", "zstd"]) == "dense zstd"


def test_an_inspection_fits_80_columns_and_tells_totals_first(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ingot.save(path, {f"model.layers.{i}.mlp.down_proj.weight": np.ones((8, 16), np.float32) for i in range(3)})
    for arguments, rows in ((["inspect", str(path)], 1), (["inspect", str(path), "--all"], 3)):
        done = subprocess.run(
            [sys.executable, "-m", "ingot", *arguments],
            env={"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            check=True,
        )
        lines = done.stdout.decode().splitlines()
        assert max(len(text) for text in lines if str(path) not in text) <= 80
        found = [index for index, text in enumerate(lines) if "down_proj" in text]
        assert len(found) == rows
        assert found[0] > next(index for index, text in enumerate(lines) if text.startswith("codec"))
        assert ("layers.*.mlp" in lines[found[0]]) == (rows == 1)
