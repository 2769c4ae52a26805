"""From the arrays of a tensor to its codec, parameters and parts; and which of several forms is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ingot.core.checked import MAX_RANK, element_count
from ingot.core.dtypes import DTYPES
from ingot.core.floats import FLOATS
from ingot.core.retype import HOLDERS
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.npydir.arrays import Array
from ingot.formats.npydir.arrays import Group as Arrayed
from ingot.formats.npydir.carry import FLAT_GROUP, LEGACY_ZERO, SCALE, SHORT_SCALES
from ingot.formats.npydir.narrowed import NarrowedSource
from ingot.formats.npydir.sidecar import Entry
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    OFFSETS,
    POINTS,
    ROLES,
    ROW,
    ROWS_LSB,
    AffineLayout,
    Grid,
    Group,
    Zero,
)
from ingot.model.layouts.base import Shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.tensor import Tensor

Arrays = Mapping[str, Array]
Stored = tuple[Shape, AffineLayout]


@dataclass(frozen=True, slots=True)
class Form:
    """One way to store a tensor: the suffixes of its arrays, the first of which tells that it is there.

    ``make`` returns the original's shape and the layout; None for values as they are.
    """

    name: str
    suffixes: tuple[str, ...]
    bits: int
    make: Callable[[Arrays, Shape | None, str], Stored] | None = None

    def in_group(self, group: Arrayed) -> bool:
        return self.suffixes[0] in group.paths


def choose(group: Arrayed, *, int4_ready: bool) -> Form | None:
    """Return the form that is read, in squish's order; None if there is none.

    Four-bit forms beside the eight-bit one count only where the directory's sentinel says that they are complete, and
    three bits with a low-rank correction not at all.
    """
    for form in FORMS:
        unfinished = form.bits == 4 and "q" in group.paths and not int4_ready
        corrected = form.bits == 3 and any(suffix.startswith("lr") for suffix in group.foreign)
        if form.in_group(group) and not unfinished and not corrected:
            return form
    return None


def tensor_of(name: str, form: Form, arrays: Arrays, entry: Entry | None, verify: bool) -> Tensor:
    """Build the tensor.

    Raises
    ------
    FormatError
        ``npydir.array-dtype``, ``npydir.array-shape``, ``npydir.shape``, ``npydir.sidecar-dtype``.
    UnsupportedError
        ``npydir.form``: three-bit codes in another layout.
    """
    where = arrays[form.suffixes[0]].name
    if form.make is None:
        return _passthrough(name, arrays["pt"], entry, verify)
    dtype = entry.dtype if entry is not None else "f32"
    if dtype not in FLOATS:
        raise FormatError("npydir.sidecar-dtype", f"expected {', '.join(FLOATS)}, found {dtype}", where=where)
    stated = _original_shape(arrays["shape"], _digest(entry, "shape"), verify) if "shape" in arrays else None
    shape, layout = form.make(arrays, stated, where)
    layout = replace(layout, dtype=dtype)
    parts = {
        role: _part(arrays[suffix], "u8" if role == CODES else layout.scales, _digest(entry, suffix), verify)
        for role, suffix in zip(ROLES, form.suffixes, strict=False)
    }
    return Tensor(name, shape, dtype, layout.codec, parts, layout.attributes())


def _digest(entry: Entry | None, suffix: str) -> str | None:
    return None if entry is None else entry.digests.get(suffix)


def _part(array: Array, dtype: str, digest: str | None, verify: bool, type: str | None = None) -> Part:
    header = array.header
    return Part(
        dtype=dtype,
        length=header.nbytes,
        source=array.source,
        offset=header.offset,
        type=type,
        digest=digest,
        where=array.name,
        verify=verify,
    )


def _passthrough(name: str, array: Array, entry: Entry | None, verify: bool) -> Tensor:
    stored, shape = array.header.dtype, array.header.shape
    dtype = stored if entry is None else entry.dtype
    row = DTYPES[dtype]
    type = None if row.is_storage else dtype
    if dtype == stored:
        part = _part(array, row.storage, _digest(entry, "pt"), verify, type)
        return Tensor(name, shape, dtype, DenseLayout.codec, {DATA: part})
    if stored not in HOLDERS.get(dtype, ()):
        raise FormatError(
            "npydir.sidecar-dtype",
            f"expected values that {stored} holds, found {dtype} in ingot.json",
            where=array.name,
        )
    source = NarrowedSource(array.source, array.header.offset, prod(shape), (stored, dtype), array.name)
    part = _part(array, row.storage, _digest(entry, "pt"), verify, type)
    part = replace(part, source=source, offset=0, length=source.size, occupies=array.header.nbytes)
    return Tensor(name, shape, dtype, DenseLayout.codec, {DATA: part})


def _original_shape(array: Array, digest: str | None, verify: bool) -> tuple[int, ...]:
    header = array.header
    if header.dtype != "i64" or len(header.shape) != 1 or header.shape[0] > MAX_RANK:
        raise FormatError(
            "npydir.shape",
            f"expected up to {MAX_RANK} sizes of type i64, found {header.dtype} of shape {list(header.shape)}",
            where=array.name,
        )
    values = _part(replace(array, source=array.near), "i64", digest, verify).view()
    shape = tuple(int(size) for size in np.frombuffer(values, "<i8"))
    if min(shape, default=0) < 0:
        raise FormatError("npydir.shape", f"expected sizes from 0, found {list(shape)}", where=array.name)
    element_count(shape, "npydir.shape", array.name)
    return shape


def _expect(array: Array, dtype: str, shape: tuple[int, ...] | None = None, ndim: int = 2) -> tuple[int, ...]:
    header = array.header
    if header.dtype != dtype:
        raise FormatError("npydir.array-dtype", f"expected {dtype}, found {header.dtype}", where=array.name)
    wrong = len(header.shape) != ndim or 0 in header.shape if shape is None else header.shape != shape
    if wrong:
        expected = f"shape {list(shape)}" if shape is not None else f"{ndim} dimensions and no size 0"
        raise FormatError("npydir.array-shape", f"expected {expected}, found {list(header.shape)}", where=array.name)
    return header.shape


def _stored(stated: Shape | None, matrix: tuple[int, int], layout: AffineLayout, where: str) -> Stored:
    """Return the tensor's shape, and the layout with how codes are cut where that is not by the last dimension."""
    shape = stated if stated is not None else matrix
    if prod(shape) != prod(matrix):
        raise FormatError(
            "npydir.shape", f"expected a shape of {matrix[0]} x {matrix[1]} elements, found {list(shape)}", where=where
        )
    return shape, layout if layout.matrix_of(shape) == matrix else replace(layout, matrix=matrix)


