"""What a recipe's rule asks of a quantizer: which grid, and in which layout its numbers are held until they are stored.

Numbers are held as the affine family's integers, as a scaled codebook, a palette or as ggml's blocks; containers
repack these exactly. Those of a trellis are held as its streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingot.codecs.palette.encode import codebooks_for
from ingot.codecs.scaled_codebook.options import layout_of as scaled_layout
from ingot.codecs.trellis.streams import band_for
from ingot.errors import UnsupportedError, UsageError
from ingot.model.layouts.affine import NO_ZERO, ROW, ROWS_LSB, SCALE_DTYPES, AffineLayout, Zero
from ingot.model.layouts.affine import OFFSETS as OFFSET_PART
from ingot.model.layouts.affine import POINTS as POINT_PART
from ingot.model.layouts.affine import Group as Columns
from ingot.model.layouts.ggml import TYPES, GgmlBlocksLayout
from ingot.model.layouts.palette import BITS as PALETTE_BITS
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import MULTIPLY, ScaledCodebookLayout
from ingot.model.layouts.trellis import TrellisLayout, inner_rows
from ingot.model.tensor import Array
from ingot.quantization.factors import Factors
from ingot.quantization.grid import A_ROW, AS_INTEGERS, FOUR_BITS, GRIDS, NONE, OFFSETS, POINTS, Grid, TrellisGrid
from ingot.quantization.rounding import IMPORTANCE, QUANTIZERS, How, round_bands, round_matrix
from ingot.quantization.trellis import Made, round_streams

AWQ = "awq"
_TABLE_BITS = (2, 3, 4)
_MOST_GROUP = 1 << 20
_PARTS: Mapping[str, Zero] = {NONE: NO_ZERO, POINTS: POINT_PART, OFFSETS: OFFSET_PART}
_ORDER, _CORRECT = "act_order", "correct_bias"
_TOGETHER = 64  # columns of a palette that descend together

Held = AffineLayout | ScaledCodebookLayout | GgmlBlocksLayout | PaletteLayout | TrellisLayout


@dataclass(frozen=True, slots=True)
class Asked:
    """A quantizer and a grid.

    ``block`` is the type of ggml's blocks that numbers are held in, if they are. ``scaled``: channels get scales
    before, which are folded into what comes before. ``channels``, of a palette: how many rows at most have a table of
    their own, None where the tensor has one. ``streams``: numbers are a trellis's, and the grid says their bits, groups
    and scales. ``correct_bias``: what rounding moves the mean output by is taken from the bias beside the matrix.
    """

    quantizer: str
    grid: Grid
    block: str | None = None
    act_order: bool = False
    scaled: bool = False
    channels: int | None = None
    streams: bool = False
    correct_bias: bool = False

    @property
    def points(self) -> tuple[int, int] | None:
        """What zero points are between, where there are any."""
        return (0, (1 << self.grid.bits) - 1) if self.grid.zeros == POINTS else None

    def band(self, shape: tuple[int, ...]) -> int | None:
        """Return how many rows of a tensor have a table of their own; None where all of them have one."""
        if self.channels is None:
            return None
        return shape[0] // codebooks_for(shape[0], self.channels)

    def require(self, shape: tuple[int, ...], where: str) -> None:
        """Refuse a tensor that this does not fit.

        ``UnsupportedError`` ``ggml_blocks.columns``: rows that are not whole blocks; ``quantizer.matrix``: tables for
        channels of stacked matrices; ``trellis.group``: rows that are not whole groups.
        """
        cols = shape[-1]
        if self.grid.second and len(shape) > 2:
            raise UnsupportedError(
                f"expected a matrix for scales with one number for all, found shape {list(shape)}",
                rule="quantizer.matrix",
                where=where,
            )
        if self.grid.table == FOUR_BITS and cols % self.grid.group:
            raise UnsupportedError(
                f"expected columns that group {self.grid.group} divides, found {cols}; let the rule ask for "
                "cols_multiple_of, and another one take what is left",
                rule="scaled_codebook.group",
                where=where,
            )
        if self.streams and cols % self.grid.group:
            raise UnsupportedError(
                f"expected columns that group {self.grid.group} divides, found {cols}; let the rule ask for "
                "cols_multiple_of, and another one take what is left",
                rule="trellis.group",
                where=where,
            )
        if self.channels is not None and len(shape) > 2:
            raise UnsupportedError(
                f"expected a matrix for tables of {self.channels} channels, found shape {list(shape)}; use group = "
                "'tensor' for stacked matrices",
                rule="quantizer.matrix",
                where=where,
            )
        if self.block is not None and cols % TYPES[self.block].elements:
            raise UnsupportedError(
                f"expected columns that {TYPES[self.block].elements} divides for {self.block}, found {cols}; let the "
                "rule ask for cols_multiple_of, and another one take what is left",
                rule="ggml_blocks.columns",
                where=where,
            )

    def layout(self, shape: tuple[int, ...], dtype: str) -> Held:
        """Return how the numbers of a tensor of this shape and element type are held."""
        grid = self.grid
        if self.streams:
            return TrellisLayout(grid.bits, grid.group, band_for(inner_rows(shape)), dtype, grid.scales)
        if not grid.scaled:
            tables = shape[0] // (self.band(shape) or shape[0])
            return PaletteLayout(grid.bits, (tables, *(1,) * (len(shape) - 1)), 1, 0, dtype)
        if self.block is not None:
            return GgmlBlocksLayout(self.block)
        if grid.table == FOUR_BITS:
            scales = {"scales": grid.scales, "second": MULTIPLY if grid.second else None}
            return scaled_layout(shape, dtype, {"table": FOUR_BITS, "group": grid.group, **scales})[1]
        if grid.learnt:
            return ScaledCodebookLayout(grid.bits, Columns(grid.group), dtype, "f16", grid.scales)
        zero = POINT_PART if grid.signs else _PARTS[grid.zeros]
        shared = ROW if grid.group == A_ROW else Columns(grid.group)
        return AffineLayout(grid.bits, shared, ROWS_LSB, not grid.unsigned, zero, dtype, grid.scales)


def asked(quantizer: object, codec: str, options: Mapping[str, Any]) -> Asked:
    """Return what a rule asks for.

    Parameters
    ----------
    quantizer : str
        ``importance``, ``gptq`` or ``two-sided``. ``awq+`` before it: after scales for channels were searched; ``awq``
        alone is ``awq+importance``.
    codec : str
        ``affine``: integers, options ``bits`` (1 to 8; 1, symmetric alone: signs), ``group`` columns or ``row``,
        ``scales``, ``symmetric`` and ``zero_kind``.
        ``scaled_codebook``: a learnt table, options ``bits`` (2 to 4), ``group``, ``scales``; or ``table``
        ``f4_e2m1fn`` with ``group`` and ``scales`` as MXFP4 and NVFP4 have them. ``ggml_blocks``: option
        ``type``. ``palette``: values that are learnt, options ``bits`` and ``group``, channels that share a table or
        ``tensor``. All but ``importance`` have ``act_order``. ``trellis``: as
        ``scaled_codebook``, without ``act_order`` and ``awq``. All have ``correct_bias``.

    Raises
    ------
    UsageError
        ``quantizer.option``.
    """
    left = dict(options)
    correct = _boolean(left, _CORRECT, default=False)
    return replace(_asked(quantizer, codec, left), correct_bias=correct)


def _asked(quantizer: object, codec: str, left: dict[str, Any]) -> Asked:
    scaled, name = _split(quantizer)
    if name not in QUANTIZERS:
        raise _wrong(f"quantizer {', '.join(QUANTIZERS)}, {AWQ}, or {AWQ}+ before one of them", quantizer)
    order = _boolean(left, _ORDER, default=False)
    if order and name == IMPORTANCE:
        raise _wrong(f"no {_ORDER} with quantizer {IMPORTANCE}, which feeds nothing back", order)
    if codec == PaletteLayout.codec:
        grid, channels = _palette(left)
        return Asked(name, grid, None, order, scaled, channels)
    if codec == TrellisLayout.codec:
        if order or scaled:
            raise _wrong(f"neither {_ORDER} nor {AWQ} with codec {codec}", quantizer)
        return Asked(name, _groups(left, learnt=True, zeros=NONE), streams=True)
    grid, block = _grid(codec, left)
    return Asked(name, grid, block, order, scaled)


def _split(quantizer: object) -> tuple[bool, str]:
    first, plus, rest = str(quantizer).partition("+")
    if first != AWQ:
        return False, str(quantizer)
    return True, rest if plus else IMPORTANCE


def _grid(codec: str, left: dict[str, Any]) -> tuple[Grid, str | None]:
    """Return a grid, and the type of ggml's blocks that its numbers are held in."""
    if codec == GgmlBlocksLayout.codec:
        _require_known(left, ("type",))
        kind = left.get("type")
        if not isinstance(kind, str) or kind not in GRIDS:
            raise _wrong(f"type {', '.join(GRIDS)} for a quantizer", kind)
        return GRIDS[kind], None if kind in AS_INTEGERS else kind
    learnt = codec == ScaledCodebookLayout.codec
    if not learnt and codec != AffineLayout.codec:
        layouts = (AffineLayout, ScaledCodebookLayout, GgmlBlocksLayout, PaletteLayout, TrellisLayout)
        known = tuple(layout.codec for layout in layouts)
        raise _wrong(f"codec {', '.join(known)} for a quantizer", codec)
    if learnt and "table" in left:
        return _four_bits(left), None
    return _groups(left, learnt=learnt, zeros=NONE if learnt else _zeros(left)), None


