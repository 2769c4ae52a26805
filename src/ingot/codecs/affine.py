"""``quantized_group``: the affine family, ``w = s * (q - z)`` (zTensor 1.2 section 3; ``spec/affine.md``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.affine_encode import AffineEncoder, prepare
from ingot.codecs.affine_params import ROLES, SCALE_DTYPES, AffineParams, params_of
from ingot.codecs.affine_parts import PackedReader, ScalesReader
from ingot.codecs.affine_relay import AffineRelay, relays
from ingot.codecs.affine_rows import STEP, add_rows, decode_rows
from ingot.codecs.base import empty
from ingot.core.dtypes import numpy_dtype
from ingot.core.floats import FLOATS
from ingot.errors import CodecError, UnsupportedError
from ingot.model.tensor import Array, Tensor


class AffineReader:
    """Sequential decoding through a packed buffer of at most about ``STEP`` codes (never less than a row)."""

    def __init__(self, tensor: Tensor, params: AffineParams, workers: int | None = 1) -> None:
        self._params, self._workers = params, workers
        self._rows, self._cols = tensor.matrix_shape
        self._row = 0
        self._packed = PackedReader(tensor.parts["packed_weight"], params, self._cols)
        self._scales = ScalesReader(tensor.parts["scales"], params)
        self._zeros = ScalesReader(tensor.parts["zeros"], params) if params.zeros else None
        self._step = max(1, STEP * (1 if workers == 1 else 8) // max(self._cols, 1))

    def read_into(self, out: Array) -> None:
        for target, packed, scales, zeros in self._runs(out):
            decode_rows(self._params, packed, scales, zeros, out[target], self._workers)

    def add_into(self, base: Array, out: Array) -> None:
        """Write ``base`` plus the next rows into ``out``; see ``codecs.delta.AddingReader``."""
        if base.dtype != out.dtype or base.shape != out.shape or not (base.flags.c_contiguous and base.flags.aligned):
            raise ValueError(f"expected an aligned base like the output in C order, found {base.dtype} {base.shape}")
        for target, packed, scales, zeros in self._runs(out):
            add_rows(self._params, packed, scales, zeros, base[target], out[target])

    def _runs(self, out: Array) -> Iterator[tuple[slice, Array, Array, Array | None]]:
        """Yield runs of the next ``len(out)`` rows with their packed codes, scales and zero points."""
        if out.ndim != 2 or out.shape[1] != self._cols or len(out) > self._rows - self._row:
            raise ValueError(f"expected at most {self._rows - self._row} rows of {self._cols}, found {out.shape}")
        self._row += len(out)
        if not out.size:  # there may be any number of empty rows; scales that they have are read by finish
            return
        for start in range(0, len(out), self._step):
            target = slice(start, min(start + self._step, len(out)))
            count = target.stop - start
            packed = self._packed.next(count)
            scales = self._scales.next(count, self._cols)
            zeros = self._zeros.next(count, self._cols) if self._zeros else None
            yield target, packed, scales, zeros

    def finish(self) -> None:
        self._packed.finish()
        self._scales.finish()
        if self._zeros:
            self._zeros.finish()


class AffineCodec:
    """Integers with scales and zero points: INT8 per row (Vectro), INT4, INT3 and INT2 in groups, and all between."""

    id: ClassVar[str] = "quantized_group"
    lossless: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Rules ``affine.params``, ``affine.parts``, ``affine.dtype``, ``affine.size``."""
        _checked(tensor)

    def decode(self, tensor: Tensor, dtype: str) -> Array:
        """Return the values in f32, f16 or bf16, rounded once from f32, or in f64, which holds the f32 values.

        Raw codes in a mapped file are decoded where they lie, if each row begins at a byte. Large tensors use
        several threads (``core.parallel.default_workers``).
        """
        params = _checked(tensor)
        if dtype not in FLOATS:
            raise UnsupportedError(
                f"expected a target dtype {', '.join(FLOATS)}, found {dtype}", rule="affine.dtype", where=tensor.name
            )
        out = empty(tensor.shape, dtype, tensor.name)
        matrix = out.reshape(tensor.matrix_shape)
        codes = tensor.parts["packed_weight"]
        if codes.encoding == "raw" and codes.source.mapped and params.in_rows(matrix.shape[1]):
            arrays = {role: part.array() for role, part in tensor.parts.items()}
            packed = np.frombuffer(codes.view(), np.uint8)
            decode_rows(params, packed, arrays["scales"], arrays.get("zeros"), matrix, workers=None)
            return out
        reader = AffineReader(tensor, params, workers=None)
        reader.read_into(matrix)
        reader.finish()
        return out

    def reader(self, tensor: Tensor) -> AffineReader:
        return AffineReader(tensor, _checked(tensor))

    def relays(self, tensor: Tensor) -> Iterator[AffineRelay]:
        """Yield the layouts of the same integers: low bits first, signed or not; that nearest to as stored first."""
        return relays(tensor, _checked(tensor))

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> AffineEncoder:
        """Prepare to quantize. Options, all with defaults (``spec/affine.md``, "Options"):

        ``bits`` 1 to 8 (4); ``group`` columns per group, ``"row"`` or ``"tensor"`` (128; ``"row"`` at 8 bits);
        ``symmetric`` (true); ``signed`` (as ``symmetric``): two's complement codes; ``scales`` f16, bf16 or f32 (f16;
        f32 where a scale serves a whole row or tensor);
        ``bit_order`` lsb or msb (lsb); ``quantizer`` absmax, minmax, mse, or, for one bit, sign or
        sign-rms (absmax; minmax where not symmetric); ``unbiased`` scales (false).
        """
        return prepare(shape, dtype, options)


def _checked(tensor: Tensor) -> AffineParams:
    params = params_of(tensor)
    _check_roles(tensor, params)
    rows, cols = tensor.matrix_shape
    count = prod(params.scale_shape(rows, cols))
    parts = tensor.parts
    _check_part(tensor, "packed_weight", (params.packed_dtype,), params.packed_bytes(rows, cols))
    scale_bytes = count * numpy_dtype(_check_part(tensor, "scales", SCALE_DTYPES, None)).itemsize
    _check_part(tensor, "scales", SCALE_DTYPES, scale_bytes)
    if params.zeros:
        _check_part(tensor, "zeros", (parts["scales"].dtype,), scale_bytes)
    return params


def _check_roles(tensor: Tensor, params: AffineParams) -> None:
    expected = ROLES if params.zeros else ROLES[:2]
    if set(tensor.parts) != set(expected):
        raise CodecError(
            "affine.parts",
            f"expected the parts {', '.join(expected)}, found {', '.join(sorted(tensor.parts)) or 'none'}",
            where=tensor.name,
        )


def _check_part(tensor: Tensor, role: str, dtypes: tuple[str, ...], nbytes: int | None) -> str:
    part = tensor.parts[role]
    where = f"{tensor.name}.{role}"
    if part.dtype not in dtypes or part.type not in (None, part.dtype):
        raise CodecError(
            "affine.dtype", f"expected {' or '.join(dtypes)}, found {part.type or part.dtype}", where=where
        )
    if nbytes is not None and part.nbytes != nbytes:
        raise CodecError(
            "affine.size",
            f"expected {nbytes} bytes for shape {list(tensor.shape)}, found {part.nbytes}",
            where=where,
        )
    return part.dtype
