"""The tensors of a kernel unit: typed layouts over the bytes where they lie, decoded values where none fits."""

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
    aligned,
    groups,
    read_header,
    require_digest,
    stated,
)
from ingot.ext.ane.kernel_units.kind import Kind, kind_of
from ingot.ext.ane.kernel_units.unit import read_unit
from ingot.model.bytesource import ByteSource, DerivedSource, MemorySource
from ingot.model.layouts.affine import CODES, NO_ZERO, POINTS, ROW, ROWS_LSB, SCALES, WHOLE, ZEROS, AffineLayout, Group
from ingot.model.layouts.base import Layout, matrix_shape
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.palette import CODEBOOK, INDICES, PaletteLayout
from ingot.model.layouts.palette import SCALES as CODEBOOK_SCALES
from ingot.model.layouts.sparse import MASK, NONZEROS, MaskLayout
from ingot.model.part import Part
from ingot.model.reading.pieces import PartBytes, Pieces
from ingot.model.tensor import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_BIAS, _ACTIVATION, _WEIGHT = ".bias", ".activation", ".weight"
_ENTRY_DTYPES = {"half": "f16", "int8": "i8", "uint8": "u8"}


class UnitSource(DerivedSource):
    """A unit's file, whose CRC-32C is compared before any byte is handed out, once; a ``ByteSource``."""

    def __init__(self, source: ByteSource, *, verify: bool) -> None:
        self.source, self.name, self.size, self.mapped = source, source.name, source.size, source.mapped
        self._proven = not verify

    def prove(self) -> None:
        """Compare the digest; raises ``IntegrityError`` ``anek.digest``."""
        if not self._proven:
            require_digest(self.source, self.name)
            self._proven = True

    def view(self, offset: int, length: int) -> memoryview:
        self.prove()
        return self.source.view(offset, length)

    def readinto(self, offset: int, out: memoryview) -> None:
        self.prove()
        self.source.readinto(offset, out)

    def changed(self) -> bool:
        return self.source.changed()

    def close(self) -> None:
        self.source.close()


class Decoded:
    """The values of one unit at a time, for the parts of those that have no layout: the last one asked for is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[UnitSource, memoryview] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoded, ()

    def values(self, source: UnitSource) -> memoryview:
        """Return the bytes of a unit's weights as float16."""
        with self._lock:
            if self._held is None or self._held[0] is not source:
                self._held = None  # before the next one is made: one tensor at a time
                unit = read_unit(source.view(0, source.size), source.name)
                self._held = source, unit.dense().astype("<f2").reshape(-1).view(np.uint8).data
            return self._held[1]


class _Values(MemorySource):
    """What a unit decodes to as a ``ByteSource``."""

    mapped = False

    def __init__(self, source: UnitSource, size: int, decoded: Decoded) -> None:
        super().__init__(b"", source.name)
        self.size, self._source, self._decoded = size, source, decoded

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


