"""Check tensors: the rules of the codec, the digests of parts, and the values of parts on which the decoder relies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingot.codecs.base import Codec
from ingot.codecs.dense.codec import require_bool
from ingot.codecs.sparse.blocks import ID as PRUNED
from ingot.codecs.sparse.blocks import stored_matrix
from ingot.codecs.table import CODECS
from ingot.core.bytes import checksums
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.parallel import ordered_together
from ingot.core.runtime.progress import Progress
from ingot.engine.chunks import chunks, matrix_of, weight
from ingot.errors import CodecError, IngotError
from ingot.inspect.findings import Finding, finding_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import TensorMap
from ingot.model.tensor import Tensor

_CHUNK = 4 << 20
NO_DIGEST = "part.no-digest"


def check_tensors(tensors: TensorMap[Tensor], state: Progress) -> Iterator[list[Finding]]:
    """Check tensors in this process; yield the findings of each tensor in order."""

    def check(tensor: Tensor) -> tuple[str, int, list[Finding]]:
        return tensor.name, tensor.nbytes, check_tensor(tensor)

    for name, nbytes, findings in ordered_together(check, tensors.uncached(), weight):
        state.advance(nbytes, name)
        yield findings


def check_tensor(tensor: Tensor) -> list[Finding]:
    """Check the rules of a tensor's codec, its digests, and the values on which the decoder relies; return findings."""
    findings: list[Finding] = []
    codec = CODECS.get(tensor.codec)
    try:
        if codec is not None:
            codec.check(tensor)
        for role, part in tensor.parts.items():
            findings += _check_part(part, f"{tensor.name}/{role}", _spare_bits(tensor))
        stored = tensor
        if codec is not None and tensor.codec == PRUNED:
            stored = stored_matrix(tensor)  # without the dropped blocks, whose declared size may be huge
            codec = CODECS[stored.codec]
        accepts_any_bytes = codec is not None and codec.elementwise and codec.lossless
        if codec is not None and not accepts_any_bytes and tensor.dtype in DTYPES:
            findings += _check_values(codec, stored)
    except (IngotError, MemoryError) as error:
        findings.append(finding_of(error, tensor.name))
    if codec is None:
        findings.append(
            Finding(
                "note",
                "codec.unknown",
                tensor.name,
                f"codec {tensor.codec!r} is not known here; only the parts were checked",
            )
        )
    return findings


def _spare_bits(tensor: Tensor) -> int:
    """Return the number of unused bits after the last element of a dense tensor with elements below 8 bits; else 0."""
    row = DTYPES.get(tensor.dtype)
    return 0 if row is None or tensor.codec != DenseLayout.codec or row.bits >= 8 else -tensor.size * row.bits % 8


def _check_part(part: Part, location: str, spare: int) -> list[Finding]:
    """Read a part; check its digest, check that bools are 0 or 1, and check that the last ``spare`` bits are zero."""
    buffer = memoryview(bytearray(min(_CHUNK, part.nbytes)))
    last = 0
    if part.dtype != "bool" and part.length and part.read_small(buffer):
        last = buffer[-1]
    else:
        last = _read_part(part, location, buffer)
    if last >> (8 - spare):
        raise CodecError("dense.spare-bits", f"expected zeros in the last {spare} bits, found others", where=location)
    digest = part.digest or getattr(part.source, "digest", None)  # a part of a view has the digest of its source
    if digest is None:
        return [Finding("note", NO_DIGEST, location, "no digest: damage inside this part cannot be seen")]
    if digest.startswith("crc32c:"):  # reading has checked it
        return []
    if checksums.algorithm_of(digest, "part.digest", location) is None:
        message = f"the algorithm of the digest {digest[:40]!r} is not known here"
        return [Finding("note", "part.unknown-digest", location, message)]
    return []


def _read_part(part: Part, location: str, buffer: memoryview) -> int:
    """Read a part in chunks, which checks its digest and bools; return its last byte, 0 if it is empty."""
    reader = part.reader(chunks=True)
    last = 0
    for start in range(0, part.nbytes, _CHUNK):
        chunk = buffer[: min(_CHUNK, part.nbytes - start)]
        reader.readinto(chunk)
        last = chunk[-1]
        if part.dtype == "bool":
            require_bool(np.frombuffer(chunk, np.uint8), DTYPES["bool"], location)
    reader.finish()
    return last


def _check_values(codec: Codec, tensor: Tensor) -> list[Finding]:
    """Decode all rows in chunks, which checks indices and scales; return findings about NaN and infinite values."""
    matrix = matrix_of(tensor)
    nonfinite = 0
    if codec.checks_stored:
        decoded = codec.stored(tensor)
    else:
        decoded = chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1)))
    for rows in decoded:
        if DTYPES[tensor.dtype].is_float and rows.size:
            with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaNs
                nonfinite += int(rows.size - np.count_nonzero(np.isfinite(rows.astype(np.float32))))
    if nonfinite and not codec.lossless:
        return [Finding("error", "codec.non-finite", tensor.name, f"{nonfinite} values decode to NaN or infinity")]
    return []
