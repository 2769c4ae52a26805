"""Repacking of dense floats into a wider type, for containers without the floats' type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder, Repacked, cannot
from ingot.core.numeric.dtypes import DTYPES, from_file, numpy_dtype
from ingot.core.numeric.exact_cast import EXACT_WIDER_DTYPES, is_always_exact, narrow, widen
from ingot.errors import IntegrityError, UsageError
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import CHUNK
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor


def repack(tensor: Tensor, layout: DenseLayout) -> Repacked:
    """Return the repacking of a checked dense tensor into a wider type; the logical type of its part is unchanged.

    If exactness depends on the values, the tensor is read. No decoder reads the result: a container that accepts the
    wider type returns the values in the tensor's type.
    """
    holder = layout.holder
    if layout.dtype != tensor.dtype or holder not in EXACT_WIDER_DTYPES.get(tensor.dtype, ()):
        return cannot(layout, f"{holder or layout.dtype} cannot represent all values of {tensor.dtype}")
    # Per value: source, result, and f32 intermediates with the check of exactness.
    parts = layout.part_specs(tensor.shape)
    return Repacked(
        layout, parts, tensor.size, 1, 24, _why_not(tensor, holder), lambda: DenseRepackReader(tensor, holder)
    )


def _why_not(tensor: Tensor, holder: str) -> str | None:
    if is_always_exact(tensor.dtype, holder):
        return None
    reader = DenseRepackReader(tensor, holder)
    for start in range(0, tensor.size, CHUNK):
        if reader.next_values(min(CHUNK, tensor.size - start)) is None:
            return f"{holder} cannot represent a value exactly"
    reader.finish()
    return None


class DenseRepackReader:
    """A sequential reader that returns a dense tensor's values in a wider type."""

    def __init__(self, tensor: Tensor, holder: str) -> None:
        self._reader = tensor.parts[DATA].reader()
        self._name = tensor.name
        self._holder = holder
        self._row = DTYPES[tensor.dtype]

    def next_values(self, rows: int) -> Array | None:
        """Return the next values in the wider type; None if it cannot represent them."""
        raw = np.empty(rows * self._row.bits // 8, np.uint8)
        self._reader.readinto(raw.data)
        values = from_file(raw, self._row.storage).view(numpy_dtype(self._row.name))
        return widen(values, self._row.name, self._holder)

    def read(self, rows: int) -> dict[str, Array]:
        wide = self.next_values(rows)
        if wide is None:  # other values than ``repack`` checked
            raise IntegrityError(
                "store.changed",
                "the values differ from an earlier read: the source changed meanwhile; run again",
                where=self._name,
            )
        return {DATA: wide}

    def finish(self) -> None:
        self._reader.finish()


@dataclass(slots=True)
class HolderEncoder(Encoder):
    """A dense encoder that stores values in a wider type: bf16 in f32, 8-bit floats in f16."""

    inner: Encoder
    dtype: str
    holder: str
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any]
    lossless: bool
    codec: str = DenseLayout.codec
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = False

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        values = self.inner.encode(rows, start)["data"].reshape(-1).view(numpy_dtype(self.dtype))
        wide = widen(values, self.dtype, self.holder)
        assert wide is not None  # exact, as ``is_always_exact`` states
        return {"data": wide}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        values = narrow(parts["data"].reshape(-1).view(numpy_dtype(self.holder)), self.dtype)
        assert values is not None
        self.inner.decode({"data": values}, out)


def holder_of(encoder: Encoder) -> str | None:
    """Return the smallest wider type that represents all values of ``encoder``; None if there is none."""
    part = encoder.parts[0]
    dtype = part.type or part.dtype
    return next((name for name in EXACT_WIDER_DTYPES.get(dtype, ()) if is_always_exact(dtype, name)), None)


def with_holder(encoder: Encoder, holder: str) -> HolderEncoder:
    """Return an encoder that stores the same values in the wider type ``holder``.

    Raises ``UsageError`` ``dense.option`` if ``holder`` cannot represent a value.
    """
    part = encoder.parts[0]
    dtype = part.type or part.dtype
    if part.length is None or holder not in EXACT_WIDER_DTYPES.get(dtype, ()) or not is_always_exact(dtype, holder):
        raise UsageError(f"expected a type with all values of {dtype}, found {holder!r}", rule="dense.option")
    size = part.length * 8 // DTYPES[dtype].bits * numpy_dtype(holder).itemsize
    parts = (PartSpec("data", holder, size, dtype),)
    return HolderEncoder(encoder, dtype, holder, parts, encoder.params, encoder.lossless)
