"""Parsing of the options of the affine family's encoder (``spec/affine.md``, "Options")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from ingot.codecs.affine.sign import SIGNS
from ingot.codecs.base import option_error, require_known
from ingot.codecs.range_probe import AUTO, HALF
from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import (
    FLAT_LSB,
    NO_ZERO,
    OFFSETS,
    PER_TENSOR,
    POINTS,
    ROW,
    SCALE_DTYPES,
    AffineLayout,
    Constant,
    Grid,
    Group,
    Zero,
)

QUANTIZERS = ("absmax", "minmax", "mse", *SIGNS)
FLAT = "flat"
OPTIONS = (
    "bits",
    "group",
    "symmetric",
    "signed",
    "scales",
    "bit_order",
    "quantizer",
    "unbiased",
    "zero_kind",
    "zero_point",
    "cut",
)
_option_error = partial(option_error, AffineLayout.codec)


@dataclass(frozen=True, slots=True)
class ParsedOptions:
    """The encoder's settings, with defaults filled in."""

    settings: AffineLayout
    quantizer: str
    unbiased: bool
    auto: bool

    @property
    def levels(self) -> float:
        """The divisor for the range probe: a group's scale is about its largest magnitude divided by this number."""
        bits = self.settings.bits
        point = self.settings.zero_point
        if self.quantizer in SIGNS:
            return 1.0
        if self.settings.zeros:
            return 2.0**bits - 1
        return float(2 ** (bits - 1) - 1 if point is None else min(point, 2**bits - 1 - point))


def parse(options: Mapping[str, Any], shape: tuple[int, ...], source: str) -> ParsedOptions:
    """Return the checked options for a tensor of ``shape`` and element type ``source``.

    Raises ``UsageError`` ``affine.option``.
    """
    require_known(AffineLayout.codec, options, OPTIONS)
    bits = _bits(options)
    grid = _grid(options)
    zero_kind = _choice(options, "zero_kind", ("point", "offset"), "point")
    symmetric, quantizer = _quantizer(options, offset=zero_kind == "offset")
    if symmetric and bits < 2:
        raise _option_error("bits of at least 2 for a symmetric quantizer", bits)
    zero_point = _zero_point(options, bits)
    signed = options.get("signed", symmetric and zero_point is None)
    if not isinstance(signed, bool) or (symmetric and signed != (zero_point is None)):
        raise _option_error("signed true or false, and true where symmetric without zero_point", signed)
    scale_dtype = _choice(
        options, "scales", (*SCALE_DTYPES, "source", HALF, AUTO), AUTO if isinstance(grid, Group) else "f32"
    )
    if scale_dtype == HALF:
        scale_dtype = "bf16" if source == "bf16" else AUTO
    auto = scale_dtype == AUTO
    if auto:
        scale_dtype = "f16"
    elif scale_dtype == "source":
        scale_dtype = source if source in SCALE_DTYPES else "f32"
    order = _choice(options, "bit_order", ("lsb", "msb", FLAT), "lsb")
    if order == FLAT and options.get("cut", "rows") != "rows":
        raise _option_error("cut rows for bit_order flat", options["cut"])
    unbiased = options.get("unbiased", False)
    if not isinstance(unbiased, bool):
        raise _option_error("unbiased true or false", unbiased)
    zero: Zero = (OFFSETS if zero_kind == "offset" else POINTS) if not symmetric else NO_ZERO
    if zero_point is not None:
        zero = Constant(zero_point)
    settings = AffineLayout(
        bits, grid, FLAT_LSB if order == FLAT else f"rows_{order}", signed, zero, source, scale_dtype
    )
    _refuse_contradictions(settings, quantizer, symmetric=symmetric, offset=zero_kind == "offset")
    if unbiased and (settings.per_tensor or quantizer in SIGNS or zero_kind == "offset"):
        raise _option_error("unbiased false for one scale per tensor, for signs and for offsets", unbiased)
    return ParsedOptions(_with_cut(options, shape, settings), quantizer, unbiased, auto)


