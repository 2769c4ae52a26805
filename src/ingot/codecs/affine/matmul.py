"""Products with packed weights of the affine family (``spec/affine.md``, "Multiplying")."""

from __future__ import annotations

import numpy as np

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.rows import decode_rows
from ingot.codecs.tiles import Product
from ingot.core.numeric.dtypes import as_bits, float_name, numpy_dtype, written
from ingot.core.runtime import native
from ingot.errors import CodecError, IngotError, UnsupportedError
from ingot.model.layouts.affine import AffineLayout, canonical
from ingot.model.tensor import Array, Tensor

BATCH = {"f32": 32, "f16": 4, "bf16": 4}
"""By type of x, the largest number of rows for which ``matmul`` is fastest. For more rows, ``gemm`` is used in 16 bits,
and decoded blocks of rows in f32, because products of f32 with codes are not exact and need two instructions."""

_LARGEST_POINT = 1 << 15


class PackedMatrix:
    """A matrix ``w`` [rows, cols] that is stored as codes, scales and zero points.

    Parameters
    ----------
    params : AffineLayout
        A layout that ``packed_params`` returned.
    shape : rows, cols
    packed : u8, rows * params.row_bytes(cols)
        Not copied: a mapped file stays mapped.
    scales, zeros : arrays of ``params.scale_shape(rows, cols)``, in any number of dimensions; f32, f16 or bf16
        Both have the same type. ``zeros`` is None if ``params.zeros`` is false.

    Raises
    ------
    CodecError
        ``affine.size``: an array has another size.
    """

    def __init__(
        self, params: AffineLayout, shape: tuple[int, int], packed: Array, scales: Array, zeros: Array | None
    ) -> None:
        self.params = params
        self.shape = shape
        self.packed = packed.reshape(-1).view(np.uint8)
        self.scales = scales.reshape(-1)
        self.zeros = None if zeros is None else zeros.reshape(-1)
        self._check()
        self._direct = multiplies(params, shape[1])
        self._takes_gemm = in_blocks(params, shape[1])
        self._native = self._open() if self._direct or self._takes_gemm else None

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> PackedMatrix:
        """Return the matrix of a 2-d tensor without copying its parts.

        Raises
        ------
        CodecError
            The checks of ``AffineCodec.check``.
        UnsupportedError
            ``matmul.layout``: the tensor cannot stay packed.
        """
        params = packed_params(tensor)
        packed = np.frombuffer(tensor.parts["packed_weight"].view(), np.uint8)
        zeros = tensor.parts["zeros"].array() if params.zeros else None
        return cls(params, tensor.matrix_shape, packed, tensor.parts["scales"].array(), zeros)

    @property
    def direct(self) -> bool:
        """Whether ``matmul`` supports this layout: 4 or 8 bits, the first code in the low bits of a byte."""
        return self._direct

    @property
    def takes_gemm(self) -> bool:
        """Whether ``gemm`` supports this layout: 2, 3, 4 or 8 bits, low bits first, groups of 32n columns."""
        return self._takes_gemm

    def matmul(self, x: Array, out: Array, bias: Array | None = None, workers: int = 1) -> None:
        """Write ``x @ w.T + bias`` to ``out``, summed in f32 in a fixed order and rounded once.

        The result does not depend on the number of workers or on the instruction set.

        Parameters
        ----------
        x : [m, cols], at most 64 rows; f32, f16 or bf16
        out : [m, rows] of the element type of ``x``, C order
        bias : [rows], f32, f16 or bf16
        workers : int
            The number of threads, including the calling one.

        Raises
        ------
        ValueError
            Sizes or types contradict each other, or ``direct`` is false.
        """
        name = float_name(x)
        types = (name, name if bias is None else float_name(bias))
        self.matmul_bits(as_bits(x), written(out), None if bias is None else as_bits(bias), types, workers)

    def matmul_bits(self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int) -> None:
        """Run ``matmul`` on arrays with u16 for f16 and bf16; ``types`` are the dtypes of ``x`` and ``bias``.

        For speed, only sizes are checked.
        """
        self.native_matrix().matmul(x, bias, out, types[0], types[1], workers)

    def gemm(self, x: Array, out: Array, bias: Array | None = None, workers: int = 1) -> None:
        """Write ``x @ w.T + bias`` to ``out`` for any number of rows of ``x``; weights are unpacked once per 256 rows.

        The order of sums differs from ``matmul`` ("Many rows" in ``spec/affine.md``). A row's result does not depend on
        the number of rows. Raises ``ValueError`` if sizes or types contradict each other, or ``takes_gemm`` is false.
        """
        name = float_name(x)
        types = (name, name if bias is None else float_name(bias))
        self.gemm_bits(as_bits(x), written(out), None if bias is None else as_bits(bias), types, workers)

    def gemm_bits(self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int) -> None:
        """Run ``gemm`` on arrays of the types that ``matmul_bits`` expects."""
        self.native_matrix().gemm(x, bias, out, types[0], types[1], workers)

    @property
    def rounds(self) -> bool:
        """Whether ``int8`` supports this layout: ``gemm`` does, and the zero point is at most 2^15."""
        return self._takes_gemm and abs(self.params.zero_point or 0) <= _LARGEST_POINT

    def int8(self, x: Array, out: Array, bias: Array | None = None, workers: int = 1, *, dots: bool = True) -> None:
        """Run ``gemm`` with ``x`` rounded to 8 bits in blocks of 32 columns.

        See "Activations in 8 bits" in ``spec/affine.md``. ``dots`` allows instructions that only some processors have;
        the result is the same. Raises ``ValueError`` if sizes or types contradict each other, or ``rounds`` is false.
        """
        name = float_name(x)
        types = (name, name if bias is None else float_name(bias))
        self.int8_bits(as_bits(x), written(out), None if bias is None else as_bits(bias), types, workers, dots=dots)

    def int8_bits(
        self, x: Array, out: Array, bias: Array | None, types: tuple[str, str], workers: int, *, dots: bool = True
    ) -> None:
        """Run ``int8`` on arrays of the types that ``matmul_bits`` expects."""
        self.native_matrix().int8(x, bias, out, types[0], types[1], workers, dots)

    def native_matrix(self) -> native.kernels.PackedMatrix:
        """Return the native matrix; raise ``ValueError`` if the kernels do not support this layout."""
        if self._native is None:
            raise ValueError("expected a layout that the kernels support; decode the matrix")
        return self._native

    def choose_product(self, dtype: str, rows: int) -> Product | None:
        """Return the kernel for ``rows`` rows of x in ``dtype``; None if decoding the matrix is faster."""
        if rows <= BATCH[dtype] and self._direct:
            return self.matmul_bits
        return self.gemm_bits if self._takes_gemm and dtype != "f32" else None

    def parts(self) -> dict[str, Array]:
        """Return the parts of the stored tensor by role."""
        parts = {"packed_weight": self.packed, "scales": self.scales}
        return parts if self.zeros is None else {**parts, "zeros": self.zeros}

    def decode(self, start: int, stop: int, dtype: str, workers: int | None = None) -> Array:
        """Return rows ``start`` to ``stop`` in f32, f16 or bf16; raises ``CodecError`` ``affine.overflow``."""
        out = np.empty((stop - start, self.shape[1]), numpy_dtype(dtype))
        self.decode_into(start, out, workers)
        return out

    def decode_into(self, start: int, out: Array, workers: int | None = None) -> None:
        """Decode ``len(out)`` rows from row ``start`` on into ``out`` [n, cols], in the type of ``out``.

        Raises the errors of ``decode``.
        """
        stop = start + len(out)
        row_bytes = self.params.row_bytes(self.shape[1])
        scales = self._scales_per_row()
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
        expected = (self.params.packed_bytes(rows, cols), count, count if self.params.zeros else None)
        sizes = (self.packed.size, self.scales.size, None if self.zeros is None else self.zeros.size)
        if expected != sizes:
            raise CodecError("affine.size", f"expected codes, scales and zeros of sizes {expected}, found {sizes}")

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
    """Return whether ``PackedMatrix.from_tensor`` supports a tensor, according to its attributes.

    If ``direct`` is set, ``matmul`` must support the layout too. Reads no weights and raises no error.
    """
    try:
        params = packed_params(tensor)
    except IngotError:
        return False
    return not direct or multiplies(params, tensor.shape[1])


