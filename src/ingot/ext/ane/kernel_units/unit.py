"""Reading a kernel unit that may be hostile: everything is checked before it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import FormatError
from ingot.ext.ane.chips import kernel_format as formats
from ingot.ext.ane.chips.activation import read_lut
from ingot.ext.ane.chips.bits import e4m3_numbers, pack_lsb, unpack_lsb
from ingot.ext.ane.kernel_units.header import (
    ASYMMETRIC,
    BLOCKS,
    HEADER,
    RECORD_WORDS,
    SPARSE,
    UNRELOCATED,
    Header,
    aligned,
    groups,
    read_header,
    require_digest,
)
from ingot.ext.ane.kernel_units.kind import NUMPY, PLAIN, kind_of
from ingot.ext.ane.kernel_units.pack import KernelWeight
from ingot.model.bytesource import MemorySource

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class KernelUnit:
    """A unit that was read and checked: header, records as u32 [groups, 14], and the weight as it was packed."""

    header: Header
    records: Array
    weight: KernelWeight

    def dense(self) -> Array:
        """Return the weights as float16 of the header's shape, scale included, each rounded once from float32."""
        with np.errstate(over="ignore", invalid="ignore"):  # arm64 tells of signalling NaNs
            return self._values().astype(np.float16).reshape(self.header.shape)

    def _values(self) -> Array:
        """Return the weights in f32 [channels, values of one]."""
        weight, channels = self.weight, self.header.channels
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


def read_unit(data: bytes | memoryview, where: str = "kernel unit") -> KernelUnit:
    """Read a kernel unit, and check every byte of it.

    Raises
    ------
    FormatError
        ``anek.magic``, ``anek.version``, ``anek.header``, ``anek.bounds``, ``anek.kind``, ``anek.records``,
        ``anek.padding``, ``anek.copies``, ``ane.lut``.
    IntegrityError
        ``anek.digest``.
    """
    view = memoryview(data)
    header = read_header(view[:HEADER], view.nbytes, where)
    require_digest(MemorySource(view), where)
    reader = _Reader(header, np.frombuffer(view, np.uint8), where)
    return KernelUnit(header, reader.records, reader.weight())


class _Reader:
    def __init__(self, header: Header, data: Array, where: str) -> None:
        self._header, self._data, self._where = header, data, where
        kind = kind_of(header, where)
        self._bits, self._entry, self._palette = kind.bits, kind.entry, kind.palette
        self.records = self._records()

    def _refuse(self, rule: str, expected: str, found: object = "otherwise") -> FormatError:
        return FormatError(rule, f"expected {expected}, found {found}", where=self._where)

    def section(self, name: str) -> Array:
        """Return the bytes of a section's first copy, after all copies and their padding were checked."""
        located = self._header.sections[name]
        copies = self._header.copies if name in ("lut", "pal", "scale", "bias") else 1
        stride, size = self._header.stride(name), located.length
        first = self._data[located.offset : located.offset + size]
        for copy in range(copies if size else 0):
            at = located.offset + copy * stride
            if not np.array_equal(self._data[at : at + size], first):
                raise self._refuse("anek.copies", f"equal copies of section {name}")
            if self._data[at + size : at + aligned(size)].any():
                raise self._refuse("anek.padding", f"zeros behind section {name}")
        return first

    def _records(self) -> Array:
        """Return the records, after every word was compared with what the geometry says, offsets apart."""
        header = self._header
        count = -(-header.channels // header.ocg)
        raw = self.section("ocgs")
        if header.sections["ocgs"].count != count:
            raise self._refuse("anek.records", f"{count} records", header.sections["ocgs"].count)
        records = raw.view("<u4").reshape(count, RECORD_WORDS)
        sizes = np.array([channels for _, _, channels in groups(header)], np.uint32)
        if (records[:, 1] != sizes).any() or (records[:, 2:12] != UNRELOCATED).any() or records[:, 12:].any():
            raise self._refuse("anek.records", "sizes of the geometry, ten slots of -1 and flags of 0")
        return records

    def weight(self) -> KernelWeight:
        """Read tables, scales, biases and all groups."""
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
        pal, header = self.section("pal"), self._header
        shape = (header.codebooks, 1 << self._bits, header.vector)
        if not self._palette:
            return None
        codebooks = pal.view(NUMPY[self._entry]).reshape(shape)
        return codebooks.astype(codebooks.dtype.newbyteorder("="))

    def _scales(self) -> tuple[Array | None, Array | None]:
        """Return scales [channels] or [channels, blocks], and the zero points behind them."""
        header = self._header
        raw, dtype = self.section("scale"), numpy_dtype(header.scale_dtype)
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
        """Read every group from where its record says, which has to be where the last one ended."""
        header, stream = self._header, self.section("weights")
        per, vector = header.per_channel, header.vector
        rows = header.channels // vector
        if formats.is_unity(header.kernel_format):
            if stream.size or self.records[:, 0].any():
                raise self._refuse("anek.records", "no weights of an identity", f"{stream.size} bytes")
            return np.zeros(0, np.float16 if self._bits == 16 else NUMPY[self._entry]), None
        if -(-rows * per * (1 if header.flags & SPARSE else self._bits) // 8) > stream.size:
            raise self._refuse("anek.records", "weights for every channel", f"{stream.size} bytes")
        values = np.zeros((rows, per), np.uint8 if self._palette else PLAIN[header.kernel_format])
        mask = np.zeros((rows, per), np.bool_) if header.flags & SPARSE else None
        cursor = tile = 0
        for index, (of_tile, first, channels) in enumerate(groups(header)):
            start = cursor if of_tile == tile else aligned(cursor)
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

    def _group(self, stream: Array, at: int, out: Array, mask: Array | None) -> int:
        """Read one group into ``out``; return where it ends."""
        count, kept = out.size, None
        if mask is not None:
            raw = self._take(stream, at, -(-count // 8))
            kept = np.unpackbits(raw, count=count, bitorder="little").astype(np.bool_)
            if count % 8 and raw[-1] >> count % 8:
                raise self._refuse("anek.padding", "zeros behind a mask")
            mask[...] = kept.reshape(mask.shape)
            at, count = at + raw.size, int(np.count_nonzero(kept))
        raw = self._take(stream, at, -(-count * self._bits // 8))
        if self._palette:
            codes = unpack_lsb(raw, self._bits, count)
            if not np.array_equal(pack_lsb(codes, self._bits), raw):
                raise self._refuse("anek.padding", "zeros behind a group's indices")
        else:
            codes = raw.view(PLAIN[self._header.kernel_format])
        out.reshape(-1)[slice(None) if kept is None else kept] = codes
        return at + raw.size

    def _take(self, stream: Array, at: int, size: int) -> Array:
        if at + size > stream.size:
            raise self._refuse("anek.records", f"{size} bytes at {at}", f"{stream.size} in all")
        return np.ascontiguousarray(stream[at : at + size])
