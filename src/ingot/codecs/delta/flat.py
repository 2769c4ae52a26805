"""What the codecs of ``.wdelta`` share: float32 differences, seen flat (``spec/wdelta.md``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ingot.codecs.cast import cast, flat
from ingot.codecs.reach import Reach
from ingot.core import native
from ingot.core.dtypes import STORAGE_DTYPES, dtype, from_file, numpy_dtype
from ingot.core.floats import as_bits, float_name, written
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.part import Part
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

# Elements that a reader decodes at a time: what it needs beside them stays in the second-level cache.
PIECE = 1 << 18
# Positions that a reader takes at a time.
_POSITIONS = PIECE // 4
# Bytes of positions up to which they are held, and read once.
_HELD = 1 << 20
# Bytes of positions that are looked at together, whether they ascend.
_LOOKED_AT = 1 << 17


def scale_reach() -> Reach:
    """Return what f16 scales of signs or codes of 4 bits reach down to: the layouts know no other type.

    From 2^-21 on means and steps of ordinary differences, some eight times smaller than the largest, are numbers.
    """
    return Reach("scales", "f16", (), 8, "f32")


class F16Scales:
    """The part of ``codecs.reach.Reaching`` that encoders with f16 scales share."""

    reach: Reach

    def look(self, rows: Array, start: int) -> bool:
        return self.reach.look(rows)

    def wider(self) -> Mapping[str, Any]:
        return {}

    def lost(self) -> str | None:
        return self.reach.lost()


@dataclass(kw_only=True, eq=False)
class WholeEncoder:
    """An encoder that looks for the largest differences and therefore takes a tensor whole."""

    codec: str
    size: int
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def fit_pass(self, rows: Array) -> None:
        """Nothing to learn beforehand."""

    def largest(self, rows: Array, count: int) -> tuple[Array, Array, Array]:
        """Return all values flat, and positions and values of the ``count`` largest by magnitude, ascending.

        Of equal magnitudes the first are taken.

        Raises
        ------
        CodecError
            ``<codec>.whole``: not all rows; ``<codec>.non-finite``: a difference is NaN or infinite.
        """
        values = flat_values(rows)
        if values.size != self.size:
            raise CodecError(f"{self.codec}.whole", f"expected all {self.size} values, found {values.size}")
        positions, kept = np.empty(count, np.int64), np.empty(count, np.float32)
        if count:
            bad = native.kernels.top_select(values, positions, kept)
            if bad < values.size:
                raise non_finite(self.codec, float(values[bad]), bad)
        return values, positions, kept


def flat_values(rows: Array) -> Array:
    """Return the float32 values of some rows in one dimension, C order."""
    if rows.dtype != np.float32:
        raise ValueError(f"expected differences in float32, found {rows.dtype}")
    return np.require(rows, requirements=("C", "A")).reshape(-1)


def non_finite(codec: str, value: float, index: int) -> CodecError:
    """Return the refusal of a NaN or an infinity: it would be lost, or spread over its row or tensor."""
    return CodecError(
        f"{codec}.non-finite",
        f"expected finite differences, found {value:g} at element {index}; store this tensor with delta_exact",
    )


def require_source(codec: str, source: str) -> None:
    """Refuse a source that is not float32: a difference is computed in it."""
    if dtype(source).name != "f32":
        raise UnsupportedError(f"codec {codec} stores differences in f32, found {source}", rule=f"{codec}.dtype")


def require_options(codec: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Refuse options that the codec does not know."""
    unknown = sorted(str(key) for key in options if key not in known)
    if unknown:
        names = " and ".join(known) or "none"
        raise UsageError(f"codec {codec} knows the options {names}, found {unknown[0]!r}", rule=f"{codec}.option")


def share_option(codec: str, options: Mapping[str, Any], key: str, default: float, below: float) -> float:
    """Return an option that is a share: a number from 0 to less than 1, or to ``below``."""
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < 1 or value == below):
        raise UsageError(
            f"codec {codec} expects a share from 0 to 1 for {key}, found {value!r}", rule=f"{codec}.option"
        )
    return value


