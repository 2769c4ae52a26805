"""Products with weights of the affine family that stay packed (``spec/affine.md``, "Multiplying")."""

from __future__ import annotations

import numpy as np

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.rows import decode_rows
from ingot.codecs.tiles import Product
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits, float_name, written
from ingot.core.runtime import native
from ingot.errors import CodecError, IngotError, UnsupportedError
from ingot.model.layouts.affine import AffineLayout, natural
from ingot.model.tensor import Array, Tensor

BATCH = {"f32": 32, "f16": 4, "bf16": 4}
"""Rows of x, by its type, that ``matmul`` is for; more take ``gemm`` in 16 bits, and decoded blocks of rows in f32,
whose products with codes are not exact: they would be multiplied and added in two instructions, not one."""

_LARGEST_POINT = 1 << 15


class PackedMatrix:
    """A matrix ``w`` [rows, cols] that is held as codes, scales and zero points.

    Parameters
    ----------
    params : AffineLayout
        As ``packed_params`` returns them.
    shape : rows, cols
    packed : u8, rows * params.row_bytes(cols)
        Held, not copied: a mapped file stays mapped.
    scales, zeros : of ``params.scale_shape(rows, cols)``, any number of dimensions; f32, f16 or bf16, one type
        ``zeros`` is None where ``params.zeros`` is false.

    Raises
    ------
    CodecError
        ``affine.size``: an array of another size.
    """

    def __init__(
        self, params: AffineLayout, shape: tuple[int, int], packed: Array, scales: Array, zeros: Array | None
    ) -> None:
        self.params, self.shape = params, shape
        self.packed = packed.reshape(-1).view(np.uint8)
        self.scales = scales.reshape(-1)
        self.zeros = None if zeros is None else zeros.reshape(-1)
        self._check()
        self._direct, self._many = multiplies(params, shape[1]), in_blocks(params, shape[1])
        self._native = self._open() if self._direct or self._many else None

    @classmethod
    def of(cls, tensor: Tensor) -> PackedMatrix:
        """Return the matrix of a 2-d tensor, its parts as they lie.

        Raises
        ------
        CodecError
            As ``AffineCodec.check``.
        UnsupportedError
            ``matmul.layout``: the tensor cannot stay packed.
        """
        params = packed_params(tensor)
        packed = np.frombuffer(tensor.parts["packed_weight"].view(), np.uint8)
        zeros = tensor.parts["zeros"].array() if params.zeros else None
        return cls(params, tensor.matrix_shape, packed, tensor.parts["scales"].array(), zeros)

    @property
    def direct(self) -> bool:
        """Whether ``matmul`` takes this layout: 4 or 8 bits, low bits first."""
        return self._direct

    @property
    def many(self) -> bool:
        """Whether ``gemm`` takes this layout: 2, 3, 4 or 8 bits, low bits first, groups of whole blocks of 32."""
        return self._many

    def matmul(self, x: Array, out: Array, bias: Array | None = None, workers: int = 1) -> None:
        """Write ``x @ w.T + bias`` into ``out``, summed in f32 in a fixed order and rounded once.

        The same bits for any number of workers, on every instruction set.

        Parameters
        ----------
        x : [m, cols], at most 64 rows; f32, f16 or bf16
        out : [m, rows] of the element type of ``x``, C order
        bias : [rows], f32, f16 or bf16
        workers : int
            Threads, the calling one included.

        Raises
        ------
        ValueError
            Sizes or types do not fit together, or ``direct`` is false.
        """
        name = float_name(x)
        types = (name, name if bias is None else float_name(bias))
        self.matmul_bits(as_bits(x), written(out), None if bias is None else as_bits(bias), types, workers)

    def matmul_bits(self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int) -> None:
        """``matmul`` of arrays in which f16 and bf16 come as u16; ``types`` names those of ``x`` and of ``bias``.

        For callers in a hurry: it looks at nothing but sizes.
        """
        self.opened().matmul(x, bias, out, types[0], types[1], workers)

    def gemm(self, x: Array, out: Array, bias: Array | None = None, workers: int = 1) -> None:
        """As ``matmul``, for any number of rows of ``x``: weights are unpacked once for 256 of them.

        The order of sums is another ("Many rows" in ``spec/affine.md``), and a row's result does not depend on how many
        there are. Raises ``ValueError`` where sizes or types do not fit together, or ``many`` is false.
        """
        name = float_name(x)
        types = (name, name if bias is None else float_name(bias))
        self.gemm_bits(as_bits(x), written(out), None if bias is None else as_bits(bias), types, workers)

    def gemm_bits(self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int) -> None:
        """``gemm`` of arrays as ``matmul_bits`` takes them."""
        self.opened().gemm(x, bias, out, types[0], types[1], workers)

    @property
    def rounds(self) -> bool:
        """Whether ``int8`` takes this layout: what ``gemm`` takes, with zero points of at most 2^15."""
        return self._many and abs(self.params.zero_point or 0) <= _LARGEST_POINT

    def int8(self, x: Array, out: Array, bias: Array | None = None, workers: int = 1, *, dots: bool = True) -> None:
        """As ``gemm``, with ``x`` rounded to 8 bits for every block of 32 columns ("Activations in 8 bits" in
        ``spec/affine.md``).

        Without ``dots`` instructions are not used that only some processors of an instruction set have; the result is
        the same. Raises ``ValueError`` where sizes or types do not fit together, or ``rounds`` is false.
        """
        name = float_name(x)
        types = (name, name if bias is None else float_name(bias))
        self.int8_bits(as_bits(x), written(out), None if bias is None else as_bits(bias), types, workers, dots=dots)

    def int8_bits(
        self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int, *, dots: bool = True
    ) -> None:
        """``int8`` of arrays as ``matmul_bits`` takes them."""
        self.opened().int8(x, bias, out, types[0], types[1], workers, dots)

    def opened(self) -> native.kernels.PackedMatrix:
        """Return what kernels of several matrices take; ``ValueError`` where none takes this layout."""
        if self._native is None:
            raise ValueError("expected a layout that the kernels take; decode it")
        return self._native

    def way(self, dtype: str, rows: int) -> Product | None:
        """Return the product by the kernels for so many rows of x of a type; None where decoding is better."""
        if rows <= BATCH[dtype] and self._direct:
            return self.matmul_bits
        return self.gemm_bits if self._many and dtype != "f32" else None

    def parts(self) -> dict[str, Array]:
        """Return the parts of the stored tensor by their roles."""
        parts = {"packed_weight": self.packed, "scales": self.scales}
        return parts if self.zeros is None else {**parts, "zeros": self.zeros}

    def decode(self, start: int, stop: int, dtype: str, workers: int | None = None) -> Array:
        """Return rows ``start`` to ``stop`` in f32, f16 or bf16; raises ``CodecError`` ``affine.overflow``."""
        out = np.empty((stop - start, self.shape[1]), numpy_dtype(dtype))
        self.decode_into(start, out, workers)
        return out

    def decode_into(self, start: int, out: Array, workers: int | None = None) -> None:
        """Decode as many rows from ``start`` as ``out`` [n, cols] has, in its type; raises as ``decode``."""
        stop, row_bytes, scales = start + len(out), self.params.row_bytes(self.shape[1]), self._scales_per_row()
        span = slice(start * scales, stop * scales) if not self.params.per_tensor else slice(None)
        zeros = None if self.zeros is None else self.zeros[span]
        decode_rows(
            self.params, self.packed[start * row_bytes : stop * row_bytes], self.scales[span], zeros, out, workers
        )

    def _scales_per_row(self) -> int:
        return self.params.scale_shape(1, self.shape[1])[-1] if self.params.group_size is not None else 1

    def _check(self) -> None:
        rows, cols = self.shape
        count = int(np.prod(self.params.scale_shape(rows, cols)))
        wanted = (self.params.packed_bytes(rows, cols), count, count if self.params.zeros else None)
        sizes = (self.packed.size, self.scales.size, None if self.zeros is None else self.zeros.size)
        if wanted != sizes:
            raise CodecError("affine.size", f"expected codes, scales and zeros of sizes {wanted}, found {sizes}")

    def _open(self) -> native.kernels.PackedMatrix:
        rows, cols = self.shape
        return native.kernels.PackedMatrix(
            self.packed,
            as_bits(self.scales),
            None if self.zeros is None else as_bits(self.zeros),
            rows=rows,
            cols=cols,
            group=self.params.group_columns(cols),
            bits=self.params.bits,
            signed=self.params.signed,
            per_tensor=self.params.per_tensor,
            row_bytes=self.params.row_bytes(cols),
            offset=self.params.offset,
            zero_point=self.params.zero_point or 0,
            scale_dtype=float_name(self.scales),
        )