def _scales(array: Array, known: tuple[str, ...]) -> str:
    """Return the type of scales, one of ``known``."""
    if array.header.dtype not in known:
        wanted = " or ".join(known)
        raise FormatError("npydir.array-dtype", f"expected {wanted}, found {array.header.dtype}", where=array.name)
    return array.header.dtype


def _grid(array: Array, rows: int, cols: int) -> Grid:
    """Return what shares a scale: a row, or a group of columns whose size follows from their number."""
    shape = array.header.shape
    if shape in ((rows,), (rows, 1)):
        return ROW
    if len(shape) != 2 or shape[0] != rows or not shape[1] or cols % shape[1]:
        raise FormatError(
            "npydir.array-shape",
            f"expected [{rows}] or [{rows}, groups] with groups of one size in {cols} columns, found {list(shape)}",
            where=array.name,
        )
    return Group(cols // shape[1])


def _int8(arrays: Arrays, stated: Shape | None, where: str) -> Stored:
    rows, cols = _expect(arrays["q"], "i8")
    scales = _scales(arrays["s"], (SCALE,))
    layout = AffineLayout(8, _grid(arrays["s"], rows, cols), ROWS_LSB, True, NO_ZERO, SCALE, scales)
    return _stored(stated, (rows, cols), layout, where)


def _nibbles(arrays: Arrays, stated: Shape | None, where: str, suffixes: tuple[str, str], zero: Zero) -> Stored:
    codes, scales = suffixes
    rows, half = _expect(arrays[codes], "u8")
    dtype = _scales(arrays[scales], SHORT_SCALES)
    layout = AffineLayout(4, _grid(arrays[scales], rows, 2 * half), ROWS_LSB, False, zero, SCALE, dtype)
    return _stored(stated, (rows, 2 * half), layout, where)


def _int4_offset(arrays: Arrays, stated: Shape | None, where: str) -> Stored:
    shape, layout = _nibbles(arrays, stated, where, ("q4a", "s4a"), OFFSETS)
    _expect(arrays["z4a"], layout.scales, arrays["s4a"].header.shape)
    return shape, layout


def _int4_legacy(arrays: Arrays, stated: Shape | None, where: str) -> Stored:
    return _nibbles(arrays, stated, where, ("q4", "s4"), LEGACY_ZERO)


def _int3(arrays: Arrays, stated: Shape | None, where: str) -> Stored:
    if len(arrays["q3"].header.shape) == 2:
        raise UnsupportedError(
            "expected three-bit codes packed eight in three bytes, found a matrix of codes: squish has layouts that do "
            "not agree; convert the original again",
            rule="npydir.form",
            where=where,
        )
    shape = stated or ()
    size = prod(shape)
    if size % FLAT_GROUP or not size:
        raise FormatError(
            "npydir.shape",
            f"expected a multiple of {FLAT_GROUP} elements at three bits, found {list(shape)}",
            where=where,
        )
    matrix = (size // FLAT_GROUP, FLAT_GROUP)
    layout = AffineLayout(3, ROW, ROWS_LSB, False, POINTS, SCALE)
    _expect(arrays["q3"], "u8", (layout.packed_bytes(*matrix),))
    for suffix in ("s3", "z3"):
        flat = arrays[suffix].header.shape == (matrix[0], 1)
        _expect(arrays[suffix], SCALE, (matrix[0], 1) if flat else matrix[:1])
    return _stored(shape, matrix, layout, where)


FORMS = (
    Form("q4a", ("q4a", "s4a", "z4a"), 4, _int4_offset),
    Form("q4", ("q4", "s4"), 4, _int4_legacy),
    Form("q3", ("q3", "s3", "z3"), 3, _int3),
    Form("pt", ("pt",), 0),
    Form("q", ("q", "s"), 8, _int8),
)
"""In the order in which they are preferred."""

BY_NAME = {form.name: form for form in FORMS}
