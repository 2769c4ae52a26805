"""The page of a checkpoint: its data are those of compare and of the files, and it asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.conversion.run import prepare
from ingot.errors import FormatError, UsageError
from ingot.inspect.compare import CompareReport
from ingot.inspect.page.look import PageData, collect_page_data
from ingot.inspect.page.page import page
from ingot.inspect.page.sample import BINS, histogram
from ingot.inspect.page.svg import Segment, heat, treemap
from ingot.inspect.receipt import add_receipt
from tests.support.adapters import Q, base_folder, lora, peft_folder

VOID = ("meta", "input", "br")


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


@pytest.fixture(scope="module")
def pair(weights: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file of weights, and what int4 makes of it; tests only read them."""
    folder = tmp_path_factory.mktemp("pair")
    ingot.save(folder / "model.safetensors", weights)
    ingot.convert(folder / "model.safetensors", folder / "int4.zt", "int4")
    return folder / "model.safetensors", folder / "int4.zt"


@pytest.fixture(scope="module")
def looked(pair: tuple[Path, Path]) -> PageData:
    return collect_page_data(*pair, histograms=5)


@pytest.fixture(scope="module")
def compared(pair: tuple[Path, Path]) -> CompareReport:
    return ingot.compare(*pair)


def test_errors_are_those_of_compare(looked: PageData, compared: CompareReport) -> None:
    found = looked
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
    status = {row.name: row.status for row in collect_page_data(pair[0], tmp_path / "less.zt").rows}
    assert (status["lm_head.weight"], status["more"]) == ("only in A", "only in B")


def test_histograms_are_of_bounded_samples_and_have_the_grid(pair: tuple[Path, Path], looked: PageData) -> None:
    found = looked
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
    assert collect_page_data(pair[0], histograms=0).histograms == []


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
    assert "<svg" in page(collect_page_data(tmp_path / "odd.zt"))


def check(text: str, found: PageData) -> Elements:
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


def test_the_page_asks_for_nothing_and_is_small(looked: PageData, tmp_path: Path) -> None:
    check(page(looked), looked)
    rng = np.random.default_rng(0)
    names = [
        f"model.layers.{n}.{part}" for n in range(125) for part in map("self_attn.{}_proj.weight".format, "qkvoabcd")
    ]
    ingot.save(tmp_path / "many.safetensors", {name: rng.standard_normal((4, 8)) for name in names})
    many = collect_page_data(tmp_path / "many.safetensors")
    with_errors = [replace(row, status="differs", error=0.123456, cosine=0.999, changed=1.0) for row in many.rows]
    many = replace(many, reference="many.safetensors", rows=with_errors)
    text = page(many)
    assert len(many.rows) == 1000
    assert len(text.encode()) <= 2 << 20
    check(text, many)


HOSTILE = "</script></title></style><!--<img src='http://x/y' onerror=\"x()\">]]>&lt;{}%s\u2028\u202e\x00\n"


def page_of_words(folder: Path, words: str) -> str:
    """Make a page of files that say ``words`` wherever a file may say what it likes."""
    folder.mkdir()
    name = f"model.layers.1.{words.replace(chr(0), '')}.weight"
    ingot.save(folder / "a.safetensors", {name: np.ones((4, 4), np.float32)}, {f"k{words}": f"v{words}"})
    (folder / "config.json").write_text(json.dumps({"model_type": words}))
    (folder / f"{words.translate({ord('/'): None, 0: None})}.model").write_text("")
    add_receipt(folder, {"of": {"kind": f"of{words}"}, "figures": {f"figure{words}": 1.0}})
    (folder / "e.json").write_text(json.dumps({"model": f"model{words}", "perplexity": 1.5}))
    (folder / "c.json").write_text(json.dumps({"tensors": [{"name": name, "action": words}]}))
    found = collect_page_data(folder / "a.safetensors", conversion=folder / "c.json", evaluations=[folder / "e.json"])
    text = page(replace(found, receipts=[*found.receipts, *collect_page_data(folder).receipts]))
    check(text, found)
    return text


def test_whatever_files_say_is_text(tmp_path: Path) -> None:
    """Names and metadata, files beside the weights, receipts, evaluations, a conversion: none becomes an element."""
    text = page_of_words(tmp_path / HOSTILE.replace("/", "").replace("\0", ""), HOSTILE)
    plain = page_of_words(tmp_path / "plain", "plain")
    assert [tag for tag, _ in Elements(text).found] == [tag for tag, _ in Elements(plain).found]
    assert "<!--" not in text
    assert not set("\u2028\u202e\0") & set(text)
    for told in ("model.layers.1.", "k", "v", "figure", "model"):
        assert f"{told}</script></title>" in unescape(text), told