def packed_params(tensor: Tensor) -> AffineLayout:
    """Return the layout of a tensor whose rows can be decoded separately; reads no weights.

    Raises
    ------
    CodecError
        The checks of ``AffineCodec.check``.
    UnsupportedError
        ``matmul.layout``: the tensor is no matrix of codec ``affine`` in which each row begins at a byte and has its
        own scales.
    """
    if tensor.codec == AffineCodec.id and len(tensor.shape) == 2:
        AffineCodec().check(tensor)
        params = canonical(AffineLayout.from_tensor(tensor), tensor.shape)
        if params.matrix is None and params.block is None and params.in_rows(tensor.shape[1]):
            return params
    raise UnsupportedError(
        "expected a matrix of codec affine in rows of whole bytes with scales along the rows, found codec "
        f"{tensor.codec} of shape {list(tensor.shape)}; decode it",
        rule="matmul.layout",
        where=tensor.name,
    )


def multiplies(params: AffineLayout, cols: int) -> bool:
    """Return whether ``matmul`` supports the layout: 4 or 8 bits, first code lowest, groups that fill 4-byte words."""
    group = params.group_columns(cols)
    fits = (params.group_size is None and params.block is None) or group >= cols or group % (32 // params.bits) == 0
    return params.bits in (4, 8) and not params.msb and cols > 0 and fits


def in_blocks(params: AffineLayout, cols: int) -> bool:
    """Return whether ``gemm`` supports the layout: 2, 3, 4 or 8 bits, first code lowest.

    Groups must be multiples of 32 columns, or a row must be one group.
    """
    group = params.group_columns(cols)
    fits = (params.group_size is None and params.block is None) or group >= cols or group % 32 == 0
    return params.bits in (2, 3, 4, 8) and not params.msb and cols > 0 and fits
