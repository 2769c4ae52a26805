"""Parsing of a recipe's quantizer into a grid of values and the layout that stores the codes.

Layouts are integers of the codec ``affine``, scaled codebooks, palettes, ggml's blocks and trellis streams. If a
container stores another layout, the codes are repacked exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingot.codecs.blocks.entries import BLOCK, ENTRY_TYPES
from ingot.codecs.palette.encode import codebooks_for
from ingot.codecs.range_probe import HALF
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
from ingot.model.layouts.scaled_codebook import DIVIDE, MULTIPLY, ScaledCodebookLayout
from ingot.model.layouts.trellis import TrellisLayout, inner_rows
from ingot.model.tensor import Array
from ingot.quantization.device.round import round_on_device, rounds_on_device
from ingot.quantization.entries import round_entries
from ingot.quantization.factors import Factors
from ingot.quantization.grid import A_ROW, AS_INTEGERS, FOUR_BITS, GRIDS, NONE, OFFSETS, POINTS, Grid, TrellisGrid
from ingot.quantization.rounding import IMPORTANCE, QUANTIZERS, TWO_SIDED, How, round_bands, round_matrix
from ingot.quantization.trellis import RoundedMatrix, round_streams

AWQ = "awq"
_TABLE_BITS = (2, 3, 4)
_MAX_GROUP = 1 << 20
_PARTS: Mapping[str, Zero] = {NONE: NO_ZERO, POINTS: POINT_PART, OFFSETS: OFFSET_PART}
_ORDER = "act_order"
_CORRECT = "correct_bias"
_CODED = "coded_bits"
_CODED_RANGE = (1, 7)
_DESCENT_COLUMNS = 64  # columns of a palette that descend together

StoredLayout = AffineLayout | ScaledCodebookLayout | GgmlBlocksLayout | PaletteLayout | TrellisLayout


@dataclass(frozen=True, slots=True)
class QuantizerSpec:
    """A quantizer, the grid to which it rounds, and the codec that stores the codes.

    Parameters
    ----------
    block : str or None
        The ggml block type in which codes and scales are stored; None for other codecs.
    scaled : bool
        Channels are scaled before rounding (AWQ), and the inverse scales are folded into the preceding operations.
    channels : int or None
        For a palette: the largest number of rows that share a table; None if the tensor has one table.
    streams : bool
        The codec is ``trellis``. Its grid has only bits, group size and type of scales.
    correct_bias : bool
        The layer's bias compensates the change of the mean output.
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
    def entries(self) -> bool:
        """Whether codes are entries of a grid type of ggml, such as ``iq2_xs``.

        The grid of the spec then has only bits and group size.
        """
        return self.block in ENTRY_TYPES

    @property
    def on_device(self) -> bool:
        """Whether torch can round matrices on a device other than the CPU."""
        return not self.streams and not self.entries and self.grid.coded is None and rounds_on_device(self.grid)

    @property
    def points(self) -> tuple[int, int] | None:
        """The smallest and the largest zero point; None if the grid has no zero points."""
        return (0, (1 << self.grid.bits) - 1) if self.grid.zeros == POINTS else None

    def band(self, shape: tuple[int, ...]) -> int | None:
        """Return the number of rows that share a table; None if all rows share one table."""
        if self.channels is None:
            return None
        return shape[0] // codebooks_for(shape[0], self.channels)

    def require(self, shape: tuple[int, ...], location: str) -> None:
        """Raise ``UnsupportedError`` for a tensor shape that this spec does not support.

        ``ggml_blocks.columns``: the row length is not a multiple of the block size. ``quantizer.matrix``: stacked
        matrices with tables for groups of channels, or with a second scale. ``trellis.group``,
        ``scaled_codebook.group``: the row length is not a multiple of the group size.
        """
        cols = shape[-1]
        if self.grid.second and len(shape) > 2:
            raise UnsupportedError(
                f"expected a matrix for scales with a second scale, found shape {list(shape)}",
                rule="quantizer.matrix",
                where=location,
            )
        if self.grid.table == FOUR_BITS and cols % self.grid.group:
            raise UnsupportedError(
                f"expected columns that group {self.grid.group} divides, found {cols}; set cols_multiple_of in the "
                "rule, and let another rule quantize the remaining tensors",
                rule="scaled_codebook.group",
                where=location,
            )
        if self.streams and cols % self.grid.group:
            raise UnsupportedError(
                f"expected columns that group {self.grid.group} divides, found {cols}; set cols_multiple_of in the "
                "rule, and let another rule quantize the remaining tensors",
                rule="trellis.group",
                where=location,
            )
        if self.channels is not None and len(shape) > 2:
            raise UnsupportedError(
                f"expected a matrix for tables of {self.channels} channels, found shape {list(shape)}; use group = "
                "'tensor' for stacked matrices",
                rule="quantizer.matrix",
                where=location,
            )
        if self.block is not None and cols % TYPES[self.block].elements:
            raise UnsupportedError(
                f"expected columns that {TYPES[self.block].elements} divides for {self.block}, found {cols}; set "
                "cols_multiple_of in the rule, and let another rule quantize the remaining tensors",
                rule="ggml_blocks.columns",
                where=location,
            )

    def layout(self, shape: tuple[int, ...], dtype: str) -> StoredLayout:
        """Return the layout in which a tensor of this shape and element type is stored."""
        grid = self.grid
        if self.streams:
            return TrellisLayout(grid.bits, grid.group, band_for(inner_rows(shape)), dtype, grid.scales)
        if not grid.scaled:
            tables = shape[0] // (self.band(shape) or shape[0])
            return PaletteLayout(grid.bits, (tables, *(1,) * (len(shape) - 1)), 1, 0, dtype)
        if self.block is not None:
            return GgmlBlocksLayout(self.block)
        if grid.table == FOUR_BITS:
            scales = {"scales": grid.scales, "second": grid.second}
            return scaled_layout(shape, dtype, {"table": FOUR_BITS, "group": grid.group, **scales})[1]
        if grid.learnt:
            return ScaledCodebookLayout(grid.bits, Columns(grid.group), dtype, "f16", grid.scales)
        zero = POINT_PART if grid.signs else _PARTS[grid.zeros]
        shared = ROW if grid.group == A_ROW else Columns(grid.group)
        return AffineLayout(grid.bits, shared, ROWS_LSB, not grid.unsigned, zero, dtype, grid.scales)


