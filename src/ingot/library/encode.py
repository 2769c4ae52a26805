"""Encode an object as a delta, with an entropy code, in zstd or raw, whichever is smallest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.codecs.base import STEP
from ingot.codecs.delta.exact import ID as DELTA
from ingot.codecs.delta.exact_chunks import is_coded as has_delta
from ingot.codecs.delta.exact_chunks import pack, params_for
from ingot.codecs.lossless.float_entropy import EntropyCodec
from ingot.codecs.lossless.float_entropy_rows import is_coded as has_entropy
from ingot.codecs.table import CODECS
from ingot.core.bytes.encodings import FRAME, compress_frame
from ingot.core.numeric.dtypes import DTYPES, from_file, numpy_dtype
from ingot.core.runtime.parallel import default_workers, for_ranges, ordered
from ingot.formats.base import WriteOptions
from ingot.formats.detect import FORMATS
from ingot.library.objects import StorageForm
from ingot.model.artifact import Artifact
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Array
from ingot.stores.local import LocalTarget

MIN_DELTA = 1 << 14
"""The minimum size in bytes of an object that may be stored as a delta.

The file of a smaller object would be mostly overhead.
"""

DELTA_SUFFICES = 4
"""If the values are at least this number of times larger than their delta, other codecs are not tried.

Entropy coding never reduces weights by this factor.
"""

_BYTES = "u8"


@dataclass(frozen=True, slots=True)
class Encoded:
    """An object in encoded form: codec, parameters, and the specs and bytes of its parts."""

    codec: str
    dtype: str
    specs: tuple[PartSpec, ...]
    parts: Mapping[str, Array]
    params: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def is_delta(self) -> bool:
        """Whether the object is stored as a delta."""
        return self.codec == DELTA

    def write(self, files: LocalTarget, variant: StorageForm, shape: tuple[int, ...]) -> int:
        """Write the file of the object's ``variant`` into ``files``; return its size in bytes."""
        spec = TensorSpec(variant.id, shape, self.dtype, self.codec, self.specs, self.params)
        writer = FORMATS["zt"].writer(files, variant.file, Artifact([spec]), WriteOptions())
        try:
            writer.begin(spec)
            for part in self.specs:
                writer.write(part.role, self.parts[part.role].data)
            writer.end()
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        return files.store().stat(variant.file).size


def element_type(dtype: str) -> str:
    """Return the element type for encoding: ``dtype`` if the codecs of differences support it, else ``u8``."""
    return dtype if has_delta(dtype) and DTYPES[dtype].category != "b" else _BYTES


def smallest(data: memoryview, dtype: str, base: memoryview | None) -> Encoded:
    """Return the smallest encoding of some bytes.

    Parameters
    ----------
    data : memoryview
    dtype : str
        Dtype of the values, as ``element_type`` returns it.
    base : memoryview, optional
        The content of a base object of the same size. If a base is passed, the result may be a delta.
    """
    delta = as_delta(data, dtype, base) if base is not None else None
    if delta is not None and delta.nbytes * DELTA_SUFFICES <= data.nbytes:
        return delta
    without_base = _with_entropy(data, dtype) if has_entropy(dtype) else _in_zstd(data, dtype)
    if without_base.nbytes >= data.nbytes:
        without_base = _raw(data, dtype)
    return delta if delta is not None and delta.nbytes < without_base.nbytes else without_base


def as_delta(data: memoryview, dtype: str, base: memoryview) -> Encoded:
    """Return the delta from the content of a base object, ``base``, to the content of an object, ``data``."""
    values = _values(data, dtype)
    parts = pack(_values(base, dtype), values)
    params = params_for(dtype)
    specs = tuple(PartSpec(role, "u32" if role == "sizes" else _BYTES, parts[role].nbytes) for role in parts)
    return Encoded(DELTA, dtype, specs, parts, params.attributes(values.size))


def _with_entropy(data: memoryview, dtype: str) -> Encoded:
    values = _values(data, dtype)
    encoder = CODECS[EntropyCodec.id].encoder(values.shape, dtype, {})
    step = max(1, STEP // encoder.step) * encoder.step
    chunks: dict[int, dict[str, Array]] = {}

    def encode(start: int, stop: int) -> None:
        encoded = encoder.encode(values[start:stop], start)
        # Copied, because the encoder reuses its buffers
        chunks[start] = {role: np.array(part) for role, part in encoded.items()}

    for_ranges(values.size, step, encode)
    parts = {role: np.concatenate([chunks[start][role] for start in sorted(chunks)]) for role in ("sizes", "planes")}
    specs = tuple(PartSpec(part.role, part.dtype, parts[part.role].nbytes) for part in encoder.parts)
    return Encoded(encoder.codec, dtype, specs, parts, encoder.params)


def _in_zstd(data: memoryview, dtype: str) -> Encoded:
    chunks = [data[start : start + FRAME] for start in range(0, data.nbytes, FRAME)]
    frames = b"".join(ordered(compress_frame, chunks, default_workers() if len(chunks) > 1 else 0))
    return _dense(np.frombuffer(frames, np.uint8), dtype, encoding="zstd", uncompressed=data.nbytes)


def _raw(data: memoryview, dtype: str) -> Encoded:
    return _dense(np.frombuffer(data, np.uint8), dtype)


def _dense(stored: Array, dtype: str, *, encoding: str = "raw", uncompressed: int | None = None) -> Encoded:
    row = DTYPES[dtype]
    spec = PartSpec("data", row.storage, stored.nbytes, None if row.is_storage else row.name, encoding, uncompressed)
    return Encoded(DenseLayout.codec, dtype, (spec,), {"data": stored}, {})


def _values(data: memoryview, dtype: str) -> Array:
    raw = np.frombuffer(data, np.uint8)
    row = DTYPES[dtype]
    return from_file(raw, row.storage) if row.is_storage else raw.view(numpy_dtype(dtype))
