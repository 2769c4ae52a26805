"""Return the tensors of a kernel unit.

If a layout describes the unit's encoding, the parts of its weight are ranges of the file; otherwise the weight is
decoded to float16.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import FormatError
from ingot.ext.ane.chips.activation import ENTRIES
from ingot.ext.ane.kernel_units.header import (
    ASYMMETRIC,
    BLOCKS,
    HEADER,
    SPARSE,
    Header,
    align,
    groups,
    read_header,
    require_digest,
    stored_digest,
)
from ingot.ext.ane.kernel_units.unit import read_unit
from ingot.ext.ane.kernel_units.unit_format import UnitFormat, unit_format
from ingot.model.bytesource import ByteSource, DerivedSource, MemorySource
from ingot.model.layouts.affine import (
    CODES,
    NO_ZERO,
    PER_TENSOR,
    POINTS,
    ROW,
    ROWS_LSB,
    SCALES,
    ZEROS,
    AffineLayout,
    Group,
)
from ingot.model.layouts.base import Layout, matrix_shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.palette import CODEBOOK, INDICES, PaletteLayout
from ingot.model.layouts.palette import SCALES as CODEBOOK_SCALES
from ingot.model.layouts.sparse import MASK, NONZEROS, MaskLayout
from ingot.model.part import Part
from ingot.model.reading.concat_source import ConcatSource, PartRange
from ingot.model.tensor import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_BIAS = ".bias"
_ACTIVATION = ".activation"
_WEIGHT = ".weight"
_ENTRY_DTYPES = {"half": "f16", "int8": "i8", "uint8": "u8"}


class UnitSource(DerivedSource):
    """Byte source of a unit's file that compares the unit's CRC-32C once, before it returns any bytes."""

    def __init__(self, source: ByteSource, *, verify: bool) -> None:
        self.source = source
        self.name = source.name
        self.size = source.size
        self.mapped = source.mapped
        self._is_checked = not verify

    def verify_sources(self) -> None:
        """Compare the digest, unless it was compared before.

        Raises ``IntegrityError`` ``anek.digest``.
        """
        if not self._is_checked:
            require_digest(self.source, self.name)
            self._is_checked = True

    def view(self, offset: int, length: int) -> memoryview:
        self.verify_sources()
        return self.source.view(offset, length)

    def readinto(self, offset: int, out: memoryview) -> None:
        self.verify_sources()
        self.source.readinto(offset, out)

    def changed(self) -> bool:
        return self.source.changed()

    def close(self) -> None:
        self.source.close()


class DecodedCache:
    """Cache of the decoded values of one unit, the one that was read last; for units that no layout describes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: tuple[UnitSource, memoryview] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodedCache, ()

    def values(self, source: UnitSource) -> memoryview:
        """Return the bytes of a unit's weights as float16; decode them unless they are cached."""
        with self._lock:
            if self._cached is None or self._cached[0] is not source:
                self._cached = None  # free the memory before the next unit is decoded
                unit = read_unit(source.view(0, source.size), source.name)
                self._cached = source, unit.dense().astype("<f2").reshape(-1).view(np.uint8).data
            return self._cached[1]


class _Values(MemorySource):
    """A byte source of a unit's weights as float16, decoded when they are read."""

    mapped = False

    def __init__(self, source: UnitSource, size: int, decoded: DecodedCache) -> None:
        super().__init__(b"", source.name)
        self.size = size
        self._source = source
        self._decoded = decoded

    def view(self, offset: int, length: int) -> memoryview:
        self._data = self._decoded.values(self._source)
        try:
            return super().view(offset, length)
        finally:
            self._data = memoryview(b"")

    def changed(self) -> bool:
        return self._source.changed()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Values, (self._source, self.size, self._decoded)


