"""Convert a tensor to the weight of a kernel unit: with its stored codes if they stream, otherwise as fp16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.codecs.sparse.mask_read import read_mask
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import UsageError
from ingot.ext.ane.chips.gates import Decision
from ingot.ext.ane.chips.kernel_format import e4m3_numbers, unpack_lsb
from ingot.ext.ane.chips.storage_form import BLOCKWISE, FP8, PALETTE, SPARSE, StorageForm, run_of
from ingot.ext.ane.kernel_units.header import MAX_UNITY
from ingot.ext.ane.kernel_units.pack import KernelWeight
from ingot.model.tensor import Array, Tensor


def dense(tensor: Tensor) -> KernelWeight:
    """Return a weight as fp16. Raises ``UsageError`` ``ane.layout`` for values that fp16 cannot represent as finite
    numbers.
    """
    return KernelWeight(tensor.shape, _finite(tensor.numpy("f16"), tensor.name), 16)


def _finite(values: Array, location: str) -> Array:
    if not np.isfinite(values).all():
        raise UsageError("expected finite values in the range of float16", rule="ane.layout", where=location)
    return values


def halves(tensor: Tensor, name: str, channels: int) -> Array:
    """Return a bias as fp16, [channels].

    Raises ``UsageError`` ``ane.layout`` if it has another shape, or values outside the range of fp16.
    """
    if tensor.shape != (channels,):
        raise UsageError(f"expected a bias of [{channels}], found {list(tensor.shape)}", rule="ane.layout", where=name)
    return _finite(tensor.numpy("f16"), name)


def stored(tensor: Tensor, storage_form: StorageForm, decision: Decision) -> KernelWeight:
    """Return the weight with its codes or indices, in the storage form ``storage_form``.

    Raises
    ------
    UsageError
        ``ane.layout``: NaN, or scales or zero points that a unit cannot store.
    """
    inner = storage_form if storage_form.inner is None else storage_form.inner
    mask = None
    if storage_form.category == SPARSE:
        values = tensor.numpy("f16")
        mask = read_mask(tensor)
        if storage_form.inner is None:
            return KernelWeight(tensor.shape, _finite(values, tensor.name), 16, mask=mask)
    if inner.category == PALETTE:
        params = tensor.params if mask is None else tensor.params["inner"]["params"]
        return _widened(_palette(tensor, params, mask), decision.stored_bits)
    if inner.category == FP8:
        codes = _bytes(tensor, "data").reshape(tensor.shape)
        if not np.isfinite(e4m3_numbers(codes)).all():
            raise UsageError("expected finite weights, found NaN", rule="ane.layout", where=tensor.name)
        return KernelWeight(tensor.shape, codes, 8)
    return _integers(tensor, inner, mask)


def _bytes(tensor: Tensor, role: str) -> Array:
    return np.frombuffer(tensor.parts[role].view(), np.uint8)


def _integers(tensor: Tensor, storage_form: StorageForm, mask: Array | None) -> KernelWeight:
    """Return int8 values with their scales, and zero points if the codes exceed the range of int8.

    The codes are computed from decoded values, so the packing does not matter. Each value is the scale times an integer
    of at most nine bits, so the rounded quotient is that integer.
    """
    shape = tensor.shape
    channels = tensor.shape[0]
    params = tensor.params if mask is None else tensor.params["inner"]["params"]
    values = tensor.numpy("f32").reshape(channels, -1).astype(np.float64)
    run = run_of(shape, params) if storage_form.category == BLOCKWISE else None
    scales = _floats(tensor, "scales").reshape(-1)
    scale = scales.reshape(channels, -1) if run else np.broadcast_to(scales.reshape(-1, 1), (channels, 1))
    spread = np.repeat(scale, run, axis=1)[:, : values.shape[1]] if run else scale
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(spread == 0, 0.0, values / spread)
    codes = np.rint(quotient)
    if not (np.abs(codes - quotient) <= 0.01).all():
        raise UsageError("expected zero points that are integers", rule="ane.layout", where=tensor.name)
    factors = _factors(scale, tensor.name)
    zero = None
    if codes.size and not (codes.min() >= -128 and codes.max() <= 127):
        low = codes.min(axis=1)
        high = codes.max(axis=1)
        zero = np.where(low < -128, -128 - low, np.minimum(0, 127 - high))
        codes = codes + zero[:, None]
        if not (codes.min() >= -128 and codes.max() <= 127 and np.abs(zero).max() <= 128):
            raise UsageError("expected codes of at most 8 bits", rule="ane.layout", where=tensor.name)
        zero = zero.astype(np.int8)
    if mask is not None:
        codes = np.where(mask.reshape(codes.shape), codes, 0)
    values_int8 = codes.astype(np.int8).reshape(shape)
    if run:
        return KernelWeight(shape, values_int8, 8, mask=mask, scale=factors, block=run)
    return KernelWeight(shape, values_int8, 8, mask=mask, scale=factors[:, 0].copy(), zero=zero)


def _factors(scale: Array, location: str) -> Array:
    """Return ``scale`` as float16 if float16 represents it exactly, else as float32; a unit can store both types
    (B25).
    """
    halves = _rounded(scale)
    return halves if np.array_equal(halves.astype(np.float32), scale) else _finite(scale.astype(np.float32), location)


def _rounded(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _widened(weight: KernelWeight, bits: int | None) -> KernelWeight:
    """Return a palette with indices of ``bits``; its codebooks are padded with zeros to 2**bits entries.

    If the weight has no codebooks, or if ``bits`` is None, it is returned unchanged.
    """
    if bits is None or weight.codebooks is None:
        return weight
    more = (1 << bits) - weight.codebooks.shape[1]
    return replace(weight, bits=bits, codebooks=np.pad(weight.codebooks, ((0, 0), (0, more), (0, 0))))


def identity(weight: KernelWeight) -> KernelWeight:
    """Return a diagonal matrix as an identity with a scale per channel; return any other weight unchanged."""
    channels = weight.shape[0]
    if weight.values.dtype != np.float16 or weight.mask is not None or channels * channels != weight.values.size:
        return weight
    square = weight.values.reshape(channels, channels)
    diagonal = square.diagonal()
    if channels > MAX_UNITY or not diagonal.any() or np.count_nonzero(square) != np.count_nonzero(diagonal):
        return weight
    return replace(weight, values=np.zeros(0, np.float16), scale=diagonal.copy(), unity=True)


def _floats(tensor: Tensor, role: str) -> Array:
    part = tensor.parts[role]
    return _bytes(tensor, role).view(numpy_dtype(part.type or part.dtype)).astype(np.float32)


def _palette(tensor: Tensor, params: Mapping[str, Any], mask: Array | None = None) -> KernelWeight:
    shape = tensor.shape
    bits = params["bits"]
    vector = params.get("vector_size", 1)
    groups = list(params.get("groups", ()))
    tensor.numpy()  # the codec's own checks of sizes and digests
    books = groups[0] if groups else 1
    stored = tensor.parts["codebook"].dtype
    table = _bytes(tensor, "codebook").view({"i8": np.int8, "u8": np.uint8}[stored]) if stored in ("i8", "u8") else None
    halves = _finite(_floats(tensor, "codebook").astype(np.float16), tensor.name) if table is None else table
    scale = None
    if "codebook_scales" in tensor.parts:
        scales = np.repeat(_floats(tensor, "codebook_scales"), shape[0] // books)
        scale = _factors(scales, tensor.name)
    count = tensor.size // vector
    role = "indices" if mask is None else "nonzeros"
    count_stored = count if mask is None else int(np.count_nonzero(mask))
    indices = unpack_lsb(_bytes(tensor, role), bits, count_stored)
    if mask is not None:
        full = np.zeros(count, np.uint8)
        full[mask.reshape(-1)] = indices
        indices = full
    values = indices.reshape(shape[0] // vector, -1)
    kept_rows = None if mask is None else mask.reshape(values.shape)
    return KernelWeight(shape, values, bits, halves.reshape(books, 1 << bits, vector), kept_rows, scale)
