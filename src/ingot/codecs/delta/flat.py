"""Base classes of the codecs of ``.wdelta``: f32 differences as one flat array (``spec/wdelta.md``)."""

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
from ingot.core.numeric.buffers import HUGE_PAGE, prefault, scratch
from ingot.core.numeric.dtypes import STORAGE_DTYPES, as_bits, dtype, float_name, written
from ingot.core.runtime import native
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

BATCH = 1 << 18
"""Elements that a reader decodes at a time, so that temporaries stay in the second-level cache."""
_ADDED = 1 << 20  # elements that are added at a time if only their codes are read meanwhile


def scale_reach() -> RangeProbe:
    """Return the range probe for f16 scales of signs or 4-bit codes; their layouts allow no other type.

    It accepts differences whose largest magnitude is at least 2^-21. Scales are mean magnitudes, or steps between
    codes. They are usually about eight times smaller than the largest magnitude, and f16 represents these.
    """
    return RangeProbe("scales", "f16", (), 8, "f32")


class F16Scales(BaseEncoder):
    """A base class of encoders with f16 scales: it returns ``reach`` as their range probe."""

    reach: RangeProbe

    def range_probe(self) -> RangeProbe:
        return self.reach


class Differences(NamedTuple):
    """The f32 differences ``tuned - base``, which kernels compute from two flat arrays.

    The arrays contain the bits of floats of the type ``dtype``. If ``base`` is None, ``tuned`` are the differences.
    """

    tuned: Array
    base: Array | None
    dtype: str

    @classmethod
    def from_rows(cls, rows: Array) -> Differences:
        """Return the differences that are given as f32 rows."""
        return cls(flat_values(rows), None, "f32")

    @classmethod
    def between(cls, base: Array, tuned: Array) -> Differences:
        """Return the differences of two C-order arrays of one float type, without computing them."""
        return cls(as_bits(tuned.reshape(-1)), as_bits(base.reshape(-1)), float_name(tuned))

    @property
    def size(self) -> int:
        """The number of differences."""
        return self.tuned.size

    def part(self, start: int, stop: int) -> Differences:
        """Return the differences ``start`` to ``stop``."""
        return Differences(self.tuned[start:stop], None if self.base is None else self.base[start:stop], self.dtype)

    def array(self) -> Array:
        """Compute the differences as a flat f32 array."""
        if self.base is None:
            return self.tuned
        out = scratch(self.tuned.shape, np.float32)
        native.kernels.differences(self.tuned, self.base, out, self.dtype)
        return out

    def value_at(self, index: int) -> float:
        """Return the difference at ``index``."""
        return float(self.part(index, index + 1).array()[0])

    def range_without(self, skipped: Array, low: float, high: float) -> tuple[float, float]:
        """Return the range of all differences except those at ``skipped``.

        ``low`` to ``high`` is the range that the caller computed, and is returned if ``low`` is not 0. If ``low`` is 0,
        its sign may be wrong, and the range is computed again.
        """
        return (low, high) if low != 0 else native.kernels.range_between(self.array(), skipped)


class PairEncoder(Encoder):
    """An encoder of f32 differences that gets base and fine-tune, and subtracts while it encodes.

    Both are in C order, and both have the same type: f32, f16 or bf16. The encoder allocates no array of differences.
    Its parts have the same bits as the parts of an array of the differences.
    """

    @abstractmethod
    def add_decoded(self, parts: Mapping[str, Array], base: Array, out: Array) -> None:
        """Write ``base`` plus the decoded ``parts`` to ``out``, with the same bits as ``AddingReader.add_into``."""

    @abstractmethod
    def encode_differences(self, differences: Differences, rows: int, start: int) -> dict[str, Array]:
        """Return the encoded parts of ``differences``.

        ``rows`` is the number of their rows, and ``start`` is the index of the first of these rows in the tensor.
        """

    @abstractmethod
    def fit_differences(self, differences: Differences) -> None:
        """Update the state of the fit pass, for example the largest differences so far.

        ``differences`` are those of the next rows. ``encode_differences`` uses the state later. An encoder without a
        fit pass does nothing here.
        """

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        """Return the encoded parts of ``rows``, which are f32 differences."""
        return self.encode_differences(Differences.from_rows(rows), len(rows), start)

    def encode_pair(self, base: Array, tuned: Array, start: int = 0) -> dict[str, Array]:
        return self.encode_differences(Differences.between(base, tuned), len(tuned), start)

    def fit_pass(self, rows: Array) -> None:
        """Call ``fit_differences`` with ``rows``, the f32 differences of the next rows."""
        self.fit_differences(Differences.from_rows(rows))

    def fit_pair(self, base: Array, tuned: Array) -> None:
        self.fit_differences(Differences.between(base, tuned))


