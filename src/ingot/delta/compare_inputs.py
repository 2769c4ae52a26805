"""What a diff finds out of its inputs before it plans: whether they are weights, and which tensors are the same."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from ingot.artifacts import identity
from ingot.artifacts.identity import COMPARED_AT_ONCE
from ingot.codecs.delta.sparse_patch import as_unsigned
from ingot.core.runtime.progress import Progress
from ingot.delta.chain import require_decoders
from ingot.delta.pairs import Asking, Both, Pairs
from ingot.engine.chunks import chunks, matrix_of
from ingot.engine.fit import is_opaque, paired_chunks, rows_of, window
from ingot.errors import UnsupportedError, UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import KEY
from ingot.model.tensor import Tensor


def same_tensors(pairs: Mapping[str, Both], asking: Asking, progress: Progress) -> dict[str, str]:
    """Return the digests of the tensors whose values are those of the base, bit for bit.

    Reads those once, others up to the first chunk that differs.
    """
    names = [name for name, both in pairs.items() if both.is_alike]
    digests = {}
    for name, digest in zip(names, asking.each(common_digest, names), strict=True):
        if digest is not None:
            digests[name] = digest
            progress.advance(pairs[name].nbytes, name)
    return digests


def require_same_keys(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor], container: str) -> None:
    """Refuse what a container has no words for: tensors of one side, and other shapes; for patches, element types too.

    Raises ``UnsupportedError`` ``delta.keys``.
    """
    for name in (*(name for name in base if name not in tuned), *(name for name in tuned if name not in base)):
        raise _keys(container, "the same tensors in base and fine-tune", "one in only one of them", name)
    pairs = Pairs(base, tuned)
    for both in pairs.uncached():
        first, tensor = both.pair
        name = tensor.name
        if first.shape != tensor.shape:
            raise _keys(container, "the same shape in base and fine-tune", f"{first.shape} and {tensor.shape}", name)
        if first.dtype != tensor.dtype and container != "wdelta":
            raise _keys(
                container, "the same element type in base and fine-tune", f"{first.dtype} and {tensor.dtype}", name
            )


def _keys(container: str, expected: str, found: str, name: str) -> UnsupportedError:
    kind = ".wdelta" if container == "wdelta" else "sparse patch"
    return UnsupportedError(f"a {kind} needs {expected}, found {found}; write a .zt", rule="delta.keys", where=name)


def changed_elements(pairs: Mapping[str, Both], same: Container[str], asking: Asking) -> dict[str, int]:
    """Return how many elements of each tensor differ in their bits; those in ``same`` and packed ones are left out."""
    names = [name for name, both in pairs.items() if name not in same and not is_opaque(both.pair[1])]
    return dict(zip(names, asking.each(changed, names), strict=True))


def changed(both: Both) -> int:
    """Return how many elements of two tensors differ in their bits."""
    first, other = both.pair
    matrix = matrix_of(first, other.codec)
    step = max(1, COMPARED_AT_ONCE // max(matrix[1], 1))
    pairs = zip(chunks(first, matrix, step), chunks(other, matrix, step), strict=True)
    return sum(int(np.count_nonzero(as_unsigned(left) != as_unsigned(right))) for left, right in pairs)


def check_inputs(*checkpoints: Checkpoint) -> None:
    """Refuse what has no values of its own: deltas, and tensors that nothing here decodes."""
    for checkpoint in checkpoints:
        if KEY in checkpoint.metadata:
            raise UsageError(
                "expected weights, found a delta; patch its base first and compare with the result",
                rule="delta.of-delta",
                where=checkpoint.location,
            )
        require_decoders(checkpoint)


def common_digest(both: Both) -> str | None:
    """Return the digest of two tensors of one shape and dtype with the same values, bit for bit, else None."""
    return identity.common_digest(*both.pair)


def is_cast(both: Both) -> bool:
    """Whether the fine-tune's tensor, as far as the base has rows of it, is the base's cast to its element type.

    Stops at the first difference. ``both`` is comparable (``engine.fit``).
    """
    base, tuned = both.pair
    matrix = matrix_of(tuned, base.codec)
    shared = rows_of(base.shape, matrix[1])
    left = max(1, COMPARED_AT_ONCE // max(matrix[1], 1))
    start = 0
    for old, new in paired_chunks(base, tuned, matrix, left, tuned.dtype):
        count = window(start, start + len(new), shared)
        if not np.array_equal(as_unsigned(old[:count]), as_unsigned(new[:count])):
            return False
        start += len(new)
    return True
