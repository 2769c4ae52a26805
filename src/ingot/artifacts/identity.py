"""Content ids, which do not depend on the file, the container, the shards or a lossless codec of the tensors.

A content id is ``blake3:hex`` of one line per tensor, in code-point order of names (``spec/deltas.md``, "Identity")::

    name NUL dtype NUL shape NUL digest LF

The sizes of the shape are joined by commas. The digest is the BLAKE3 of the values, dense, row-major, little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.numeric.dtypes import DTYPES, file_bytes
from ingot.core.runtime.parallel import ordered_together
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.chunks import chunks, matrix_of, weight
from ingot.engine.fit import is_opaque
from ingot.model.bytesource import Stamp
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import CHUNK
from ingot.model.reading.limits import require_in_proportion
from ingot.model.tensor import Tensor

_CHUNK = 1 << 20
COMPARED_AT_ONCE = 1 << 20
"""The number of elements in a chunk when two tensors are compared."""


@dataclass(frozen=True, slots=True)
class TensorId:
    """One tensor's line in a content id. ``digest`` is the BLAKE3 of the values in hexadecimal digits."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


def content_id(
    tensors: Mapping[str, Tensor], *, workers: int | None = None, progress: ProgressCallback | None = None
) -> str:
    """Return the content id of a checkpoint or of a mapping of tensors: ``blake3:`` and 64 hexadecimal digits.

    Two checkpoints have the same id if they have the same names, shapes, element types and values, bit for bit. Shards,
    containers and lossless codecs do not matter. Every value is read once, in chunks, several tensors in parallel.

    Raises ``UnsupportedError`` if a tensor cannot be decoded, ``ResourceError`` ``decoded.limit``, and the errors of
    decoding. If the file has a digest of its full contents, it is checked first.
    """
    if isinstance(tensors, Checkpoint):
        tensors.require_whole()
    return content_of(tensor_ids(tensors.values(), workers=workers, progress=progress))


def tensor_ids(
    tensors: Iterable[Tensor], *, workers: int | None = None, progress: ProgressCallback | None = None
) -> dict[str, TensorId]:
    """Return the ids of ``tensors`` by name: element type, shape and digest. Raises the errors of ``content_id``."""
    selected: Sequence[Tensor] = list(tensors)
    require_in_proportion(selected, "content id")
    state = Progress(sum(tensor.nbytes for tensor in selected), progress)
    digests = ordered_together(tensor_digest, selected, weight, workers)
    ids = {}
    for tensor, digest in zip(selected, digests, strict=True):
        ids[tensor.name] = TensorId(tensor.dtype, tensor.shape, digest)
        state.advance(tensor.nbytes, tensor.name)
    return ids


def content_of(ids: Mapping[str, TensorId]) -> str:
    """Return the content id of an artifact whose tensors have the ids ``ids``, by name."""
    running = Blake3()
    for name in sorted(ids):
        item = ids[name]
        line = f"{name}\0{item.dtype}\0{','.join(map(str, item.shape))}\0{item.digest}\n"
        running.update(line.encode("utf-8", "surrogatepass"))
    return running.text()


def tensor_digest(tensor: Tensor) -> str:
    """Return the BLAKE3 of a tensor's values in hexadecimal digits.

    The values are dense, row-major and little-endian; types below a byte are packed.
    """
    running = Blake3()
    if tensor.codec == DenseLayout.codec and set(tensor.parts) == {"data"}:
        part = tensor.parts["data"]
        reader = part.reader()
        buffer = bytearray(min(CHUNK, part.nbytes))
        for start in range(0, part.nbytes, CHUNK):
            chunk = memoryview(buffer)[: min(CHUNK, part.nbytes - start)]
            reader.readinto(chunk)
            running.update(chunk)
        reader.finish()
    else:
        matrix = matrix_of(tensor)
        for rows in chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1))):
            running.update(file_bytes(rows))
    return hex_of(running)


def same_type(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same shape and element type."""
    return first.shape == second.shape and first.dtype == second.dtype


def equal_values(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors of equal shape and type have equal values, bit for bit.

    Reading stops at the first chunk that differs.
    """
    return common_digest(first, second) is not None


def common_digest(first: Tensor, second: Tensor) -> str | None:
    """Return the digest of the values of two tensors of equal shape and type; None if a bit differs."""
    if is_opaque(first) or is_opaque(second) or DTYPES[first.dtype].bits < 8:  # chunks are not packed
        digest = tensor_digest(first)
        return digest if digest == tensor_digest(second) else None
    matrix = matrix_of(first, second.codec)
    step = max(1, COMPARED_AT_ONCE // max(matrix[1], 1))
    running = Blake3()
    for first_rows, other_rows in zip(chunks(first, matrix, step), chunks(second, matrix, step), strict=True):
        data = file_bytes(first_rows)
        if not np.array_equal(np.frombuffer(data, np.uint8), np.frombuffer(file_bytes(other_rows), np.uint8)):
            return None
        running.update(data)
    return hex_of(running)


def same_identity(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether two results of ``Checkpoint.identity`` identify the same files and views.

    The results may come from different processes and machines, and may have been sent as JSON. Device numbers are
    ignored, because they differ between machines.
    """
    return bool(_comparable(first) == _comparable(second))


def _comparable(value: Any) -> Any:
    """Return an identity for comparisons: tuples become lists, as in JSON, and device numbers are removed."""
    if isinstance(value, Mapping):
        return {str(key): _comparable(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    items = [_comparable(item) for item in value]
    if [type(item) for item in items] == [int, int, int, int, int, str]:  # a stamp
        return [*Stamp(*items)._replace(device=0)]
    return items
