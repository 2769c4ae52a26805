"""What manifests of zTensor, of both versions, have in common: how messages name a tensor, which one broke the schema,
and columns of dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingot.core.columns import Column, chosen, numbers
from ingot.errors import FormatError
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.tensor import Tensor

Flags = NDArray[np.bool_]


def label(file: str, name: str, role: str | None = None) -> str:
    """Return how messages name a tensor or part; hostile names are cut."""
    text = f"{file}: tensor {name[:200]!r}"
    return text if role is None else f"{text} part {role[:80]!r}"


@dataclass(frozen=True, slots=True)
class Schema:
    """What the ``objects`` of a manifest are: their type, the key of their parts and the type of these.

    ``missing``, ``wrong`` and ``range`` are the rules of a field that is absent, of another type, or out of range.
    """

    object: type
    parts: str
    part: type
    missing: str
    wrong: str
    range: str

    def blame(self, root: Any, error: msgspec.ValidationError, file: str) -> FormatError:
        """Find the tensor and part that broke the schema; the message of a whole-manifest check does not name them."""
        where = f"{file}: manifest"
        for where_found, value, kind in self._pieces(root, file):
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as found:
                error, where = found, where_found
                break
        return FormatError(self._rule(str(error)), str(error), where=where)

    def _pieces(self, root: Any, file: str) -> Iterator[tuple[str, Any, type]]:
        objects = root.get("objects") if isinstance(root, dict) else None
        for name, value in objects.items() if isinstance(objects, dict) else ():
            parts = value.get(self.parts) if isinstance(value, dict) else None
            for role, part in parts.items() if isinstance(parts, dict) else ():
                yield label(file, name, role), part, self.part
            yield label(file, name), value, self.object

    def _rule(self, message: str) -> str:
        if "missing required field" in message:
            return self.missing
        return self.range if "`int` >=" in message or "`int` <=" in message else self.wrong


@dataclass(frozen=True, slots=True)
class DenseColumns:
    """Columns of dense tensors in one raw part that states nothing more than its digest, as most are.

    Parameters
    ----------
    data : bytes
        What was decoded.
    rows : dict
        All tensors by name; of these, ``simple`` tells which are meant.
    shape : Column
        By row.
    first : memoryview
        By row the first of its parts.
    dtype, offset, length, digest : Column or memoryview
        By part.
    """

    data: bytes
    rows: dict[str, int]
    simple: bytes
    shape: Column
    first: memoryview
    dtype: Column
    offset: memoryview
    length: memoryview
    digest: Column

    def tensors(
        self, source: ByteSource, *, verify: bool, digest_of_decoded: bool = False
    ) -> Callable[[str], Tensor | None]:
        """Return what makes such tensors, without an object between, and None of others."""
        rows, simple, first, dtypes, digests = self.rows, self.simple, self.first, self.dtype, self.digest

        def make(name: str) -> Tensor | None:
            row = rows[name]
            if not simple[row]:
                return None
            at = first[row]
            dtype, begin = dtypes.texts[dtypes.first[at]], digests.first[at]
            part = Part(
                dtype=dtype,
                length=self.length[at],
                source=source,
                offset=self.offset[at],
                digest=None if begin < 0 else self.data[begin : begin + digests.second[at]].decode(),
                digest_of_decoded=digest_of_decoded,
                where=label(source.name, name, DATA),
                verify=verify,
            )
            return Tensor(name, self.shape.sizes(row), dtype, DenseLayout.codec, {DATA: part})

        return make

    def kind(self, name: str) -> Hashable:
        """Return what tells the kinds of such tensors (``Many.kind``), and None of others."""
        row = self.rows[name]
        return (self.dtype.first[self.first[row]], self.shape.sizes(row)) if self.simple[row] else None


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


def has_maps(column: Column, data: bytes) -> bool:
    """Whether the values of a column that was left where it lies are CBOR maps, where they are there."""
    starts = numbers(column.first)
    heads = np.frombuffer(data, np.uint8)[starts[starts >= 0]]
    return bool((heads >> 5 == 5).all())


def kinds(column: Column, known: Container[str]) -> Iterator[tuple[str, int]]:
    """Yield texts of a column that are not known, and how often they occur."""
    for number, text in enumerate(column.texts):
        if text not in known:
            yield text, int(np.count_nonzero(numbers(column.first) == number))
