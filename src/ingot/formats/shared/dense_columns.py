"""Dense tensors of a file whose header was decoded into columns; each tensor is built on access."""

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
    """Columns of dense tensors that have one uncompressed part and no properties besides an optional digest.

    Parameters
    ----------
    data : Buffer
        The decoded manifest or header.
    rows : mapping
        Row by name of every tensor, in order.
    simple : bytes
        By row: nonzero for tensors that these columns describe.
    shape : Column
        By row.
    first : memoryview, optional
        By row the index of its first part, and the end. None if the index of a part equals its row.
    dtype : Column
        By part.
    types : sequence of DType or None
        The storage type for each text of ``dtype``; None for an unknown text.
    offset, length : memoryview
        By part, in bytes. Lengths were checked.
    begins, sizes : memoryview, optional
        By part: the offset and the length of the digest's text in ``data``; if the part has no digest, the offset is
        negative.
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

        ``head`` contains the decoded manifest, ``rows`` and ``shape``. ``parts`` has by row the first part, and the
        end. ``columns`` are by part: storage types, offsets, lengths, and digests as ranges of the manifest.
        """
        data, rows, shape = head
        dtype, offset, length, digest = columns
        types = storage_types(dtype)
        flags = simple.tobytes()
        return cls(data, rows, flags, shape, parts, dtype, types, offset, length, digest.first, digest.second)

    def part_of(self, row: int) -> int:
        """Return the index of the only part of the tensor in a row."""
        return row if self.first is None else self.first[row]


class DenseTensors:
    """Builds dense tensors from the rows of ``DenseColumns``, without an object per manifest entry.

    Parameters
    ----------
    columns : DenseColumns
    source : ByteSource
        The file. Its ``name`` begins error messages unless ``label`` is given.
    verify, digest_of_decoded : bool
        See ``Part``.
    label : callable, optional
        Returns the location of a tensor's part for error messages, given the tensor's name.
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
        """Return all tensors of a file by ``names``; each is built on access.

        ``closely`` builds, given its name, a tensor that the columns do not describe.
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
        shape = self._shapes.setdefault(shape, shape)  # few distinct shapes
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
    """Return for each tensor whether it is dense, with one part and without attributes.

    ``codecs`` and ``attributes`` are columns of tensors. ``starts`` are the indices of their first parts, and the end.
    ``absent`` are columns of parts; the part of a matching tensor has no value there.
    """
    first = numbers(starts)
    present = np.zeros(int(first[-1]) + 1, bool)  # the last entry serves tensors without parts at the end
    for column in absent:
        present[:-1] |= numbers(column.first) >= 0
    simple: Flags = (np.diff(first) == 1) & ~present[first[:-1]]
    simple &= (map_texts(codecs, {DenseLayout.codec: 1}) == 1) & (numbers(attributes.first) < 0)
    return simple


def storage_types(column: Column) -> list[DType | None]:
    """Return the storage type of each text of a column; None for texts that name no storage type."""
    return [DTYPES[text] if text in DTYPES and DTYPES[text].is_storage else None for text in column.texts]


def _label_of(file: str, name: str) -> str:
    return label(file, name, DATA)
