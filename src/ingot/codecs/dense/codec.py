"""``dense``: unchanged values in row-major order (zTensor 1.2, section 3; ``spec/dense.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any, ClassVar

import numpy as np

from ingot.codecs.base import Codec, Encoder, Repacked, Rows, cannot, result
from ingot.codecs.cast import cast, cast_into, exact_cast, flat, require_cast
from ingot.codecs.dense.repack import repack, with_holder
from ingot.core.numeric.dtypes import DTYPES, DType, dtype, little_endian, numpy_dtype
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.layouts.base import Layout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.part import Part, PartReader
from ingot.model.reading.slices import RunLayout
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array, Tensor

_SCRATCH = 1 << 18  # elements in the buffer of a reader that casts


@dataclass(slots=True)
class DenseEncoder(Encoder):
    """An encoder that casts rows, or stores them unchanged.

    ``lossless`` is False if a value of the source's dtype may be rounded.
    """

    parts: tuple[PartSpec, ...]
    lossless: bool
    target: str
    codec: str = DenseLayout.codec
    params: Mapping[str, Any] = field(default_factory=dict)
    fit_passes: int = 0
    step: int = 1
    single_chunk: bool = False

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        return {"data": cast(rows, self.target).reshape(-1)}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        cast_into(parts["data"], out)


class DenseReader(Rows):
    """A sequential reader of a dense tensor; casts go through a scratch buffer."""

    def __init__(self, tensor: Tensor) -> None:
        self._name = tensor.name
        self._row = decodable(tensor)
        self._part = tensor.parts["data"]
        self._open: PartReader | None = None
        self._done = False  # the part was read by one call

    @property
    def _reader(self) -> PartReader:
        """The reader of the part, opened on first use."""
        if self._open is None:
            self._open = self._part.reader()
            if self._done:
                self._open.skip(self._part.length)
        return self._open

    def fill(self, out: Array) -> None:
        target = flat(out)
        stored_dtype = numpy_dtype(self._row.name)
        if out.dtype == stored_dtype:
            if self._open is None and out.nbytes == self._part.length and not self._done:
                data = target.view(np.uint8)
                if self._part.read_small(data.data):
                    self._done = True
                    as_values(data, target, self._row, self._name)
                    return
            read_values(self._reader, target, self._row, self._name)
            return
        require_cast(self._row.name, dtype(out.dtype).name, self._name)
        scratch = np.empty(min(_SCRATCH, target.size), stored_dtype)
        for start in range(0, target.size, _SCRATCH):
            batch = target[start : start + _SCRATCH]
            read_values(self._reader, scratch[: batch.size], self._row, self._name)
            cast_into(scratch[: batch.size], batch, self._name)

    def skip(self, count: int) -> None:
        """Skip ``count`` values."""
        self._reader.skip(self._row.nbytes(count))

    def finish(self) -> None:
        if not self._done:
            self._reader.finish()


class DenseCodec(Codec):
    """Values of any element type; option ``dtype`` casts them."""

    id: ClassVar[str] = DenseLayout.codec
    lossless: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    def check(self, tensor: Tensor) -> None:
        """Check parameters, parts and shape of ``tensor``; rules ``dense.part-missing``, ``dense.dtype``,
        ``dense.size``.

        The size is not checked for an unknown dtype.
        """
        part = require_part(tensor, "data")
        check_values(tensor, part, tensor.size)

    def decode(self, tensor: Tensor, dtype: str, out: Array | None = None) -> Array:
        """Return the values; in the tensor's dtype, a read-only view of the part if possible.

        If the logical type is unknown, the storage elements are returned. Each must be one value (zTensor 1.2, section
        2), and no other dtype may be requested.
        """
        self.check(tensor)
        if dtype == tensor.dtype and out is None:
            return _view(tensor)
        require_cast(decodable(tensor).name, dtype, tensor.name)
        out = result(tensor, dtype, out)
        reader = self.reader(tensor)
        reader.read_into(out)
        reader.finish()
        return out

    def reader(self, tensor: Tensor) -> DenseReader:
        self.check(tensor)
        return DenseReader(tensor)

    def runs(self, tensor: Tensor, shape: tuple[int, ...]) -> RunLayout | None:
        """Return the positions of runs of values that fill complete bytes; None for a type of unknown size."""
        self.check(tensor)
        row = DTYPES.get(tensor.dtype)
        if row is None:
            return None
        elements = 8 // gcd(8, row.bits)
        return RunLayout(elements, {"data": elements * row.bits // 8})

    def repack(self, tensor: Tensor, layout: Layout) -> Repacked:
        """Return the repacking into a wider type with the same values, for a container without the tensor's type."""
        if not isinstance(layout, DenseLayout):
            return cannot(layout, f"dense values cannot be stored in {layout.codec}")
        self.check(tensor)
        return repack(tensor, layout)

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Mapping[str, Any]) -> Encoder:
        """Return the encoder. Option ``dtype``: the element type to store, in any spelling.

        Option ``holder``: a wider type, f16 or f32, for the stored values, for containers without the element type.
        """
        source = encodable(dtype)
        target = _target(options, source)
        require_cast(source.name, target.name)
        size = int(np.prod(shape, dtype=object)) if shape else 1
        spec = PartSpec("data", target.storage, target.nbytes(size), None if target.is_storage else target.name)
        plain = DenseEncoder(parts=(spec,), lossless=exact_cast(source.name, target.name), target=target.name)
        return with_holder(plain, options["holder"]) if "holder" in options else plain


