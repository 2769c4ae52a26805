"""What the codecs of ``.wdelta`` share: float32 differences, seen flat (``spec/wdelta.md``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ingot.codecs.base import AddingReader, BaseEncoder, Encoder
from ingot.codecs.cast import flat
from ingot.codecs.range_probe import RangeProbe
from ingot.core.numeric.buffers import HUGE, enter, scratch
from ingot.core.numeric.dtypes import STORAGE_DTYPES, dtype
from ingot.core.numeric.floats import as_bits, float_name, written
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

# Elements that a reader decodes at a time: what it needs beside them stays in the second-level cache.
PIECE = 1 << 18
# Elements that are added at a time: nothing but their codes is read between.
_ADDED = 1 << 20


def scale_reach() -> RangeProbe:
    """Return what f16 scales of signs or codes of 4 bits reach down to: the layouts know no other type.

    From 2^-21 on means and steps of ordinary differences, some eight times smaller than the largest, are numbers.
    """
    return RangeProbe("scales", "f16", (), 8, "f32")


class F16Scales(BaseEncoder):
    """The range probe of encoders with f16 scales, the type that their layouts fix."""

    reach: RangeProbe

    def range_probe(self) -> RangeProbe:
        return self.reach


class Differences(NamedTuple):
    """Differences in float32 as kernels take them: ``tuned`` less ``base``, flat arrays of bits of one float type.

    Without a base ``tuned`` are the differences.
    """

    tuned: Array
    base: Array | None
    dtype: str

    @classmethod
    def given(cls, rows: Array) -> Differences:
        """Return float32 differences."""
        return cls(flat_values(rows), None, "f32")

    @classmethod
    def between(cls, base: Array, tuned: Array) -> Differences:
        """Return those of two arrays of one float type, C order; nothing is computed yet."""
        return cls(as_bits(tuned.reshape(-1)), as_bits(base.reshape(-1)), float_name(tuned))

    @property
    def size(self) -> int:
        """How many there are."""
        return self.tuned.size

    def part(self, start: int, stop: int) -> Differences:
        """Return some of them."""
        return Differences(self.tuned[start:stop], None if self.base is None else self.base[start:stop], self.dtype)

    def array(self) -> Array:
        """Return them computed."""
        if self.base is None:
            return self.tuned
        out = scratch(self.tuned.shape, np.float32)
        native.kernels.differences(self.tuned, self.base, out, self.dtype)
        return out

    def at(self, index: int) -> float:
        """Return one."""
        return float(self.part(index, index + 1).array()[0])

    def range_without(self, skipped: Array, low: float, high: float) -> tuple[float, float]:
        """Return the range of all but those at ``skipped``, which is ``low`` to ``high``; of zeros the right one."""
        return (low, high) if low != 0 else native.kernels.range_between(self.array(), skipped)


class PairEncoder(Encoder):
    """An encoder of float32 differences that takes base and fine-tune, and subtracts while it encodes.

    Both arrays are f32, f16 or bf16, of one type, in C order. No array of differences is made; the bits are those that
    the differences would give.
    """

    @abstractmethod
    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Write ``base`` plus the decoded ``parts`` into ``out``, with the bits of ``AddingReader.add_into``."""

    @abstractmethod
    def encode_of(self, of: Differences, rows: int, start: int) -> dict[str, Array]:
        """Encode the differences of ``rows`` rows."""

    @abstractmethod
    def fit_of(self, of: Differences) -> None:
        """Take in the next differences of a fit pass."""

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the parts of these rows."""
        return self.encode_of(Differences.given(rows), len(rows), start)

    def encode_pair(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        return self.encode_of(Differences.between(base, tuned), len(tuned), start)

    def fit_pass(self, rows: Array) -> None:
        """Take in the next rows, where the encoder learns beforehand."""
        self.fit_of(Differences.given(rows))

    def fit_pair(self, base: Array, tuned: Array) -> None:
        self.fit_of(Differences.between(base, tuned))


@dataclass(kw_only=True, eq=False)
class WholeEncoder(PairEncoder):
    """An encoder that looks for the largest differences and therefore takes a tensor whole."""

    codec: str
    size: int
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def fit_of(self, of: Differences) -> None:
        """Nothing to learn beforehand."""

    def largest(self, of: Differences, count: int) -> tuple[Array, Array, tuple[float, float]]:
        """Return positions and values of the ``count`` largest by magnitude, ascending, and the range of the others.

        Of equal magnitudes the first are taken. Where there are no others, the range says nothing.

        Raises
        ------
        CodecError
            ``<codec>.whole``: not all rows; ``<codec>.non-finite``: a difference is NaN or infinite.
        """
        if of.size != self.size:
            raise CodecError(f"{self.codec}.whole", f"expected all {self.size} values, found {of.size}")
        positions, kept, low, high = scratch((count,), np.int64), scratch((count,), np.float32), 0.0, 0.0
        if count:
            bad, low, high = native.kernels.top_of(*of, positions, kept)
            if bad < of.size:
                raise non_finite(self.codec, of.at(bad), bad)
        return positions, kept, (low, high)


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


class Addition(NamedTuple):
    """What a piece of differences is added to, or subtracted from: flat arrays of one float type.

    ``out`` gets ``base`` plus the differences, or less them, and ``back``, where given, ``out`` less them again: each
    computed in float32 and rounded once.
    """

    base: Array
    out: Array
    back: Array | None
    less: bool

    def part(self, start: int, stop: int) -> Addition:
        """Return that of some of the elements."""
        back = None if self.back is None else self.back[start:stop]
        return Addition(self.base[start:stop], self.out[start:stop], back, self.less)

    @property
    def arguments(self) -> tuple[Array, Array, Array | None, bool, str]:
        """What the kernels that add take last."""
        back = None if self.back is None else written(self.back)
        return as_bits(self.base), written(self.out), back, self.less, float_name(self.out)


class AddsByPieces(AddingReader):
    """A reader that adds or subtracts while it decodes, some elements at a time.

    If ``by_rows`` is set, these are whole rows.
    """

    by_rows: ClassVar[bool] = False

    @abstractmethod
    def add(self, piece: Addition) -> None:
        """Add the next differences, as many as the piece has elements."""

    def add_into(self, base: Array, out: Array) -> None:
        self._run(base, out, None, less=False)

    def add_back_into(self, base: Array, out: Array, back: Array) -> None:
        """As ``add_into``, and write ``out`` less the same rows, computed in f32 and rounded once, into ``back``.

        ``back`` shares no memory with the other arrays.
        """
        self._run(base, out, back, less=False)

    def subtract_from(self, base: Array, out: Array) -> None:
        """Write ``base`` less the next rows, computed in f32 and rounded once, into ``out``."""
        self._run(base, out, None, less=True)

    def _run(self, base: Array, out: Array, back: Array | None, *, less: bool) -> None:
        if not out.size:
            return
        step = max(1, _ADDED // out.shape[-1]) * out.shape[-1] if self.by_rows else _ADDED
        first, two, three = base.reshape(-1), flat(out), None if back is None else flat(back)
        begun = [array for array in (two, three) if array is not None and array.ctypes.data != first.ctypes.data]
        for start in range(0, out.size, step):
            piece = slice(start, start + step)
            for array in begun:  # what comes next is written next: so a page that is begun is cleared whole
                enter(array[start:], step * array.itemsize + HUGE)
            self.add(Addition(first[piece], two[piece], None if three is None else three[piece], less))