class _Stream:
    """Runs of bits, one behind the other, of which some do not end at a byte; a ``ByteSource``.

    ``runs`` is [2, n]: byte of the file at which a run begins, and its bits.
    """

    mapped = False

    def __init__(self, source: UnitSource, runs: Array) -> None:
        self.name, self._source, self._runs = source.name, source, runs
        self._ends = np.cumsum(runs[1])
        self.size = -(-int(self._ends[-1]) // 8)

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(length, np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        bits = np.zeros(8 * out.nbytes, np.uint8)
        begin, end = 8 * offset, min(8 * (offset + out.nbytes), int(self._ends[-1]))
        index = int(np.searchsorted(self._ends, begin, "right"))
        while begin < end:
            start, count = (int(value) for value in self._runs[:, index])
            first = begin - (int(self._ends[index]) - count)
            last = min(count, first + end - begin)
            data = np.empty(-(-last // 8) - first // 8, np.uint8)
            self._source.readinto(start + first // 8, data.data)
            at = begin - 8 * offset
            run = np.unpackbits(data, bitorder="little")[first % 8 :][: last - first]
            bits[at : at + run.size] = run
            begin += run.size
            index += 1
        if out.nbytes:
            out.cast("B")[:] = np.packbits(bits, bitorder="little").data

    def changed(self) -> bool:
        return self._source.changed()

    def close(self) -> None:
        """Nothing to do: the file belongs to the catalog."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit whose header was read and checked; nothing else of it was, but the masks of a sparse one."""

    name: str
    source: UnitSource
    header: Header
    kind: Kind
    head: bytes

    @property
    def digest(self) -> str:
        """The digest that the unit states of itself."""
        return stated(self.head)

    @staticmethod
    def of(name: str, source: UnitSource) -> Unit:
        """Read the header; errors as ``read_header`` and ``kind_of``."""
        head = bytearray(min(HEADER, source.size))
        source.source.readinto(0, memoryview(head))
        header = read_header(head, source.size, source.name)
        return Unit(name, source, header, kind_of(header, source.name), bytes(head))

    def tensors(self, decoded: Decoded) -> Iterator[Tensor]:
        """Yield the weight under the unit's name, then its bias and activation table if there are any.

        Raises ``FormatError`` ``anek.records`` for weights that are not as many as the shape says.
        """
        stored = _Stored(self).tensor()
        if stored is None:
            size = 2 * self.header.channels * self.header.per_channel
            part = Part("f16", size, _Values(self.source, size, decoded), where=f"{self.name}: {DATA}")
            stored = self._dense(self.name, self.header.shape, part)
        yield stored
        stem = self.name.removesuffix(_WEIGHT)
        for section, end, count in (("bias", _BIAS, self.header.channels), ("lut", _ACTIVATION, ENTRIES)):
            if self.header.sections[section].length:
                yield self._dense(stem + end, (count,), self.section(section, DATA, "f16"))

    def _dense(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        return Tensor(name, shape, "f16", DenseLayout.codec, {DATA: part}, {})

    def section(self, section: str, role: str, dtype: str, length: int | None = None) -> Part:
        """Return the first copy of a section, or so many of its first bytes, as a part."""
        entry = self.header.sections[section]
        size = entry.length if length is None else length
        return Part(dtype, size, self.source, entry.offset, where=f"{self.name}: {role}")


class _Stored:
    """A unit's weight as it is stored: where its groups lie, and the layout that says what they are."""

    def __init__(self, unit: Unit) -> None:
        self._unit, self._header, self._kind = unit, unit.header, unit.kind

    def tensor(self) -> Tensor | None:
        """Return the tensor; None where no layout says what the unit does."""
        header = self._header
        if self._kind.unity:
            self._require_end(0)
            return None
        masks, values, kept = self._runs()
        layout, parts, role = self._layout()
        if layout is None:
            return None
        dtype = layout.dtype if isinstance(layout, DenseLayout) else "f16"
        plain = dtype if isinstance(layout, DenseLayout) else "u8"  # what the part holds
        if header.flags & SPARSE:
            layout, role = MaskLayout(dtype, kept, layout), NONZEROS
            parts = {MASK: self._part(MASK, "u8", masks), **parts}
        parts = {role: self._part(role, plain, values), **parts}
        return Tensor(self._unit.name, header.shape, dtype, layout.codec, parts, layout.attributes())

    def _runs(self) -> tuple[Array, Array, int]:
        """Return where masks and values of the groups lie, in the order of channels, and how many values are kept."""
        header, stream = self._header, self._header.sections["weights"]
        per, bits = header.per_channel, self._kind.bits
        places: dict[int, tuple[int, int, int, int]] = {}
        cursor = tile = total = 0
        for of_tile, first, channels in groups(header):
            cursor, tile = cursor if of_tile == tile else aligned(cursor), of_tile
            count = channels // header.vector * per
            kept, mask = count, 0
            if header.flags & SPARSE:
                mask = -(-count // 8)
                kept = self._kept(stream.offset + cursor, mask) if cursor + mask <= stream.length else 0
            places[first] = (stream.offset + cursor, count, stream.offset + cursor + mask, kept * bits)
            cursor += mask + -(-kept * bits // 8)
            total += kept
            if cursor > stream.length:
                break
        self._require_end(cursor)
        runs = np.array([places[first] for first in sorted(places)], np.int64).T
        return runs[:2], runs[2:], total

    def _kept(self, offset: int, size: int) -> int:
        data = np.empty(size, np.uint8)
        self._unit.source.source.readinto(offset, data.data)
        return int(np.count_nonzero(np.unpackbits(data)))

    def _require_end(self, end: int) -> None:
        length = self._header.sections["weights"].length
        if end != length:
            raise FormatError(
                "anek.records", f"expected weights that end at {end}, found {length}", where=self._unit.source.name
            )

    def _layout(self) -> tuple[Layout | None, dict[str, Part], str]:
        """Return the layout of dense values, codes or indices, the parts beside them, and their role."""
        header, kind, unit = self._header, self._kind, self._unit
        scaled = header.sections["scale"].length > 0
        if kind.palette:
            return self._palette(scaled)
        if kind.entry != "int8":
            dense = None if scaled else DenseLayout("f16" if kind.entry == "half" else "f8_e4m3fn")
            return dense, {}, DATA
        dtype = header.scale_dtype
        one = np.ones(1, numpy_dtype(dtype).newbyteorder("<"))
        scales = one.itemsize * header.channels * header.scales
        parts = {SCALES: unit.section("scale", SCALES, dtype, scales) if scaled else _memory(one, dtype)}
        zero = POINTS if header.flags & ASYMMETRIC else NO_ZERO
        if header.flags & ASYMMETRIC:
            points = self._read(header.sections["scale"].offset + scales, header.channels).view(np.int8)
            parts[ZEROS] = _memory(points.astype(one.dtype), dtype)
        grid = Group(header.block) if header.flags & BLOCKS else ROW if scaled else WHOLE
        own = (header.channels, header.per_channel)
        matrix = None if matrix_shape(header.shape) == own else own
        return AffineLayout(8, grid, ROWS_LSB, True, zero, "f16", dtype, matrix), parts, CODES

    def _palette(self, scaled: bool) -> tuple[Layout | None, dict[str, Part], str]:
        header, kind, unit = self._header, self._kind, self._unit
        entries = _ENTRY_DTYPES[kind.entry]
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
        layout = PaletteLayout(kind.bits, groups, header.vector, 0, "f16", entries, scale_dtype)
        return layout, parts, INDICES

    def _read(self, offset: int, size: int) -> Array:
        data = np.empty(size, np.uint8)
        self._unit.source.source.readinto(offset, data.data)
        return data

    def _part(self, role: str, dtype: str, runs: Array) -> Part:
        """Return a part of numbers of ``dtype`` in runs of bits, as bytes where all but the last end at one."""
        unit = self._unit
        where = f"{unit.name}: {role}"
        if (runs[1, :-1] % 8).any():
            stream: ByteSource = _Stream(unit.source, runs)
        else:
            whole = PartBytes(Part("u8", unit.source.size, unit.source, where=where), scattered=True)
            spans = np.stack([np.zeros_like(runs[0]), runs[0], -(-runs[1] // 8)])
            stream = Pieces(where, [whole], spans)
        row = DTYPES[dtype]
        return Part(row.storage, stream.size, stream, type=None if row.is_storage else row.name, where=where)


def _memory(values: Array, dtype: str) -> Part:
    return Part(dtype, values.nbytes, MemorySource(values.view(np.uint8).data))
