"""Entries of the header: what it says of one tensor, by itself or as rows of columns that are checked together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np

from ingot.core.checksums import Buffer
from ingot.core.columns import ABSENT, Array, Column, Index, chosen, field, json_table, numbers, record
from ingot.core.dtypes import dtype
from ingot.core.structs import warm
from ingot.errors import IngotError
from ingot.formats.wdelta.layout import FIELDS, STRATEGIES
from ingot.model.delta import Change

_Natural = Annotated[int, msgspec.Meta(ge=0)]


@warm
class Entry(msgspec.Struct):
    """What the header says of one tensor; fields of all strategies."""

    strategy: str
    shape: tuple[_Natural, ...]
    dtype: str
    base_dtype: str | None = None
    sparsity: int | float | None = None
    outlier_fraction: int | float | None = None
    n_elements: _Natural | None = None
    n_cols: _Natural | None = None
    n_outliers: _Natural | None = None
    int4_layout: int | None = None
    indices: Any = None
    values: Any = None
    scales: Any = None
    packed_signs: Any = None
    outlier_idx: Any = None
    outlier_vals: Any = None
    scale: Any = None
    zero_point: Any = None
    packed: Any = None

    @property
    def codec(self) -> str:
        """Codec id of the strategy."""
        return STRATEGIES[self.strategy].codec

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def layout(self) -> int:
        """How ``packed`` is laid out: 1 without the outliers, 2 with them."""
        return self.int4_layout or 1

    @property
    def change(self) -> Change:
        """What becomes of the tensor. Without a ``base_dtype`` the result is of ``dtype``, as of deltatensors 0.2.0."""
        return change_of(self.base_dtype or self.dtype)

    def record_of(self, field: str) -> str:
        """Return the name that ``_ref`` gives for the array of a field; the field's own where none is given."""
        value = getattr(self, field)
        name = value.get("_ref") if isinstance(value, dict) else None
        return name if isinstance(name, str) else field

    def params(self) -> dict[str, Any]:
        """Return the codec's parameters."""
        if self.strategy == "sparse":
            return {} if self.sparsity is None else {"sparsity": self.sparsity}
        if self.strategy == "quantized":
            return {}
        fraction = {} if self.outlier_fraction is None else {"outlier_fraction": self.outlier_fraction}
        return {**fraction, "layout": self.layout}

    def counts(self) -> dict[str, int | None]:
        """Return how many elements each array of the payload has; None where only the payload tells."""
        if self.strategy == "sparse":
            return {"indices": None, "values": None}
        if self.strategy == "quantized":
            return {"scales": scale_rows(self.shape), "packed_signs": -(-self.size // 8)}
        apart = self.n_outliers or 0
        codes = self.size - (apart if self.layout == 1 else 0)
        return {"outlier_idx": apart, "outlier_vals": apart, "scale": 1, "zero_point": 1, "packed": -(-codes // 2)}


def change_of(base_dtype: str | None) -> Change:
    """Return what becomes of a tensor that states this element type, or none."""
    return Change("apply", dtype(base_dtype).name if base_dtype else "f32")


def scale_rows(shape: Sequence[int]) -> int:
    """Return how many scales a tensor of strategy ``quantized`` has: one per row, its first dimension."""
    return shape[0] if len(shape) > 1 else 1


def cols(shape: Sequence[int]) -> int:
    """Return the number that ``n_cols`` states."""
    return prod(shape[1:]) if len(shape) > 1 else prod(shape)


_REF = record(field("_ref", "text"))
_ROW = record(
    field("strategy", "text"),
    field("shape", "sizes"),
    field("dtype", "text"),
    field("base_dtype", "text", optional=True),
    field("sparsity", "decimal", optional=True),
    field("outlier_fraction", "decimal", optional=True),
    field("n_elements", "number", optional=True),
    field("n_cols", "number", optional=True),
    field("n_outliers", "number", optional=True),
    field("int4_layout", "number", optional=True),
    *(field(name, _REF, optional=True) for name in FIELDS),
)
_MANY = 1 << 55
"""Elements: nothing so large is told without a closer look, so that no product of theirs passes 63 bits."""
_NAMES = tuple(STRATEGIES)


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """All entries of a header that break no rule. ``rest`` is the header without them, which is still to be parsed;
    ``alike`` has for each the first that was spelled as it is, or itself. ``data`` has the texts of ``decimals``, each
    once: what else was decoded is not kept."""

    rows: Index
    rest: bytes
    alike: memoryview
    data: Buffer
    strategy: Column
    shape: Column
    base_dtype: Column
    decimals: tuple[Column, Column]
    counts: tuple[Column, Column, Column, Column]

    def entry(self, row: int) -> Entry:
        """Return one entry."""
        strategy = self.strategy.text(row) or ""
        sparsity, fraction = (
            None if (at := each.span(row)) is None else json.loads(bytes(self.data[at])) for each in self.decimals
        )
        elements, cols, outliers, layout = (None if each.first[row] < 0 else each.first[row] for each in self.counts)
        return Entry(
            strategy,
            self.shape.sizes(row),
            "float32",
            self.base_dtype.text(row),
            sparsity,
            fraction,
            elements,
            cols,
            outliers,
            layout,
            **{name: {"_ref": name} for name in STRATEGIES[strategy].fields},
        )

    @property
    def kinds(self) -> Array:
        """The number of each entry's strategy, in the order of ``STRATEGIES``."""
        return chosen(self.strategy, {name: number for number, name in enumerate(_NAMES)})

    @property
    def sizes(self) -> Array:
        """The number of elements of each tensor."""
        return numbers(self.shape.third)

    @property
    def scales(self) -> Array:
        """``scale_rows`` of each tensor."""
        return np.where(self._ranks > 1, self._leading, 1)

    @property
    def layouts(self) -> Array:
        """``Entry.layout`` of each tensor."""
        return np.maximum(numbers(self.counts[3].first), 1)

    @property
    def outliers(self) -> Array:
        """``n_outliers`` of each tensor."""
        return numbers(self.counts[2].first)

    def sound(self, version: int) -> bool:
        """Whether no entry breaks a rule; some that break none are not told so."""
        kinds, sizes = self.kinds, self.sizes
        elements, columns, outliers, layouts = (numbers(each.first) for each in self.counts)
        if (kinds < 0).any() or (sizes > _MANY).any() or (self._leading == 0).any():
            return False
        signs, codes = (kinds == _NAMES.index(name) for name in ("quantized", "int4"))
        wrong = (signs | codes) & (elements != sizes)
        wrong |= signs & (columns != np.where(self._ranks > 1, sizes // self._leading, sizes))
        wrong |= codes & ((outliers < 0) | (outliers > sizes))
        wrong |= codes & ~np.isin(layouts, (ABSENT,) if version == 1 else (ABSENT, 1, 2))
        return not wrong.any() and _are_dtypes(self.base_dtype.texts)

    @property
    def _ranks(self) -> Array:
        return np.diff(numbers(self.shape.second))

    @property
    def _leading(self) -> Array:
        """The first size of each tensor, 1 where it has none."""
        ranks, flat = self._ranks, np.append(numbers(self.shape.first), 1)
        return np.where(ranks > 0, flat[numbers(self.shape.second)[:-1]], 1)


def entry_columns(data: Buffer, version: int) -> EntryColumns | None:
    """Decode the entries of a header; None where it deserves a closer look."""
    table = json_table(data, _ROW, under="tensors")
    if table is None:
        return None
    strategy, shape, kind, base, sparsity, fraction, elements, columns, outliers, layout, *refs = table.columns
    if set(kind.texts) - {"float32"} or not _refer(strategy, refs):
        return None
    texts = _Texts(data, table.alike)
    decimals = texts.of(sparsity), texts.of(fraction)
    made = EntryColumns(
        table.rows,
        table.rest,
        table.alike,
        bytes(texts.found),
        strategy,
        shape,
        base,
        decimals,
        (elements, columns, outliers, layout),
    )
    return made if made.sound(version) else None


class _Texts:
    """Gathers texts of entries out of ``data``, each different one once; ``alike`` tells which are spelled the same."""

    def __init__(self, data: Buffer, alike: memoryview) -> None:
        self._data = data
        self._firsts, self._numbers = np.unique(numbers(alike), return_inverse=True)
        self._known: dict[bytes, int] = {}
        self.found = bytearray()

    def of(self, column: Column) -> Column:
        """Return a column of spans of ``data`` as one of spans of what was gathered."""
        spans = np.array([self._place(column.span(row)) for row in self._firsts.tolist()], np.int64).reshape(-1, 2)
        begins, lengths = (_found(each, self._numbers) for each in spans.T)
        return Column((begins, lengths, b"", [], []))

    def _place(self, span: slice | None) -> tuple[int, int]:
        if span is None:
            return ABSENT, 0
        text = bytes(self._data[span])
        begin = self._known.setdefault(text, len(self.found))
        if begin == len(self.found):
            self.found += text
        return begin, len(text)


def _found(values: Array, numbers: Array) -> bytes | tuple[int, int]:
    """Return what ``Column`` takes of the values that these are the numbers of."""
    return (int(values[0]), numbers.size) if np.unique(values).size == 1 else values[numbers].tobytes()


def _refer(strategy: Column, refs: Sequence[Column]) -> bool:
    """Whether every entry refers to all arrays of its strategy by their names."""
    for name, ref in zip(FIELDS, refs, strict=True):
        needed = chosen(
            strategy, {text: int(name in STRATEGIES[text].fields) for text in strategy.texts if text in STRATEGIES}
        )
        if (needed.astype(bool) & (chosen(ref.inner[0], {name: 1}) != 1)).any():
            return False
    return True


def _are_dtypes(texts: Sequence[str]) -> bool:
    try:
        return all(dtype(text) is not None for text in texts)
    except IngotError:
        return False