def to_f16(values: Array, codec: str) -> Array:
    """Round finite float32 values to float16; ``<codec>.overflow`` where one is too large."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        value = float(values[int(np.argmin(np.isfinite(rounded)))])
        raise CodecError(
            f"{codec}.overflow",
            f"expected differences that float16 can hold (at most 65504), found {value:g}; store this tensor whole",
        )
    return rounded


def check_parts(tensor: Tensor, dtypes: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Check that the tensor is of float32 and has exactly these parts in these types; return each one's elements.

    Rules ``<codec>.dtype``, ``<codec>.parts``, ``<codec>.part-dtype``, ``<codec>.size`` (no whole elements).
    """
    codec = tensor.codec
    if tensor.dtype != "f32":
        raise CodecError(f"{codec}.dtype", f"expected a difference in f32, found {tensor.dtype}", where=tensor.name)
    if set(tensor.parts) != set(dtypes):
        found = ", ".join(sorted(tensor.parts)) or "none"
        raise CodecError(f"{codec}.parts", f"expected the parts {', '.join(dtypes)}, found {found}", where=tensor.name)
    counts = {}
    for role, wanted in dtypes.items():
        part = tensor.parts[role]
        where = f"{tensor.name}.{role}"
        if part.dtype not in wanted or part.type not in (None, part.dtype):
            raise CodecError(
                f"{codec}.part-dtype", f"expected {' or '.join(wanted)}, found {part.type or part.dtype}", where=where
            )
        count, odd = divmod(part.nbytes, STORAGE_DTYPES[part.dtype].bits // 8)
        if odd:
            raise CodecError(f"{codec}.size", f"expected whole elements, found {part.nbytes} bytes", where=where)
        counts[role] = count
    return counts


def require_count(tensor: Tensor, role: str, found: int, expected: int) -> None:
    """Refuse a part of another number of elements: ``<codec>.size``."""
    if found != expected:
        raise CodecError(
            f"{tensor.codec}.size",
            f"expected {expected} elements for shape {list(tensor.shape)}, found {found}",
            where=f"{tensor.name}.{role}",
        )


def matrix_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of ``Tensor.matrix_shape`` for a shape."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


class Values:
    """Sequential reading of a part's elements."""

    def __init__(self, part: Part) -> None:
        self._reader, self._dtype = part.reader(), part.dtype
        self.left = part.count

    def next(self, count: int) -> Array:
        """Return the next ``count`` elements."""
        raw = np.empty(count * numpy_dtype(self._dtype).itemsize, np.uint8)
        self._reader.readinto(raw.data)
        self.left -= count
        return from_file(raw, self._dtype)

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` elements."""
        self._reader.skip(count * numpy_dtype(self._dtype).itemsize)
        self.left -= count

    def finish(self) -> None:
        """Read what is left, then check length and digest."""
        while self.left:
            self.next(min(self.left, PIECE))
        self._reader.finish()


class Codes:
    """Sequential reading of codes of 1 or 4 bits that follow each other without regard to bytes, high bits first."""

    def __init__(self, part: Part, bits: int) -> None:
        self._bytes, self._per_byte = Values(part), 8 // bits
        self._position = 0
        self._carried = np.empty(0, np.uint8)

    def next(self, count: int) -> tuple[Array, int]:
        """Return bytes that hold the next ``count`` codes, and how many codes of their first byte come before them."""
        first = self._position % self._per_byte
        size = -(-(first + count) // self._per_byte)
        fresh = self._bytes.next(size - self._carried.size) if size > self._carried.size else None
        packed = self._carried if fresh is None else np.concatenate([self._carried, fresh])
        self._position += count
        if count:
            self._carried = packed[-1:] if self._position % self._per_byte else packed[:0]
        return packed, first

    def skip(self, count: int) -> None:
        """Pass over the next ``count`` codes; the byte in which they end is read."""
        stop = self._position + count
        seen = -(-self._position // self._per_byte)  # bytes that were read
        if stop // self._per_byte >= seen:
            self._bytes.skip(stop // self._per_byte - seen)
            self._carried = self._bytes.next(1 if stop % self._per_byte else 0)
        self._position = stop

    def finish(self) -> None:
        self._bytes.finish()


class Held:
    """``Values`` of an array in memory."""

    def __init__(self, array: Array) -> None:
        self._array = array

    @property
    def left(self) -> int:
        return self._array.size

    def next(self, count: int) -> Array:
        values, self._array = self._array[:count], self._array[count:]
        return values

    def skip(self, count: int) -> None:
        self._array = self._array[count:]

    def finish(self) -> None:
        """Length and digest were checked when the array was read."""


class Placed:
    """Sequential reading of positions with their values, in ascending order.

    Memory is bounded by what is asked for where positions ascend as they are stored, which one pass over them tells
    beforehand. Others are sorted in memory with their values.
    """

    def __init__(self, tensor: Tensor, positions: str, values: str) -> None:
        self._tensor = tensor
        self._positions, self._values = _ascending(tensor.parts[positions], tensor.parts[values], tensor.size)
        self._at = np.empty(0, np.int64)  # positions whose values come next
        self._last = -1

    def until(self, stop: int) -> Iterator[tuple[Array, Array]]:
        """Yield positions below ``stop`` that were not taken yet, and their values, in runs."""
        while True:
            cut = int(np.searchsorted(self._at, stop))
            if cut:
                yield self._at[:cut], self._values.next(cut)
            self._at = self._at[cut:]
            if self._at.size or not self._positions.left:
                return
            self._fill()

    def all_until(self, stop: int) -> tuple[Array, Array]:
        """Return positions below ``stop`` that were not taken yet, and their values."""
        runs = list(self.until(stop))
        if len(runs) == 1:
            return runs[0]
        empty = (self._at[:0], self._values.next(0))
        at, what = zip(empty, *runs, strict=True)
        return np.concatenate(at), np.concatenate(what)

    def skip(self, stop: int) -> int:
        """Pass over what lies below ``stop``, of which positions alone are read; return how many there were."""
        passed = 0
        while True:
            cut = int(np.searchsorted(self._at, stop))
            self._at, passed = self._at[cut:], passed + cut
            if self._at.size or not self._positions.left:
                self._values.skip(passed)
                return passed
            self._fill()

    def finish(self) -> None:
        self._positions.finish()
        self._values.finish()

    def _fill(self) -> None:
        count = min(self._positions.left, _POSITIONS)
        at = self._positions.next(count).astype(np.int64, copy=False)
        bad = native.kernels.first_unordered(at, self._last, self._tensor.size)
        if bad < count:
            raise self._misplaced(int(at[bad]))
        self._at, self._last = at, int(at[-1])

    def _misplaced(self, found: int) -> CodecError:
        codec, size = self._tensor.codec, self._tensor.size
        if 0 <= found < size:
            return CodecError(
                f"{codec}.duplicate", f"expected every position once, found {found} twice", where=self._tensor.name
            )
        return CodecError(
            f"{codec}.index", f"expected positions from 0 to {size - 1}, found {found}", where=self._tensor.name
        )


def _ascending(positions: Part, values: Part, size: int) -> tuple[Values | Held, Values | Held]:
    """Return readers of positions, in ascending order, and of their values."""
    if positions.nbytes > _HELD and _ascends(positions, size):
        return Values(positions), Values(values)
    at = _whole(positions)
    if positions.nbytes <= _HELD and bool((at[1:] > at[:-1]).all()):
        return Held(at), Values(values)
    order = np.argsort(at, kind="stable")
    return Held(at[order]), Held(_whole(values)[order])


def _ascends(positions: Part, size: int) -> bool:
    """Whether positions ascend, each below ``size``; the digest is checked by whoever reads them next."""
    reader, last = positions.reader(), -1
    buffer = np.empty(min(positions.nbytes, _LOOKED_AT), np.uint8)  # one for all: fresh pages cost more than reading
    for start in range(0, positions.nbytes, _LOOKED_AT):
        piece = buffer[: positions.nbytes - start]
        reader.readinto(piece.data)
        at = from_file(piece, positions.dtype).astype(np.int64, copy=False)
        if native.kernels.first_unordered(at, last, size) < at.size:
            return False
        last = int(at[-1])
    return True


def _whole(part: Part) -> Array:
    reader = Values(part)
    array = reader.next(reader.left)
    reader.finish()
    return array


def place(positions: Array, values: Array, out: Array, where: str | None = None) -> None:
    """Put values, rounded to the element type of the flat ``out``, at ascending positions."""
    native.kernels.place_values(positions, as_bits(rounded(values, out, where)), written(out))


def rounded(values: Array, out: Array, where: str | None = None) -> Array:
    """Return values in the element type of ``out``; ``dense.overflow`` where it cannot hold one."""
    return cast(values, float_name(out), where)


class Addition(NamedTuple):
    """What a piece of differences is added to, or subtracted from: flat arrays of one float type.

    ``out`` gets ``base`` plus the differences, or less them, and ``back``, where given, ``out`` less them again: each
    computed in float32 and rounded once.
    """

    base: Array
    out: Array
    back: Array | None
    less: bool

    @property
    def arguments(self) -> tuple[Array, Array, Array | None, bool, str]:
        """What the kernels that add take last."""
        back = None if self.back is None else written(self.back)
        return as_bits(self.base), written(self.out), back, self.less, float_name(self.out)


class AddsByPieces(ABC):
    """A ``RowReader`` that adds while it decodes (``codecs.delta.base.AddingReader``, ``UndoingReader``).

    ``by_rows`` tells whether pieces are of whole rows.
    """

    by_rows: ClassVar[bool] = False

    @abstractmethod
    def add(self, piece: Addition) -> None:
        """Add the next differences, as many as the piece has elements."""

    def add_into(self, base: Array, out: Array) -> None:
        self._run(base, out, None, less=False)

    def add_back_into(self, base: Array, out: Array, back: Array) -> None:
        self._run(base, out, back, less=False)

    def subtract_from(self, base: Array, out: Array) -> None:
        self._run(base, out, None, less=True)

    def _run(self, base: Array, out: Array, back: Array | None, *, less: bool) -> None:
        if not out.size:
            return
        step = max(1, PIECE // out.shape[-1]) * out.shape[-1] if self.by_rows else PIECE
        first, two, three = base.reshape(-1), flat(out), None if back is None else flat(back)
        for start in range(0, out.size, step):
            piece = slice(start, start + step)
            self.add(Addition(first[piece], two[piece], None if three is None else three[piece], less))