def _refuse_contradictions(settings: AffineLayout, quantizer: str, *, symmetric: bool, offset: bool) -> None:
    per_tensor = settings.per_tensor
    signs = quantizer in SIGNS
    if signs and (settings.bits != 1 or settings.signed or per_tensor):
        raise _option_error(
            f"1 bit, unsigned, and a scale per group or row, for quantizer {quantizer}",
            (settings.bits, settings.signed, settings.granularity),
        )
    if offset and (symmetric or settings.signed or per_tensor or signs):
        raise _option_error(
            "codes that are unsigned, not symmetric, and a scale per group or row, for zero_kind offset",
            (settings.signed, symmetric, settings.granularity, quantizer),
        )
    if settings.zero_point is not None and (not symmetric or per_tensor):
        raise _option_error("a symmetric quantizer and a scale per group or row for zero_point", settings.zero_point)


def _zero_point(options: Mapping[str, Any], bits: int) -> int | None:
    if "zero_point" not in options:
        return None
    point = options["zero_point"]
    highest = (1 << bits) - 2
    if not isinstance(point, int) or isinstance(point, bool) or not 1 <= point <= highest:
        raise _option_error(f"zero_point from 1 to {highest}", point)
    return point


def _with_cut(options: Mapping[str, Any], shape: tuple[int, ...], settings: AffineLayout) -> AffineLayout:
    """Return the settings with the packed matrix that the option ``cut`` selects."""
    cut = _choice(options, "cut", ("rows", "axis0", "flat"), "rows")
    size = prod(shape)
    if cut == "rows" or not size:
        return settings
    if settings.per_tensor:
        raise _option_error("cut rows where one scale serves the tensor", cut)
    if cut == "axis0":
        first = shape[0] if shape else 1
        return _with_matrix(settings, shape, (first, size // first))
    group = settings.group_size
    if group is None:
        raise _option_error("a group for cut flat", options.get("group"))
    if size % group:
        raise UnsupportedError(  # no error of the option: a recipe's next candidate may suit this tensor
            f"codec {AffineLayout.codec} expects elements that group {group} divides for cut flat, found "
            f"{size}; take cut rows or another group",
            rule="affine.cut",
        )
    by_row = replace(settings, grid=ROW)
    return _with_matrix(by_row, shape, (size // group, group))


def _with_matrix(settings: AffineLayout, shape: tuple[int, ...], matrix: tuple[int, int]) -> AffineLayout:
    return settings if settings.matrix_of(shape) == matrix else replace(settings, matrix=matrix)


def _choice(options: Mapping[str, Any], key: str, choices: tuple[str, ...], default: str) -> str:
    value = options.get(key, default)
    if not isinstance(value, str) or value not in choices:
        raise _option_error(f"{key} {' or '.join(choices)}", value)
    return value


def _bits(options: Mapping[str, Any]) -> int:
    bits = options.get("bits", 4)
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= 8:
        raise _option_error("bits from 1 to 8", bits)
    return bits


def _grid(options: Mapping[str, Any]) -> Grid:
    group = options.get("group", "row" if options.get("bits") == 8 else 128)
    if group in ("row", "tensor"):
        return ROW if group == "row" else PER_TENSOR
    if not isinstance(group, int) or isinstance(group, bool) or not 1 <= group <= 2**31:
        raise _option_error("group 'row', 'tensor' or a positive number of columns", group)
    return Group(group)


def _quantizer(options: Mapping[str, Any], *, offset: bool) -> tuple[bool, str]:
    """Return whether codes are symmetric, and the quantizer; the default of each depends on the other."""
    if "quantizer" in options:
        quantizer = _choice(options, "quantizer", QUANTIZERS, "absmax")
        symmetric = options.get("symmetric", quantizer not in ("minmax", *SIGNS) and not offset)
    else:
        symmetric = options.get("symmetric", not offset)
        quantizer = "absmax" if symmetric else "minmax"
    if not isinstance(symmetric, bool):
        raise _option_error("symmetric true or false", symmetric)
    if quantizer != "mse" and symmetric != (quantizer == "absmax"):
        raise _option_error("quantizer absmax where symmetric, minmax or signs where not, or mse", quantizer)
    return symmetric, quantizer
