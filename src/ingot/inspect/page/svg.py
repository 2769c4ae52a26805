"""Charts as SVG: a treemap, stacked columns, a heat map, histograms and dots.

No chart library is used, because Vega needs ``unsafe-eval`` and a megabyte of scripts, and other libraries fix the
colours. These charts use the colours of the page, which depend on its light or dark theme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ingot.inspect.page.sample import Histogram
from ingot.reporting.html import text_of

WIDTH = 1060
_STEPS = 10
_LAST_HEAD = 14  # the width of the last heading of a heat map beyond its column


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a treemap or of a column: its amount, the index of its colour, and its tooltip."""

    amount: float
    colour: int
    title: str


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{text_of(label)}">{"".join(body)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, cls: str, title: str = "") -> str:
    tooltip = f"<title>{text_of(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{cls}">{tooltip}</rect>'


def _text(x: float, y: float, text: str, cls: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="t {cls}">{text_of(text)}</text>'


def treemap(groups: Mapping[str, Sequence[Segment]], label: str, height: float = 340) -> str:
    """Return a treemap: a rectangle for each group, cut into its segments; areas are proportional to amounts."""
    sums = {name: sum(segment.amount for segment in segments) for name, segments in groups.items()}
    names = sorted((name for name in sums if sums[name] > 0), key=lambda name: -sums[name])
    rectangles = _squarify([sums[name] for name in names], WIDTH, height)
    body = []
    for name, (x, y, group_width, group_height) in zip(names, rectangles, strict=True):
        offset = 0.0
        for segment in sorted(groups[name], key=lambda segment: segment.colour):
            share = segment.amount / sums[name]
            cls = f"c{segment.colour}"
            if group_width >= group_height:
                start_x = x + offset * group_width
                body.append(_rect(start_x, y, share * group_width, group_height, cls, segment.title))
            else:
                start_y = y + offset * group_height
                body.append(_rect(x, start_y, group_width, share * group_height, cls, segment.title))
            offset += share
        body.append(_rect(x, y, group_width, group_height, "frame"))
        if group_width > 7 * len(name) + 6 and group_height > 16:
            body.append(_text(x + 4, y + 13, name, "over"))
    return _svg(WIDTH, height, label, body)


def _squarify(amounts: Sequence[float], width: float, height: float) -> list[tuple[float, float, float, float]]:
    """Return x, y, width and height of a nearly square rectangle for each amount (Bruls, Huizing, van Wijk, 2000).

    The amounts must be in falling order.
    """
    scale = width * height / max(sum(amounts), 1e-9)
    areas = [amount * scale for amount in amounts]
    x = 0.0
    y = 0.0
    rectangles = list[tuple[float, float, float, float]]()
    start = 0
    while start < len(areas):
        side = max(min(width, height), 1e-9)
        end = start + 1
        total = areas[start]
        while end < len(areas):
            extended = total + areas[end]
            before = _worst_ratio(areas[start], areas[end - 1], total, side)
            if _worst_ratio(areas[start], areas[end], extended, side) > before:
                break
            end = end + 1
            total = extended
        thickness = total / side
        offset = 0.0
        for area in areas[start:end]:
            length = area / thickness if thickness else 0.0
            if width >= height:
                rectangles.append((x, y + offset, thickness, length))
            else:
                rectangles.append((x + offset, y, length, thickness))
            offset += length
        if width >= height:
            x = x + thickness
            width = width - thickness
        else:
            y = y + thickness
            height = height - thickness
        start = end
    return rectangles


def _worst_ratio(largest: float, smallest: float, total: float, side: float) -> float:
    """Return the largest aspect ratio of the rectangles in a strip along ``side`` with the area ``total``.

    ``largest`` and ``smallest`` are the areas of its largest and smallest rectangle.
    """
    return max(side * side * largest / (total * total), total * total / (side * side * max(smallest, 1e-12)))


def columns(groups: Mapping[str, Sequence[Segment]], label: str, top: str, height: float = 150) -> str:
    """Return a column of stacked segments for each group; ``top`` labels the highest column."""
    highest = max((sum(segment.amount for segment in segments) for segments in groups.values()), default=0.0) or 1.0
    step = max(6.0, min(64.0, (WIDTH - 10) / max(len(groups), 1)))
    width = max(WIDTH, 10 + step * len(groups))
    label_interval = max(1, round(34 / step))
    body = [f'<line x1="0" y1="18" x2="{width:g}" y2="18" class="line"/>', _text(0, 13, top)]
    for index, (name, segments) in enumerate(groups.items()):
        y = 18.0 + height
        for segment in segments:
            segment_height = height * segment.amount / highest
            y -= segment_height
            body.append(_rect(5 + index * step, y, step - 1, segment_height, f"c{segment.colour}", segment.title))
        if index % label_interval == 0:
            body.append(_text(5 + index * step, height + 32, name))
    return _svg(width, height + 38, label, body)


def heat(
    rows: Sequence[str], heads: Sequence[str], values: Mapping[tuple[str, str], tuple[float, str]], label: str
) -> str:
    """Return a heat map; ``values`` maps headings of row and column to a number and a tooltip.

    Colours span ``heat_range``; 0 is grey.
    """
    low, high = heat_range([value for value, _ in values.values()])
    margin = 8 + 7 * max(map(len, rows), default=0)
    step = max(9.0, min(48.0, (WIDTH - margin - _LAST_HEAD) / max(len(heads), 1)))
    label_interval = max(1, round(30 / step))
    row_height = 22
    body = [_text(0, 18 + row_height * index + 15, name) for index, name in enumerate(rows)]
    body += [_text(margin + step * index, 12, head) for index, head in enumerate(heads) if index % label_interval == 0]
    for row_index, row in enumerate(rows):
        y = 18 + row_height * row_index
        for index, head in enumerate(heads):
            if (row, head) in values:
                value, title = values[row, head]
                level = 0 if value <= 0 else 1 + round((_STEPS - 1) * (value - low) / (high - low))
                body.append(_rect(margin + step * index, y, step - 1, row_height - 1, f"h{level}", title))
    return _svg(max(WIDTH, margin + step * len(heads) + _LAST_HEAD), 20 + row_height * len(rows), label, body)


def heat_range(values: Iterable[float]) -> tuple[float, float]:
    """Return the values that get the faintest and the strongest colour.

    The strongest colour is the largest value. The faintest colour is the smallest positive value, but at most 0.9
    times the largest value, so that nearly equal values get similar colours.
    """
    positive = [value for value in values if value > 0]
    largest = max(positive, default=1.0)
    return min(min(positive, default=0.0), 0.9 * largest), largest


def histogram(data: Histogram) -> str:
    """Return a histogram drawn over the histogram of the reference, with a tick below it for each level of the
    codes.
    """
    width = 340.0
    height = 90.0
    max_count = max(*data.counts, *(data.reference or ()), 1)
    span = data.high - data.low
    body = []
    if data.reference is not None:
        body.append(f'<path d="{_outline(data.reference, max_count, width, height)}" class="behind"/>')
    body.append(f'<path d="{_outline(data.counts, max_count, width, height)}" class="front"/>')
    inside = [level for level in data.levels if data.low <= level <= data.high]
    ticks = "".join(f"M{width * (level - data.low) / span:.1f} {height + 2:g}v9" for level in inside)
    body.append(f'<path d="{ticks}" class="tick"/>')
    body += [_text(0, height + 24, f"{data.low:.3g}"), _text(width, height + 24, f"{data.high:.3g}", "end")]
    body.append(_text(width / 2, height + 24, "0", "mid"))
    return _svg(width, height + 28, f"Values of {data.name}", body)


def _outline(counts: Sequence[int], max_count: int, width: float, height: float) -> str:
    """Return the SVG path of a histogram's outline."""
    step = width / len(counts)
    bins = "".join(f"V{height - height * count / max_count:.1f}h{step:.2f}" for count in counts)
    return f"M0 {height:g}{bins}V{height:g}Z"


def dots(series: Mapping[str, float], label: str, mark: float | None = None) -> str:
    """Return a chart with a dot for each name of ``series``; ``mark`` is the value of a horizontal reference line."""
    values = [*series.values(), *([] if mark is None else [mark])]
    low = min(values)
    high = max(values)
    span = (high - low) or max(abs(high), 1.0)
    step = min(160.0, (WIDTH - 130) / max(len(series), 1))
    chart_height = 120.0

    def y_of(value: float) -> float:
        return 22 + chart_height * (1 - (value - low) / span)

    body = []
    if mark is not None:
        body.append(f'<path d="M0 {y_of(mark):.1f}H{WIDTH}" class="mark"/>')
        body.append(_text(WIDTH, y_of(mark) - 4, f"reference {mark:.5g}", "end"))
    points = [(100 + step * index, y_of(value)) for index, value in enumerate(series.values())]
    body.append(f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="curve"/>')
    for index, ((x, y), (name, value)) in enumerate(zip(points, series.items(), strict=True)):
        rises = index + 1 < len(points) and points[index + 1][1] < y  # a rising line would cross the label
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot"><title>{text_of(name)}: {value:.6g}</title></circle>'
        )
        body.append(_text(x + 4 if rises else x, y - 8, f"{value:.5g}", "end" if rises else "mid"))
        body.append(_text(x, chart_height + 40, name[-int(step / 7) :], "mid"))
    return _svg(WIDTH, chart_height + 48, label, body)
