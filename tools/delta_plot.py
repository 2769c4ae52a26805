"""The plot of ``spec/deltas-quality.md``: what a delta's bytes buy.

``tools/delta_table.py`` writes it beside the page, from the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plots
from matplotlib.axes import Axes
from matplotlib.text import Annotation

PEER = "deltatensors"
SHARES = plots.Scale(0.055, 0.75, (0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7), 100, " %")
GAPS = plots.Scale(0.003, 100, (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100))
# Distances of a name from its mark in pixels, in the order in which they are tried.
_OFFSETS = (0, 12, -12, 24, -24, -36, -48)

Point = tuple[float, float, str]


def points(figures: Mapping[str, Any], kind: str) -> list[Point]:
    """Return share, size of the perplexity gap on ``kind``, and name of every row that has a gap; the base is none."""
    tuned = figures["finetune"][kind]
    rows = [(row["share"], abs(row[kind] - tuned), row["name"]) for row in figures["rows"]]
    return sorted(row for row in rows if row[1] >= GAPS.low)


def svg(figures: Mapping[str, Any], kind: str = "code") -> str:
    """Return the plot: both axes logarithmic, one mark per delta, Ingot's best for every size joined by a line."""
    marks = points(figures, kind)
    ours = [mark for mark in marks if not mark[2].startswith(PEER)]
    theirs = [mark for mark in marks if mark[2].startswith(PEER)]
    base = abs(figures["base"][kind] - figures["finetune"][kind])
    with plots.style():
        figure = plots.new_figure(760, 470)
        axes = figure.subplots()
        plots.set_scales(axes, SHARES, GAPS)
        plots.set_titles(
            axes,
            f"Perplexity gap on held-out {kind} against the delta's size",
            f"Lower and further left is better. Without a delta the gap is {base:.0f}.",
        )
        axes.set_xlabel("share of the fine-tune's bytes")
        line = _best(ours)
        axes.plot([mark[0] for mark in line], [mark[1] for mark in line], color=plots.BLUE, alpha=0.45)
        for group, marker, colour, label in (
            (ours, "o", plots.BLUE, "Ingot"),
            (theirs, "s", plots.ORANGE, f"{PEER} 0.2.0"),
        ):
            shares, gaps = [mark[0] for mark in group], [mark[1] for mark in group]
            axes.plot(shares, gaps, marker, markersize=10, color=colour, label=label)
        axes.legend(ncols=2, frameon=False, loc="upper right")
        figure.draw_without_rendering()
        _write_names(axes, marks)
        return plots.render(figure, f"Perplexity gap on {kind} against the size of the delta")


def _best(marks: Sequence[Point]) -> list[Point]:
    """Return the marks that no smaller delta is as good as."""
    best: list[Point] = []
    for mark in marks:
        if not best or mark[1] < best[-1][1]:
            best.append(mark)
    return best


def _write_names(axes: Axes, marks: Sequence[Point]) -> None:
    """Write each name beside its mark; above or below if another name or mark is in the way."""
    renderer = axes.get_figure(root=True)._get_renderer()
    centres = [axes.transData.transform(mark[:2]) for mark in marks]
    taken = [(x - 6, x + 6, y - 4, y + 4) for x, y in centres]
    for (share, gap, name), centre in zip(marks, centres, strict=True):
        text = name.removeprefix(f"{PEER} 0.2.0 ")
        for offset in _OFFSETS:
            side, align = (9, "left") if centre[0] + 9 + 6.3 * len(text) < axes.bbox.x1 else (-9, "right")
            note: Annotation = axes.annotate(
                text, (share, gap), (side, offset), textcoords="offset points", ha=align, va="center_baseline"
            )
            box = note.get_window_extent(renderer)
            if offset == _OFFSETS[-1] or not any(
                box.x0 < right and left < box.x1 and box.y0 + 2 < top and bottom < box.y1 - 2
                for left, right, bottom, top in taken
            ):
                break
            note.remove()
        taken.append((box.x0, box.x1, box.y0, box.y1))