def test_values_whose_squares_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the page nor its data has what JSON lacks; what cannot be said is left out."""
    first = {
        "model.layers.0.mlp.up_proj.weight": np.full((4, 8), 1e200),
        "model.layers.0.mlp.down_proj.weight": np.array([[np.nan, np.inf], [1, 2]], np.float32),
        "model.layers.1.mlp.up_proj.weight": np.full((4, 8), 1.7e308),
        "model.layers.1.mlp.down_proj.weight": np.full((4, 8), 1e-150),
        "model.layers.2.mlp.up_proj.weight": np.ones((4, 8)),
    }
    ingot.save(tmp_path / "a.safetensors", first)
    ingot.save(tmp_path / "b.safetensors", {name: values[::-1] * np.float32(-1) for name, values in first.items()})
    found = collect_page_data(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    errors = {row.name: row.error for row in found.rows}
    assert errors["model.layers.0.mlp.up_proj.weight"] is None
    assert errors["model.layers.2.mlp.up_proj.weight"] == 2.0
    text = page(found)
    check(text, found)
    assert not re.search(r"[\s\">-](?:nan|inf)\b", text)
    assert run(["report", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row["error"] for row in told["tensors"]] == list(errors.values())


def test_constants_that_json_lacks_are_refused(model: Path, tmp_path: Path) -> None:
    for text in ('{"perplexity": NaN}', '{"perplexity": 1, "kl": Infinity}', '{"perplexity": 1, "kl": -Infinity}'):
        (tmp_path / "eval.json").write_text(text)
        with pytest.raises(FormatError) as caught:
            collect_page_data(model, evaluations=[tmp_path / "eval.json"])
        assert caught.value.rule == "report.json"


def test_evaluations_and_a_conversion_are_taken_from_files(model: Path, tmp_path: Path) -> None:
    made = ingot.convert(model, tmp_path / "int4.zt", "int4")
    tensors = [{"name": item.name, "action": item.action} for item in made.tensors]
    (tmp_path / "convert.json").write_text(json.dumps({"tensors": tensors}))
    scores = {"model": "int4", "perplexity": 12.5, "kl": 0.25, "agreement": 0.5}
    (tmp_path / "eval.json").write_text(json.dumps(scores))
    for prefix, shown in (([], "no added token"), ([{"id": 2, "text": "<bos>"}], "<bos>"), ("x", "not stated")):
        (tmp_path / "other.json").write_text(json.dumps({**scores, "window_prefix": prefix}))
        assert (
            collect_page_data(tmp_path / "int4.zt", evaluations=[tmp_path / "other.json"]).scores[0].window_prefix
            == shown
        )
    found = collect_page_data(
        tmp_path / "int4.zt", conversion=tmp_path / "convert.json", evaluations=[tmp_path / "eval.json"]
    )
    assert {row.name: row.action for row in found.rows} == {item.name: item.action for item in made.tensors}
    assert [(item.model, item.perplexity, item.kl, item.agreement) for item in found.scores] == [
        ("int4", 12.5, 0.25, 0.5)
    ]
    assert found.scores[0].window_prefix == "not stated"  # as of files of earlier releases
    text = page(found)
    check(text, found)
    assert "<dt>perplexity</dt><dd>12.50</dd>" in text
    assert "<dt>KL to the reference, nats</dt><dd>0.2500</dd>" in text
    assert text.index(">Quality</h2>") < text.index(">Bytes by layer and role</h2>") < text.index(">Values</h2>")

    assert "windows begin with" in text


def test_an_adapter_is_described_and_compared_by_what_it_changes(tmp_path: Path) -> None:
    model = base_folder(tmp_path / "base")
    adapter = peft_folder(tmp_path / "adapter", lora())
    alone = collect_page_data(adapter)
    assert alone.adapter.startswith("LoRA adapter (PEFT)")
    both = collect_page_data(model, adapter)
    assert both.adapter == alone.adapter
    differing = {row.name for row in both.rows if row.status not in ("identical", "equal")}
    assert differing == {f"{Q}.weight"}
    shown = page(both)
    check(shown, both)
    assert "Largest differences" in shown


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"perplexity": "x"}', '{"perplexity": true}', '{"perplexity": 1e999}', "x"]
)
def test_other_files_are_no_evaluations(text: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(text)
    with pytest.raises(FormatError) as caught:
        collect_page_data(model, evaluations=[tmp_path / "eval.json"])
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
    told = dict(collect_page_data(file).receipts)
    assert told["sealed file"] == sealed.digest
    assert told["content id"] == told["receipt of the weights"]
    assert "12.5" in told["measured"]
    (beside,) = tmp_path.rglob("sealed.safetensors*receipt.json")
    beside.write_text("{")
    assert dict(collect_page_data(file).receipts)["receipt"].startswith("receipt")


def test_the_plan_for_chips_is_that_of_plan(pair: tuple[Path, Path]) -> None:
    found, planned = collect_page_data(pair[1], chip="m1,m4"), ingot.plan(pair[1], "m1,m4")
    (section,) = found.sections
    columns = [column.name for column in section.data.columns]
    rows = [dict(zip(columns, row, strict=True)) for row in section.data.rows]
    assert [(row["chip"], row["outcomes"]) for row in rows] == [(item.chip, item.outcomes) for item in planned.chips]
    assert [row["moved"] for row in rows] == [item.totals["moved"] for item in planned.chips]
    assert '<h2 id="neural">Neural Engine</h2>' in page(found)
    assert "Neural Engine" not in page(collect_page_data(pair[1]))
    assert all(item.product in page(found) for item in planned.chips)
    assert "m4" in planned._repr_html_()


def test_areas_of_a_treemap_are_amounts() -> None:
    amounts = {"a": [6.0, 2.0], "b": [3.0], "c": [0.0], "d": [1.0] * 9}
    drawn = treemap({name: [Segment(value, 1, f"{name}") for value in them] for name, them in amounts.items()}, "x")
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


def test_notebooks_show_checkpoints_reports_and_plans(pair: tuple[Path, Path], compared: CompareReport) -> None:
    with ingot.open(pair[1]) as checkpoint:
        shown = checkpoint._repr_html_()
    assert "int4.zt" in shown
    assert "affine" in shown
    assert "mlp.down_proj" in compared._repr_html_()
    with prepare(pair[0], "not-written.zt", "int4") as prepared:
        assert "nothing was written" in prepared._repr_html_()
        items = (compared, ingot.report(pair[0]), ingot.plan(pair[1], "m4"), prepared)
        for shown in (item._repr_html_() for item in items):
            assert "<table" in shown or "<pre" in shown
            assert not {tag for tag, _ in Elements(shown).found} & {"script", "style", "img"}