def parse_quantizer(quantizer: object, codec: str, options: Mapping[str, Any]) -> QuantizerSpec:
    """Return the spec that a recipe rule's quantizer, codec and options declare.

    Parameters
    ----------
    quantizer : str
        ``importance``, ``gptq`` or ``two-sided``. With the prefix ``awq+``, scales of channels are searched first;
        ``awq`` alone is ``awq+importance``.
    codec : str
        ``affine``: integers, options ``bits`` (1 to 8; a single bit stores the sign, and must be symmetric), ``group``
        columns or ``row``, ``scales``, ``symmetric`` and ``zero_kind``. With ``coded_bits``, 1 to 7, and ``two-sided``:
        integers of 8 bits in rows for an entropy coder, which stores them in this number of bits on average; option
        ``scales``. ``scaled_codebook``: a learnt table, options ``bits`` (2 to 4), ``group``, ``scales``; or ``table``
        ``f4_e2m1fn`` with the ``group`` and ``scales`` of MXFP4 or NVFP4. ``ggml_blocks``: option ``type``.
        ``palette``: learnt values, options ``bits`` and ``group``, channels that share a table or ``tensor``. All but
        ``importance`` have ``act_order``. ``trellis``: the options of ``scaled_codebook``, without ``act_order`` and
        ``awq``. All have ``correct_bias``.

    Raises
    ------
    UsageError
        ``quantizer.option``.
    """
    remaining = dict(options)
    correct = _boolean(remaining, _CORRECT, default=False)
    return replace(_parse(quantizer, codec, remaining), correct_bias=correct)


