"""``scaled_codebook``: one small table of values, times a scale per group (``spec/scaled_codebook.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Rows, decode_by_rows
from ingot.codecs.palette.rows import BitReader, Lookup, chunk_step, pack
from ingot.codecs.reach import Reach
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.core.dtypes import from_file, numpy_dtype
from ingot.core.floats import LARGEST, cast, cast_into, float_name
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.base import matrix_shape
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import (
    CODEBOOK,
    DTYPES_OF_VALUES,
    INDICES,
    NF4,
    RULE,
    SCALES,
    ScaledCodebookLayout,
)
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

ID = ScaledCodebookLayout.codec
OPTIONS = ("table", "group", "scales")
GROUP = 64
_SCRATCH = 1 << 16  # elements that stay in cache

TABLES: Mapping[str, Array] = {"nf4": np.array(NF4, np.float32)}
"""Tables that options name; each ascending, with entries from -1 to 1."""


def scaled_into(layout: ScaledCodebookLayout, lookup: Lookup, packed: Array, scales: Array, out: Array) -> None:
    """Write ``scale * entry`` into ``out``: one product in f32, rounded once to its type.

    Parameters
    ----------
    packed : u8, the stream of the rows' indices, which begins at a byte
    scales : f32, [rows, groups]
    out : [rows, cols], C order, f32, f16 or bf16

    Raises
    ------
    CodecError
        ``scaled_codebook.overflow``: finite numbers give a value past the range of ``out.dtype``.
    """
    values: Array = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    lookup(packed, 0, values.reshape(-1))
    grouped = values.reshape(*scales.shape, -1)
    most = float(np.abs(values).max(initial=0)) * float(np.abs(scales).max(initial=0))
    with np.errstate(over="ignore", invalid="ignore"):
        sound = None if most <= LARGEST[float_name(out)] else np.isfinite(grouped) & np.isfinite(scales)[:, :, None]
        grouped *= scales[:, :, None]
        if values is not out:
            cast_into(values, out)
    if sound is not None and bool((sound.reshape(out.shape) & ~np.isfinite(cast(out, "f32"))).any()):
        dtype = float_name(out)
        raise CodecError(f"{ID}.overflow", f"expected products of scale and entry that {dtype} can hold")


class ScaledReader(Rows):
    """Sequential decoding, a few rows at a time."""

    def __init__(self, tensor: Tensor) -> None:
        self._layout, self._where = _checked(tensor), tensor.name
        _, self._cols = tensor.matrix_shape
        self._groups = self._layout.groups(self._cols)
        self._indices = BitReader(tensor.parts[INDICES], self._layout.bits, "scaled_codebook.padding", tensor.name)
        self._scales, self._scale_dtype = tensor.parts[SCALES].reader(), self._layout.scales
        self._table = tensor.parts[CODEBOOK]
        self._lookup: Lookup | None = None
        self._step = max(1, _SCRATCH // max(self._cols, 1))

    def fill(self, out: Array) -> None:
        if not out.size:
            return
        if self._lookup is None:
            self._lookup = _lookup(self._layout, self._table.array())
        for start in range(0, len(out), self._step):
            target = out[start : start + self._step]
            packed, scales = self._indices.next(target.size), self._next_scales(len(target))
            try:
                scaled_into(self._layout, self._lookup, packed, scales, target)
            except CodecError as error:
                raise error.at(self._where) from None

    def skip(self, count: int) -> None:
        """Pass over ``count`` values, whole rows of them."""
        self._indices.skip(count)
        rows = count // max(self._cols, 1)
        self._scales.skip(rows * self._groups * numpy_dtype(self._scale_dtype).itemsize)

    def finish(self) -> None:
        self._indices.finish()
        self._scales.finish()
        self._table.view()  # its digest, also where no value was asked for

    def _next_scales(self, rows: int) -> Array:
        raw = np.empty(rows * self._groups * numpy_dtype(self._scale_dtype).itemsize, np.uint8)
        self._scales.readinto(raw.data)
        return cast(from_file(raw, self._scale_dtype), "f32").reshape(rows, self._groups)


def _lookup(layout: ScaledCodebookLayout, table: Array) -> Lookup:
    params = PaletteLayout(layout.bits, (1,), 1, 0, "f32", "f32")
    return Lookup(params, (1,), cast(table, "f32").reshape(1, -1, 1))


class ScaledEncoder:
    """Divides each group by its largest magnitude and takes the nearest entries; of two as near the lower one."""

    codec: str = ID
    fit_passes: int = 0
    single_chunk: bool = False
    lossless: bool = False

    def __init__(self, shape: tuple[int, ...], layout: ScaledCodebookLayout, table: Array) -> None:
        self._layout, self._table = layout, table
        self._middle = (table[1:] + table[:-1]) / 2
        self._reach = Reach("scales", layout.scales, (), 1, layout.dtype)
        self._lookup = _lookup(layout, table)
        self._groups = layout.groups(matrix_shape(shape)[1])
        self.params: Mapping[str, Any] = layout.attributes()
        self.parts: tuple[PartSpec, ...] = layout.part_specs(shape)
        self.step = chunk_step(1, matrix_shape(shape)[1], PaletteLayout(layout.bits, (1,), 1, 0, "f32", "f32"))

    def look(self, rows: Array, start: int) -> bool:
        return self._reach.look(rows)

    def wider(self) -> Mapping[str, Any]:
        return self._reach.wider()

    def lost(self) -> str | None:
        return self._reach.lost()

    def fit_pass(self, rows: Array) -> None:
        pass

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the parts of these rows.

        Raises ``CodecError``: ``scaled_codebook.non-finite``; ``scaled_codebook.scale-overflow``: the scales' type
        cannot hold a group's largest magnitude.
        """
        wide = cast(rows, "f32")
        if not np.isfinite(wide).all():
            raise CodecError(
                f"{ID}.non-finite", "expected finite values, found NaN or infinity; keep this tensor dense"
            )
        table = self._table if start == 0 else self._table[:0]
        if not wide.size:
            return {
                INDICES: np.empty(0, np.uint8),
                SCALES: cast(wide.reshape(-1), self._layout.scales),
                CODEBOOK: table,
            }
        grouped = wide.reshape(len(wide), self._groups, -1)
        largest = np.abs(grouped).max(axis=2, initial=0)
        with np.errstate(over="ignore"):
            scales = cast(largest, self._layout.scales)
        used = cast(scales, "f32")
        if not np.isfinite(used).all():
            raise CodecError(f"{ID}.scale-overflow", f"expected scales that {self._layout.scales} can hold")
        used = np.where(used == 0, np.float32(1), used)  # nothing but zeros, or values below the type's reach
        with np.errstate(over="ignore"):
            indices = np.searchsorted(self._middle, (grouped / used[:, :, None]).reshape(-1), side="left")
        parts = {INDICES: pack(indices.astype(np.uint8), self._layout.bits), SCALES: cast(used, self._layout.scales)}
        return {**parts, CODEBOOK: table}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        if not out.size:
            return
        scales = cast(parts[SCALES], "f32").reshape(len(out), self._groups)
        scaled_into(self._layout, self._lookup, parts[INDICES], scales, out)


