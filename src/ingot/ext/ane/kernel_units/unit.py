"""Read kernel units; files are untrusted, so every value is checked before it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import FormatError
from ingot.ext.ane.chips import kernel_format as formats
from ingot.ext.ane.chips.activation import read_lut
from ingot.ext.ane.chips.kernel_format import e4m3_numbers, pack_lsb, unpack_lsb
from ingot.ext.ane.kernel_units.header import (
    ASYMMETRIC,
    BLOCKS,
    HEADER,
    RECORD_WORDS,
    SPARSE,
    UNRELOCATED,
    Header,
    align,
    groups,
    read_header,
    require_digest,
)
from ingot.ext.ane.kernel_units.pack import KernelWeight
from ingot.ext.ane.kernel_units.unit_format import NUMPY, PLAIN, unit_format
from ingot.model.bytesource import MemorySource

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class KernelUnit:
    """A unit that was read and checked: header, records as u32 [groups, 14], and the packed weight."""

    header: Header
    records: Array
    weight: KernelWeight

    def dense(self) -> Array:
        """Return the weights as float16 in the header's shape, multiplied by their scales.

        Each weight is computed in float32 and rounded once.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # arm64 reports signalling NaNs
            return self._values().astype(np.float16).reshape(self.header.shape)

    def _values(self) -> Array:
        """Return the weights as float32 [channels, weights per channel]."""
        weight = self.weight
        channels = self.header.channels
        if weight.unity:
            values = np.eye(channels, dtype=np.float32)
        elif weight.codebooks is None:
            stored = weight.values.reshape(channels, -1)
            values = e4m3_numbers(stored) if weight.entry == "e4m3" else stored.astype(np.float32)
        else:
            first = np.arange(channels // weight.vector) * weight.vector
            books = first // (channels // len(weight.codebooks))
            entries = weight.codebooks.astype(np.float32)[books[:, None], weight.values]
            values = np.moveaxis(entries, -1, 1).reshape(channels, -1)
        if weight.zero is not None:
            values = values - weight.zero.astype(np.float32)[:, None]
        if weight.mask is not None:
            values = np.where(weight.mask.reshape(channels, -1), values, np.float32(0))
        if weight.scale is not None:
            scale = weight.scale.astype(np.float32).reshape(channels, -1)
            values = values * (np.repeat(scale, weight.block, axis=1)[:, : values.shape[1]] if weight.block else scale)
        return values


def read_unit(data: bytes | memoryview, location: str = "kernel unit") -> KernelUnit:
    """Return the unit in ``data``, after checking every byte of it.

    Raises
    ------
    FormatError
        ``anek.magic``, ``anek.version``, ``anek.header``, ``anek.bounds``, ``anek.kind``, ``anek.records``,
        ``anek.padding``, ``anek.copies``, ``ane.lut``.
    IntegrityError
        ``anek.digest``.
    """
    view = memoryview(data)
    header = read_header(view[:HEADER], view.nbytes, location)
    require_digest(MemorySource(view), location)
    reader = _Reader(header, np.frombuffer(view, np.uint8), location)
    return KernelUnit(header, reader.records, reader.weight())


class _Reader:
    def __init__(self, header: Header, data: Array, location: str) -> None:
        self._header = header
        self._data = data
        self._location = location
        decoded = unit_format(header, location)
        self._bits = decoded.bits
        self._entry = decoded.entry
        self._palette = decoded.palette
        self.records = self._records()

    def _refuse(self, rule: str, expected: str, actual: object = None) -> FormatError:
        return FormatError(
            rule, f"expected {expected}" + ("" if actual is None else f", found {actual}"), where=self._location
        )

    def section(self, name: str) -> Array:
        """Return the first copy of a section, after checking that all copies are equal and that padding is zero.

        Raises ``FormatError`` ``anek.copies``, ``anek.padding``.
        """
        entry = self._header.sections[name]
        copies = self._header.copies if name in ("lut", "pal", "scale", "bias") else 1
        stride = self._header.stride(name)
        size = entry.length
        first = self._data[entry.offset : entry.offset + size]
        for copy in range(copies if size else 0):
            offset = entry.offset + copy * stride
            if not np.array_equal(self._data[offset : offset + size], first):
                raise self._refuse("anek.copies", f"equal copies of section {name}")
            if self._data[offset + size : offset + align(size)].any():
                raise self._refuse("anek.padding", f"zeros after section {name}")
        return first

    def _records(self) -> Array:
        """Return the records, after checking them against the header, except for the offsets of groups."""
        header = self._header
        count = -(-header.channels // header.ocg)
        raw = self.section("ocgs")
        if header.sections["ocgs"].count != count:
            raise self._refuse("anek.records", f"{count} records of groups", header.sections["ocgs"].count)
        records = raw.view("<u4").reshape(count, RECORD_WORDS)
        sizes = np.array([channels for _, _, channels in groups(header)], np.uint32)
        if (records[:, 1] != sizes).any() or (records[:, 2:12] != UNRELOCATED).any() or records[:, 12:].any():
            raise self._refuse(
                "anek.records",
                "records with the group sizes that the header implies, ten words of 0xFFFFFFFF and flags of 0",
            )
        return records

    def weight(self) -> KernelWeight:
        """Return the weight: values of all groups, tables, scales and biases."""
        header = self._header
        values, mask = self._groups()
        scale, zero = self._scales()
        weight = KernelWeight(
            header.shape, values, self._bits, self._codebooks(), mask, scale, self._halves("bias"), zero=zero,
            block=header.block, unity=formats.is_unity(header.kernel_format),
        )  # fmt: skip
        lut = self.section("lut")
        return replace(weight, lut=read_lut(lut.view("<f2").astype(np.float16))) if lut.size else weight

    def _codebooks(self) -> Array | None:
        pal = self.section("pal")
        header = self._header
        shape = (header.codebooks, 1 << self._bits, header.vector)
        if not self._palette:
            return None
        codebooks = pal.view(NUMPY[self._entry]).reshape(shape)
        return codebooks.astype(codebooks.dtype.newbyteorder("="))

    def _scales(self) -> tuple[Array | None, Array | None]:
        """Return the scales, [channels] or [channels, blocks], and the zero points that follow them.

        Both are None without scales. The zero points are None without the flag ``ASYMMETRIC``.
        """
        header = self._header
        raw = self.section("scale")
        dtype = numpy_dtype(header.scale_dtype)
        if not raw.size:
            return None, None
        size = dtype.itemsize * header.channels * header.scales
        scale = raw[:size].view(dtype.newbyteorder("<")).astype(dtype)
        if header.flags & BLOCKS:
            return scale.reshape(header.channels, header.scales), None
        return scale, raw[size:].view("i1").copy() if header.flags & ASYMMETRIC else None

    def _halves(self, name: str) -> Array | None:
        raw = self.section(name)
        return raw.view("<f2").astype(np.float16) if raw.size else None

    def _groups(self) -> tuple[Array, Array | None]:
        """Return the values and the mask of all groups, after checking that each group begins at the end of the group
        before it.
        """
        header = self._header
        stream = self.section("weights")
        per = header.per_channel
        vector = header.vector
        rows = header.channels // vector
        if formats.is_unity(header.kernel_format):
            if stream.size or self.records[:, 0].any():
                raise self._refuse("anek.records", "no weights in an identity", f"{stream.size} bytes")
            return np.zeros(0, np.float16 if self._bits == 16 else NUMPY[self._entry]), None
        if -(-rows * per * (1 if header.flags & SPARSE else self._bits) // 8) > stream.size:
            raise self._refuse("anek.records", "weights for every channel", f"{stream.size} bytes")
        values = np.zeros((rows, per), np.uint8 if self._palette else PLAIN[header.kernel_format])
        mask = np.zeros((rows, per), np.bool_) if header.flags & SPARSE else None
        cursor = tile = 0
        for index, (of_tile, first, channels) in enumerate(groups(header)):
            start = cursor if of_tile == tile else align(cursor)
            if self.records[index, 0] != start or stream[cursor : min(start, stream.size)].any():
                raise self._refuse("anek.records", f"group {index} at {start}", int(self.records[index, 0]))
            span = slice(first // vector, -(-(first + channels) // vector))
            cursor = self._group(stream, start, values[span], None if mask is None else mask[span])
            tile = of_tile
        if cursor != stream.size:
            raise self._refuse("anek.records", f"weights that end at {cursor}", stream.size)
        native = values.astype(values.dtype.newbyteorder("="))
        if self._palette:
            return native, mask
        return native.reshape(header.shape), None if mask is None else mask.reshape(header.shape)

    def _group(self, stream: Array, offset: int, out: Array, mask: Array | None) -> int:
        """Read one group into ``out`` and ``mask``; return the offset of its end."""
        count = out.size
        selected = None
        if mask is not None:
            raw = self._take(stream, offset, -(-count // 8))
            selected = np.unpackbits(raw, count=count, bitorder="little").astype(np.bool_)
            if count % 8 and raw[-1] >> count % 8:
                raise self._refuse("anek.padding", "zeros after a mask")
            mask[...] = selected.reshape(mask.shape)
            offset = offset + raw.size
            count = int(np.count_nonzero(selected))
        raw = self._take(stream, offset, -(-count * self._bits // 8))
        if self._palette:
            codes = unpack_lsb(raw, self._bits, count)
            if not np.array_equal(pack_lsb(codes, self._bits), raw):
                raise self._refuse("anek.padding", "zeros after the indices of a group")
        else:
            codes = raw.view(PLAIN[self._header.kernel_format])
        out.reshape(-1)[slice(None) if selected is None else selected] = codes
        return offset + raw.size

    def _take(self, stream: Array, offset: int, size: int) -> Array:
        if offset + size > stream.size:
            raise self._refuse(
                "anek.records", f"{size} bytes of weights at offset {offset}", f"{stream.size} bytes in total"
            )
        return np.ascontiguousarray(stream[offset : offset + size])
