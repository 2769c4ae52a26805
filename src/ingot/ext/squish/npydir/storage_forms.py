"""Choose among the storage forms of a tensor, and build the tensor from the arrays of a form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, FLOATS, MAX_RANK, element_count, from_file, numpy_dtype
from ingot.core.numeric.exact_cast import EXACT_WIDER_DTYPES, narrow
from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squish.npydir.arrays import Array
from ingot.ext.squish.npydir.arrays import Group as Arrayed
from ingot.ext.squish.npydir.carry import FLAT_GROUP, LEGACY_ZERO, SCALE, SHORT_SCALES
from ingot.ext.squish.npydir.sidecar import Entry
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.affine import (
    CODES,
    FLAT_LSB,
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
from ingot.model.layouts.base import Layout, Shape, matrix_shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.low_rank import LEFT_FACTOR, RIGHT_FACTOR, CorrectedLayout
from ingot.model.layouts.scaled_codebook import CODEBOOK, INDICES, NF4, ScaledCodebookLayout
from ingot.model.layouts.scaled_codebook import SCALES as CODEBOOK_SCALES
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Array as Values
from ingot.model.tensor import Tensor

_CHUNK = 1 << 18


class NarrowedSource:
    """Byte source of an array's values, each converted to the element type that ``ingot.json`` declares.

    Parameters
    ----------
    source : ByteSource
        The array file.
    offset : int
        Byte offset of the values in the file.
    count : int
        Number of elements.
    types : tuple of str
        Element type in the file (f16 or f32) and element type of the tensor.
    location : str
        File name for error messages.

    Raises
    ------
    FormatError
        When bytes are read: ``npydir.narrowed`` for a value that the tensor's type cannot represent.
    """

    mapped = False

    def __init__(self, source: ByteSource, offset: int, count: int, types: tuple[str, str], location: str) -> None:
        self._source = source
        self._offset = offset
        self._location = location
        self._stored, self._dtype = types
        self._wide = numpy_dtype(self._stored).itemsize
        self._item = numpy_dtype(self._dtype).itemsize
        self.name = source.name
        self.size = count * self._item

    def view(self, offset: int, length: int) -> memoryview:
        """Return a copy of the bytes."""
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes that start at ``offset``."""
        target = np.frombuffer(out, np.uint8)
        filled = 0
        while filled < target.size:
            first, skip = divmod(offset + filled, self._item)
            count = min(_CHUNK, -(-(target.size - filled + skip) // self._item))
            chunk = self._values(first, count)[skip : skip + target.size - filled]
            target[filled : filled + chunk.size] = chunk
            filled += chunk.size

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        self._source.close()

    def _values(self, first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        raw = np.empty(count * self._wide, np.uint8)
        self._source.readinto(self._offset + first * self._wide, raw.data)
        values = narrow(from_file(raw, self._stored), self._dtype)
        if values is None:
            raise FormatError(
                "npydir.narrowed",
                f"expected {self._stored} values that {self._dtype} can represent, as ingot.json declares, found "
                "others",
                where=self._location,
            )
        return values.view(np.uint8)


Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Stored:
    """The layout of a tensor in a storage form, and the array from which each part is read.

    ``shape`` is the shape of the original tensor. ``parts`` maps each role to the element type of its part and the
    suffix of its array. ``lengths`` has the sizes in bytes of parts that are shorter than their arrays. ``tables`` has
    the element type and the values of parts that have no array.
    """

    shape: Shape
    layout: Layout
    parts: Mapping[str, tuple[str, str]]
    lengths: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, tuple[str, Values]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StorageForm:
    """A variant of storing a tensor as several arrays, whose names have the given suffixes.

    A tensor is stored in this form if the array with the first suffix exists. ``make`` returns the description of a
    tensor; it is None for dense tensors. Its arguments are the arrays by suffix, the declared shape of the original,
    the file name for messages, and the element type. The declared shape is None if there is no shape array.
    """

    name: str
    suffixes: tuple[str, ...]
    bits: int
    make: Callable[[Arrays, Shape | None, str, str], Stored] | None = None

    def in_group(self, group: Arrayed) -> bool:
        return self.suffixes[0] in group.paths


def choose(group: Arrayed, *, int4_ready: bool) -> StorageForm | None:
    """Return the present storage form that squish prefers; None if no form is present.

    If the eight-bit form is present, a four-bit form is chosen only if ``int4_ready`` is set: the sentinel that marks
    all four-bit forms as complete exists.
    """
    for candidate in STORAGE_FORMS:
        unfinished = candidate.name in ("q4a", "q4") and "q" in group.paths and not int4_ready
        # As in squish's reader: indices without scales are ignored if another form is present.
        torn = (
            candidate.name == "nf4"
            and any(suffix not in group.paths for suffix in candidate.suffixes)
            and len(group.paths) > 1
        )
        if candidate.in_group(group) and not unfinished and not torn:
            return candidate
    return None


def tensor_of(name: str, storage: StorageForm, arrays: Arrays, entry: Entry | None, verify: bool) -> Tensor:
    """Return the tensor that a storage form's arrays describe.

    Raises
    ------
    FormatError
        ``npydir.array-dtype``, ``npydir.array-shape``, ``npydir.shape``, ``npydir.sidecar-dtype``.
    UnsupportedError
        ``npydir.form``: three-bit codes in another layout.
    """
    location = arrays[storage.suffixes[0]].name
    if storage.make is None:
        return _passthrough(name, arrays["pt"], entry, verify)
    dtype = entry.dtype if entry is not None else "f32"
    if dtype not in FLOATS:
        raise FormatError(
            "npydir.sidecar-dtype",
            f"expected one of the element types {', '.join(FLOATS)} in ingot.json, found {dtype}",
            where=location,
        )
    declared_shape = _original_shape(arrays["shape"], _digest(entry, "shape"), verify) if "shape" in arrays else None
    stored = storage.make(arrays, declared_shape, location, dtype)
    parts = {
        role: _part(arrays[suffix], part_dtype, _digest(entry, suffix), verify, length=stored.lengths.get(role))
        for role, (part_dtype, suffix) in stored.parts.items()
    }
    parts.update({role: memory_part(table, part_dtype) for role, (part_dtype, table) in stored.tables.items()})
    return Tensor(name, stored.shape, dtype, stored.layout.codec, parts, stored.layout.attributes())


def _digest(entry: Entry | None, suffix: str) -> str | None:
    return None if entry is None else entry.digests.get(suffix)


def _part(
    array: Array,
    dtype: str,
    digest: str | None,
    verify: bool,
    type: str | None = None,
    length: int | None = None,
) -> Part:
    header = array.header
    return Part(
        dtype=dtype,
        length=header.nbytes if length is None else length,
        source=array.source,
        offset=header.offset,
        type=type,
        digest=digest,
        where=array.name,
        verify=verify,
    )


def _passthrough(name: str, array: Array, entry: Entry | None, verify: bool) -> Tensor:
    stored = array.header.dtype
    shape = array.header.shape
    dtype = stored if entry is None else entry.dtype
    row = DTYPES[dtype]
    type = None if row.is_storage else dtype
    if dtype == stored:
        part = _part(array, row.storage, _digest(entry, "pt"), verify, type)
        return Tensor(name, shape, dtype, DenseLayout.codec, {DATA: part})
    if stored not in EXACT_WIDER_DTYPES.get(dtype, ()):
        raise FormatError(
            "npydir.sidecar-dtype",
            f"expected an element type that {stored} values can represent, found {dtype} in ingot.json",
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
            f"expected at most {MAX_RANK} sizes of type i64, found {header.dtype} of shape {list(header.shape)}",
            where=array.name,
        )
    values = _part(replace(array, source=array.values), "i64", digest, verify).view()
    shape = tuple(int(size) for size in np.frombuffer(values, "<i8"))
    if min(shape, default=0) < 0:
        raise FormatError("npydir.shape", f"expected sizes of at least 0, found {list(shape)}", where=array.name)
    element_count(shape, "npydir.shape", array.name)
    return shape


def _check_array(array: Array, dtype: str, shape: tuple[int, ...] | None = None, ndim: int = 2) -> tuple[int, ...]:
    header = array.header
    if header.dtype != dtype:
        raise FormatError("npydir.array-dtype", f"expected {dtype}, found {header.dtype}", where=array.name)
    is_invalid = len(header.shape) != ndim or 0 in header.shape if shape is None else header.shape != shape
    if is_invalid:
        expected = f"shape {list(shape)}" if shape is not None else f"{ndim} dimensions and no size 0"
        raise FormatError("npydir.array-shape", f"expected {expected}, found {list(header.shape)}", where=array.name)
    return header.shape


def _affine(
    declared_shape: Shape | None,
    matrix: tuple[int, int],
    layout: AffineLayout,
    location: str,
    suffixes: tuple[str, ...],
) -> Stored:
    """Return the description of an affine tensor whose codes are a matrix of shape ``matrix``.

    The layout gets this shape if it differs from the default matrix of the tensor's shape.
    """
    shape = _shape(declared_shape, matrix, location)
    with_matrix = layout if layout.matrix_of(shape) == matrix else replace(layout, matrix=matrix)
    types = ("u8", layout.scales, layout.scales)
    roles = ROLES if layout.zeros else ROLES[:2]
    return Stored(shape, with_matrix, dict(zip(roles, zip(types, suffixes, strict=False), strict=False)))


def _shape(declared_shape: Shape | None, matrix: tuple[int, int], location: str) -> Shape:
    shape = declared_shape if declared_shape is not None else matrix
    if prod(shape) != prod(matrix):
        raise FormatError(
            "npydir.shape",
            f"expected a shape of {matrix[0]} x {matrix[1]} elements, found {list(shape)}",
            where=location,
        )
    return shape


def _scales(array: Array, allowed_dtypes: tuple[str, ...]) -> str:
    """Return the element type of the scales; raise ``FormatError`` ``npydir.array-dtype`` if it is not one of
    ``allowed_dtypes``."""
    if array.header.dtype not in allowed_dtypes:
        expected = " or ".join(allowed_dtypes)
        raise FormatError("npydir.array-dtype", f"expected {expected}, found {array.header.dtype}", where=array.name)
    return array.header.dtype


def _grid(array: Array, rows: int, cols: int) -> Grid:
    """Return which elements share a scale: all elements of a row, or a group of columns.

    The group size follows from the number of scales.
    """
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


def _int8(arrays: Arrays, declared_shape: Shape | None, location: str, dtype: str) -> Stored:
    rows, cols = _check_array(arrays["q"], "i8")
    scales = _scales(arrays["s"], (SCALE,))
    layout = AffineLayout(8, _grid(arrays["s"], rows, cols), ROWS_LSB, True, NO_ZERO, dtype, scales)
    return _affine(declared_shape, (rows, cols), layout, location, ("q", "s"))


def _int4_offset(arrays: Arrays, declared_shape: Shape | None, location: str, dtype: str) -> Stored:
    stored = _nibbles(arrays, declared_shape, (location, dtype), ("q4a", "s4a", "z4a"), OFFSETS)
    _check_array(arrays["z4a"], arrays["s4a"].header.dtype, arrays["s4a"].header.shape)
    return stored


def _int4_legacy(arrays: Arrays, declared_shape: Shape | None, location: str, dtype: str) -> Stored:
    return _nibbles(arrays, declared_shape, (location, dtype), ("q4", "s4"), LEGACY_ZERO)


def _nibbles(
    arrays: Arrays,
    declared_shape: Shape | None,
    location_and_dtype: tuple[str, str],
    suffixes: tuple[str, ...],
    zero: Zero,
) -> Stored:
    location, dtype = location_and_dtype
    rows, half = _check_array(arrays[suffixes[0]], "u8")
    scales = arrays[suffixes[1]]
    types = _scales(scales, SHORT_SCALES)
    layout = AffineLayout(4, _grid(scales, rows, 2 * half), ROWS_LSB, False, zero, dtype, types)
    return _affine(declared_shape, (rows, 2 * half), layout, location, suffixes)


def _nf4(arrays: Arrays, declared_shape: Shape | None, location: str, dtype: str) -> Stored:
    rows, half = _check_array(arrays["nf4"], "u8")
    matrix = (rows, 2 * half)
    _scales(arrays["s_nf4"], (SCALE,))
    grid = _grid(arrays["s_nf4"], *matrix)
    shape = _shape(declared_shape, matrix, location)
    if matrix_shape(shape) != matrix:
        raise FormatError(
            "npydir.shape", f"expected a shape of {matrix[0]} rows of {matrix[1]}, found {list(shape)}", where=location
        )
    layout = ScaledCodebookLayout(4, grid if isinstance(grid, Group) else ROW, dtype, "f32", SCALE)
    parts = {INDICES: ("u8", "nf4"), CODEBOOK_SCALES: (SCALE, "s_nf4")}
    return Stored(shape, layout, parts, tables={CODEBOOK: ("f32", np.array(NF4, np.float32))})


def _int3(arrays: Arrays, declared_shape: Shape | None, location: str, dtype: str) -> Stored:
    """Return the description of MiLo's three-bit form.

    Codes are in row-major order, and eight codes take three bytes. Each run of codes shares a scale and a zero point.
    """
    if len(arrays["q3"].header.shape) == 2:
        raise UnsupportedError(
            "expected three-bit codes packed eight in three bytes, found a matrix of codes: squish has layouts that "
            "contradict each other; convert the original again",
            rule="npydir.form",
            where=location,
        )
    shape = declared_shape or ()
    size = prod(shape)
    runs = prod(arrays["s3"].header.shape)
    run = _run_length(size, runs)
    if run is None:
        raise FormatError(
            "npydir.array-shape",
            f"expected elements in {runs} runs of one length, {FLAT_GROUP} or another power of two, found "
            f"{list(shape)}",
            where=location,
        )
    is_column = arrays["s3"].header.shape == (runs, 1)
    for suffix in ("s3", "z3"):
        _check_array(arrays[suffix], SCALE, (runs, 1) if is_column else (runs,))
    _check_array(arrays["q3"], "u8", (-(-size // 8) * 3,))
    has_full_runs = size % run == 0
    matrix = (runs, run) if has_full_runs else (1, size)
    grid: Grid = ROW if has_full_runs else Group(run)
    layout = AffineLayout(
        3, grid, ROWS_LSB if has_full_runs and run % 8 == 0 else FLAT_LSB, False, POINTS, dtype, SCALE
    )
    stored = _affine(shape, matrix, layout, location, ("q3", "s3", "z3"))
    return replace(stored, lengths={CODES: -(-size * 3 // 8)})


def _run_length(size: int, runs: int) -> int | None:
    """Return the number of elements that share a scale if ``size`` elements have ``runs`` scales.

    Returns None if no number or several numbers are possible. Powers of two are preferred, first ``FLAT_GROUP``.
    """
    if not size or not runs:
        return None
    candidates = [run for run in (FLAT_GROUP, *(1 << power for power in range(2, 21))) if -(-size // run) == runs]
    if candidates:
        return candidates[0]
    shortest = -(-size // runs)
    return shortest if -(-size // shortest) == runs and -(-size // (shortest + 1)) != runs else None


def _milo(arrays: Arrays, declared_shape: Shape | None, location: str, dtype: str) -> Stored:
    """Return the description of MiLo's three-bit form with a low-rank correction of its quantization error."""
    inner = _int3(arrays, declared_shape, location, dtype)
    rows, cols = matrix_shape(inner.shape)
    rank = _check_array(arrays["lra"], SCALE)[1]
    if rank > min(rows, cols):
        expected = f"a rank of at most {min(rows, cols)}, the smaller size of the matrix"
        raise FormatError("npydir.array-shape", f"expected {expected}, found {rank}", where=arrays["lra"].name)
    _check_array(arrays["lra"], SCALE, (rows, rank))
    _check_array(arrays["lrb"], SCALE, (rank, cols))
    parts = {**inner.parts, LEFT_FACTOR: (SCALE, "lra"), RIGHT_FACTOR: (SCALE, "lrb")}
    return Stored(inner.shape, CorrectedLayout(inner.layout, rank, dtype), parts, inner.lengths)


STORAGE_FORMS = (
    StorageForm("q4a", ("q4a", "s4a", "z4a"), 4, _int4_offset),
    StorageForm("q4", ("q4", "s4"), 4, _int4_legacy),
    StorageForm("milo", ("lra", "lrb", "q3", "s3", "z3"), 3, _milo),
    StorageForm("q3", ("q3", "s3", "z3"), 3, _int3),
    StorageForm("nf4", ("nf4", "s_nf4"), 4, _nf4),
    StorageForm("pt", ("pt",), 0),
    StorageForm("q", ("q", "s"), 8, _int8),
)
"""Storage forms in squish's order of preference."""
