"""Dense tensors of a file whose header is decoded into columns; each tensor is built on access."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.core.bytes.checksums import Buffer
from ingot.core.numeric.dtypes import DTYPES, DType
from ingot.core.parsing.columns import Column, map_texts, numbers
from ingot.formats.shared.manifests import label
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.lazy_parts import LazyParts
from ingot.model.tensor import Tensor

Shape = tuple[int, ...]
Flags = NDArray[np.bool_]
_ROLES = (DATA,)


@dataclass(frozen=True, slots=True)
class DenseColumns:
    """Columns for dense tensors with one uncompressed part and no properties besides an optional digest.

    Parameters
    ----------
    data : Buffer
        The decoded manifest or header.
    rows : mapping
        The row of each tensor by name, in order.
    simple : bytes
        By row; nonzero if these columns describe the tensor.
    shape : Column
        By row.
    first : memoryview, optional
        By row, the index of the first part; the last element is the number of parts. None if part and row indices are
        equal.
    dtype : Column
        By part.
    types : sequence of DType or None
        The storage type of each text of ``dtype``; None for an unknown text.
    offset, length : memoryview
        By part, in bytes. Lengths are already checked.
    begins, sizes : memoryview, optional
        By part: offset and length of the digest's text in ``data``; the offset is negative without a digest.
    """

    data: Buffer
    rows: Mapping[str, int]
    simple: bytes
    shape: Column
    first: memoryview | None
    dtype: Column
    types: Sequence[DType | None]
    offset: memoryview
    length: memoryview
    begins: memoryview | None = None
    sizes: memoryview | None = None

    @classmethod
    def of_parts(
        cls,
        head: tuple[Buffer, Mapping[str, int], Column],
        parts: memoryview,
        simple: Flags,
        columns: tuple[Column, memoryview, memoryview, Column],
    ) -> DenseColumns:
        """Return the columns of a manifest that lists parts.

        ``head`` is a tuple of ``data``, ``rows`` and ``shape``. ``parts`` is the value of ``first``. ``columns`` is a
        tuple of columns by part: storage types, offsets, lengths, and digests as ranges of ``data``.
        """
        data, rows, shape = head
        dtype, offset, length, digest = columns
        types = storage_types(dtype)
        flags = simple.tobytes()
        return cls(data, rows, flags, shape, parts, dtype, types, offset, length, digest.first, digest.second)

    def part_of(self, row: int) -> int:
        """Return the index of the single part of the tensor in ``row``."""
        return row if self.first is None else self.first[row]


class DenseTensors:
    """A builder of dense tensors from rows of ``DenseColumns``, without an object per entry of the manifest.

    Parameters
    ----------
    columns : DenseColumns
    source : ByteSource
        The file. Its ``name`` begins error messages if ``label`` is None.
    verify, digest_of_decoded : bool
        As in ``Part``.
    label : callable, optional
        Returns the location of a tensor's part for error messages, from the tensor's name.
    """

    def __init__(
        self,
        columns: DenseColumns,
        source: ByteSource,
        *,
        verify: bool,
        digest_of_decoded: bool = False,
        label: Callable[[str], str] | None = None,
    ) -> None:
        self._columns = columns
        self._source = source
        self._verify = verify
        self._decoded = digest_of_decoded
        self._label = label or partial(_label_of, source.name)
        dtypes = zip(columns.dtype.texts, columns.types, strict=True)
        self._texts = [text if row is None else row.name for text, row in dtypes]
        self._shapes: dict[Shape, Shape] = {}
        self._nothing: dict[str, Any] = {}

    def lazy(self, names: Collection[str], closely: Callable[[str], Tensor] | None = None) -> LazyMap[Tensor]:
        """Return all tensors of a file by name; each is built on access.

        ``closely`` builds the tensor of a given name if the columns do not describe it.
        """
        columns = self._columns

        def build(name: str, parts_of: Callable[[str, int], Mapping[str, Part]]) -> Tensor:
            row = columns.rows[name]
            if closely is not None and not columns.simple[row]:
                return closely(name)
            return self._tensor(name, row, parts_of(name, row))

        late = partial(LazyParts, _ROLES, self._parts)
        return LazyMap(names, partial(build, parts_of=self._parts), partial(build, parts_of=late))

    def _tensor(self, name: str, row: int, parts: Mapping[str, Part]) -> Tensor:
        columns = self._columns
        shape = columns.shape.sizes(row)
        shape = self._shapes.setdefault(shape, shape)  # there are few distinct shapes
        dtype = self._texts[columns.dtype.first[columns.part_of(row)]]
        return Tensor(name, shape, dtype, DenseLayout.codec, parts, self._nothing)

    def _parts(self, name: str, row: int) -> dict[str, Part]:
        columns = self._columns
        index = columns.part_of(row)
        code = columns.dtype.first[index]
        dtype = columns.types[code]
        part = Part(
            dtype=columns.dtype.texts[code] if dtype is None else dtype.storage,
            length=columns.length[index],
            source=self._source,
            offset=columns.offset[index],
            type=None if dtype is None or dtype.is_storage else dtype.name,
            digest=self._digest(index),
            digest_of_decoded=self._decoded,
            where=self._label(name),
            verify=self._verify,
        )
        return {DATA: part}

    def _digest(self, part: int) -> str | None:
        columns = self._columns
        if columns.begins is None or columns.sizes is None or columns.begins[part] < 0:
            return None
        begin = columns.begins[part]
        return bytes(columns.data[begin : begin + columns.sizes[part]]).decode()


def plain_dense(codecs: Column, attributes: Column, starts: memoryview, *absent: Column) -> Flags:
    """Return for each tensor whether it is dense, has one part, and has no attributes.

    ``codecs`` and ``attributes`` are columns of tensors; ``starts`` are the indices of their first parts, then the
    number of parts. ``absent`` are columns of parts that must be empty for the tensor's part.
    """
    first = numbers(starts)
    present = np.zeros(int(first[-1]) + 1, bool)  # the last element serves tensors without parts at the end
    for column in absent:
        present[:-1] |= numbers(column.first) >= 0
    simple: Flags = (np.diff(first) == 1) & ~present[first[:-1]]
    simple &= (map_texts(codecs, {DenseLayout.codec: 1}) == 1) & (numbers(attributes.first) < 0)
    return simple


def storage_types(column: Column) -> list[DType | None]:
    """Return the storage type of each text of a column; None for texts that are no storage type."""
    return [DTYPES[text] if text in DTYPES and DTYPES[text].is_storage else None for text in column.texts]


def _label_of(file: str, name: str) -> str:
    return label(file, name, DATA)
