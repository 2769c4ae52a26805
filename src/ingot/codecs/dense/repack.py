"""Dense floats in a wider element type that holds them exactly, for containers without a name for their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder, Repacked, cannot
from ingot.core.numeric.dtypes import DTYPES, from_file, numpy_dtype
from ingot.core.numeric.retype import HOLDERS, always_held, narrow, widen
from ingot.errors import IntegrityError, UsageError
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import CHUNK
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor


def repack(tensor: Tensor, layout: DenseLayout) -> Repacked:
    """Return a checked dense tensor's values in a wider type; its part's logical type stays the tensor's own.

    Reads the tensor where only its values tell whether they fit. No decoder reads the result as it is: a container that
    takes it gives the values back in their own type.
    """
    holder = layout.holder
    if layout.dtype != tensor.dtype or holder not in HOLDERS.get(tensor.dtype, ()):
        return cannot(layout, f"{holder or layout.dtype} is not one of the types that hold {tensor.dtype}")
    # Source, result, and intermediate results in f32 with their proof, per value.
    parts = layout.part_specs(tensor.shape)
    return Repacked(
        layout, parts, tensor.size, 1, 24, _why_not(tensor, holder), lambda: DenseRepackReader(tensor, holder)
    )


def _why_not(tensor: Tensor, holder: str) -> str | None:
    if always_held(tensor.dtype, holder):
        return None
    reader = DenseRepackReader(tensor, holder)
    for start in range(0, tensor.size, CHUNK):
        if reader.widened(min(CHUNK, tensor.size - start)) is None:
            return f"a value is no number of {holder}"
    reader.finish()
    return None


class DenseRepackReader:
    """One pass over the values."""

    def __init__(self, tensor: Tensor, holder: str) -> None:
        self._reader, self._where, self._holder = tensor.parts[DATA].reader(), tensor.name, holder
        self._row = DTYPES[tensor.dtype]

    def widened(self, rows: int) -> Array | None:
        """Return the next values in the holder's type; None where it does not hold them."""
        raw = np.empty(rows * self._row.bits // 8, np.uint8)
        self._reader.readinto(raw.data)
        values = from_file(raw, self._row.storage).view(numpy_dtype(self._row.name))
        return widen(values, self._row.name, self._holder)

    def read(self, rows: int) -> dict[str, Array]:
        wide = self.widened(rows)
        if wide is None:  # ``repack`` saw others
            raise IntegrityError(
                "store.changed",
                "expected the values that were read before, found others: the source changed",
                where=self._where,
            )
        return {DATA: wide}

    def finish(self) -> None:
        self._reader.finish()


@dataclass(slots=True)
class HeldEncoder(Encoder):
    """A dense encoder whose values are stored in a wider type that holds all of them: bf16 in f32, 8 bits in f16."""

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
        assert wide is not None  # ``always_held``
        return {"data": wide}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        values = narrow(parts["data"].reshape(-1).view(numpy_dtype(self.holder)), self.dtype)
        assert values is not None
        self.inner.decode({"data": values}, out)


def holder_of(encoder: Encoder) -> str | None:
    """Return the smallest wider type that holds all values which ``encoder`` stores; None where none does."""
    part = encoder.parts[0]
    dtype = part.type or part.dtype
    return next((name for name in HOLDERS.get(dtype, ()) if always_held(dtype, name)), None)


def held_in(encoder: Encoder, holder: str) -> HeldEncoder:
    """Return an encoder of the same values that stores them as ``holder``, a type that holds all of them.

    Raises ``UsageError`` ``dense.option`` where it is none.
    """
    part = encoder.parts[0]
    dtype = part.type or part.dtype
    if part.length is None or holder not in HOLDERS.get(dtype, ()) or not always_held(dtype, holder):
        raise UsageError(f"expected a type that holds all values of {dtype}, found {holder!r}", rule="dense.option")
    size = part.length * 8 // DTYPES[dtype].bits * numpy_dtype(holder).itemsize
    parts = (PartSpec("data", holder, size, dtype),)
    return HeldEncoder(encoder, dtype, holder, parts, encoder.params, encoder.lossless)
