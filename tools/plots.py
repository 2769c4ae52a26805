"""What the plots of the pages share: SVG by matplotlib, equal on every run, readable on light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

BLUE, ORANGE, TEXT = "#2f7ed8", "#d9822b", "#6b7280"
_SVG = "http://www.w3.org/2000/svg"
# Points that matplotlib draws as pixels of the page: 72 to an inch.
_DPI = 72
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ingot",
    "font.size": 12,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#9ca3af",
    "grid.alpha": 0.3,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
# matplotlib writes colours into each element; the page's reader has a light or a dark background.
_STYLE = """
text { font-family: system-ui, sans-serif !important; }
@media (prefers-color-scheme: dark) { text { fill: #c3c9d2 !important; } }
@media (prefers-color-scheme: light) { text { fill: #374151 !important; } }
"""


class Scale(NamedTuple):
    """A logarithmic axis: its limits, its ticks, and what a tick is multiplied by and followed by."""

    low: float
    high: float
    ticks: Sequence[float]
    factor: float = 1
    unit: str = ""


@contextmanager
def style() -> Iterator[None]:
    """Draw with the settings that all plots share."""
    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(width: int, height: int) -> Figure:
    """Return an empty figure of so many pixels."""
    return Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")


def set_scales(axes: Axes, x: Scale, y: Scale) -> None:
    """Make both axes logarithmic, with the given ticks alone."""
    axes.set(xscale="log", yscale="log", xlim=(x.low, x.high), ylim=(y.low, y.high))
    for axis, scale in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_major_locator(FixedLocator(scale.ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda tick, _, scale=scale: f"{scale.factor * tick:g}{scale.unit}"))


def set_titles(axes: Axes, title: str, subtitle: str) -> None:
    """Write a title, and a line of plain text below it."""
    axes.set_title(title, pad=26)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes)


def render(figure: Figure, title: str, tooltips: Mapping[str, str] | None = None) -> str:
    """Return a figure as SVG; ``tooltips`` are texts by the ``gid`` of what they belong to."""
    buffer = io.StringIO()
    metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", dpi=_DPI, transparent=True, metadata=metadata)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(buffer.getvalue())
    root.set("role", "img")
    for size in ("width", "height"):  # the page scales the picture
        del root.attrib[size]
    for name, text in (("style", _STYLE), ("title", title)):
        element = ElementTree.Element(f"{{{_SVG}}}{name}")
        element.text = text
        root.insert(0, element)
    for element in root.iter():
        if tooltip := (tooltips or {}).get(element.get("id", "")):
            child = ElementTree.SubElement(element, f"{{{_SVG}}}title")
            child.text = tooltip
    return ElementTree.tostring(root, encoding="unicode") + "\n"
