"""The codec ``fixed16``: 16-bit fixed point with one power of two per tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Encoder, Rows, decode_by_rows
from ingot.errors import CodecError, UsageError
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor


def write_values(codes: Array, exponent: int, out: Array) -> None:
    """Write ``q * 2**exponent`` to ``out``: exact in float32, then rounded once to the dtype of ``out``."""
    out[...] = np.ldexp(codes.astype(np.float32), exponent).reshape(out.shape).astype(out.dtype)


@dataclass(frozen=True)
class Fixed16Encoder(Encoder):
    """Encodes one tensor; its parameters and the sizes of its parts are final before it reads a value."""

    parts: tuple[PartSpec, ...]
    params: Mapping[str, Any]
    codec: str = "fixed16"
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = False
    lossless: bool = False

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        codes = np.rint(np.ldexp(rows.astype(np.float32), -self.params["exponent"]))
        if not (np.abs(codes) <= 32767).all():  # NaN fails the comparison too
            raise CodecError(
                "fixed16.range",
                f"a value exceeds 32767 * 2**{self.params['exponent']} or is NaN; choose a larger exponent",
            )
        return {"data": codes.astype(np.int16)}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        write_values(parts["data"], self.params["exponent"], out)


class Fixed16Reader(Rows):
    """Decodes one tensor row by row."""

    def __init__(self, tensor: Tensor) -> None:
        self._part = tensor.parts["data"].reader()
        self._exponent = tensor.params["exponent"]

    def fill(self, out: Array) -> None:
        codes = np.empty(out.size, "<i2")
        self._part.readinto(codes.view(np.uint8).data)
        write_values(codes, self._exponent, out)

    def finish(self) -> None:
        self._part.finish()


class Fixed16Codec(Codec):
    """Sixteen-bit fixed point with one power of two for the whole tensor."""

    id: ClassVar[str] = "fixed16"
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        exponent = tensor.params.get("exponent")
        if type(exponent) is not int or not -100 <= exponent <= 100:
            raise CodecError("fixed16.params", f"exponent is {exponent!r}, not -100 to 100", where=tensor.name)
        part = tensor.parts.get("data")
        if part is None or len(tensor.parts) != 1 or part.dtype != "i16" or part.nbytes != 2 * tensor.size:
            raise CodecError("fixed16.parts", f"expected one part, data, {tensor.size} of i16", where=tensor.name)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        return decode_by_rows(self, tensor, dtype, out)

    def reader(self, tensor: Tensor) -> Fixed16Reader:
        self.check(tensor)
        return Fixed16Reader(tensor)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> Fixed16Encoder:
        exponent = options.get("exponent", -12)
        if set(options) - {"exponent"} or type(exponent) is not int or not -100 <= exponent <= 100:
            raise UsageError(f"{dict(options)} is not exponent = -100 to 100", rule="fixed16.option")
        params = {"exponent": exponent, "dtype": dtype}
        return Fixed16Encoder((PartSpec("data", "i16", 2 * prod(shape)),), params)
