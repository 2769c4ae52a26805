"""Checks and comparisons of a diff's inputs before planning: whether they are weights, and which tensors are equal."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from ingot.artifacts import identity
from ingot.artifacts.identity import COMPARED_AT_ONCE
from ingot.codecs.delta.sparse_patch import as_unsigned
from ingot.core.runtime.progress import Progress
from ingot.delta.pairs import PairExecutor, PairMap, TensorPair
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.delta_chain import require_decoders
from ingot.engine.fit import is_opaque, paired_chunks, rows_of, window
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import KEY
from ingot.model.tensor import Tensor


def same_tensors(pairs: Mapping[str, TensorPair], executor: PairExecutor, progress: Progress) -> dict[str, str]:
    """Return the digests of the fine-tune's tensors that equal the base's bit for bit, by name.

    Equal tensors are read once, other tensors up to the first different chunk.
    """
    names = [name for name, pair in pairs.items() if pair.is_same_type]
    digests = {}
    for name, digest in zip(names, executor.map(common_digest, names), strict=True):
        if digest is not None:
            digests[name] = digest
            progress.advance(pairs[name].nbytes, name)
    return digests


def require_same_keys(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], container: str) -> None:
    """Raise ``UnsupportedError`` ``delta.keys`` unless base and fine-tune have the same names and shapes.

    ``container`` is a format that cannot store new, removed or reshaped tensors: ``wdelta``, or ``safetensors`` for
    sparse patches. Sparse patches also need equal element types.
    """
    for name in (*(name for name in base if name not in tuned), *(name for name in tuned if name not in base)):
        raise _keys(container, "the same tensors in base and fine-tune", "one in only one of them", name)
    pairs = PairMap(base, tuned)
    for pair in pairs.uncached():
        first, tensor = pair.tensors
        name = tensor.name
        if first.shape != tensor.shape:
            raise _keys(container, "the same shape in base and fine-tune", f"{first.shape} and {tensor.shape}", name)
        if first.dtype != tensor.dtype and container != "wdelta":
            raise _keys(
                container, "the same element type in base and fine-tune", f"{first.dtype} and {tensor.dtype}", name
            )


def _keys(container: str, expected: str, actual: str, name: str) -> UnsupportedError:
    label = ".wdelta" if container == "wdelta" else "sparse patch"
    return UnsupportedError(f"a {label} needs {expected}, found {actual}; write a .zt", rule="delta.keys", where=name)


def changed_elements(pairs: Mapping[str, TensorPair], same: Container[str], executor: PairExecutor) -> dict[str, int]:
    """Return the number of elements that differ in any bit, by tensor name.

    Tensors in ``same``, and tensors whose values Ingot cannot compute with, are skipped.
    """
    names = [name for name, pair in pairs.items() if name not in same and not is_opaque(pair.tensors[1])]
    return dict(zip(names, executor.map(count_changed, names), strict=True))


def count_changed(pair: TensorPair) -> int:
    """Return the number of elements of two tensors that differ in any bit."""
    first, tuned = pair.tensors
    matrix = matrix_of(first, tuned.codec)
    step = max(1, COMPARED_AT_ONCE // max(matrix[1], 1))
    pairs = zip(chunks(first, matrix, step), chunks(tuned, matrix, step), strict=True)
    return sum(int(np.count_nonzero(as_unsigned(old) != as_unsigned(new))) for old, new in pairs)


def check_inputs(*checkpoints: Checkpoint) -> None:
    """Raise ``UsageError`` ``delta.of-delta`` for a delta, and ``UnsupportedError`` for a tensor without a decoder."""
    for checkpoint in checkpoints:
        if KEY in checkpoint.metadata:
            raise UsageError(
                "expected weights, found a delta; patch its base first and compare with the result",
                rule="delta.of-delta",
                where=checkpoint.location,
            )
        require_decoders(checkpoint)


def common_digest(pair: TensorPair) -> str | None:
    """Return the digest of two tensors of one shape and dtype if all bits are equal; else None."""
    return identity.common_digest(*pair.tensors)


def is_cast(pair: TensorPair) -> bool:
    """Return whether the leading rows that exist in both tensors are equal after a cast to the fine-tune's type.

    Reading stops at the first difference. ``TensorPair.is_comparable`` must be true for ``pair``.
    """
    base, tuned = pair.tensors
    matrix = matrix_of(tuned, base.codec)
    shared = rows_of(base.shape, matrix[1])
    step = max(1, COMPARED_AT_ONCE // max(matrix[1], 1))
    start = 0
    for old, new in paired_chunks(base, tuned, matrix, step, tuned.dtype):
        count = window(start, start + len(new), shared)
        if not np.array_equal(as_unsigned(old[:count]), as_unsigned(new[:count])):
            return False
        start += len(new)
    return True
