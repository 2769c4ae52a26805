"""Dense tensors of a file whose header was decoded into columns: made one by one, or told where they lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.core.checksums import Buffer
from ingot.core.columns import Column, chosen, numbers
from ingot.core.dtypes import DTYPES, DType
from ingot.formats.manifests import label
from ingot.model.bytesource import ByteSource
from ingot.model.late_parts import LateParts
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.lazy import Lazy
from ingot.model.part import Part
from ingot.model.tensor import Tensor

Shape = tuple[int, ...]
Flags = NDArray[np.bool_]
_ROLES = (DATA,)


@dataclass(frozen=True, slots=True)
class DenseColumns:
    """Columns of dense tensors in one raw part that states nothing more than its digest, as most are.

    Parameters
    ----------
    data : Buffer
        What was decoded.
    rows : mapping
        All tensors by name, in order; of these, ``simple`` tells which are meant.
    shape : Column
        By row.
    first : memoryview, optional
        By row the first of its parts, and the end; None where a part's number is its tensor's.
    dtype : Column
        By part; ``types`` are what its texts stand for, None for what nobody knows.
    offset, length : memoryview
        By part; lengths are right.
    begins, sizes : memoryview, optional
        By part: where its digest lies in ``data``, below 0 for none, and how long it is.
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
        """Return those of a manifest that states parts.

        ``head`` is what was decoded, ``rows`` and ``shape``; ``parts`` has by row the first part, and the end;
        ``columns`` are of parts: storage types, offsets, lengths, digests that were left where they lie.
        """
        data, rows, shape = head
        dtype, offset, length, digest = columns
        types, flags = storage_types(dtype), simple.tobytes()
        return cls(data, rows, flags, shape, parts, dtype, types, offset, length, digest.first, digest.second)

    def part_of(self, row: int) -> int:
        """Return the number of such a tensor's part."""
        return row if self.first is None else self.first[row]


class DenseTensors:
    """What makes tensors of ``DenseColumns``, without an object between.

    Parameters
    ----------
    columns : DenseColumns
    source : ByteSource
        The file, whose ``name`` messages have, unless ``label`` says where a part is by its tensor's name.
    verify, digest_of_decoded : bool
        As of ``Part``.
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
        self._columns, self._source, self._verify = columns, source, verify
        self._decoded = digest_of_decoded
        self._label = label or partial(_label_of, source.name)
        spelled = zip(columns.dtype.texts, columns.types, strict=True)
        self._texts = [text if row is None else row.name for text, row in spelled]
        self._shapes: dict[Shape, Shape] = {}
        self._nothing: dict[str, Any] = {}

    def lazy(self, names: Collection[str], closely: Callable[[str], Tensor] | None = None) -> Lazy[Tensor]:
        """Return all tensors of a file; ``closely`` makes those that are no such ones."""
        columns = self._columns

        def made(name: str, parts_of: Callable[[str, int], Mapping[str, Part]]) -> Tensor:
            row = columns.rows[name]
            if closely is not None and not columns.simple[row]:
                return closely(name)
            return self._tensor(name, row, parts_of(name, row))

        late = partial(LateParts, _ROLES, self._parts)
        return Lazy(names, partial(made, parts_of=self._parts), partial(made, parts_of=late))

    def _tensor(self, name: str, row: int, parts: Mapping[str, Part]) -> Tensor:
        columns = self._columns
        shape = columns.shape.sizes(row)
        shape = self._shapes.setdefault(shape, shape)  # few differ
        kind = self._texts[columns.dtype.first[columns.part_of(row)]]
        return Tensor(name, shape, kind, DenseLayout.codec, parts, self._nothing)

    def _parts(self, name: str, row: int) -> dict[str, Part]:
        columns = self._columns
        at = columns.part_of(row)
        code = columns.dtype.first[at]
        known = columns.types[code]
        part = Part(
            dtype=columns.dtype.texts[code] if known is None else known.storage,
            length=columns.length[at],
            source=self._source,
            offset=columns.offset[at],
            type=None if known is None or known.is_storage else known.name,
            digest=self._digest(at),
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
    """Return which tensors are dense ones without attributes in one part, of which columns of parts say nothing.

    ``codecs`` and ``attributes`` are columns of tensors, ``starts`` their first parts and the end, ``absent`` those of
    parts.
    """
    first = numbers(starts)
    stated = np.zeros(int(first[-1]) + 1, bool)  # the last for tensors without parts behind all others
    for column in absent:
        stated[:-1] |= numbers(column.first) >= 0
    alone: Flags = (np.diff(first) == 1) & ~stated[first[:-1]]
    alone &= (chosen(codecs, {DenseLayout.codec: 1}) == 1) & (numbers(attributes.first) < 0)
    return alone


def storage_types(column: Column) -> list[DType | None]:
    """Return what the texts of a column stand for that are storage types."""
    return [DTYPES[text] if text in DTYPES and DTYPES[text].is_storage else None for text in column.texts]


def _label_of(file: str, name: str) -> str:
    return label(file, name, DATA)
