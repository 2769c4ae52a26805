"""The methods that merge models: the sum, SLERP, and sums of trimmed or dropped differences to a base.

Each method computes blocks of a tensor in f32. A method that needs properties of the full tensor, such as the angle
between two models, first reads the full tensor in a separate pass (``spec/merging.md``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.core.numeric.dtypes import FLOATS
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import CodecError
from ingot.model.tensor import Array

BLOCK = 1 << 18
"""The number of elements that are merged at a time."""
LINEAR = "linear"
SLERP = "slerp"
TASK_ARITHMETIC = "task-arithmetic"
TIES = "ties"
DARE = ("dare", "dare-linear")
DARE_TIES = "dare-ties"
METHODS = (LINEAR, SLERP, TASK_ARITHMETIC, TIES, *DARE, DARE_TIES)
WITHOUT_BASE = (LINEAR, SLERP)
"""Methods that treat the first model like the other models, instead of as a base."""
WITH_DENSITY = (TIES, *DARE, DARE_TIES)
WITH_SEED = (*DARE, DARE_TIES)

_PARALLEL = 0.9995  # larger cosines are interpolated linearly, as in mergekit
_NO_DIRECTION = 1e-8  # a vector with a smaller norm has no direction
_HALF = 16
_BINS = 1 << _HALF

ReadBlock = Callable[[int, int], list[Array]]
"""A function that returns the f32 values of a range of elements (start, stop), one array per model, the base first."""


@dataclass(frozen=True, slots=True)
class TensorMerge:
    """The method and the parameters that merge one tensor.

    ``weights`` and ``densities`` have one value for each model after the base; for the methods ``WITHOUT_BASE``, also
    one for the first model. ``scale`` multiplies the merged difference. ``seed`` is the seed of DARE.
    """

    method: str
    weights: tuple[float, ...]
    densities: tuple[float, ...] = ()
    scale: float = 1.0
    seed: int = 0


class Merger:
    """A merge of one tensor, computed block by block."""

    def __init__(self, name: str, size: int, merge: TensorMerge, read: ReadBlock) -> None:
        self._name = name
        self._size = size
        self._merge = merge
        self._read = read
        self._shares: tuple[float, float] | None = None
        self._trims: list[_Trim | None] | None = None

    def block(self, index: int) -> Array:
        """Return the merged values of a block in f32.

        Raises ``CodecError`` ``merge.values``: a value of a model, or a merged value, is NaN or infinite.
        """
        start = index * BLOCK
        with np.errstate(all="ignore"):  # the check below refuses values that are not finite
            result = self._merged(index, self._values(start, min(start + BLOCK, self._size)))
        if not np.isfinite(result).all():
            raise CodecError("merge.values", "the merged value is NaN or infinite; lower the weights", where=self._name)
        return result

    def _values(self, start: int, stop: int) -> list[Array]:
        values = self._read(start, stop)
        for index, item in enumerate(values):
            if not np.isfinite(item).all():
                raise CodecError(
                    "merge.values", f"model {index + 1} has a value that is NaN or infinite", where=self._name
                )
        return values

    def _blocks(self) -> Iterator[list[Array]]:
        for start in range(0, self._size, BLOCK):
            check_cancelled()
            yield self._values(start, min(start + BLOCK, self._size))

    def _merged(self, index: int, values: list[Array]) -> Array:
        method = self._merge.method
        weights = np.array(self._merge.weights, np.float32)
        if method == LINEAR:
            total: Array = weighted_sum(values, weights) / weights.sum(dtype=np.float32)
            return total
        if method == SLERP:
            first, second = self._slerp_shares()
            return np.float32(first) * values[0] + np.float32(second) * values[1]
        base = values[0]
        deltas = [item - base for item in values[1:]]
        if method == TIES:
            deltas = [
                delta if trim is None else trim.apply(index, delta)
                for delta, trim in zip(deltas, self._trimmed(), strict=True)
            ]
        elif method in WITH_SEED:
            deltas = [self._dropped(model, index, delta) for model, delta in enumerate(deltas)]
        if method in (TIES, DARE_TIES):
            change = elect_sign(deltas, weights, mean=method == TIES)
        else:
            change = weighted_sum(deltas, weights)
        return base + np.float32(self._merge.scale) * change

    def _slerp_shares(self) -> tuple[float, float]:
        if self._shares is None:
            sums = np.zeros(3)
            for values in self._blocks():
                first, second = (item.astype(np.float64) for item in values)
                sums += (first @ first, second @ second, first @ second)
            share = self._merge.weights[1] / sum(self._merge.weights)
            self._shares = slerp_shares(share, math.sqrt(sums[0]), math.sqrt(sums[1]), float(sums[2]))
        return self._shares

    def _trimmed(self) -> list[_Trim | None]:
        if self._trims is None:
            self._trims = self._measure_trims()
        return self._trims

    def _measure_trims(self) -> list[_Trim | None]:
        """Return, for each model, the elements that TIES keeps; None if it keeps all.

        Reads the tensor up to three times.
        """
        counts = [kept_count(density, self._size) for density in self._merge.densities]
        if all(count == self._size for count in counts):
            return [None] * len(counts)
        searches = [_Search(count) for count in counts]
        for step in (_Search.count_high, _Search.count_low):
            for values in self._blocks():
                for item, search in zip(values[1:], searches, strict=True):
                    step(search, _magnitude_bits(item - values[0]))
        trims = [search.trim() for search in searches]
        if any(trim.has_surplus for trim in trims):
            for values in self._blocks():
                for item, trim in zip(values[1:], trims, strict=True):
                    trim.count_equal(_magnitude_bits(item - values[0]))
        return [None if count == self._size else trim for count, trim in zip(counts, trims, strict=True)]

    def _dropped(self, model: int, index: int, delta: Array) -> Array:
        density = self._merge.densities[model]
        if density == 1:
            return delta
        selected = random_bits(self._merge.seed, model, self._name, index, len(delta)) < np.uint64(density * 2.0**32)
        scaled: Array = np.where(selected, delta / np.float32(density), np.float32(0))
        return scaled


def weighted_sum(values: Sequence[Array], weights: Array) -> Array:
    """Return the sum of arrays multiplied by their weights, in f32, added in order."""
    total: Array = values[0] * weights[0]
    for item, weight in zip(values[1:], weights[1:], strict=True):
        total += item * weight
    return total


def slerp_shares(share: float, first_norm: float, second_norm: float, product: float) -> tuple[float, float]:
    """Return the factors of two vectors in their spherical interpolation (SLERP) at ``share``; 0 is the first vector.

    The interpolation is linear if the vectors are nearly parallel or opposite, or if one has nearly no length.
    ``product`` is the inner product of the vectors.
    """
    if min(first_norm, second_norm) <= _NO_DIRECTION:
        return 1 - share, share
    cosine = min(1.0, max(-1.0, product / first_norm / second_norm))
    if abs(cosine) > _PARALLEL:
        return 1 - share, share
    angle = math.acos(cosine)
    return math.sin((1 - share) * angle) / math.sin(angle), math.sin(share * angle) / math.sin(angle)


def elect_sign(deltas: Sequence[Array], weights: Array, *, mean: bool) -> Array:
    """Return the sum of the weighted differences that have the elected sign, element by element.

    The elected sign is the sign of the sum of all weighted differences; for 0 it is positive. With ``mean`` the result
    is divided by the sum of the weights of the differences that were added.
    """
    weighted = [delta * weight for delta, weight in zip(deltas, weights, strict=True)]
    positive = sum(weighted[1:], weighted[0]) >= 0
    total: Array = np.zeros_like(weighted[0])
    divisor = np.zeros_like(total)
    for item, weight in zip(weighted, weights, strict=True):
        agrees = (item != 0) & ((item > 0) == positive)
        total += np.where(agrees, item, np.float32(0))
        divisor += np.where(agrees, weight, np.float32(0))
    if mean:
        divisor[divisor == 0] = 1
        total /= divisor
    return total


def kept_count(density: float, size: int) -> int:
    """Return the number of elements that remain at a density; at least one."""
    return size if density == 1 else min(size, max(1, int(density * size)))


def random_bits(seed: int, model: int, name: str, block: int, count: int) -> Array:
    """Return ``count`` random 32-bit integers for the elements of a block, as an array.

    The result depends only on the arguments, not on threads, memory or the order of reading. The integers are outputs
    of the counter-based generator Philox4x64-10; its key is a digest of the seed, the model's position and the tensor's
    name.
    """
    digest = hashlib.sha256(f"{seed}\0{model}\0{name}".encode("utf-8", "surrogatepass")).digest()
    # Each increment of the generator's counter yields eight 32-bit integers.
    generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"), counter=block * (BLOCK // 8))
    raw = generator.random_raw(-(-count // 2)).astype("<u8")
    return raw.view("<u4")[:count].astype(np.uint64)


def _magnitude_bits(values: Array) -> Array:
    """Return the bits of the magnitudes of f32 values as integers, which sort like the magnitudes."""
    bits: Array = np.abs(values).view(np.uint32)
    return bits


class _Search:
    """A search for the smallest of the ``count`` largest magnitudes.

    It counts the magnitudes by their high 16 bits, and then, within the bin that was found, by their low 16 bits.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._high = np.zeros(_BINS, np.int64)
        self._low = np.zeros(_BINS, np.int64)

    def count_high(self, bits: Array) -> None:
        self._high += np.bincount(bits >> _HALF, minlength=_BINS)

    def count_low(self, bits: Array) -> None:
        high, _ = _last_bin(self._high, self._count)
        self._low += np.bincount(bits[bits >> _HALF == high] & (_BINS - 1), minlength=_BINS)

    def trim(self) -> _Trim:
        high, remaining = _last_bin(self._high, self._count)
        low, remaining = _last_bin(self._low, remaining)
        return _Trim(high << _HALF | low, remaining, int(self._low[low]))


