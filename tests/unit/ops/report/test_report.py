"""The page of a checkpoint: its data are those of compare and of the files, and it asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import FormatError, UsageError
from ingot.ops.check.receipt import add_receipt
from ingot.ops.report.look import Look, look
from ingot.ops.report.page import page
from ingot.ops.report.sample import BINS, histogram
from ingot.ops.report.svg import Piece, heat, treemap

VOID = ("meta", "input", "br")
HOSTILE = 'model.layers.1.</script><img src="http://x/y">\u202e.weight'


class Elements(HTMLParser):
    """Collects the elements of a page, and holds it to closing each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.inside == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside[-1]] = self.texts.get(self.inside[-1], "") + data


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> tuple[Path, Path]:
    ingot.convert(model, tmp_path / "int4.zt", "int4")
    return model, tmp_path / "int4.zt"


def test_errors_are_those_of_compare(pair: tuple[Path, Path]) -> None:
    found, compared = look(*pair), ingot.compare(*pair)
    by_name = {row.name: row for row in found.rows}
    assert set(by_name) == {item.name for item in compared.tensors}
    for item in compared.tensors:
        row = by_name[item.name]
        assert item.stats is not None
        assert row.status == item.status
        assert row.cosine == item.stats.cosine
        assert row.error == pytest.approx(10 ** (-item.stats.snr_db / 20))
        assert (row.changed == 0) == item.same
    assert {row.codec for row in found.rows} == {"dense", "int4 g64"}
    assert found.nbytes == sum(cell.nbytes for cell in found.cells)
    assert sum(cell.tensors for cell in found.cells) == len(found.rows)
    total = sum((cell.error or 0) ** 2 * cell.squared for cell in found.cells) / sum(c.squared for c in found.cells)
    assert total == pytest.approx(10 ** (-compared.total.snr_db / 10))


def test_tensors_that_only_one_has_are_listed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with ingot.open(pair[0]) as first:
        tensors = {name: tensor for name, tensor in first.items() if name != "lm_head.weight"}
        ingot.save(tmp_path / "less.zt", {**tensors, "more": np.ones(3, np.float32)})
    status = {row.name: row.status for row in look(pair[0], tmp_path / "less.zt").rows}
    assert (status["lm_head.weight"], status["more"]) == ("only in A", "only in B")


def test_histograms_are_of_bounded_samples_and_have_the_grid(pair: tuple[Path, Path]) -> None:
    found = look(*pair, histograms=5)
    assert len(found.histograms) == 5
    for item in found.histograms:
        assert len(item.counts) == BINS
        assert sum(item.counts) == item.values <= 1 << 16
    packed = [item for item in found.histograms if item.codec == "affine"]
    assert packed
    for item in packed:
        with ingot.open(pair[1]) as second:
            row = second[item.name].numpy()[0, : item.run]
        assert list(item.levels) == sorted({float(value) for value in row})
        assert item.run == 64
        assert len(item.levels) <= 16
        assert item.reference is not None
    assert look(pair[0], histograms=0).histograms == []


def test_samples_of_odd_tensors(tmp_path: Path) -> None:
    arrays = {
        "scalar": np.float32(2).reshape(()),
        "empty": np.ones((0, 4), np.float32),
        "nan": np.full((4, 4), np.nan, np.float32),
        "wide": np.ones((2, 1 << 17), np.float32),
    }
    ingot.save(tmp_path / "odd.zt", arrays)
    with ingot.open(tmp_path / "odd.zt") as checkpoint:
        assert histogram(checkpoint["nan"], None) is None
        scalar, wide = (histogram(checkpoint[name], None) for name in ("scalar", "wide"))
        assert scalar is not None
        assert wide is not None
        assert (scalar.values, wide.values <= 1 << 16) == (1, True)
    assert "<svg" in page(look(tmp_path / "odd.zt"))