def _parse(quantizer: object, codec: str, options: dict[str, Any]) -> QuantizerSpec:
    scaled, name = _split(quantizer)
    if name not in QUANTIZERS:
        raise _option_error(f"quantizer {', '.join(QUANTIZERS)}, {AWQ}, or {AWQ}+ before one of them", quantizer)
    order = _boolean(options, _ORDER, default=False)
    if order and name == IMPORTANCE:
        raise _option_error(f"no {_ORDER} with quantizer {IMPORTANCE}, which has no feedback", order)
    if _CODED in options:
        return QuantizerSpec(name, _coded(quantizer, codec, options, order=order))
    if codec == PaletteLayout.codec:
        grid, channels = _palette(options)
        return QuantizerSpec(name, grid, None, order, scaled, channels)
    if codec == TrellisLayout.codec:
        if order or scaled:
            raise _option_error(f"neither {_ORDER} nor {AWQ} with codec {codec}", quantizer)
        return QuantizerSpec(name, _groups(options, learnt=True, zeros=NONE), streams=True)
    grid, block = _grid(codec, options)
    if block in ENTRY_TYPES and (order or scaled):
        raise _option_error(f"neither {_ORDER} nor {AWQ} with type {block}", quantizer)
    return QuantizerSpec(name, grid, block, order, scaled)


def _coded(quantizer: object, codec: str, options: dict[str, Any], *, order: bool) -> Grid:
    """Return the grid of integers for an entropy coder."""
    coded = options.pop(_CODED)
    if quantizer != TWO_SIDED or codec != AffineLayout.codec or order:
        raise _option_error(f"{_CODED} only with codec {AffineLayout.codec} and quantizer {TWO_SIDED} alone", quantizer)
    low, high = _CODED_RANGE
    if not isinstance(coded, int | float) or isinstance(coded, bool) or not low <= coded <= high:
        raise _option_error(f"{_CODED} from {low} to {high}", coded)
    options = {"bits": 8, "group": "row", **options}
    if options["bits"] != 8 or options["group"] != "row":
        raise _option_error(f"bits 8 and group 'row' with {_CODED}", options)
    return replace(_groups(options, learnt=False, zeros=NONE), coded=float(coded))


def _split(quantizer: object) -> tuple[bool, str]:
    first, plus, suffix = str(quantizer).partition("+")
    if first != AWQ:
        return False, str(quantizer)
    return True, suffix if plus else IMPORTANCE


def _grid(codec: str, options: dict[str, Any]) -> tuple[Grid, str | None]:
    """Return the grid that a codec's options declare, and the ggml block type that stores it.

    The block type is None for codecs other than ``ggml_blocks``.
    """
    if codec == GgmlBlocksLayout.codec:
        _require_known(options, ("type",))
        block_type = options.get("type")
        if block_type in ENTRY_TYPES:
            return Grid(max(2, int(str(block_type)[2])), BLOCK), str(block_type)  # one bit would mean signs
        if not isinstance(block_type, str) or block_type not in GRIDS:
            raise _option_error(f"type {', '.join((*GRIDS, *ENTRY_TYPES))} for a quantizer", block_type)
        return GRIDS[block_type], None if block_type in AS_INTEGERS else block_type
    learnt = codec == ScaledCodebookLayout.codec
    if not learnt and codec != AffineLayout.codec:
        layouts = (AffineLayout, ScaledCodebookLayout, GgmlBlocksLayout, PaletteLayout, TrellisLayout)
        codecs = tuple(layout.codec for layout in layouts)
        raise _option_error(f"codec {', '.join(codecs)} for a quantizer", codec)
    if learnt and "table" in options:
        return _four_bits(options), None
    return _groups(options, learnt=learnt, zeros=NONE if learnt else _zeros(options)), None


def _four_bits(options: Mapping[str, Any]) -> Grid:
    """Return the grid of MXFP4 (OCP Microscaling Formats 1.0) or of NVFP4, which MLX stores without a second scale."""
    _require_known(options, ("table", "group", "scales", "second"))
    group_sizes = {("f8_e8m0fnu", None): 32, **{("f8_e4m3fn", second): 16 for second in (None, MULTIPLY, DIVIDE)}}
    scales = options.get("scales", "f8_e8m0fnu"), options.get("second")
    if options["table"] != FOUR_BITS or scales not in group_sizes:
        raise _option_error(
            f"table {FOUR_BITS} with scales f8_e8m0fnu, or f8_e4m3fn without second or with {MULTIPLY} or {DIVIDE}",
            dict(options),
        )
    if options.get("group", group_sizes[scales]) != group_sizes[scales]:
        raise _option_error(f"group {group_sizes[scales]} for scales {scales[0]}", options["group"])
    return Grid(4, group_sizes[scales], scales[0], table=FOUR_BITS, second=scales[1])


