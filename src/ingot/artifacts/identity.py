"""Content ids: the same tensors are the same whatever file, container, shard or lossless codec they lie in.

``blake3:hex`` of one line per tensor, names in code-point order (``spec/deltas.md``, "Identity")::

    name NUL dtype NUL shape NUL digest LF

with the shape's sizes joined by commas and the digest the BLAKE3 of the values, dense, row-major, little-endian.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.numeric.dtypes import file_bytes
from ingot.core.runtime.parallel import ordered_together
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.chunks import chunks, matrix_of, weight
from ingot.model.bytesource import Stamp
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import CHUNK
from ingot.model.reading.limits import require_in_proportion
from ingot.model.tensor import Tensor

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorId:
    """One tensor's line in a content id; ``digest`` is the hex of its values' BLAKE3."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


def content_id(
    tensors: Mapping[str, Tensor], *, workers: int | None = None, progress: ProgressCallback | None = None
) -> str:
    """Return the content id of a checkpoint, or of any tensors by name: ``blake3:`` and 64 hexadecimal digits.

    Two checkpoints have the same id if they have the same names, shapes, element types and values, bit for bit:
    re-sharded, in another container, or encoded without loss. Reads every value once, in chunks, tensors in parallel.

    Raises ``UnsupportedError`` where a tensor cannot be decoded, ``ResourceError`` ``decoded.limit``, and whatever
    decoding raises. The digest over a whole file, where there is one, is checked first.
    """
    if isinstance(tensors, Checkpoint):
        tensors.require_whole()
    return content_of(tensor_ids(tensors.values(), workers=workers, progress=progress))


def tensor_ids(
    tensors: Iterable[Tensor], *, workers: int | None = None, progress: ProgressCallback | None = None
) -> dict[str, TensorId]:
    """Return the lines of ``tensors`` by name; errors as ``content_id``."""
    chosen: Sequence[Tensor] = list(tensors)
    require_in_proportion(chosen, "content id")
    state = Progress(sum(tensor.nbytes for tensor in chosen), progress)
    digests = ordered_together(tensor_digest, chosen, weight, workers)
    ids = {}
    for tensor, digest in zip(chosen, digests, strict=True):
        ids[tensor.name] = TensorId(tensor.dtype, tensor.shape, digest)
        state.advance(tensor.nbytes, tensor.name)
    return ids


def content_of(ids: Mapping[str, TensorId]) -> str:
    """Return the content id of tensors whose own digests are known."""
    running = Blake3()
    for name in sorted(ids):
        item = ids[name]
        line = f"{name}\0{item.dtype}\0{','.join(map(str, item.shape))}\0{item.digest}\n"
        running.update(line.encode("utf-8", "surrogatepass"))
    return running.text()


def tensor_digest(tensor: Tensor) -> str:
    """Return the hex of the BLAKE3 of a tensor's values, dense, row-major, little-endian; sub-byte types are packed."""
    running = Blake3()
    if tensor.codec == DenseLayout.codec and set(tensor.parts) == {"data"}:
        part = tensor.parts["data"]
        reader = part.reader()
        buffer = bytearray(min(CHUNK, part.nbytes))
        for start in range(0, part.nbytes, CHUNK):
            piece = memoryview(buffer)[: min(CHUNK, part.nbytes - start)]
            reader.readinto(piece)
            running.update(piece)
        reader.finish()
    else:
        matrix = matrix_of(tensor)
        for rows in chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1))):
            running.update(file_bytes(rows))
    return hex_of(running)


def same_identity(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether ``Checkpoint.identity`` of two processes, perhaps on two machines, is that of the same files and views.

    Either may have been JSON. The numbers of devices do not count: on another machine a file system has another.
    """
    return bool(_comparable(found) == _comparable(expected))


def _comparable(value: Any) -> Any:
    """Return an identity as JSON has it, less the numbers of devices."""
    if isinstance(value, Mapping):
        return {str(key): _comparable(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        return value
    items = [_comparable(item) for item in value]
    if [type(item) for item in items] == [int, int, int, int, int, str]:  # a stamp
        return [*Stamp(*items)._replace(device=0)]
    return items