def _four_bits(left: Mapping[str, Any]) -> Grid:
    """Return MXFP4's grid (OCP Microscaling Formats 1.0) or NVFP4's."""
    _require_known(left, ("table", "group", "scales", "second"))
    kinds = {("f8_e8m0fnu", None): 32, ("f8_e4m3fn", MULTIPLY): 16}
    asked = left.get("scales", "f8_e8m0fnu"), left.get("second")
    if left["table"] != FOUR_BITS or asked not in kinds:
        raise _wrong(f"table {FOUR_BITS} with scales f8_e8m0fnu, or f8_e4m3fn and second {MULTIPLY}", dict(left))
    if left.get("group", kinds[asked]) != kinds[asked]:
        raise _wrong(f"group {kinds[asked]} for scales {asked[0]}", left["group"])
    return Grid(4, kinds[asked], asked[0], table=FOUR_BITS, second=asked[1] is not None)


def _groups(left: Mapping[str, Any], *, learnt: bool, zeros: str) -> Grid:
    """Return the grid of options ``bits``, ``group`` and ``scales``."""
    _require_known(left, ("bits", "group", "scales"))
    bits, group, scales = left.get("bits", 4), left.get("group", 64), left.get("scales", "f16")
    group = A_ROW if group == "row" and not learnt else group
    few = _TABLE_BITS if learnt else tuple(range(1 if zeros == NONE else 2, 9))
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in few:
        raise _wrong(f"bits from {few[0]} to {few[-1]}", bits)
    if not isinstance(group, int) or isinstance(group, bool) or not (1 <= group <= _MOST_GROUP or group == A_ROW):
        raise _wrong(f"group from 1 to {_MOST_GROUP} columns", group)
    if scales not in SCALE_DTYPES:
        raise _wrong(f"scales {', '.join(SCALE_DTYPES)}", scales)
    return Grid(bits, group, scales, learnt, zeros)


