"""Casts between element types for codecs, which round once and never lose values silently.

Allowed: float to float, integer or bool to float, complex to complex, and integer to an integer type with all of its
values. Refused: float to integer, complex to real, and any type to a packed type or a type of scales (``f8_e8m0fnu``).
Rounding is to nearest, ties to even. A NaN stays a NaN, perhaps with another payload.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ingot.core.numeric import dtypes as floats
from ingot.core.numeric.dtypes import DTYPES, dtype, numpy_dtype
from ingot.errors import CodecError, UnsupportedError
from ingot.model.tensor import Array

# Elements per step, so that temporaries stay in the second-level cache.
_CHUNK = 1 << 16
_FLOAT_TARGETS = ("f64", "f32", "f16", "bf16", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")
_EXPONENT_BITS = {"f16": 0x7C00, "bf16": 0x7F80}
# Every integer up to this one is an f64.
_EXACT_INTEGER = 2**53


def flat(array: Array) -> Array:
    """Return the 1-d view of a C-contiguous array; raise ``ValueError`` if that needs a copy."""
    if not array.flags.c_contiguous:
        raise ValueError("expected a C-contiguous array, found a strided one")
    return array.reshape(-1)


def require_cast(source: str, target: str, location: str | None = None) -> None:
    """Raise ``UnsupportedError`` ``dense.cast`` if a cast from ``source`` to ``target`` is not allowed."""
    if not _allowed(source, target):
        message = f"Ingot does not cast {source} to {target}, because values may be lost; choose another type"
        raise UnsupportedError(message, rule="dense.cast", where=location)


@cache
def _allowed(source: str, target: str) -> bool:
    if source == target:
        return True
    old = DTYPES[source]
    new = DTYPES[target]
    if old.bits < 8 or new.bits < 8:
        return False
    if old.category == "c" or new.category == "c":
        return old.category == new.category
    if new.category == "f":
        return target in _FLOAT_TARGETS
    return old.category != "f" and np.can_cast(numpy_dtype(source), numpy_dtype(target), "safe")


@cache
def exact_cast(source: str, target: str) -> bool:
    """Return whether ``target`` has every value of ``source``, including infinities but not NaN payloads."""
    if source == target:
        return True
    if not _allowed(source, target):
        return False
    old = DTYPES[source]
    new = DTYPES[target]
    if old.category == "c":
        return old.bits <= new.bits
    if new.category != "f":
        return True
    limits = _finfo(target)
    if old.category == "f":
        mine = _finfo(source)
        finer = float(limits.smallest_subnormal) <= float(mine.smallest_subnormal)
        return bool(limits.nmant >= mine.nmant and finer and _covers(source, target))
    digits = old.bits - (old.category == "i") if old.category != "b" else 1
    return bool(limits.nmant + 1 >= digits and float(limits.max) >= 2.0**digits)


def cast(array: Array, target: str, location: str | None = None) -> Array:
    """Return ``array`` as ``target``, C-contiguous; without a copy if nothing changes.

    Raises
    ------
    UnsupportedError
        The cast is not allowed (``dense.cast``).
    CodecError
        A finite value would become infinite or NaN, or an infinity a NaN (``dense.overflow``); an integer exceeds 2**53
        in magnitude (``dense.inexact``).
    """
    new_dtype = numpy_dtype(target)
    if array.dtype == new_dtype:
        return np.ascontiguousarray(array).reshape(array.shape)
    out = np.empty(array.shape, new_dtype)
    cast_into(np.ascontiguousarray(array), out, location)
    return out


def cast_into(array: Array, out: Array, location: str | None = None) -> None:
    """Cast ``array`` into ``out`` (same number of elements, both C-contiguous); raises the errors of ``cast``."""
    source = dtype(array.dtype)
    target = dtype(out.dtype)
    require_cast(source.name, target.name, location)
    values = flat(array)
    rounded = flat(out)
    source_name = source.name
    target_name = target.name
    if source.category == "c" and source is not target:
        values = values.view(numpy_dtype(source.storage))
        rounded = rounded.view(numpy_dtype(target.storage))
        source_name = source.storage
        target_name = target.storage
    with np.errstate(all="ignore"):  # overflow is checked, underflow rounds, and signalling NaNs are values like others
        for start in range(0, values.size, _CHUNK):
            stop = start + _CHUNK
            _cast_chunk(values[start:stop], rounded[start:stop], source_name, target_name, location)


def _cast_chunk(array: Array, out: Array, source: str, target: str, location: str | None) -> None:
    if source == target or DTYPES[target].category != "f":
        out[...] = array
        return
    values = array
    if DTYPES[source].category != "f":
        values = _exact_f64(array, location)
        source = "f64"
    # NumPy casts the types that the native kernel lacks, through float32.
    native = source in floats.FLOATS and target in floats.FLOATS
    if native and values.flags.aligned and out.flags.aligned:
        floats.cast_into(values, out)
    else:
        out[...] = _once(values, source, target)
    if not _covers(source, target):
        _check_class(values, out, target, location)


def _once(values: Array, source: str, target: str) -> Array:
    """Return ``values`` in a type from which the cast to ``target`` rounds correctly, so that there is one rounding."""
    if source == "f64" and target not in ("f64", "f32", "f16"):
        return _round_to_odd(values)  # ml_dtypes casts float64 by way of float32
    if source not in ("f64", "f32"):
        wider: Array = values.astype(np.float32)  # exact: every narrower float is a float32
        return wider
    return values


def _round_to_odd(values: Array) -> Array:
    """Return f64 values as f32; inexact ones are truncated and get the last bit set.

    A second rounding, to a type with at least two bits less, then gives the correctly rounded value (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Transactions on Computers 57(4), 2008, section 3).
    """
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    inexact = (back != values) & ~np.isnan(values)
    bits = nearest.view(np.uint32)
    bits = bits - (inexact & (np.abs(back) > np.abs(values)))
    truncated: Array = (bits | inexact).astype(np.uint32)
    return truncated.view(np.float32)


def _exact_f64(array: Array, location: str | None) -> Array:
    if array.dtype.kind in "iu" and array.dtype.itemsize == 8:
        beyond = array > _EXACT_INTEGER
        if array.dtype.kind == "i":
            beyond |= array < -_EXACT_INTEGER
        if beyond.any():
            value = int(array[int(np.argmax(beyond))])
            raise CodecError(
                "dense.inexact",
                f"expected integers of at most 2**53 in magnitude to cast, found {value}",
                where=location,
            )
    exact: Array = array.astype(np.float64)
    return exact


def _check_class(values: Array, out: Array, target: str, location: str | None) -> None:
    mask = _EXPONENT_BITS.get(target)
    if mask is not None and (out.view(np.uint16) & mask).max(initial=0) < mask:
        return  # all finite: the result of isfinite, several times faster
    infinite = ~np.isfinite(out)
    if not infinite.any():
        return
    before = values[infinite].astype(np.float64)
    after = out[infinite].astype(np.float64)
    changed = np.isnan(before) != np.isnan(after)
    changed |= np.isinf(before) != np.isinf(after)
    if changed.any():
        value = float(before[int(np.argmax(changed))])
        raise CodecError(
            "dense.overflow",
            f"expected values of at most {float(_finfo(target).max):g}, the largest {target}, found {value:g}",
            where=location,
        )


@cache
def _covers(source: str, target: str) -> bool:
    """Return whether all values of ``source`` are within the range of ``target``."""
    return bool(float(_finfo(target).max) >= float(_finfo(source).max) and (_has_inf(target) or not _has_inf(source)))


@cache
def _has_inf(name: str) -> bool:
    infinite = np.full(1, np.inf, np.float32).astype(numpy_dtype(name))
    return bool(np.isinf(infinite.astype(np.float32))[0])


@cache
def _finfo(name: str) -> Any:
    if name in ("f64", "f32", "f16"):
        return np.finfo(numpy_dtype(name))
    import ml_dtypes  # noqa: PLC0415 - slow to import; only casts to these types need it, as in core.dtypes

    finfo: Any = ml_dtypes.finfo
    return finfo(numpy_dtype(name))
