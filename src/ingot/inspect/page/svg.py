"""Charts as SVG: a treemap, stacked columns, a heat map, histograms and dots.

Drawn here and not by a library: pages of Vega need ``unsafe-eval`` and a megabyte of scripts, pictures of others have
their colours fixed, where these take those of the page, light or dark, on a screen or on
paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ingot.inspect.page.sample import Histogram
from ingot.reporting.html import text_of

WIDTH = 1060
_STEPS = 10
_LAST_HEAD = 14  # what the last number over a table of colours takes beyond its column


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a treemap or of a column: how much, in which colour, and what is told of it."""

    amount: float
    colour: int
    title: str


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{text_of(label)}">{"".join(body)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, cls: str, title: str = "") -> str:
    told = f"<title>{text_of(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{cls}">{told}</rect>'


def _text(x: float, y: float, text: str, cls: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="t {cls}">{text_of(text)}</text>'


def treemap(groups: Mapping[str, Sequence[Piece]], label: str, height: float = 340) -> str:
    """Return rectangles whose areas are amounts: groups, each cut into its pieces."""
    sums = {name: sum(piece.amount for piece in pieces) for name, pieces in groups.items()}
    names = sorted((name for name in sums if sums[name] > 0), key=lambda name: -sums[name])
    body = []
    for name, (x, y, wide, high) in zip(names, _squares([sums[name] for name in names], WIDTH, height), strict=True):
        at = 0.0
        for piece in sorted(groups[name], key=lambda piece: piece.colour):
            share = piece.amount / sums[name]
            if wide >= high:
                body.append(_rect(x + at * wide, y, share * wide, high, f"c{piece.colour}", piece.title))
            else:
                body.append(_rect(x, y + at * high, wide, share * high, f"c{piece.colour}", piece.title))
            at += share
        body.append(_rect(x, y, wide, high, "frame"))
        if wide > 7 * len(name) + 6 and high > 16:
            body.append(_text(x + 4, y + 13, name, "over"))
    return _svg(WIDTH, height, label, body)


def _squares(amounts: Sequence[float], width: float, height: float) -> list[tuple[float, float, float, float]]:
    """Return a rectangle for each of falling amounts, near to squares (Bruls, Huizing, van Wijk, 2000)."""
    scale = width * height / max(sum(amounts), 1e-9)
    areas = [amount * scale for amount in amounts]
    x = 0.0
    y = 0.0
    placed = list[tuple[float, float, float, float]]()
    start = 0
    while start < len(areas):
        side = max(min(width, height), 1e-9)
        end = start + 1
        total = areas[start]
        while end < len(areas):
            more = total + areas[end]
            if _worst(areas[start], areas[end], more, side) > _worst(areas[start], areas[end - 1], total, side):
                break
            end = end + 1
            total = more
        thick = total / side
        at = 0.0
        for area in areas[start:end]:
            long = area / thick if thick else 0.0
            placed.append((x, y + at, thick, long) if width >= height else (x + at, y, long, thick))
            at += long
        if width >= height:
            x = x + thick
            width = width - thick
        else:
            y = y + thick
            height = height - thick
        start = end
    return placed


def _worst(largest: float, smallest: float, total: float, side: float) -> float:
    return max(side * side * largest / (total * total), total * total / (side * side * max(smallest, 1e-12)))


def columns(groups: Mapping[str, Sequence[Piece]], label: str, top: str, height: float = 150) -> str:
    """Return a column of stacked pieces for each group; ``top`` names the height of the highest."""
    most = max((sum(piece.amount for piece in pieces) for pieces in groups.values()), default=0.0) or 1.0
    step = max(6.0, min(64.0, (WIDTH - 10) / max(len(groups), 1)))
    width = max(WIDTH, 10 + step * len(groups))
    every = max(1, round(34 / step))
    body = [f'<line x1="0" y1="18" x2="{width:g}" y2="18" class="line"/>', _text(0, 13, top)]
    for index, (name, pieces) in enumerate(groups.items()):
        y = 18.0 + height
        for piece in pieces:
            high = height * piece.amount / most
            y -= high
            body.append(_rect(5 + index * step, y, step - 1, high, f"c{piece.colour}", piece.title))
        if index % every == 0:
            body.append(_text(5 + index * step, height + 32, name))
    return _svg(width, height + 38, label, body)


def heat(
    rows: Sequence[str], heads: Sequence[str], values: Mapping[tuple[str, str], tuple[float, str]], label: str
) -> str:
    """Return a table of colours: ``values`` by row and head, each with what is told of it.

    Colours go over ``heat_range``; 0 has none.
    """
    least, most = heat_range([value for value, _ in values.values()])
    left = 8 + 7 * max(map(len, rows), default=0)
    step = max(9.0, min(48.0, (WIDTH - left - _LAST_HEAD) / max(len(heads), 1)))
    every = max(1, round(30 / step))
    high = 22
    body = [_text(0, 18 + high * index + 15, name) for index, name in enumerate(rows)]
    body += [_text(left + step * index, 12, head) for index, head in enumerate(heads) if index % every == 0]
    for line, row in enumerate(rows):
        for index, head in enumerate(heads):
            if (row, head) in values:
                value, title = values[row, head]
                level = 0 if value <= 0 else 1 + round((_STEPS - 1) * (value - least) / (most - least))
                body.append(_rect(left + step * index, 18 + high * line, step - 1, high - 1, f"h{level}", title))
    return _svg(max(WIDTH, left + step * len(heads) + _LAST_HEAD), 20 + high * len(rows), label, body)


def heat_range(values: Iterable[float]) -> tuple[float, float]:
    """Return the values of the faintest colour and of the strongest: of the least above 0 and of the largest.

    A tenth of the largest apart at least: what differs by less looks alike.
    """
    positive = [value for value in values if value > 0]
    most = max(positive, default=1.0)
    return min(min(positive, default=0.0), 0.9 * most), most


def histogram(found: Histogram) -> str:
    """Return a histogram, that of the reference behind it, and below it a tick for each level of the codes."""
    width = 340.0
    high = 90.0
    most = max(*found.counts, *(found.reference or ()), 1)
    span = found.high - found.low
    body = []
    if found.reference is not None:
        body.append(f'<path d="{_outline(found.reference, most, width, high)}" class="behind"/>')
    body.append(f'<path d="{_outline(found.counts, most, width, high)}" class="front"/>')
    inside = [level for level in found.levels if found.low <= level <= found.high]
    ticks = "".join(f"M{width * (level - found.low) / span:.1f} {high + 2:g}v9" for level in inside)
    body.append(f'<path d="{ticks}" class="tick"/>')
    body += [_text(0, high + 24, f"{found.low:.3g}"), _text(width, high + 24, f"{found.high:.3g}", "end")]
    body.append(_text(width / 2, high + 24, "0", "mid"))
    return _svg(width, high + 28, f"Values of {found.name}", body)


def _outline(counts: Sequence[int], most: int, width: float, high: float) -> str:
    step = width / len(counts)
    return f"M0 {high:g}" + "".join(f"V{high - high * count / most:.1f}h{step:.2f}" for count in counts) + f"V{high:g}Z"


def dots(series: Mapping[str, float], label: str, mark: float | None = None) -> str:
    """Return a line with a dot for each name, in their order; ``mark`` is a line across, the reference's figure."""
    values = [*series.values(), *([] if mark is None else [mark])]
    low, high = min(values), max(values)
    span = (high - low) or max(abs(high), 1.0)
    step = min(160.0, (WIDTH - 130) / max(len(series), 1))
    tall = 120.0

    def height(value: float) -> float:
        return 22 + tall * (1 - (value - low) / span)

    body = (
        []
        if mark is None
        else [
            f'<path d="M0 {height(mark):.1f}H{WIDTH}" class="mark"/>',
            _text(WIDTH, height(mark) - 4, f"reference {mark:.5g}", "end"),
        ]
    )
    points = [(100 + step * index, height(value)) for index, value in enumerate(series.values())]
    body.append(f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="curve"/>')
    for index, ((x, y), (name, value)) in enumerate(zip(points, series.items(), strict=True)):
        rises = (
            index + 1 < len(points) and points[index + 1][1] < y
        )  # the line would go through what stands over the dot
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot"><title>{text_of(name)}: {value:.6g}</title></circle>'
        )
        body.append(_text(x + 4 if rises else x, y - 8, f"{value:.5g}", "end" if rises else "mid"))
        body.append(_text(x, tall + 40, name[-int(step / 7) :], "mid"))
    return _svg(WIDTH, tall + 48, label, body)