def stays_packed(tensor: Tensor, *, direct: bool = False) -> bool:
    """Whether ``PackedMatrix.of`` takes a tensor, as far as its attributes tell, and where ``direct`` the kernels too;
    raises nothing, reads no weights."""
    try:
        params = packed_params(tensor)
    except IngotError:
        return False
    return not direct or multiplies(params, tensor.shape[1])


def packed_params(tensor: Tensor) -> AffineLayout:
    """Return the parameters by which a tensor's rows can be decoded a few at a time; it reads no weights.

    Raises
    ------
    CodecError
        As ``AffineCodec.check``.
    UnsupportedError
        ``matmul.layout``: not a matrix of the affine family whose rows begin at a byte and have scales of their own.
    """
    if tensor.codec == AffineCodec.id and len(tensor.shape) == 2:
        AffineCodec().check(tensor)
        params = natural(AffineLayout.of(tensor), tensor.shape)
        if params.matrix is None and params.block is None and params.in_rows(tensor.shape[1]):
            return params
    raise UnsupportedError(
        "expected a matrix of codec affine in rows of whole bytes with scales along the rows, found "
        f"{tensor.codec} of shape {list(tensor.shape)}; decode it",
        rule="matmul.layout",
        where=tensor.name,
    )


def multiplies(params: AffineLayout, cols: int) -> bool:
    """Whether the kernels multiply with such rows: 4 or 8 bits, the lowest first, groups of whole 4-byte words."""
    group = params.group_columns(cols)
    fits = (params.group_size is None and params.block is None) or group >= cols or group % (32 // params.bits) == 0
    return params.bits in (4, 8) and not params.msb and cols > 0 and fits


def in_blocks(params: AffineLayout, cols: int) -> bool:
    """Whether the kernels for many rows multiply with such rows: 2, 3, 4 or 8 bits, the lowest first, groups of whole
    blocks of 32 columns, or one for a row."""
    group = params.group_columns(cols)
    fits = (params.group_size is None and params.block is None) or group >= cols or group % 32 == 0
    return params.bits in (2, 3, 4, 8) and not params.msb and cols > 0 and fits
