"""Plan the entropy coding of packed weights: the same codes and scales, in the encoding ``ingot.packed/1``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ingot.codecs.table import CODECS, stored_exactly
from ingot.conversion.candidates import compressed_size
from ingot.core.bytes.packed import PACKED
from ingot.engine.steps import recode
from ingot.engine.work import Step
from ingot.formats.base import RAW, Format
from ingot.model.part import Part
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor

_RUN = 1 << 19  # bytes of a run of a part that is sampled
_RUNS = 4
_WORTHWHILE = 0.995
"""A part is encoded only if its encoded sample is at most this share of the sample, because decoding takes time."""


def plan_packed(tensor: Tensor, format: Format, rule: str) -> Step | None:
    """Return the step that stores a quantized tensor unchanged, with its parts entropy-coded if that is smaller.

    Returns None if the tensor is not quantized, if coding does not make it smaller, or if the format cannot store the
    encoding.
    """
    if tensor.codec not in CODECS or stored_exactly(tensor):
        return None
    spec = tensor.spec()
    raw = in_encoding(spec, RAW)
    parts = tuple(_smaller(raw, part, tensor.parts[part.role]) for part in raw.parts)
    packed = replace(spec, parts=parts)
    if all(part.encoding == RAW for part in parts) or format.why_unsupported(packed) is not None:
        return None
    if all(part.encoding == tensor.parts[part.role].encoding for part in parts):
        return None
    return recode(tensor, packed, f"{rule} ({tensor.codec} {PACKED})")


def in_encoding(spec: TensorSpec, encoding: str) -> TensorSpec:
    """Return the spec of a tensor with the same parts in an encoding."""
    return replace(spec, parts=tuple(_in_encoding(part, encoding) for part in spec.parts))


def _in_encoding(part: PartSpec, encoding: str) -> PartSpec:
    if encoding == RAW:
        return replace(part, encoding=RAW, length=part.nbytes, uncompressed_length=None)
    return replace(part, encoding=encoding, length=None, uncompressed_length=part.nbytes)


def _smaller(spec: TensorSpec, part: PartSpec, stored: Part) -> PartSpec:
    """Return the spec of an entropy-coded part if a sample becomes smaller; else the spec of the raw part."""
    sample = _sample(stored)
    packed = _in_encoding(part, PACKED)
    return packed if compressed_size(spec, packed, sample) <= _WORTHWHILE * sample.nbytes else part


def _sample(part: Part) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return evenly spaced runs of a part's decoded bytes, or all of a small part. Digests are not checked."""
    unchecked = replace(part, verify=False)
    if part.nbytes <= _RUNS * _RUN:
        return np.frombuffer(unchecked.view(), np.uint8)
    out = np.empty(_RUNS * _RUN, np.uint8)
    for index in range(_RUNS):
        start = index * (part.nbytes - _RUN) // (_RUNS - 1)
        unchecked.readinto(start, out[index * _RUN : (index + 1) * _RUN].data)
    return out