class ScaledCodebookCodec:
    """A table of up to 256 values, times a scale per group of columns or row: NF4 and its like."""

    id: ClassVar[str] = ID
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``scaled_codebook.params``, ``.group``, ``.parts``, ``.dtype`` and ``.size``."""
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32."""
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> ScaledReader:
        return ScaledReader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> ScaledEncoder:
        """Prepare to encode. Options, all with defaults:

        ``table`` nf4; ``group`` columns that share a scale and divide a row's, or ``"row"`` (64); ``scales`` f32, f16
        or bf16 (f32).
        """
        source = resolve_dtype(dtype).name
        if source not in DTYPES_OF_VALUES:
            raise UnsupportedError(
                f"expected weights of type {', '.join(DTYPES_OF_VALUES)}, found {source}", rule=f"{ID}.dtype"
            )
        unknown = sorted(str(key) for key in options if key not in OPTIONS)
        if unknown:
            raise _wrong(f"the options {', '.join(OPTIONS)}", unknown[0])
        name, group, scales = options.get("table", "nf4"), options.get("group", GROUP), options.get("scales", "f32")
        if not isinstance(name, str) or name not in TABLES:
            raise _wrong(f"table {', '.join(TABLES)}", name)
        if scales not in DTYPES_OF_VALUES:
            raise _wrong(f"scales {', '.join(DTYPES_OF_VALUES)}", scales)
        if group != "row" and (not isinstance(group, int) or isinstance(group, bool) or not 1 <= group <= 2**31):
            raise _wrong("group 'row' or a positive number of columns", group)
        cols = matrix_shape(shape)[1]
        if group != "row" and cols % group:
            raise UnsupportedError(
                f"codec {ID} expects columns that group {group} divides, found {cols}; take another group or 'row'",
                rule=f"{ID}.group",
            )
        bits = len(TABLES[name]).bit_length() - 1
        layout = ScaledCodebookLayout(bits, None if group == "row" else group, source, "f32", scales)
        return ScaledEncoder(shape, layout, TABLES[name])


def _checked(tensor: Tensor) -> ScaledCodebookLayout:
    layout = ScaledCodebookLayout.of(tensor)
    if layout.dtype != tensor.dtype:
        raise CodecError(
            RULE, f"expected dtype {tensor.dtype}, the tensor's, found {layout.dtype!r:.80}", where=tensor.name
        )
    if set(tensor.parts) != {INDICES, CODEBOOK, SCALES}:
        stored = ", ".join(sorted(tensor.parts)) or "none"
        raise CodecError(
            f"{ID}.parts", f"expected the parts {INDICES}, {CODEBOOK}, {SCALES}, found {stored}", where=tensor.name
        )
    for role in (CODEBOOK, SCALES):
        if tensor.parts[role].dtype not in DTYPES_OF_VALUES:
            raise _wrong_type(tensor, role, " or ".join(DTYPES_OF_VALUES))
    for spec in layout.part_specs(tensor.shape):
        part = tensor.parts[spec.role]
        if part.dtype != spec.dtype or part.type not in (None, spec.dtype):
            raise _wrong_type(tensor, spec.role, spec.dtype)
        if part.nbytes != spec.length:
            raise CodecError(
                f"{ID}.size",
                f"expected {spec.length} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
                where=f"{tensor.name}.{spec.role}",
            )
    return layout


def _wrong_type(tensor: Tensor, role: str, expected: str) -> CodecError:
    part = tensor.parts[role]
    return CodecError(
        f"{ID}.dtype", f"expected {expected}, found {part.type or part.dtype}", where=f"{tensor.name}.{role}"
    )


def _wrong(expected: str, found: object) -> UsageError:
    return UsageError(f"codec {ID} expects {expected}, found {found!r:.80}", rule=f"{ID}.option")