def _last_bin(counts: Array, wanted_count: int) -> tuple[int, int]:
    """Return the bin of the smallest of the ``wanted_count`` largest values, and how many of these are in the bin."""
    from_top = np.cumsum(counts[::-1])
    index = int(np.searchsorted(from_top, wanted_count))
    above = int(from_top[index - 1]) if index else 0
    return len(counts) - 1 - index, wanted_count - above


class _Trim:
    """The selection of elements that TIES keeps.

    These are the magnitudes above a threshold, and the first elements that are equal to the threshold.
    """

    def __init__(self, threshold: int, equal_kept: int, equal_total: int) -> None:
        self._threshold = np.uint32(threshold)
        self._equal_kept = equal_kept
        self._ends: list[int] = [0]
        self.has_surplus = equal_kept < equal_total

    def count_equal(self, bits: Array) -> None:
        """Count the elements of the next block that are equal to the threshold."""
        self._ends.append(self._ends[-1] + int(np.count_nonzero(bits == self._threshold)))

    def apply(self, index: int, delta: Array) -> Array:
        """Return the differences of a block, zero where they are trimmed."""
        bits = _magnitude_bits(delta)
        selected = bits >= self._threshold
        if self.has_surplus:
            equal = np.flatnonzero(bits == self._threshold)
            selected[equal[max(0, self._equal_kept - self._ends[index]) :]] = False
        return np.where(selected, delta, np.float32(0))


def is_mergeable(dtype: str) -> bool:
    """Return whether tensors of an element type are merged; tensors of other types must be equal in all models."""
    return dtype in FLOATS