class _BitRuns:
    """Byte source that joins runs of bits of a file, which may end within a byte, without gaps.

    ``runs``, int64 [2, n], has the byte offset of each run in the file, and its number of bits.
    """

    mapped = False

    def __init__(self, source: UnitSource, runs: Array) -> None:
        self.name = source.name
        self._source = source
        self._runs = runs
        self._ends = np.cumsum(runs[1])
        self.size = -(-int(self._ends[-1]) // 8)

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        bits = np.zeros(8 * out.nbytes, np.uint8)
        begin = 8 * offset
        end = min(8 * (offset + out.nbytes), int(self._ends[-1]))
        index = int(np.searchsorted(self._ends, begin, "right"))
        while begin < end:
            start, count = (int(value) for value in self._runs[:, index])
            first = begin - (int(self._ends[index]) - count)
            last = min(count, first + end - begin)
            data = np.empty(-(-last // 8) - first // 8, np.uint8)
            self._source.readinto(start + first // 8, data.data)
            position = begin - 8 * offset
            run = np.unpackbits(data, bitorder="little")[first % 8 :][: last - first]
            bits[position : position + run.size] = run
            begin += run.size
            index += 1
        if out.nbytes:
            out.cast("B")[:] = np.packbits(bits, bitorder="little").data

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Do nothing: the catalog closes the file."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit whose header was checked; ``tensors`` also reads the masks of a sparse unit and some scales."""

    name: str
    source: UnitSource
    header: Header
    unit_format: UnitFormat
    head: bytes

    @property
    def digest(self) -> str:
        """The digest in the unit's header."""
        return stored_digest(self.head)

    @staticmethod
    def from_source(name: str, source: UnitSource) -> Unit:
        """Return the unit of a file after reading its header.

        Raises the errors of ``read_header`` and ``unit_format``.
        """
        head = bytearray(min(HEADER, source.size))
        source.source.readinto(0, memoryview(head))
        header = read_header(head, source.size, source.name)
        return Unit(name, source, header, unit_format(header, source.name), bytes(head))

    def tensors(self, decoded: DecodedCache) -> Iterator[Tensor]:
        """Yield the weight under the unit's name, then its bias and its activation table if it has them.

        Raises ``FormatError`` ``anek.records`` if the number of weights does not fit the shape.
        """
        stored = _WeightReader(self).tensor()
        if stored is None:
            size = 2 * self.header.channels * self.header.per_channel
            part = Part("f16", size, _Values(self.source, size, decoded), where=f"{self.name}: {DATA}")
            stored = self._dense(self.name, self.header.shape, part)
        yield stored
        stem = self.name.removesuffix(_WEIGHT)
        for section, suffix, count in (("bias", _BIAS, self.header.channels), ("lut", _ACTIVATION, ENTRIES)):
            if self.header.sections[section].length:
                yield self._dense(stem + suffix, (count,), self.section(section, DATA, "f16"))

    def _dense(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        return Tensor(name, shape, "f16", DenseLayout.codec, {DATA: part}, {})

    def section(self, section: str, role: str, dtype: str, length: int | None = None) -> Part:
        """Return the first copy of a section as a part; with ``length``, only its first ``length`` bytes."""
        entry = self.header.sections[section]
        size = entry.length if length is None else length
        return Part(dtype, size, self.source, entry.offset, where=f"{self.name}: {role}")


class _WeightReader:
    """Reader of a unit's weight in its stored encoding: it determines the layout and the location of all groups."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._header = unit.header
        self._format = unit.unit_format

    def tensor(self) -> Tensor | None:
        """Return the weight in its stored encoding; None if no layout describes it."""
        header = self._header
        if self._format.unity:
            self._require_end(0)
            return None
        masks, values, value_count = self._runs()
        layout, parts, role = self._layout()
        if layout is None:
            return None
        dtype = layout.dtype if isinstance(layout, DenseLayout) else "f16"
        stored_dtype = dtype if isinstance(layout, DenseLayout) else "u8"  # element type of the values' part
        if header.flags & SPARSE:
            layout = MaskLayout(dtype, value_count, layout)
            role = NONZEROS
            parts = {MASK: self._part(MASK, "u8", masks), **parts}
        parts = {role: self._part(role, stored_dtype, values), **parts}
        return Tensor(self._unit.name, header.shape, dtype, layout.codec, parts, layout.attributes())

    def _runs(self) -> tuple[Array, Array, int]:
        """Return the bit runs of the masks and of the values, ordered by channel, and the number of stored values."""
        header = self._header
        stream = self._header.sections["weights"]
        per_channel = header.per_channel
        bits = self._format.bits
        runs_by_channel: dict[int, tuple[int, int, int, int]] = {}
        cursor = tile = total = 0
        for of_tile, first, channels in groups(header):
            cursor = cursor if of_tile == tile else align(cursor)
            tile = of_tile
            count = channels // header.vector * per_channel
            value_count = count
            mask = 0
            if header.flags & SPARSE:
                mask = -(-count // 8)
                value_count = (
                    self._count_selected(stream.offset + cursor, mask) if cursor + mask <= stream.length else 0
                )
            runs_by_channel[first] = (stream.offset + cursor, count, stream.offset + cursor + mask, value_count * bits)
            cursor += mask + -(-value_count * bits // 8)
            total += value_count
            if cursor > stream.length:
                break
        self._require_end(cursor)
        runs = np.array([runs_by_channel[first] for first in sorted(runs_by_channel)], np.int64).T
        return runs[:2], runs[2:], total

    def _count_selected(self, offset: int, size: int) -> int:
        data = np.empty(size, np.uint8)
        self._unit.source.source.readinto(offset, data.data)
        return int(np.count_nonzero(np.unpackbits(data)))

    def _require_end(self, end: int) -> None:
        length = self._header.sections["weights"].length
        if end != length:
            raise FormatError(
                "anek.records", f"expected {end} bytes of weights, found {length}", where=self._unit.source.name
            )

    def _layout(self) -> tuple[Layout | None, dict[str, Part], str]:
        """Return the layout, the parts besides the main part, and the role of the main part: values, codes or indices.

        The layout is None if no layout describes the encoding.
        """
        header = self._header
        unit_format = self._format
        unit = self._unit
        scaled = header.sections["scale"].length > 0
        if unit_format.palette:
            return self._palette(scaled)
        if unit_format.entry != "int8":
            dense = None if scaled else DenseLayout("f16" if unit_format.entry == "half" else "f8_e4m3fn")
            return dense, {}, DATA
        dtype = header.scale_dtype
        unit_scale = np.ones(1, numpy_dtype(dtype).newbyteorder("<"))
        scales = unit_scale.itemsize * header.channels * header.scales
        parts = {SCALES: unit.section("scale", SCALES, dtype, scales) if scaled else _memory(unit_scale, dtype)}
        zero = POINTS if header.flags & ASYMMETRIC else NO_ZERO
        if header.flags & ASYMMETRIC:
            zero_points = self._read(header.sections["scale"].offset + scales, header.channels).view(np.int8)
            parts[ZEROS] = _memory(zero_points.astype(unit_scale.dtype), dtype)
        grid = Group(header.block) if header.flags & BLOCKS else ROW if scaled else PER_TENSOR
        stored_matrix = (header.channels, header.per_channel)
        matrix = None if matrix_shape(header.shape) == stored_matrix else stored_matrix
        return AffineLayout(8, grid, ROWS_LSB, True, zero, "f16", dtype, matrix), parts, CODES

    def _palette(self, scaled: bool) -> tuple[Layout | None, dict[str, Part], str]:
        header = self._header
        unit_format = self._format
        unit = self._unit
        entries = _ENTRY_DTYPES[unit_format.entry]
        parts = {CODEBOOK: unit.section("pal", CODEBOOK, entries)}
        if scaled:
            section = header.sections["scale"]
            raw = self._read(section.offset, section.length).view(f"<u{section.length // header.channels}")
            factors = raw.reshape(header.codebooks, -1)
            if (factors != factors[:, :1]).any():
                return None, {}, INDICES
            parts[CODEBOOK_SCALES] = _memory(factors[:, 0].copy(), header.scale_dtype)
        groups = (header.codebooks, *(1 for _ in header.shape[1:]))
        scale_dtype = header.scale_dtype if scaled else None
        layout = PaletteLayout(unit_format.bits, groups, header.vector, 0, "f16", entries, scale_dtype)
        return layout, parts, INDICES

    def _read(self, offset: int, size: int) -> Array:
        data = np.empty(size, np.uint8)
        self._unit.source.source.readinto(offset, data.data)
        return data

    def _part(self, role: str, dtype: str, runs: Array) -> Part:
        """Return a part of values of ``dtype`` from runs of bits.

        Bits are copied only if a run other than the last run ends within a byte.
        """
        unit = self._unit
        location = f"{unit.name}: {role}"
        if (runs[1, :-1] % 8).any():
            stream: ByteSource = _BitRuns(unit.source, runs)
        else:
            file_range = PartRange(Part("u8", unit.source.size, unit.source, where=location), scattered=True)
            spans = np.stack([np.zeros_like(runs[0]), runs[0], -(-runs[1] // 8)])
            stream = ConcatSource(location, [file_range], spans)
        row = DTYPES[dtype]
        return Part(row.storage, stream.size, stream, type=None if row.is_storage else row.name, where=location)


def _memory(values: Array, dtype: str) -> Part:
    return Part(dtype, values.nbytes, MemorySource(values.view(np.uint8).data))