def _target(options: Mapping[str, Any], source: DType) -> DType:
    unknown = sorted(set(options) - {"dtype", "holder"})
    if unknown:
        raise UsageError(f"codec dense has the options dtype and holder, found {unknown[0]!r}", rule="dense.option")
    if "dtype" not in options:
        return source
    try:
        return dtype(options["dtype"])
    except UnsupportedError as error:
        raise UsageError(error.message, rule="dense.option") from error


def _view(tensor: Tensor) -> Array:
    part = tensor.parts["data"]
    if tensor.dtype in DTYPES:
        row = decodable(tensor)
        values = part.array()
        require_bool(values, row, tensor.name)
        values = values.view(numpy_dtype(row.name))
    elif part.count == tensor.size:
        values = part.array()
    else:
        raise UnsupportedError(
            f"unknown element type {tensor.dtype!r}, and its {part.count} stored elements are not one per value",
            rule="dense.unknown-dtype",
            where=tensor.name,
        )
    try:
        shaped = values.reshape(tensor.shape)
    except ValueError as error:  # NumPy's limit on dimensions is lower than a format's
        raise UnsupportedError(f"NumPy cannot make shape {list(tensor.shape)}", rule="dense.shape") from error
    if part.encoding == "raw":
        shaped.flags.writeable = False
    return shaped


def require_part(tensor: Tensor, role: str) -> Part:
    """Return a part; raise ``CodecError`` ``<codec>.part-missing`` if it is missing."""
    if role not in tensor.parts:
        raise CodecError(
            f"{tensor.codec}.part-missing", f"expected a part {role!r}, found {list(tensor.parts)}", where=tensor.name
        )
    return tensor.parts[role]


def check_values(tensor: Tensor, part: Part, count: int) -> None:
    """Raise ``CodecError`` ``<codec>.dtype`` or ``.size`` if ``part`` does not contain ``count`` values of the tensor's
    dtype.
    """
    row = DTYPES.get(tensor.dtype)
    if row is None:
        return
    if part.dtype != row.storage:
        raise CodecError(
            f"{tensor.codec}.dtype",
            f"expected storage {row.storage} for {row.name}, found {part.dtype}",
            where=tensor.name,
        )
    if part.nbytes != row.nbytes(count):
        raise CodecError(
            f"{tensor.codec}.size",
            f"expected {row.nbytes(count)} bytes for {count} values of {row.name}, found {part.nbytes}",
            where=tensor.name,
        )


def decodable(tensor: Tensor) -> DType:
    """Return the tensor's element type.

    Raises ``UnsupportedError`` if the type is unknown, or if its elements do not fill complete bytes. Parts of these
    types can only be copied.
    """
    row = DTYPES.get(tensor.dtype)
    if row is None:
        raise UnsupportedError(
            f"unknown element type {tensor.dtype!r}; its parts can be copied, but not decoded",
            rule="dense.unknown-dtype",
            where=tensor.name,
        )
    return _whole_bytes(row, tensor.name)


def encodable(name: str) -> DType:
    """Return the ``DType`` of a source to encode; raise ``UnsupportedError`` for a type of less than a byte."""
    return _whole_bytes(dtype(name), None)


def _whole_bytes(row: DType, location: str | None) -> DType:
    if row.bits < 8:
        raise UnsupportedError(
            f"{row.name} is packed below a byte; its parts can be copied, but not decoded",
            rule="dense.packed-dtype",
            where=location,
        )
    return row


def require_bool(values: Array, row: DType, location: str) -> None:
    """Raise ``CodecError`` ``dense.bool`` for a bool that is not 0x00 or 0x01 (zTensor 1.2, section 2)."""
    if row.category == "b" and values.size and int(values.view(np.uint8).max()) > 1:
        raise CodecError("dense.bool", "expected bytes 0x00 and 0x01 in a bool, found another", where=location)


def read_values(reader: PartReader, out: Array, row: DType, location: str) -> None:
    """Read the next values of a part into the 1-d ``out``, in the native dtype of ``row``."""
    data = out.view(np.uint8)
    reader.readinto(data.data)
    as_values(data, out, row, location)


def as_values(data: Array, out: Array, row: DType, location: str) -> None:
    """Convert ``out``, whose bytes are ``data``, in place from the byte order of files to the machine's."""
    storage = little_endian(row.storage)
    if not storage.isnative:
        data.view(f"u{storage.itemsize}").byteswap(inplace=True)
    require_bool(out, row, location)