def check(text: str, found: Look) -> Elements:
    """Hold a page to asking for nothing: no address in it, and a policy that would forbid it."""
    elements = Elements(text)
    for tag, attributes in elements.found:
        assert tag not in ("img", "link", "iframe", "object", "embed", "base", "form", "use", "image")
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "srcset", "style", "action", "xlink:href")
            assert name != "href" or (value or "").startswith("#")
    style, script = elements.texts["style"], elements.texts["script"]
    assert "url(" not in style
    assert "@import" not in style
    assert "fetch" not in script
    policy = next(a["content"] or "" for tag, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert allowed["default-src"] == "'none'"
    for name, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert allowed[name] == f"'sha256-{digest}'"
    rows = re.findall(
        r"<tr><td class=\"n\">(.*?)</td>", text.partition('<table id="table">')[2].partition("</table>")[0]
    )
    assert len(rows) == len(found.rows)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"] for tag, a in elements.found if tag == "a"} <= {f"#{id}" for id in ids}
    assert all(a.get("aria-label") or a.get("aria-hidden") for tag, a in elements.found if tag == "svg")
    return elements


def test_the_page_asks_for_nothing_and_is_small(pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = look(*pair)
    check(page(found), found)
    rng = np.random.default_rng(0)
    names = [
        f"model.layers.{n}.{part}" for n in range(125) for part in map("self_attn.{}_proj.weight".format, "qkvoabcd")
    ]
    ingot.save(tmp_path / "many.safetensors", {name: rng.standard_normal((4, 8)) for name in names})
    many = look(tmp_path / "many.safetensors", tmp_path / "many.safetensors")
    text = page(many)
    assert len(many.rows) == 1000
    assert len(text.encode()) <= 2 << 20
    check(text, many)


def test_names_from_files_are_text(tmp_path: Path) -> None:
    ingot.save(tmp_path / "h.safetensors", {HOSTILE: np.ones((4, 4), np.float32)}, {"<b>": "</script><script>alert(1)"})
    found = look(tmp_path / "h.safetensors")
    text = page(found)
    elements = check(text, found)
    assert [tag for tag, _ in elements.found].count("script") == 1
    assert "\u202e" not in text
    assert 'src="http://x/y"' in unescape(text)


def test_evaluations_and_a_conversion_are_taken_from_files(model: Path, tmp_path: Path) -> None:
    made = ingot.convert(model, tmp_path / "int4.zt", "int4")
    tensors = [{"name": item.name, "action": item.action} for item in made.tensors]
    (tmp_path / "convert.json").write_text(json.dumps({"tensors": tensors}))
    (tmp_path / "eval.json").write_text(json.dumps({"model": "int4", "perplexity": 12.5, "kl": 0.25, "agreement": 0.5}))
    found = look(tmp_path / "int4.zt", conversion=tmp_path / "convert.json", evaluations=[tmp_path / "eval.json"])
    assert {row.name: row.action for row in found.rows} == {item.name: item.action for item in made.tensors}
    assert [(item.model, item.perplexity, item.kl, item.agreement) for item in found.scores] == [
        ("int4", 12.5, 0.25, 0.5)
    ]
    assert "12.5" in check(page(found), found).texts["text"]


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"perplexity": "x"}', '{"perplexity": true}', '{"perplexity": 1e999}', "x"]
)
def test_other_files_are_no_evaluations(text: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(text)
    with pytest.raises(FormatError) as caught:
        look(model, evaluations=[tmp_path / "eval.json"])
    assert caught.value.rule == "report.json"


def test_a_page_is_written_whole_or_not_at_all(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ingot.report(model, out=tmp_path / "page.txt")
    assert caught.value.rule == "report.page"
    told = ingot.report(model, out=tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert {table.name for table in told.tables} == {"tensors", "cells", "histograms", "evaluations", "chips"}
    with pytest.raises(UsageError) as caught:
        ingot.report(model, out=tmp_path / "page.html")
    assert caught.value.rule == "target.exists"


def test_what_was_measured_and_sealed_is_told(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "sealed.safetensors"
    (model / "model.safetensors").rename(file)
    [sealed] = ingot.seal(file)
    add_receipt(file, {"of": {"kind": "perplexity"}, "figures": {"perplexity": 12.5}})
    told = dict(look(file).receipts)
    assert told["sealed file"] == sealed.digest
    assert told["content id"] == told["receipt of the weights"]
    assert "12.5" in told["measured"]
    (beside,) = tmp_path.rglob("sealed.safetensors*receipt.json")
    beside.write_text("{")
    assert dict(look(file).receipts)["receipt"].startswith("receipt")


def test_the_plan_for_chips_is_that_of_plan(pair: tuple[Path, Path]) -> None:
    found, planned = look(pair[1], chip="m1,m4"), ingot.plan(pair[1], "m1,m4")
    assert [(item.chip, item.outcomes) for item in found.chips] == [
        (item.chip, item.outcomes) for item in planned.chips
    ]
    assert [item.moved for item in found.chips] == [item.totals["moved"] for item in planned.chips]
    assert all(item.product in page(found) for item in planned.chips)
    assert "m4" in planned._repr_html_()


def test_areas_of_a_treemap_are_amounts() -> None:
    amounts = {"a": [6.0, 2.0], "b": [3.0], "c": [0.0], "d": [1.0] * 9}
    drawn = treemap({name: [Piece(value, 1, f"{name}") for value in them] for name, them in amounts.items()}, "x")
    rects = re.findall(r'width="([\d.]+)" height="([\d.]+)" class="c1"><title>(\w)', drawn)
    areas: dict[str, float] = {}
    for width, height, name in rects:
        areas[name] = areas.get(name, 0.0) + float(width) * float(height)
    whole = sum(areas.values())
    assert {name: area / whole for name, area in areas.items()} == pytest.approx(
        {"a": 0.4, "b": 0.15, "d": 0.45}, abs=0.01
    )


def test_what_hardly_differs_looks_alike() -> None:
    def colours(*values: float) -> list[int]:
        drawn = heat(
            ["mlp"], list(map(str, range(len(values)))), {("mlp", str(i)): (v, "") for i, v in enumerate(values)}, ""
        )
        return [int(level) for level in re.findall(r'class="h(\d+)"', drawn)]

    assert colours(0.0, 1.0, 4.0, 10.0) == [0, 1, 4, 10]
    assert min(colours(0.0, 0.999, 1.0)[1:]) == 10
    assert colours(0.0, 0.0) == [0, 0]


def test_notebooks_show_checkpoints_and_reports(pair: tuple[Path, Path]) -> None:
    with ingot.open(pair[1]) as checkpoint:
        shown = checkpoint._repr_html_()
    assert "int4.zt" in shown
    assert "affine" in shown
    for item in (ingot.compare(*pair), ingot.report(*pair)):
        elements = Elements(item._repr_html_())  # type: ignore[attr-defined]
        assert not {tag for tag, _ in elements.found} & {"script", "style", "img"}
    assert "mlp.down_proj" in ingot.compare(*pair)._repr_html_()
