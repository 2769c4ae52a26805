"""Determine the storage form of a weight, in the engine's terms, from its codec id and parameters.

The gates decide on a form, and its sizes are formulas over the shape (``spec/ane.md``). No weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import codec_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.sparse import MaskLayout

DENSE = "dense"
FP8 = "fp8"
INTEGER = "int"
BLOCKWISE = "blockwise"
PALETTE = "palette"
SPARSE = "sparse"
FOREIGN = "foreign"
_Parts = Mapping[str, str]
_HALF = 2  # bytes of an fp16, the type of values, scales and most codebooks
_ENTRY_BYTES = {"half": 2, "int8": 1, "uint8": 1, "e4m3": 1}
_ENTRIES = {"f16": "half", "bf16": "half", "f32": "half", "i8": "int8", "u8": "uint8"}


@dataclass(frozen=True, slots=True)
class StorageForm:
    """The storage of a weight, in the terms of the engine.

    Parameters
    ----------
    category : str
        ``dense`` (moved as fp16), ``fp8``, ``int`` (one scale per tensor or output channel), ``blockwise`` (finer
        scales), ``palette``, ``sparse`` (a mask, and the values that it selects), ``foreign`` (the engine has no
        equivalent form, so the weight is decoded first).
    elements : int
        Number of elements of the tensor.
    bits : int
        Bits of one stored value, code or index; for ``sparse``, of a selected value.
    entry : str
        Type of the codebook entries of a palette: ``half``, ``int8``, ``uint8`` or ``e4m3``; type of the values of
        ``fp8``: ``e4m3`` or ``e5m2``.
    zero_point : bool
        Whether the integers have zero points or offsets.
    codebooks, vector : int
        Number of codebooks of a palette, and number of elements per index.
    scales : int
        Number of fp16 scales stored with the weight.
    nonzeros : int or None
        Number of selected elements of a ``sparse`` weight.
    inner : StorageForm or None
        Form of the selected elements of a ``sparse`` weight; None if they are plain fp16.
    codec : str
        The codec id, for messages.
    misfit : str
        Reason why the engine has no such layout, so that the weight is decoded first; empty if it has this layout.
    """

    category: str
    elements: int
    bits: int = 16
    entry: str = "half"
    zero_point: bool = False
    codebooks: int = 1
    vector: int = 1
    scales: int = 0
    nonzeros: int | None = None
    inner: StorageForm | None = None
    codec: str = ""
    misfit: str = ""

    @property
    def label(self) -> str:
        """Short name: ``dense``, ``int8``, ``blockwise4``, ``palette4``, ``sparse``, ``sparse+palette4``."""
        if self.category == SPARSE:
            return SPARSE if self.inner is None else f"{SPARSE}+{self.inner.label}"
        if self.category in (INTEGER, BLOCKWISE, PALETTE):
            return f"{self.category}{self.bits}"
        return self.entry if self.category == FP8 else self.category

    @property
    def dense_bytes(self) -> int:
        """The number of bytes of the weight as dense fp16, which move to the engine if the weight folds."""
        return _HALF * self.elements

    @property
    def table_bytes(self) -> int:
        """The number of bytes of the codebooks."""
        inner = self.inner if self.category == SPARSE and self.inner is not None else self
        if inner.category != PALETTE:
            return 0
        return inner.codebooks * (1 << inner.bits) * inner.vector * _ENTRY_BYTES[inner.entry]

    @property
    def streamed_bytes(self) -> int:
        """The number of bytes that move if the weight streams.

        They are ``n * bits / 8`` bytes of codes or indices, ``n / 8`` bytes of a mask, the tables, and the scales.
        """
        scales = _HALF * self.scales
        if self.category == SPARSE:
            nonzero_count = self.elements if self.nonzeros is None else self.nonzeros
            bits = 16 if self.inner is None else self.inner.bits
            return -(-self.elements // 8) + -(-nonzero_count * bits // 8) + self.table_bytes + scales
        if self.category == PALETTE:
            return -(-self.elements // self.vector * self.bits // 8) + self.table_bytes + scales
        if self.category in (INTEGER, BLOCKWISE):
            zeros = self.scales if self.zero_point else 0
            return -(-self.elements * self.bits // 8) + scales + zeros
        return self.elements if self.category == FP8 else self.dense_bytes

    @property
    def density(self) -> float:
        """Share of the elements that the mask selects; 1 unless sparse."""
        return 1.0 if self.nonzeros is None or not self.elements else self.nonzeros / self.elements


def form_of(
    codec: str, shape: tuple[int, ...], dtype: str, params: Mapping[str, Any], parts: Mapping[str, str] | None = None
) -> StorageForm:
    """Return the storage form of a tensor.

    Parameters
    ----------
    codec : str
        An id of ``ingot.codecs``, as text; the form of any other codec is ``foreign``.
    shape, dtype, params :
        Shape, dtype and codec parameters of the tensor, as the codec's spec page lists them. If a parameter is missing
        or invalid, the form is ``foreign``.
    parts : mapping, optional
        Storage type of each part, by role. If None, codebooks are assumed to be f16 without scales.
    """
    size = prod(shape)
    make = _MAKERS.get(codec)
    try:
        storage_form = make(shape, dtype, params, parts or {}) if make is not None else None
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        storage_form = None  # the parameters come from a file; the codec raises the precise error when it decodes
    return StorageForm(FOREIGN, size, codec=codec) if storage_form is None else storage_form


def _dense(shape: tuple[int, ...], dtype: str, params: Mapping[str, Any], parts: _Parts) -> StorageForm | None:
    size = prod(shape)
    if dtype in ("f8_e4m3fn", "f8_e5m2"):
        return StorageForm(FP8, size, 8, "e4m3" if dtype == "f8_e4m3fn" else "e5m2", codec=DenseLayout.codec)
    return StorageForm(DENSE, size, codec=DenseLayout.codec) if dtype in ("f16", "bf16", "f32", "f64") else None


def _affine(shape: tuple[int, ...], dtype: str, params: Mapping[str, Any], parts: _Parts) -> StorageForm | None:
    size = prod(shape)
    bits = _within(params["bits"], 1, 8)
    scales, fine = _scales(shape, params)
    zeros = "zeros" in parts or bool(params.get("zeros")) or _shifted(params, bits)
    misfit = "offsets are no zero points" if params.get("zero_kind") == "offset" else ""
    if fine and run_of(shape, params) is None:
        misfit = "blocks are runs of one output channel's weights"
    category = BLOCKWISE if fine else INTEGER
    return StorageForm(category, size, bits, zero_point=zeros, scales=scales, codec=AffineLayout.codec, misfit=misfit)


def _shifted(params: Mapping[str, Any], bits: int) -> bool:
    """Return whether the weight needs zero points on the engine.

    If the zero point is the middle code, it needs none, because signed codes have the same values.
    """
    point = params.get("zero_point")
    return bool(point) and (params.get("signed") is True or point != 1 << (bits - 1))


def run_of(shape: tuple[int, ...], params: Mapping[str, Any]) -> int | None:
    """Return the number of consecutive weights of an output channel that share a scale.

    Return None if the weights that share a scale are not consecutive.

    ``params`` are the parameters of ``affine`` with more than one scale per output channel.
    """
    granularity = params.get("granularity", "group")
    if granularity == "blocks":
        block = params["block"]
        return int(block[-1]) if all(size == 1 for size in block[:-1]) else None
    rows, cols = params.get("matrix") or (prod(shape[:-1]), shape[-1])
    if rows % shape[0]:
        return None
    if granularity == "row":
        return int(cols)
    step = int(params["group_size"])
    return step if rows == shape[0] or cols % step == 0 else None


def _scales(shape: tuple[int, ...], params: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the number of scales, and whether they are finer than one per output channel (the first dimension)."""
    channels = shape[0] if shape else 1
    granularity = params.get("granularity", "group")
    if granularity == "tensor":
        return 1, False
    if granularity == "blocks":
        blocks = [-(-size // _within(step, 1, 2**62)) for size, step in zip(shape, params["block"], strict=True)]
        return prod(blocks), prod(blocks[1:]) != 1
    rows, cols = params.get("matrix") or (prod(shape[:-1]), shape[-1] if shape else 1)
    if granularity == "row":
        return rows, rows not in (1, channels)
    groups = -(-cols // _within(params["group_size"], 1, 2**62))
    return rows * groups, rows * groups not in (1, channels) or groups != 1


def _palette(shape: tuple[int, ...], dtype: str, params: Mapping[str, Any], parts: _Parts) -> StorageForm | None:
    bits = _within(params["bits"], 1, 8)
    vector = _within(params.get("vector_size", 1), 1, 64)
    count = prod(_within(part, 1, 2**62) for part in params.get("groups", (1,)))
    entry = _ENTRIES[parts.get("codebook", "f16")]
    scales = count if "codebook_scales" in parts else 0
    across = vector > 1 and params.get("vector_axis", 0) != 0
    misfit = "vectors lie along the output channels" if across else ""
    if any(part != 1 for part in tuple(params.get("groups", (1,)))[1:]):
        misfit = "codebooks serve runs of output channels"
    return StorageForm(
        PALETTE,
        prod(shape),
        bits,
        entry,
        codebooks=count,
        vector=vector,
        scales=scales,
        codec=PaletteLayout.codec,
        misfit=misfit,
    )


def _sparse(shape: tuple[int, ...], dtype: str, params: Mapping[str, Any], parts: _Parts) -> StorageForm | None:
    size = prod(shape)
    nonzeros = _within(params["nnz"], 0, size)
    inner = form_of(codec_of(params["inner"]["codec"]), shape, dtype, params["inner"].get("params", {}), parts)
    if inner.category in (FOREIGN, FP8, SPARSE):
        return None
    nonzero_form = None if inner.category == DENSE else inner
    return StorageForm(SPARSE, size, scales=inner.scales, nonzeros=nonzeros, inner=nonzero_form, codec=MaskLayout.codec)


def _within(value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(value)
    return value


_MAKERS = {
    DenseLayout.codec: _dense,
    AffineLayout.codec: _affine,
    PaletteLayout.codec: _palette,
    MaskLayout.codec: _sparse,
}
