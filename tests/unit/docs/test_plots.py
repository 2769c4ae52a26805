"""The plots of the pages: every figure is drawn, and drawing twice gives the same bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def texts(root: ElementTree.Element) -> set[str]:
    return {element.text or "" for element in root.iter(f"{SVG}text")}


def test_each_row_has_a_mark_whose_tooltip_names_it(readme_figures: ModuleType) -> None:
    quality_page = sys.modules["quality_page"]
    rows = json.loads((ROOT / "bench" / "quality_base.json").read_text("utf-8"))["rows"]
    drawn = quality_page.svg("Loss & size", rows, "prose")
    tooltips = {
        element.findtext(f"{SVG}title")
        for element in parsed(drawn).iter(f"{SVG}g")
        if element.get("id", "").startswith("mark-")
    }
    assert tooltips == {f"{row['by']} {row['name']}: {row['bits']:.2f} bits, {row['prose']['kl']:.5f}" for row in rows}
    assert parsed(drawn).findtext(f"{SVG}title") == "Loss & size"
    assert drawn == quality_page.svg("Loss & size", rows, "prose")


def test_goals_are_met_or_missed_by_a_factor(readme_figures: ModuleType) -> None:
    quality_page = sys.modules["quality_page"]

    def row(by: str, bits: float, kl: float) -> dict[str, object]:
        return {"by": by, "name": f"{bits} bits", "bits": bits, "prose": {"kl": kl}}

    rows = [row("Ingot", 4.5, 0.08), row("Ingot", 4.25, 0.05), row("Ingot", 3.25, 0.3), row("mlx", 3.5, 1.0)]
    *_, first, second, third, last = quality_page.goals([*rows, row("llama.cpp", 3.25, 0.1)])
    assert first.endswith("| 4.25 bits (4.25) | 0.0500 | met |")
    assert second.endswith("| 4.25 bits (4.25) | 0.0500 | met |")
    assert "mlx 3.5 bits (3.50), 1.0000 |" in third
    assert third.endswith("| 0.3000 | met |")
    assert last.endswith("| not run |")
    *_, first, _, third, _ = quality_page.goals([rows[0], row("Ingot", 3.25, 0.6), rows[3]])
    assert first.endswith("| 0.0800 | missed: 1.25 times the goal |")
    assert third.endswith("| 0.6000 | missed: 1.50 times the goal |")


def test_the_picture_names_programs_and_speeds(readme_figures: ModuleType) -> None:
    drawn = readme_figures.picture(ROOT)
    shown = texts(parsed(drawn))
    assert {"Ingot", "llama.cpp", *(label for label, _ in readme_figures.WAYS)} <= shown
    assert "width" not in parsed(drawn).attrib  # the page scales it
    assert drawn == readme_figures.picture(ROOT)


def test_each_delta_has_its_name_beside_its_mark() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import delta_plot
    finally:
        sys.path.pop(0)
    figures = json.loads((ROOT / "bench" / "delta_quality.json").read_text("utf-8"))
    names = {name.removeprefix(f"{delta_plot.PEER} 0.2.0 ") for _, _, name in delta_plot.points(figures, "code")}
    assert names
    assert names <= texts(parsed(delta_plot.svg(figures)))
