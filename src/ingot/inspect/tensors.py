"""Checking tensors: their codec's rules, their parts' digests, and the values of parts that a decoder relies on."""

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
    """Check tensors in this process."""

    def check(tensor: Tensor) -> tuple[str, int, list[Finding]]:
        return tensor.name, tensor.nbytes, check_tensor(tensor)

    for name, nbytes, findings in ordered_together(check, tensors.uncached(), weight):
        state.advance(nbytes, name)
        yield findings


def _no_digest(where: str) -> Finding:
    return Finding("note", NO_DIGEST, where, "no digest: damage inside this part cannot be seen")


def check_tensor(tensor: Tensor) -> list[Finding]:
    """Check one tensor: its codec's rules, its parts' digests, and the values of parts that a decoder relies on."""
    findings: list[Finding] = []
    codec = CODECS.get(tensor.codec)
    try:
        if codec is not None:
            codec.check(tensor)
        for role, part in tensor.parts.items():
            findings += _part(part, f"{tensor.name}/{role}", _spare_bits(tensor))
        stored = tensor
        if codec is not None and tensor.codec == PRUNED:
            stored = stored_matrix(tensor)  # what was dropped is no work, however large it claims to be
            codec = CODECS[stored.codec]
        plain = codec is not None and codec.elementwise and codec.lossless  # any bytes are values
        if codec is not None and not plain and tensor.dtype in DTYPES:
            findings += _decodes(codec, stored)
    except (IngotError, MemoryError) as error:
        findings.append(finding_of(error, tensor.name))
    if codec is None:
        findings.append(
            Finding(
                "note",
                "codec.unknown",
                tensor.name,
                f"codec {tensor.codec!r} is not known here; parts were checked only",
            )
        )
    return findings


def _spare_bits(tensor: Tensor) -> int:
    """Return the bits behind the last element of dense values that are packed below a byte."""
    row = DTYPES.get(tensor.dtype)
    return 0 if row is None or tensor.codec != DenseLayout.codec or row.bits >= 8 else -tensor.size * row.bits % 8


def _part(part: Part, where: str, spare: int) -> list[Finding]:
    """Read a part for its digest, and for bytes that are no values: in bools, and ``spare`` bits at the end."""
    buffer = memoryview(bytearray(min(_CHUNK, part.nbytes)))
    last = 0
    if part.dtype != "bool" and part.length and part.read_small(buffer):
        last = buffer[-1]
    else:
        last = _read_part(part, where, buffer)
    if last >> (8 - spare):
        raise CodecError("dense.spare-bits", f"expected zeros in the last {spare} bits, found others", where=where)
    digest = part.digest or getattr(part.source, "digest", None)  # of what it is made of
    if digest is None:
        return [_no_digest(where)]
    if digest.startswith("crc32c:"):  # which reading it has proven
        return []
    if checksums.known(digest, "part.digest", where) is None:
        told = f"digest {digest[:40]!r} is of an algorithm not known here"
        return [Finding("note", "part.unknown-digest", where, told)]
    return []


def _read_part(part: Part, where: str, buffer: memoryview) -> int:
    """Read a part piece by piece; return its last byte, 0 of none."""
    reader = part.reader(chunks=True)
    last = 0
    for start in range(0, part.nbytes, _CHUNK):
        piece = buffer[: min(_CHUNK, part.nbytes - start)]
        reader.readinto(piece)
        last = piece[-1]
        if part.dtype == "bool":
            require_bool(np.frombuffer(piece, np.uint8), DTYPES["bool"], where)
    reader.finish()
    return last


def _decodes(codec: Codec, tensor: Tensor) -> list[Finding]:
    """Run the decoder over all rows in chunks: index values, scales."""
    matrix = matrix_of(tensor)
    odd = 0
    if codec.checks_stored:
        pieces = codec.stored(tensor)
    else:
        pieces = chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1)))
    for rows in pieces:
        if DTYPES[tensor.dtype].is_float and rows.size:
            with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaNs
                odd += int(rows.size - np.count_nonzero(np.isfinite(rows.astype(np.float32))))
    if odd and not codec.lossless:
        return [Finding("error", "codec.non-finite", tensor.name, f"{odd} values decode to NaN or infinity")]
    return []