def _groups(options: Mapping[str, Any], *, learnt: bool, zeros: str) -> Grid:
    """Return the grid that the options ``bits``, ``group`` and ``scales`` describe."""
    _require_known(options, ("bits", "group", "scales"))
    bits = options.get("bits", 4)
    group = options.get("group", 64)
    scales = options.get("scales", "f16")
    scales = "f16" if scales == HALF else scales
    group = A_ROW if group == "row" and not learnt else group
    allowed = _TABLE_BITS if learnt else tuple(range(1 if zeros == NONE else 2, 9))
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed:
        raise _option_error(f"bits from {allowed[0]} to {allowed[-1]}", bits)
    if not isinstance(group, int) or isinstance(group, bool) or not (1 <= group <= _MAX_GROUP or group == A_ROW):
        raise _option_error(f"group from 1 to {_MAX_GROUP} columns", group)
    if scales not in SCALE_DTYPES:
        raise _option_error(f"scales {', '.join(SCALE_DTYPES)}", scales)
    return Grid(bits, group, scales, learnt, zeros)


def round_with(
    spec: QuantizerSpec, weights: Array, factors: Factors, levels: Array | None = None, device: Any = None
) -> list[RoundedMatrix]:
    """Return the matrix ``weights`` rounded as ``spec`` declares, as a list of bands of rows.

    There is one band, unless groups of rows have tables of their own.

    Parameters
    ----------
    weights : f32 [rows, cols]
    levels : f32 [2 ** bits], optional
        The table that an earlier matrix of the tensor learnt.
    device : torch.device, optional
        The device that rounds if the spec allows it (``spec.on_device``). Default: the CPU.
    """
    grid = spec.grid
    if device is not None and spec.on_device:
        return [round_on_device(weights, grid, factors, How(spec.quantizer, spec.act_order), device, levels)]
    if spec.streams:
        return [round_streams(weights, TrellisGrid(grid.bits, grid.group, grid.scales), factors, spec.quantizer)]
    if spec.block is not None and spec.entries:
        return [round_entries(weights, spec.block, factors, spec.quantizer)]
    how = How(spec.quantizer, spec.act_order)
    rows = spec.band(weights.shape)
    if rows is not None:
        return [*round_bands(weights, spec.grid, factors, how, rows)]
    return [round_matrix(weights, spec.grid, factors, how.quantizer, levels, act_order=how.act_order)]


def _palette(options: Mapping[str, Any]) -> tuple[Grid, int | None]:
    """Return the grid of a palette, and the number of channels that share a table.

    The number is None if all channels share one table.
    """
    _require_known(options, ("bits", "group"))
    bits = options.get("bits", 4)
    group = options.get("group", "tensor")
    if bits not in PALETTE_BITS or isinstance(bits, bool):
        raise _option_error(f"bits {', '.join(map(str, PALETTE_BITS))}", bits)
    if group != "tensor" and (not isinstance(group, int) or isinstance(group, bool) or group < 1):
        raise _option_error("group 'tensor' or a number of channels", group)
    return Grid(int(bits), _DESCENT_COLUMNS, learnt=True, scaled=False), None if group == "tensor" else int(group)


def _zeros(options: dict[str, Any]) -> str:
    """Remove the options of zero points from ``options``; return the kind of zero points.

    Offsets are never symmetric, as in the codec ``affine``.
    """
    zero_kind = options.pop("zero_kind", "point")
    if zero_kind not in ("point", "offset"):
        raise _option_error("zero_kind point or offset", zero_kind)
    symmetric = _boolean(options, "symmetric", default=zero_kind == "point")
    if symmetric and zero_kind == "offset":
        raise _option_error("symmetric false for zero_kind offset", symmetric)
    return NONE if symmetric else OFFSETS if zero_kind == "offset" else POINTS


def _boolean(options: dict[str, Any], key: str, *, default: bool) -> bool:
    value = options.pop(key, default)
    if not isinstance(value, bool):
        raise _option_error(f"{key} true or false", value)
    return value


def _require_known(options: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for key in options:
        if key not in names:
            raise _option_error(f"the options {', '.join(names)} with a quantizer", key)


def _option_error(expected: str, value: object) -> UsageError:
    return UsageError(f"expected {expected}, found {value!r:.80}", rule="quantizer.option")