@dataclass(kw_only=True, eq=False)
class SingleChunkEncoder(PairEncoder):
    """An encoder that selects the largest differences, and therefore needs the tensor in one chunk."""

    codec: str
    size: int
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = True
    lossless: bool = False

    def fit_differences(self, differences: Differences) -> None:
        """Do nothing: there is no fit pass."""

    def largest(self, differences: Differences, count: int) -> tuple[Array, Array, tuple[float, float]]:
        """Return the positions and values of the ``count`` largest magnitudes, and the range of all other differences.

        Positions ascend. Among equal magnitudes, lower positions are selected first. The range is undefined if there
        are no other differences.

        Raises
        ------
        CodecError
            ``<codec>.whole``: rows are missing; ``<codec>.non-finite``: a difference is NaN or infinite.
        """
        if differences.size != self.size:
            raise CodecError(f"{self.codec}.whole", f"expected all {self.size} values, found {differences.size}")
        positions = scratch((count,), np.int64)
        values = scratch((count,), np.float32)
        low = 0.0
        high = 0.0
        if count:
            bad, low, high = native.kernels.top_of(*differences, positions, values)
            if bad < differences.size:
                raise non_finite(self.codec, differences.value_at(bad), bad)
        return positions, values, (low, high)


def flat_values(rows: Array) -> Array:
    """Return f32 rows as a 1-d array in C order."""
    if rows.dtype != np.float32:
        raise ValueError(f"expected differences in float32, found {rows.dtype}")
    return np.require(rows, requirements=("C", "A")).reshape(-1)


def non_finite(codec: str, value: float, index: int) -> CodecError:
    """Return the error for a NaN or infinity, which would spread over its row or tensor."""
    return CodecError(
        f"{codec}.non-finite",
        f"expected finite differences, found {value:g} at element {index}; store this tensor with delta_exact",
    )


def require_source(codec: str, source: str) -> None:
    """Raise ``UnsupportedError`` ``<codec>.dtype`` if the source is not f32, the type of differences."""
    if dtype(source).name != "f32":
        raise UnsupportedError(f"codec {codec} stores differences in f32, found {source}", rule=f"{codec}.dtype")


def require_options(codec: str, options: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise ``UsageError`` ``<codec>.option`` if an option's name is not in ``names``."""
    unknown = sorted(str(key) for key in options if key not in names)
    if unknown:
        allowed = " and ".join(names) or "none"
        raise UsageError(f"codec {codec} has the options {allowed}, found {unknown[0]!r}", rule=f"{codec}.option")


def share_option(codec: str, options: Mapping[str, Any], key: str, default: float, below: float) -> float:
    """Return the option ``key``; ``default`` if it is not set.

    It must be a fraction from 0 to less than 1, or equal to ``below``. Raises ``UsageError`` ``<codec>.option``.
    """
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < 1 or value == below):
        raise UsageError(
            f"codec {codec} expects a fraction from 0 to 1 for {key}, found {value!r}", rule=f"{codec}.option"
        )
    return value


