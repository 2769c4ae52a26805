"""Reads all that a catalog offers, as a hostile file's reader would be made to: for property tests and fuzz targets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ingot.codecs.table import CODECS
from ingot.errors import IngotError
from ingot.formats.base import Catalog
from ingot.model.tensor import Tensor

# What claims more is listed but not decoded: rules allow it, and a test's time is for other things.
MAX_DECODED = 1 << 22


def read_all(catalog: Catalog) -> list[str]:
    """Take every part whole and in a range, and decode every tensor; return the rules of the errors met.

    Anything but an ``IngotError`` with a rule and a line of its own escapes.
    """
    rules = read_tensors(catalog.tensors)
    if catalog.details is not None:
        repr(catalog.details())
    if catalog.attachments.draft is not None:
        rules += read_tensors(catalog.attachments.draft)
    if catalog.attachments.coreml is not None:
        try:
            bytes(catalog.attachments.coreml.view())
        except IngotError as error:
            rules.append(checked(error))
    return rules


def read_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    rules = []
    for tensor in tensors.values():
        repr(tensor)
        for part in tensor.parts.values():
            try:
                part.readinto(0, memoryview(bytearray(min(part.nbytes, 8))))
                if part.nbytes <= MAX_DECODED:
                    part.array()
            except IngotError as error:
                rules.append(checked(error))
        try:
            decode(tensor)
        except IngotError as error:
            rules.append(checked(error))
    return rules


def decode(tensor: Tensor) -> None:
    """Check a tensor by its codec and, if it is not too large, decode it: whole, and in chunks to the same values."""
    codec = CODECS.get(tensor.codec)
    if codec is None:
        return
    codec.check(tensor)
    if tensor.size > MAX_DECODED:
        return
    whole = codec.decode(tensor, tensor.dtype)
    if not codec.streams or not whole.size:
        return
    matrix = whole.reshape(-1, whole.shape[-1] if whole.ndim else 1)
    reader, chunks = codec.reader(tensor), np.empty_like(matrix)
    for start in range(0, len(chunks), 7):
        reader.read_into(chunks[start : start + 7])
    reader.finish()
    if matrix.tobytes() != chunks.tobytes():
        raise AssertionError(f"expected {tensor!r} to decode to the same in chunks")


def checked(error: IngotError) -> str:
    """Return the rule of an error, which has one and is one line."""
    if not error.rule or "\n" in str(error):
        raise AssertionError(f"expected a rule and one line, found {error!r}")
    return error.rule
