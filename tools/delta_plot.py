"""The plot of ``spec/deltas-quality.md``: what a delta's bytes buy, as an SVG that is readable on light and dark.

``tools/delta_table.py`` writes it beside the page, from the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

PEER = "deltatensors"
WIDTH, HEIGHT = 760, 470
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 56, 60
X_TICKS = (0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7)
Y_TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

# Colours of about equal contrast on white and on black; where the viewer tells what it shows, text follows.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #6b7280; }
.title { font-size: 15px; font-weight: 600; }
.grid { stroke: #9ca3af; stroke-opacity: 0.3; }
.ours { fill: #2f7ed8; } .theirs { fill: #d9822b; }
.line { fill: none; stroke: #2f7ed8; stroke-opacity: 0.45; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) { text { fill: #c3c9d2; } }
@media (prefers-color-scheme: light) { text { fill: #374151; } }
"""

Point = tuple[float, float, str]


def points(figures: Mapping[str, Any], kind: str) -> list[Point]:
    """Return share, size of the perplexity gap on ``kind``, and name of every row that has a gap; the base is none."""
    tuned = figures["finetune"][kind]
    found = [(row["share"], abs(row[kind] - tuned), row["name"]) for row in figures["rows"]]
    return sorted(item for item in found if item[1] >= Y_TICKS[0])


def svg(figures: Mapping[str, Any], kind: str = "code") -> str:
    """Return the plot: both axes logarithmic, one mark per delta, Ingot's best for every size joined by a line."""
    marks = points(figures, kind)
    ours = [mark for mark in marks if not mark[2].startswith(PEER)]
    base = abs(figures["base"][kind] - figures["finetune"][kind])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>Perplexity gap on {kind} against the size of the delta</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="22">Perplexity gap on held-out {kind} against the delta\'s size</text>',
        f'<text x="{LEFT}" y="40">Lower and further left is better. Without a delta the gap is {base:.0f}.</text>',
        *_axes(),
        f'<polyline class="line" points="{" ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y, _ in _best(ours))}"/>',
    ]
    taken = [(_x(share) - 6, _x(share) + 6, _y(gap) + 4) for share, gap, _ in marks]
    for mark in marks:
        parts += _mark(mark, taken)
    return "\n".join([*parts, *_legend(), "</svg>", ""])


def _x(share: float) -> float:
    low, high = math.log(0.055), math.log(0.75)
    return LEFT + (math.log(share) - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(gap: float) -> float:
    low, high = math.log(Y_TICKS[0]), math.log(Y_TICKS[-1])
    return HEIGHT - BOTTOM - (math.log(gap) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _axes() -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in X_TICKS:
        x = f"{_x(tick):.1f}"
        parts.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{100 * tick:g} %</text>')
    for tick in Y_TICKS:
        y = _y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 22}" text-anchor="middle">share of the fine-tune\'s bytes</text>')
    return parts


def _best(marks: Sequence[Point]) -> list[Point]:
    """Return the marks that no smaller delta is as good as."""
    found: list[Point] = []
    for mark in marks:
        if not found or mark[1] < found[-1][1]:
            found.append(mark)
    return found


def _mark(mark: Point, taken: list[tuple[float, float, float]]) -> list[str]:
    """Draw a mark and its name: beside it, or where another name is in the way, above or below."""
    share, gap, name = mark
    x, y = _x(share), _y(gap)
    theirs = name.startswith(PEER)
    kind = "theirs" if theirs else "ours"
    text = name.removeprefix(f"{PEER} 0.2.0 ")
    width = 6.3 * len(text)
    side = "start" if x + 9 + width < WIDTH - RIGHT else "end"
    for offset in (4.0, -8.0, 17.0, -20.0, 29.0, 41.0):
        begin = x + 9 if side == "start" else x - 9 - width
        place = (begin, begin + width, y + offset)
        if all(place[0] > item[1] or place[1] < item[0] or abs(place[2] - item[2]) >= 12 for item in taken):
            break
    taken.append(place)
    shape = (
        f'<rect class="{kind}" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'
        if theirs
        else f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    )
    start = x + 9 if side == "start" else x - 9
    label = f'<text x="{start:.1f}" y="{place[2]:.1f}" text-anchor="{side}">{escape(text)}</text>'
    return [shape, label]


def _legend() -> list[str]:
    x, y = WIDTH - RIGHT - 250, TOP + 14
    return [
        f'<circle class="ours" cx="{x}" cy="{y}" r="5"/><text x="{x + 10}" y="{y + 4}">Ingot</text>',
        f'<rect class="theirs" x="{x + 65}" y="{y - 5}" width="10" height="10"/>',
        f'<text x="{x + 81}" y="{y + 4}">deltatensors 0.2.0</text>',
    ]