def to_f16(values: Array, codec: str) -> Array:
    """Return finite f32 values rounded to f16; raise ``<codec>.overflow`` if a value is too large."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        value = float(values[int(np.argmin(np.isfinite(rounded)))])
        raise CodecError(
            f"{codec}.overflow",
            f"expected differences of at most 65504, the largest float16, found {value:g}; store this tensor unchanged",
        )
    return rounded


def check_parts(tensor: Tensor, dtypes: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Check a tensor, and return the number of elements of each part.

    The tensor must be f32 and have the parts of ``dtypes`` in the allowed types. Rules: ``<codec>.dtype``,
    ``<codec>.parts``, ``<codec>.part-dtype``; ``<codec>.size`` if a part's length is no multiple of its element size.
    """
    codec = tensor.codec
    if tensor.dtype != "f32":
        raise CodecError(f"{codec}.dtype", f"expected a difference in f32, found {tensor.dtype}", where=tensor.name)
    if set(tensor.parts) != set(dtypes):
        roles = ", ".join(sorted(tensor.parts)) or "none"
        raise CodecError(f"{codec}.parts", f"expected the parts {', '.join(dtypes)}, found {roles}", where=tensor.name)
    counts = {}
    for role, allowed in dtypes.items():
        part = tensor.parts[role]
        location = f"{tensor.name}.{role}"
        if part.dtype not in allowed or part.type not in (None, part.dtype):
            raise CodecError(
                f"{codec}.part-dtype",
                f"expected {' or '.join(allowed)}, found {part.type or part.dtype}",
                where=location,
            )
        count, remainder = divmod(part.nbytes, STORAGE_DTYPES[part.dtype].bits // 8)
        if remainder:
            raise CodecError(f"{codec}.size", f"expected full elements, found {part.nbytes} bytes", where=location)
        counts[role] = count
    return counts


def require_count(tensor: Tensor, role: str, count: int, expected: int) -> None:
    """Raise ``CodecError`` ``<codec>.size`` if ``count``, a part's number of elements, is not ``expected``."""
    if count != expected:
        raise CodecError(
            f"{tensor.codec}.size",
            f"expected {expected} elements for shape {list(tensor.shape)}, found {count}",
            where=f"{tensor.name}.{role}",
        )


def matrix_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor with ``shape`` as a matrix; see ``Tensor.matrix_shape``."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


class Addition(NamedTuple):
    """Flat arrays of one float type, for an addition or subtraction of differences.

    ``out`` becomes ``base`` plus the differences, or minus the differences if ``less`` is set. If ``back`` is not None,
    it becomes ``out`` minus the differences. Each result is computed in f32 and rounded once.
    """

    base: Array
    out: Array
    back: Array | None
    less: bool

    def part(self, start: int, stop: int) -> Addition:
        """Return the addition for the elements ``start`` to ``stop``."""
        back = None if self.back is None else self.back[start:stop]
        return Addition(self.base[start:stop], self.out[start:stop], back, self.less)

    @property
    def arguments(self) -> tuple[Array, Array, Array | None, bool, str]:
        """Return the last arguments of the kernels that add differences: ``base``, ``out``, ``back``, ``less`` and the
        dtype of ``out``.
        """
        back = None if self.back is None else written(self.back)
        return as_bits(self.base), written(self.out), back, self.less, float_name(self.out)


class BatchAddingReader(AddingReader):
    """A reader that adds or subtracts while it decodes, one batch of elements at a time.

    If ``by_rows`` is set, a batch has full rows.
    """

    by_rows: ClassVar[bool] = False

    @abstractmethod
    def add(self, addition: Addition) -> None:
        """Add the next differences, one per element of ``addition``."""

    def add_into(self, base: Array, out: Array) -> None:
        self._run(base, out, None, less=False)

    def add_back_into(self, base: Array, out: Array, back: Array) -> None:
        """Add as ``add_into`` does; write ``out`` minus the same rows, computed in f32 and rounded once, to ``back``.

        ``back`` must not overlap the other arrays.
        """
        self._run(base, out, back, less=False)

    def subtract_from(self, base: Array, out: Array) -> None:
        """Write ``base`` minus the next rows, computed in f32 and rounded once, to ``out``."""
        self._run(base, out, None, less=True)

    def _run(self, base: Array, out: Array, back: Array | None, *, less: bool) -> None:
        if not out.size:
            return
        step = max(1, _ADDED // out.shape[-1]) * out.shape[-1] if self.by_rows else _ADDED
        first, second, third = base.reshape(-1), flat(out), None if back is None else flat(back)
        fresh = [array for array in (second, third) if array is not None and array.ctypes.data != first.ctypes.data]
        for start in range(0, out.size, step):
            batch = slice(start, start + step)
            for array in fresh:  # the next batch is in the last page: clear all of it
                prefault(array[start:], step * array.itemsize + HUGE_PAGE)
            self.add(Addition(first[batch], second[batch], None if third is None else third[batch], less))
