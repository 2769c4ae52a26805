"""The element type in which the exact difference of two element types is taken: the one that takes fewest bytes.

A fine-tune in f32 of a base in bf16 may hold nothing but bf16 values: then the difference is taken in bf16, and what it
gives is cast to f32. One that was trained in f32 has other values: the base is cast to f32. Where the cast leaves
little in common, the tensor itself may be smaller than a difference.
"""

from __future__ import annotations

from ingot.codecs.table import CODECS, FLOAT_ENTROPY
from ingot.conversion.candidates import sample_of
from ingot.delta.auto import SAMPLE, exact_bytes
from ingot.delta.pairs import Both
from ingot.delta.strategy import SMALL
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.fit import fitted, narrowed
from ingot.model.tensor import Array, Tensor

ENTROPY = ("bf16", "f16", "f32")
"""Element types that ``float_entropy`` stores in fewer bytes than they take."""
_CHUNK = 1 << 20
_WORTH, _FRAME = 1.02, 64
"""What the tensor itself has to save: a difference names the base, and what is the same in both takes nothing."""


def exact_dtype(both: Both) -> str | None:
    """Return the element type that the exact difference is taken in; None if the tensor itself is smaller."""
    (base, tuned), every = both.shared(), both.pair[1]
    if tuned.size <= SMALL:
        return tuned.dtype
    old, new = sample_of(base, SAMPLE), sample_of(tuned, SAMPLE)
    if old.shape != new.shape:  # read in runs from one file and in rows from the other
        return tuned.dtype
    sizes: dict[str | None, int] = {tuned.dtype: exact_bytes(fitted(old, len(old), tuned.dtype), new, tuned.dtype)}
    coarse = narrowed(new, base.dtype)
    if coarse is not None:
        sizes[base.dtype] = exact_bytes(old, coarse, base.dtype)
    if tuned.dtype in ENTROPY:
        sizes[None] = int(_WORTH * _entropy_bytes(new, tuned.dtype)) + _FRAME
    ways = sorted(sizes, key=lambda dtype: sizes[dtype])
    return next(dtype for dtype in ways if dtype != base.dtype or _narrows(every, base.dtype))


def _entropy_bytes(values: Array, dtype: str) -> int:
    parts = CODECS[FLOAT_ENTROPY].encoder(values.shape, dtype, {}).encode(values)
    return sum(part.nbytes for part in parts.values())


def _narrows(tensor: Tensor, dtype: str) -> bool:
    """Whether a cast to ``dtype`` and back keeps every bit of a tensor; stops at the first that it does not."""
    matrix = matrix_of(tensor)
    rows = chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1)))
    return all(narrowed(values, dtype) is not None for values in rows)
