"""Dense floats in a wider element type that holds them exactly, for containers without a name for their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import Encoder
from ingot.core.dtypes import DTYPES, from_file, numpy_dtype
from ingot.core.retype import HOLDERS, always_held, narrow, widen
from ingot.errors import IntegrityError
from ingot.model.part import CHUNK
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor


@dataclass(frozen=True, slots=True)
class DenseRepack:
    """A tensor's values stored as ``holder`` (f16 or f32); the part's logical type stays the tensor's own."""

    tensor: Tensor
    holder: str
    codec: str = "dense"
    step: int = 1

    @property
    def params(self) -> Mapping[str, Any]:
        return self.tensor.params

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        size = self.tensor.size * numpy_dtype(self.holder).itemsize
        return (PartSpec("data", self.holder, size, self.tensor.dtype),)

    @property
    def rows(self) -> int:
        return self.tensor.size

    @property
    def memory(self) -> int:
        """Source, result, and intermediate results in f32 with their proof."""
        return 24

    def exact(self) -> bool:
        """Whether every value comes back bit for bit; reads the tensor where only its values tell."""
        if always_held(self.tensor.dtype, self.holder):
            return True
        reader = DenseRepackReader(self)
        for start in range(0, self.rows, CHUNK):
            if reader.widened(min(CHUNK, self.rows - start)) is None:
                return False
        reader.finish()
        return True

    def reader(self) -> DenseRepackReader:
        return DenseRepackReader(self)


class DenseRepackReader:
    """One pass over the values."""

    def __init__(self, repack: DenseRepack) -> None:
        self._repack, self._reader = repack, repack.tensor.parts["data"].reader()
        self._row = DTYPES[repack.tensor.dtype]

    def widened(self, rows: int) -> Array | None:
        """Return the next values in the holder's type; None where it does not hold them."""
        raw = np.empty(rows * self._row.bits // 8, np.uint8)
        self._reader.readinto(raw.data)
        values = from_file(raw, self._row.storage).view(numpy_dtype(self._row.name))
        return widen(values, self._row.name, self._repack.holder)

    def read(self, rows: int) -> dict[str, Array]:
        found = self.widened(rows)
        if found is None:  # ``exact`` saw others
            raise IntegrityError(
                "store.changed",
                "expected the values that were read before, found others: the source changed",
                where=self._repack.tensor.name,
            )
        return {"data": found}

    def finish(self) -> None:
        self._reader.finish()


def wider(tensor: Tensor) -> Iterator[DenseRepack]:
    """Yield the wider types that a checked dense tensor may be stored in, smallest first.

    No decoder reads the result as it is: a container that takes it gives the values back in their own type.
    """
    for holder in HOLDERS.get(tensor.dtype, ()) if tensor.codec == "dense" else ():
        yield DenseRepack(tensor, holder)


@dataclass(slots=True)
class HeldEncoder:
    """A dense encoder whose values are stored in a wider type that holds all of them: bf16 in f32, 8 bits in f16."""

    inner: Encoder
    dtype: str
    holder: str
    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any]
    lossless: bool
    codec: str = "dense"
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = False

    def fit_pass(self, rows: Array) -> None:
        """No pass is needed."""

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        values = self.inner.encode(rows, start)["data"].reshape(-1).view(numpy_dtype(self.dtype))
        found = widen(values, self.dtype, self.holder)
        assert found is not None  # ``always_held``
        return {"data": found}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        values = narrow(parts["data"].reshape(-1).view(numpy_dtype(self.holder)), self.dtype)
        assert values is not None
        self.inner.decode({"data": values}, out)


def held(encoder: Encoder) -> HeldEncoder | None:
    """Return an encoder of the same values in a type that a container has a name for; None where none holds all."""
    part = encoder.parts[0]
    dtype = part.type or part.dtype
    holder = next((name for name in HOLDERS.get(dtype, ()) if always_held(dtype, name)), None)
    if holder is None or part.length is None:
        return None
    size = part.length * 8 // DTYPES[dtype].bits * numpy_dtype(holder).itemsize
    parts = (PartSpec("data", holder, size, dtype),)
    return HeldEncoder(encoder, dtype, holder, parts, encoder.params, encoder.lossless)