def rounded_as(asked: Asked, weights: Array, factors: Factors, levels: Array | None = None) -> list[Made]:
    """Return a matrix rounded as ``asked``, its bands where these have tables of their own.

    Parameters
    ----------
    weights : f32 [rows, cols]
    levels : f32 [2 ** bits], optional
        A table that was learnt before.
    """
    grid = asked.grid
    if asked.streams:
        return [round_streams(weights, TrellisGrid(grid.bits, grid.group, grid.scales), factors, asked.quantizer)]
    how = How(asked.quantizer, asked.act_order)
    rows = asked.band(weights.shape)
    if rows is not None:
        return [*round_bands(weights, asked.grid, factors, how, rows)]
    return [round_matrix(weights, asked.grid, factors, how.quantizer, levels, act_order=how.act_order)]


def _palette(left: Mapping[str, Any]) -> tuple[Grid, int | None]:
    """Return the grid of a palette, and how many channels share a table, None for all."""
    _require_known(left, ("bits", "group"))
    bits, group = left.get("bits", 4), left.get("group", "tensor")
    if bits not in PALETTE_BITS or isinstance(bits, bool):
        raise _wrong(f"bits {', '.join(map(str, PALETTE_BITS))}", bits)
    if group != "tensor" and (not isinstance(group, int) or isinstance(group, bool) or group < 1):
        raise _wrong("group 'tensor' or a number of channels", group)
    return Grid(int(bits), _TOGETHER, learnt=True, scaled=False), None if group == "tensor" else int(group)


def _zeros(options: dict[str, Any]) -> str:
    """Take what options say of zeros, as codec ``affine`` has them: offsets are never symmetric."""
    kind = options.pop("zero_kind", "point")
    if kind not in ("point", "offset"):
        raise _wrong("zero_kind point or offset", kind)
    symmetric = _boolean(options, "symmetric", default=kind == "point")
    if symmetric and kind == "offset":
        raise _wrong("symmetric false for zero_kind offset", symmetric)
    return NONE if symmetric else OFFSETS if kind == "offset" else POINTS


def _boolean(options: dict[str, Any], key: str, *, default: bool) -> bool:
    value = options.pop(key, default)
    if not isinstance(value, bool):
        raise _wrong(f"{key} true or false", value)
    return value


def _require_known(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in options:
        if key not in known:
            raise _wrong(f"the options {', '.join(known)} beside a quantizer", key)


def _wrong(expected: str, found: object) -> UsageError:
    return UsageError(f"expected {expected}, found {found!r:.80}", rule="quantizer.option")
