"""compressed-tensors folders (llm-compressor, vLLM): ``pack-quantized`` and ``int-quantized`` (``spec/interop.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ingot.errors import CodecError, FormatError, UnsupportedError
from ingot.formats.dialects.base import HUGGING_FACE, WEIGHT, Config, Dialect, Entries, Layer, PackedLayout
from ingot.formats.dialects.compressed_floats import float_kind, float_layer, float_pieces, refuses_floats
from ingot.formats.dialects.floats import FP8, config_dtype
from ingot.formats.safetensors.pieces import Piece
from ingot.model.artifact import Artifact
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    POINTS,
    ROW,
    ROWS_LSB,
    SCALES,
    WHOLE,
    ZEROS,
    AffineLayout,
    Blocks,
    Constant,
    Group,
    Row,
    Whole,
)
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.table import layout_of
from ingot.model.layouts.words import INTS, ORDER, PACKED, PACKED_LOOSE, WordsLayout, words
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor

PACKED_WEIGHT, SCALE, ZERO_POINT = ".weight_packed", ".weight_scale", ".weight_zero_point"
SHAPE, G_IDX = ".weight_shape", ".weight_g_idx"
SCALE_DTYPES = ("f16", "bf16", "f32")
FLOATS = ("float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "dense", "mixed-precision", *FLOATS)
"""What ``format`` may say; of mixed-precision each group says its own."""
METHODS = ("compressed-tensors", "sparseml")


class Kind(NamedTuple):
    """What layers in one group of ``config.json`` share."""

    format: str
    bits: int
    strategy: str
    group: int | None
    block: tuple[int, int] | None = None
    scales: str | None = None
    type: str = "int"
    symmetric: bool = True
    ordered: bool = False


class CompressedTensorsFormat(Dialect):
    """Dense tensors, integers of 1 to 8 bits in words (pack-quantized) or bytes (int-quantized), and small floats."""

    name = "compressed-tensors"
    summary = "a folder of compressed-tensors: dense tensors, and integers in words or bytes, FP8, NVFP4 and MX formats"
    config_keys = (HUGGING_FACE, "compression_config")
    codecs = (AffineLayout.codec, WordsLayout.codec, ScaledCodebookLayout.codec)

    def claims_config(self, config: Config) -> bool:
        """Whether ``quantization_config`` names it, with formats that are read."""
        stated: Config = next((config[key] for key in self.config_keys if isinstance(config.get(key), dict)), {})
        if stated.get("quant_method") not in METHODS or "config_groups" not in stated:
            return False
        return set(_formats(stated)) <= set(FORMATS)

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return a layer for every ``X.weight_packed``, and for every ``X.weight`` in bytes with a scale.

        Raises ``FormatError`` ``compressed-tensors.config``, ``.parts``, ``.dtype``, ``.shape``, ``.order``;
        ``UnsupportedError`` ``compressed-tensors.format``: weights in other types.
        """
        stated = next(config[key] for key in self.config_keys if isinstance(config.get(key), dict))
        widths = _widths(stated)
        found = [*_layers(entries, widths), *_float_layers(entries, stated, config_dtype(config))]
        taken = {key for layer in found for key in (*layer.parts.values(), *layer.also)}
        for key in entries:
            if key.endswith((PACKED_WEIGHT, SCALE)) and key not in taken:
                raise UnsupportedError(
                    "expected integers of 1 to 8 bits with a scale, found another kind of packed weight",
                    rule="compressed-tensors.format",
                    where=key,
                )
        return found

    def refuses_layer(self, spec: TensorSpec) -> str | None:
        """Why a tensor cannot be a packed layer; None if it can."""
        try:
            layout = layout_of(spec)
        except CodecError as error:
            return error.message
        if not spec.name.endswith(WEIGHT) or len(spec.shape) != 2 or not spec.size:
            return f"its packed layers are matrices called X{WEIGHT}, found shape {list(spec.shape)}"
        if any(part.encoding != "raw" for part in spec.parts):
            return "its packed layers are uncompressed"
        if isinstance(layout, ScaledCodebookLayout):
            return refuses_floats(spec)
        if isinstance(layout, WordsLayout):
            return None if layout.form in (PACKED, INTS) else f"its words are of the form {PACKED}, not {layout.form}"
        assert isinstance(layout, AffineLayout)
        return _refuses_rows(spec, layout)

    def layer_pieces(self, spec: TensorSpec) -> list[Piece]:
        """``X.weight_packed`` and ``X.weight_shape``, or ``X.weight``; with ``X.weight_scale`` and zero points."""
        layout, stem = layout_of(spec), spec.name.removesuffix(WEIGHT)
        if isinstance(layout, ScaledCodebookLayout):
            return float_pieces(spec)
        sizes = {part.role: part.length or 0 for part in spec.parts}
        rows, cols = spec.shape
        if isinstance(layout, WordsLayout):
            code_shape, scale_shape = layout.code_shape(spec.shape), layout.scale_shape(spec.shape)
            packed = layout.form == PACKED
        else:
            assert isinstance(layout, AffineLayout)
            packed = not layout.signed
            code_shape = (rows, words(cols, layout.bits)) if packed else (rows, cols)
            scale_shape = (1,) if layout.per_tensor else (rows, layout.scale_count(spec.shape) // rows)
        dtype, suffix = ("i32", PACKED_WEIGHT) if packed else ("i8", WEIGHT)
        pieces = [
            Piece(CODES, stem + suffix, dtype, code_shape, sizes[CODES]),
            Piece(SCALES, stem + SCALE, layout.scales, scale_shape, sizes[SCALES]),
        ]
        if isinstance(layout, WordsLayout) and ZEROS in sizes:
            pieces.append(Piece(ZEROS, stem + ZERO_POINT, dtype, layout.zero_shape(spec.shape), sizes[ZEROS]))
        if ORDER in sizes:
            pieces.append(Piece(ORDER, stem + G_IDX, "i32", (cols,), sizes[ORDER]))
        if packed:
            content = np.array(spec.shape, "<i8").tobytes()
            pieces.append(Piece("shape", stem + SHAPE, "i64", (2,), 16, lambda: content))
        return pieces

    def stated(self, artifact: Artifact) -> Mapping[str, Any]:
        """Return ``quantization_config`` as compressed-tensors writes it: a group of layers for each kind of them."""
        kinds: dict[Kind, list[str]] = {}
        dense = []
        for spec in artifact.tensors:
            name = spec.name.removesuffix(WEIGHT)
            if spec.codec in self.codecs:
                kinds.setdefault(_kind(layout_of(spec)), []).append(name)
            elif spec.name.endswith(WEIGHT) and len(spec.shape) == 2 and "embed" not in spec.name:
                dense.append(name)
        if not kinds:
            return {}
        groups = {
            f"group_{number}": _group_stated(kind, ["Linear"] if len(kinds) == 1 else names)
            for number, (kind, names) in enumerate(kinds.items())
        }
        formats = {kind.format for kind in kinds}
        return {
            HUGGING_FACE: {
                "quant_method": "compressed-tensors",
                "format": formats.pop() if len(formats) == 1 else "mixed-precision",
                "quantization_status": "compressed",
                "global_compression_ratio": None,
                "ignore": dense,
                "kv_cache_scheme": None,
                "config_groups": groups,
            }
        }


def _refuses_rows(spec: TensorSpec, layout: AffineLayout) -> str | None:
    """Why integers row by row are none of its own."""
    if layout.packing != ROWS_LSB or layout.zeros or layout.matrix or layout.block:
        return "its codes go row by row, low bits first, and zero points are packed integers"
    if isinstance(layout.grid, Group) and spec.shape[1] % layout.grid.columns:
        return f"its groups divide the columns, found {layout.grid.columns} of {spec.shape[1]}"
    words_of_rows = spec.shape[1] * layout.bits % 32 == 0 and not layout.per_tensor
    middle = not layout.signed and layout.zero == Constant(1 << (layout.bits - 1))
    if (middle and words_of_rows) or (layout.signed and layout.bits == 8 and layout.zero == NO_ZERO):
        return None
    return "its integers are unsigned with the zero point in the middle, or signed bytes without"


def _formats(stated: Config) -> Iterator[Any]:
    yield stated.get("format", "dense")
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield group.get("format") or "dense"


def _widths(stated: Config) -> tuple[int, ...]:
    """Return the bits that groups of layers state.

    Raises ``FormatError`` ``compressed-tensors.config``.
    """
    groups, widths = stated.get("config_groups"), set()
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        bits = weights.get("num_bits", 8)
        if type(bits) is not int or not 1 <= bits <= 8:
            raise FormatError(
                "compressed-tensors.config",
                f"expected num_bits from 1 to 8, found {str(bits)[:40]}",
                where=str(name)[:80],
            )
        widths.add(bits)
    return tuple(sorted(widths))


def _layers(entries: Entries, widths: Sequence[int]) -> Iterator[Layer]:
    for key in entries:
        if key.endswith(PACKED_WEIGHT) and entries[key].dtype == "i32":
            yield _packed(entries, key.removesuffix(PACKED_WEIGHT), widths)
        elif key.endswith(WEIGHT) and entries[key].dtype == "i8" and key.removesuffix(WEIGHT) + SCALE in entries:
            yield _bytes(entries, key.removesuffix(WEIGHT))


def _float_layers(entries: Entries, stated: Config, dtype: str) -> Iterator[Layer]:
    """Layers of floats: bytes of numbers, or numbers of less bits packed in bytes."""
    groups = stated.get("config_groups")
    kinds = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if groups else []
    floats = [kind for kind in kinds if isinstance(kind, dict) and kind.get("type") == "float"]
    for key in entries:
        packed = key.endswith(PACKED_WEIGHT) and entries[key].dtype == "u8"
        if not packed and not (key.endswith(WEIGHT) and entries[key].dtype in FP8):
            continue
        stem = key.removesuffix(PACKED_WEIGHT if packed else WEIGHT)
        yield float_layer(entries, stem, floats, dtype)


def _refuse(rule: str, text: str, where: str) -> FormatError:
    return FormatError(f"compressed-tensors.{rule}", text, where=where)


def _scales(entries: Entries, stem: str) -> Tensor:
    scale = entries.get(stem + SCALE)
    if scale is None:
        raise _refuse("parts", f"expected {stem + SCALE!r} beside the packed weight, found none", stem)
    if scale.dtype not in SCALE_DTYPES:
        raise _refuse("dtype", f"expected scales of {', '.join(SCALE_DTYPES)}, found {scale.dtype}", stem + SCALE)
    return scale


def _group(scale: Tensor, rows: int, cols: int) -> int | None:
    """Return the columns of a group, None for a whole row."""
    groups = scale.shape[1] if len(scale.shape) == 2 else 0
    if len(scale.shape) != 2 or scale.shape[0] != rows or not groups or cols % groups:
        raise _refuse("shape", f"expected scales for {rows} rows of {cols}, found {list(scale.shape)}", scale.name)
    return None if groups == 1 else cols // groups


def _packed(entries: Entries, stem: str, widths: Sequence[int]) -> Layer:
    """A layer of pack-quantized: its shape is stated, and bits follow from the width of a row."""
    codes, scale, stated = entries[stem + PACKED_WEIGHT], _scales(entries, stem), entries.get(stem + SHAPE)
    if stated is None or stated.dtype not in ("i64", "i32") or stated.shape != (2,):
        raise _refuse("parts", f"expected {stem + SHAPE!r}, two whole numbers", stem)
    rows, cols = (int(size) for size in stated.parts[DATA].array())
    if len(codes.shape) != 2 or codes.shape[0] != rows or not 0 < cols <= 32 * codes.shape[1]:
        raise _refuse("shape", f"expected words for a matrix of {rows} x {cols}, found {list(codes.shape)}", codes.name)
    bits, form = _width(codes.shape[1], cols, widths, codes.name)
    group = _group(scale, rows, cols)
    layout = WordsLayout(form, bits, group, Constant(1 << (bits - 1)), scale.dtype, scale.dtype)
    parts = {CODES: codes.name, SCALES: scale.name}
    zeros = entries.get(stem + ZERO_POINT)
    if zeros is not None:
        layout = replace(layout, zero=POINTS)
        if zeros.dtype != "i32" or zeros.shape != layout.zero_shape((rows, cols)):
            raise _refuse("shape", f"expected packed zero points, found {zeros.dtype} {list(zeros.shape)}", zeros.name)
        parts[ZEROS] = zeros.name
    also = [stated.name]
    order = _order(entries, stem, cols, group or cols)
    if order is not None and order is not _PLAIN:
        layout, parts[ORDER] = replace(layout, order=True), stem + G_IDX
    elif order is _PLAIN:
        also.append(stem + G_IDX)
    return Layer(stem + WEIGHT, (rows, cols), _simplest(layout, (rows, cols)), parts, also)


_PLAIN = np.empty(0, np.int32)


def _order(entries: Entries, stem: str, cols: int, group: int) -> Array | None:
    """Return the group of each column; ``_PLAIN`` where they are runs or were never set (-1), None where unsaid."""
    entry = entries.get(stem + G_IDX)
    if entry is None:
        return None
    if entry.dtype != "i32" or entry.shape != (cols,):
        raise _refuse("order", f"expected i32 [{cols}], found {entry.dtype} {list(entry.shape)}", entry.name)
    order = entry.parts[DATA].array()
    if bool((order == -1).all()) or np.array_equal(order, np.arange(cols) // group):
        return _PLAIN
    if int(order.min()) < 0 or int(order.max()) >= -(-cols // group):
        raise _refuse(
            "order", f"expected groups below {-(-cols // group)}, found {order.min()} to {order.max()}", entry.name
        )
    return order


def _width(across: int, cols: int, widths: Sequence[int], where: str) -> tuple[int, str]:
    """Return bits and form of rows of ``across`` words: those that config.json states and that make this width."""
    dense = [bits for bits in widths if words(cols, bits) == across]
    loose = [bits for bits in widths if bits in (3, 5, 6, 7) and -(-cols // (32 // bits)) == across]
    ways = [(bits, PACKED) for bits in dense] + [
        (bits, PACKED_LOOSE) for bits in loose if bits not in dense or across > 1
    ]
    if len(ways) != 1:
        raise _refuse(
            "shape",
            f"expected one way for {cols} codes of {', '.join(map(str, widths)) or 'no'} bits to fill {across} words, "
            f"found {len(ways)}",
            where,
        )
    return ways[0]


def _simplest(layout: WordsLayout, shape: Shape) -> PackedLayout:
    """Return the layout, as plain rows where that says the same of the same bytes."""
    cols = shape[1]
    if layout.order or layout.form != PACKED or not isinstance(layout.zero, Constant) or cols * layout.bits % 32:
        return layout
    return layout.rows


def _bytes(entries: Entries, stem: str) -> Layer:
    """A layer of int-quantized: signed bytes with a scale for the tensor, each row, group or block."""
    codes, scale, zeros = entries[stem + WEIGHT], _scales(entries, stem), entries.get(stem + ZERO_POINT)
    if len(codes.shape) != 2 or not prod(codes.shape):
        raise _refuse("shape", f"expected a matrix, found {list(codes.shape)}", codes.name)
    rows, cols = codes.shape
    parts = {CODES: codes.name, SCALES: scale.name}
    layout = AffineLayout(8, ROW, ROWS_LSB, True, NO_ZERO, scale.dtype, scale.dtype)
    if zeros is not None and (zeros.dtype != "i8" or zeros.shape != scale.shape):
        raise _refuse(
            "shape", f"expected zero points in i8 like the scales, found {zeros.dtype} {list(zeros.shape)}", stem
        )
    if prod(scale.shape) == 1 and (rows > 1 or len(scale.shape) < 2):
        point = int(zeros.parts[DATA].array()[0]) if zeros is not None else 0
        layout = replace(layout, grid=WHOLE, zero=Constant(point) if point else NO_ZERO)
        return Layer(stem + WEIGHT, (rows, cols), layout, parts, () if zeros is None else (zeros.name,))
    if len(scale.shape) == 2 and scale.shape[0] != rows and zeros is None and _divides((rows, cols), scale.shape):
        layout = replace(layout, grid=Blocks((rows // scale.shape[0], cols // scale.shape[1])))
        return Layer(stem + WEIGHT, (rows, cols), layout, parts)
    group = _group(scale, rows, cols)
    if zeros is None:
        return Layer(stem + WEIGHT, (rows, cols), replace(layout, grid=ROW if group is None else Group(group)), parts)
    asymmetric = WordsLayout(INTS, 8, group, POINTS, scale.dtype, scale.dtype)
    return Layer(stem + WEIGHT, (rows, cols), asymmetric, {**parts, ZEROS: zeros.name})


def _divides(shape: Shape, blocks: Shape) -> bool:
    return all(own and size % own == 0 for size, own in zip(shape, blocks, strict=True))


def _kind(layout: Any) -> Kind:
    """Return what layers of one group share."""
    if isinstance(layout, ScaledCodebookLayout):
        return Kind(*float_kind(layout), "float")
    if isinstance(layout, WordsLayout):
        format = "pack-quantized" if layout.form == PACKED else "int-quantized"
        strategy = "channel" if layout.group is None else "group"
        symmetric = isinstance(layout.zero, Constant)
        return Kind(format, layout.bits, strategy, layout.group, symmetric=symmetric, ordered=layout.order)
    grid = layout.grid
    strategy = "tensor" if isinstance(grid, Whole) else "channel" if isinstance(grid, Row) else "group"
    return Kind("int-quantized" if layout.signed else "pack-quantized", layout.bits, strategy, layout.group_size)


def _group_stated(kind: Kind, targets: Sequence[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": kind.bits,
        "type": kind.type,
        "symmetric": kind.symmetric,
        "strategy": kind.strategy,
        "group_size": kind.group,
        "block_structure": None if kind.block is None else list(kind.block),
        "dynamic": False,
        "actorder": "group" if kind.ordered else None,
        "observer": "minmax",
        "observer_kwargs": {},
        **({"scale_dtype": kind.scales, "zp_dtype": kind.scales} if kind.scales else {}),
    }
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": kind.format,
    }
