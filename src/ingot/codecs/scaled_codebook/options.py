"""Options of the encoder of scaled codebooks, and the layout that they declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ingot.codecs.base import is_int_between, option_error, require_known
from ingot.codecs.scaled_codebook.tables import TABLES
from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import PER_TENSOR, ROW, Group
from ingot.model.layouts.base import Shape, matrix_shape
from ingot.model.layouts.scaled_codebook import (
    DIVIDE,
    DTYPES_OF_VALUES,
    LOW_FIRST,
    MULTIPLY,
    ORDERS,
    SMALL_SCALES,
    VALUES,
    VERSION,
    Grid,
    Run,
    ScaledCodebookLayout,
    Tiles,
)

ID = ScaledCodebookLayout.codec
AMAX = "amax"
OPTIONS = ("table", "group", "scales", "second", "flat", "order", "transposed", AMAX)
GROUP = 64
_LIMIT = 2**31
_option_error = partial(option_error, ID)


def layout_of(shape: Shape, dtype: str, options: Mapping[str, Any]) -> tuple[str, ScaledCodebookLayout]:
    """Return the value of the option ``table``, and the layout that all options declare.

    Raises
    ------
    UsageError
        ``scaled_codebook.option``.
    UnsupportedError
        ``scaled_codebook.group``: the group does not divide the columns.
    """
    require_known(ID, options, OPTIONS)
    name = options.get("table", "nf4")
    scales = options.get("scales", "f32")
    second = options.get("second")
    order = options.get("order", LOW_FIRST)
    if not isinstance(name, str) or name not in VALUES:
        raise _option_error(f"table {', '.join(VALUES)}", name)
    if scales not in (*DTYPES_OF_VALUES, *SMALL_SCALES):
        raise _option_error(f"scales {', '.join((*DTYPES_OF_VALUES, *SMALL_SCALES))}", scales)
    if second not in (None, MULTIPLY, DIVIDE):
        raise _option_error(f"second {MULTIPLY} or {DIVIDE}", second)
    if second and scales == "f8_e8m0fnu":
        raise _option_error("scales other than powers of two together with second", scales)
    if AMAX in options and second is None:
        raise _option_error(f"second together with {AMAX}", second)
    bits = VALUES[name]
    if order not in ORDERS or (order != LOW_FIRST and bits != 4):
        raise _option_error(f"order {' or '.join(ORDERS)}, the second at 4 bits", order)
    grid = _grid(options.get("group", GROUP), options.get("flat", False))
    transposed = options.get("transposed", False)
    if not isinstance(transposed, bool):
        raise _option_error("transposed true or false", transposed)
    if transposed and len(shape) < 2:
        raise UnsupportedError(f"codec {ID} expects two dimensions to transpose", rule=f"{ID}.group")
    layout = ScaledCodebookLayout(bits, grid, dtype, "f32", scales, None, order, second, transposed=transposed)
    if name not in TABLES or layout.attributes()["codec_version"] != VERSION:  # version 1 stores the tables
        layout = replace(layout, values=name)
    cols = matrix_shape(layout.stored_shape(shape))[1]
    if isinstance(grid, Group) and cols % grid.columns:
        raise UnsupportedError(
            f"codec {ID} expects columns that group {grid.columns} divides, found {cols}; use another group or 'row'",
            rule=f"{ID}.group",
        )
    return name, layout


def amax_of(options: Mapping[str, Any]) -> float | None:
    """Return the option ``amax``, the largest magnitude of the matrices that share a second scale; None if unset.

    Raises ``UsageError`` ``scaled_codebook.option``.
    """
    amax = options.get(AMAX)
    if amax is None:
        return None
    if not isinstance(amax, int | float) or isinstance(amax, bool) or not 0 <= amax < float("inf"):
        raise _option_error(f"{AMAX} a finite number from 0", amax)
    return float(amax)


def _grid(group: object, flat: object) -> Grid:
    if not isinstance(flat, bool):
        raise _option_error("flat true or false", flat)
    if not flat and group in ("row", "tensor"):
        return ROW if group == "row" else PER_TENSOR
    if not flat and isinstance(group, list | tuple):
        if len(group) == 2 and all(_is_size(size) for size in group):
            return Tiles(*group)
        raise _option_error("group of two positive numbers, rows and columns of a block", group)
    if not isinstance(group, int) or not _is_size(group):
        raise _option_error("group 'row', 'tensor', [rows, columns], or a positive number of columns", group)
    return Run(group) if flat else Group(group)


def _is_size(size: object) -> bool:
    return is_int_between(size, 1, _LIMIT)
