"""Plot an activation table as text for a terminal or as SVG: the function with the table, and the error below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ingot.ext.ane.chips.activation import Fitted, Function

Array = np.ndarray[Any, np.dtype[Any]]

_WIDTH = 72
_HEIGHT = 18
_BELOW = 7
_FONT = 'font-family="sans-serif" font-size="12"'
_BOX = 'fill="none" stroke="#dadce0"'
_SVG_WIDTH = 720
_SVG_TOP = 360
_SVG_BELOW = 160
_MARGIN = 48


def text_plot(fitted: Fitted, function: Function) -> str:
    """Return lines of 80 characters: the table as ``*``, the ends of its domain as ``|``, the error as ``e``."""
    x, y, error = _curves(fitted, function, _WIDTH)
    lines = _grid(y, _HEIGHT, "*")
    low, high = fitted.lut.knot_inputs[[0, -1]]
    step = (x[-1] - x[0]) / (_WIDTH - 1)
    marks = "".join(
        "|" if abs(position - low) <= step / 2 or abs(position - high) <= step / 2 else "-" for position in x
    )
    lines += [f"{'':>8}{marks}", f"{'':>8}{x[0]:<{_WIDTH // 2}.4g}{x[-1]:>{_WIDTH // 2}.4g}", "error"]
    return "\n".join([*lines, *_grid(error, _BELOW, "e")])


def svg_plot(fitted: Fitted, function: Function, name: str) -> str:
    """Return an SVG document: the function, the table and its knots, and below the error with a separate scale."""
    x, y, error = _curves(fitted, function, 1024)
    exact = np.asarray(function(x), np.float64)
    lut = fitted.lut
    low = min(float(y.min()), float(exact.min()))
    top = _Frame((x[0], x[-1]), (low, max(float(y.max()), float(exact.max()))), _MARGIN, _SVG_TOP)
    max_abs_error = max(float(np.abs(error).max()), 1e-12)
    below = _Frame((x[0], x[-1]), (-max_abs_error, max_abs_error), 2 * _MARGIN + _SVG_TOP, _SVG_BELOW)
    knots_x = lut.knot_inputs
    dots = "".join(
        f'<circle cx="{top.x(position):.1f}" cy="{top.y(float(value)):.1f}" r="2.5" fill="#b3261e"/>'
        for position, value in zip(knots_x, lut.knots, strict=True)
        if x[0] <= position <= x[-1]
    )
    title = f"{len(lut.knots)} knots from {knots_x[0]:.4g} to {knots_x[-1]:.4g}, largest error {fitted.max_error:.3g}"
    height = 3 * _MARGIN + _SVG_TOP + _SVG_BELOW
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SVG_WIDTH}" height="{height}" {_FONT}>',
        f'<rect width="{_SVG_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="24">{_escaped(name)}: {title}</text>',
        *top.axes(),
        *below.axes(),
        top.line(x, exact, "#9aa0a6", 3.0),
        top.line(x, y, "#1a5fb4", 1.2),
        dots,
        below.line(x, error, "#b3261e", 1.0),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _curves(fitted: Fitted, function: Function, count: int) -> tuple[Array, Array, Array]:
    x = np.linspace(*fitted.interval, count).astype(np.float16).astype(np.float64)
    y = fitted.lut(x).astype(np.float64)
    return x, y, y - np.asarray(function(x), np.float64)


def _grid(values: Array, height: int, mark: str) -> list[str]:
    low = float(values.min())
    high = float(values.max())
    span = high - low or 1.0
    rows = [[" "] * len(values) for _ in range(height)]
    for column, value in enumerate(values):
        rows[height - 1 - round((float(value) - low) / span * (height - 1))][column] = mark
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    return [f"{labels.get(index, ''):>7} {''.join(row).rstrip()}".rstrip() for index, row in enumerate(rows)]


class _Frame:
    """A rectangle of the drawing with its scales."""

    def __init__(self, across: tuple[float, float], up: tuple[float, float], top: float, height: float) -> None:
        self._across = across
        self._up = up
        self._top = top
        self._height = height

    def x(self, value: float) -> float:
        low, high = self._across
        return _MARGIN + (value - low) / (high - low) * (_SVG_WIDTH - 2 * _MARGIN)

    def y(self, value: float) -> float:
        low, high = self._up
        return self._top + self._height - (value - low) / ((high - low) or 1.0) * self._height

    def line(self, x: Sequence[float] | Array, y: Sequence[float] | Array, colour: str, width: float) -> str:
        points = " ".join(f"{self.x(float(a)):.1f},{self.y(float(b)):.1f}" for a, b in zip(x, y, strict=True))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'

    def axes(self) -> list[str]:
        low, high = self._up
        bottom = self._top + self._height
        right = _SVG_WIDTH - _MARGIN
        return [
            f'<rect x="{_MARGIN}" y="{self._top}" width="{right - _MARGIN}" height="{self._height}" {_BOX}/>',
            f'<text x="{_MARGIN - 4}" y="{self._top + 10}" text-anchor="end">{high:.3g}</text>',
            f'<text x="{_MARGIN - 4}" y="{bottom}" text-anchor="end">{low:.3g}</text>',
            f'<text x="{_MARGIN}" y="{bottom + 16}">{self._across[0]:.4g}</text>',
            f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{self._across[1]:.4g}</text>',
        ]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
