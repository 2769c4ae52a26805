"""Compare two checkpoints tensor by tensor: equal, or how far apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, overload

import numpy as np

from ingot.artifacts.adapter_files import adapter_in
from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.destination import is_distributed
from ingot.artifacts.open import address_of
from ingot.artifacts.open import open as open_checkpoint
from ingot.conversion.onnx.graphs import facing
from ingot.core.numeric.dtypes import FLOATS
from ingot.core.numeric.stats import ErrorStats, measure
from ingot.core.options import takes
from ingot.core.runtime.parallel import ordered_together
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.chunks import LIGHT, chunks, matrix_of, weight
from ingot.errors import FormatError, MissingExtraError, UnsupportedError
from ingot.formats.detect import FORMATS
from ingot.inspect.comparisons import (
    DIFFERS,
    EQUAL,
    IDENTICAL,
    ONLY_A,
    ONLY_B,
    SHAPE,
    UNKNOWN,
    Comparisons,
    TensorComparison,
)
from ingot.inspect.options import ComparedFiles, CompareOptions
from ingot.model.account import describe_unread, lost_tensors
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.lazy import TensorMap
from ingot.model.reading.limits import require_in_proportion
from ingot.model.tensor import Array, Tensor
from ingot.reporting.report import Column, Figure, Line, Report, Table, Texts
from ingot.reporting.shown import Shown
from ingot.stores.location import Location

_CHUNK = 1 << 20
_NONE = ErrorStats()

Pair = tuple[Tensor, Tensor]
ByPair = Callable[[Sequence[Pair], Progress], Iterable[TensorComparison]]
"""Compares tensors, and tells what each pair gave, in order."""


@dataclass(frozen=True, slots=True)
class CompareReport(Shown):
    """All comparisons, worst first: what is missing or misshapen, then by rising signal-to-noise ratio, then the
    equal.

    ``unread``: sentences about tensors that a file holds and its reader could not express, which were not compared.
    ``notes``: what one of them is, if it is no model.
    """

    a: str
    b: str
    tensors: Sequence[TensorComparison]
    unread: Texts = ()
    notes: Texts = ()

    @property
    def same(self) -> bool:
        """Whether both hold the same tensors with the same values, and both were read completely."""
        return not self.unread and all(tensor.same for tensor in self.tensors)

    @property
    def total(self) -> ErrorStats:
        """Sums over all tensors that could be compared as numbers."""
        return sum((tensor.stats for tensor in self.tensors if tensor.stats), ErrorStats())

    @property
    def compared(self) -> int:
        """Number of tensors that could be compared as numbers."""
        return sum(tensor.stats is not None for tensor in self.tensors)

    @property
    def scored(self) -> bool:
        """Whether ``total`` says how far apart the two are: something that could be compared differs in value."""
        return any(tensor.stats is not None and tensor.status == DIFFERS for tensor in self.tensors)

    def report(self, top: int = 0) -> Report:
        """Return all comparisons; people get the ``top`` first, all for 0."""
        found = replace(self, tensors=list(self.tensors))  # asked for many times below, each made once
        counts = Counter(item.status for item in found.tensors)
        total = found.total
        shown = found.tensors[: top or None]
        figures = [
            Figure("a", self.a),
            Figure("b", self.b),
            Figure("same", found.same, "flag"),
            Figure("unread", self.unread, "texts"),
            Figure("notes", self.notes, "texts"),
            Figure("counts", {_words(*item): item[1] for item in counts.items()}, "counts", data=False),
            Figure("compared", found.compared, "count", data=False),
            Figure("max_abs", total.max_abs, "number", data=False),
            Figure("rms", total.rms, "number", data=False),
            Figure("snr", total.snr_db, "decibels", data=False),
            Figure("cosine", total.cosine, "cosine", data=False),
            Figure("more", len(found.tensors) - len(shown), "count", data=False),
        ]
        lines = [Line("{item}", "note", each="notes"), Line("{item}", "not compared", each="unread")]
        lines.append(Line("{counts}" if counts else "no tensors"))
        if found.scored:  # equal tensors beside what could not be compared are no score
            scope = "over all" if found.compared == len(found.tensors) else "over the {compared} compared"
            lines.append(Line(f"{scope}: max {{max_abs}}, RMS {{rms}}, SNR {{snr}}, cosine {{cosine}}"))
        closing = [Line("... and {more} more (--top 0 shows all)")] if len(shown) < len(found.tensors) else []
        tables = [_table("tensors", found.tensors, shown=False), _table("", shown, data=False)]
        return Report(figures, lines, tables, closing)


_COLUMNS = (
    Column("name", head="tensor"),
    Column("status", head="status"),
    Column("detail"),
    Column("", head="detail"),
    Column("max_abs", "number", "max error"),
    Column("rms", "number", "RMS error", drop=2),
    Column("snr_db", "decibels", "SNR dB"),
    Column("cosine", "cosine", "cosine", drop=1),
    Column("odd", "count"),
)


def _table(name: str, tensors: Sequence[TensorComparison], *, data: bool = True, shown: bool = True) -> Table:
    rows = []
    for item in tensors:
        odd = item.stats.odd if item.stats else 0
        detail = "; ".join(filter(None, (item.detail, f"{odd} NaN/Inf mismatches" if odd else "")))
        figures = item.stats.summary().values() if item.stats else (None,) * 4
        rows.append((item.name, item.status, item.detail, detail, *figures, odd))
    return Table(name, _COLUMNS, rows, data=data, shown=shown)


def _words(status: str, count: int) -> str:
    return status if count == 1 else status.replace("differs", "differ")


@takes(CompareOptions, "compare")
def compare(options: CompareOptions) -> CompareReport:
    """Compare two checkpoints in any formats, anything that ``ingot.open`` opens; A is the reference.

    A GGUF file beside a model's folder is compared under the folder's names.

    ``progress`` counts stored bytes of both.

    Returns
    -------
    CompareReport
        Decoded values are compared in chunks; memory stays that of a few chunks. It is the same whoever the ``engine``
        has do the work.

    Raises
    ------
    UsageError
        ``cluster.engine``.
    IngotError
        What opening and decoding raise, and with workers ``cluster.driver.spread.ask``.
    """
    is_distributed(options.engine, options.address)  # refused before anything is read
    a, b = Location.parse(options.a), Location.parse(options.b)
    with sides(options) as (first, second):
        results = compared(first, second, options.progress, _by_pair(options, (a, b), (first, second)))
        unread = [
            f"{checkpoint.location}: {describe_unread(checkpoint.unread)}"
            for checkpoint in (first, second)
            if checkpoint.unread
        ]
        adapters = {location: adapter_in(side, location) for location, side in ((a, first), (b, second))}
    notes = [f"{location}: {adapter.describe()}" for location, adapter in adapters.items() if adapter is not None]
    return CompareReport(a.display, b.display, results, unread, notes)


@contextmanager
def sides(options: CompareOptions, *, whole: bool = True) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Open both, under names and with forms that can be compared.

    Digests over whole files are proven, unless ``whole`` is False.
    """
    limit = options.max_decompressed
    with (
        open_checkpoint(options.a, io="pread", max_decompressed=limit) as first,
        open_checkpoint(options.b, io="pread", max_decompressed=limit) as second,
    ):
        for checkpoint in (first, second):
            require_in_proportion(checkpoint.tensor_map.uncached(), checkpoint.location)
            if whole:
                checkpoint.require_whole()
        with ExitStack() as stack:
            one, other = _as_models(first, second, stack)
            yield facing(one, other), facing(other, one)


def compared(
    first: Checkpoint, second: Checkpoint, progress: ProgressCallback | None = None, by_pair: ByPair | None = None
) -> Comparisons:
    """Return all comparisons of two ``sides``, worst first; ``by_pair`` compares two tensors, by default here."""
    pairs, alone = pairs_of(first, second)
    state = Progress(first.nbytes + second.nbytes, progress)
    return Comparisons(chain(alone, (by_pair or _here)(pairs, state)))


def _by_pair(
    options: CompareOptions, locations: tuple[Location, Location], checkpoints: tuple[Checkpoint, Checkpoint]
) -> ByPair:
    """Return the comparison of tensors, here or by workers."""
    if not is_distributed(options.engine, options.address):
        return _here

    def by_workers(pairs: Sequence[Pair], state: Progress) -> Iterable[TensorComparison]:
        from ingot.cluster.driver.spread import Query, ask, files_of
        from ingot.cluster.pool import pool_of

        a, b = locations
        opened = ComparedFiles(a.text, b.text, options.max_decompressed)
        addresses = {"a": address_of(a), "b": address_of(b)}
        files = files_of(opened, addresses, [checkpoint.identity() for checkpoint in checkpoints])
        queries = [Query(number, old.name, old.nbytes + other.nbytes) for number, (old, other) in enumerate(pairs)]
        with closing(pool_of(options.engine, options.address)) as pool:
            return ask("compare", files, queries, pool, state)

    return by_workers


def _here(pairs: Sequence[Pair], state: Progress) -> Iterator[TensorComparison]:
    """Compare tensors in this process."""

    def done(pair: Pair) -> tuple[TensorComparison, int]:
        return compare_pair(pair), pair[0].nbytes + pair[1].nbytes

    for found, nbytes in ordered_together(done, pairs, lambda pair: weight(pair[0]) + weight(pair[1])):
        state.advance(nbytes, found.name)
        yield found


def _as_models(first: Checkpoint, second: Checkpoint, stack: ExitStack) -> tuple[Checkpoint, Checkpoint]:
    """Return both under the names, and with the order of rows, of a model's folder, where one is a GGUF file.

    If names agree as they are, or a tensor has no name on the other side, nothing is translated.
    """
    if first.format == second.format or any(name in second for name in first):
        return first, second
    from ingot.translate.view import to_model

    pair = [first, second]
    for index, checkpoint in enumerate(pair):
        if has_model_metadata(checkpoint.format):
            with suppress(UnsupportedError, FormatError, MissingExtraError):
                translated = to_model(checkpoint, no_tokenizer=True)
                if not lost_tensors(translated.checkpoint.omissions):
                    pair[index] = translated.checkpoint
                    stack.callback(pair[index].close)
    return pair[0], pair[1]


def pairs_of(first: Checkpoint, second: Checkpoint) -> tuple[Sequence[Pair], Iterator[TensorComparison]]:
    """Return the tensors that are compared, and what is said of the others."""
    others = renamed(first, second)
    names = [name for name in first if name in second]
    return _Pairs(first.tensor_map, second.tensor_map, [*names, *others], others), _alone(first, second, others)


def _alone(first: Checkpoint, second: Checkpoint, others: Mapping[str, str]) -> Iterator[TensorComparison]:
    there = set(others.values())
    for name in second:
        if name not in first and name not in there:
            yield TensorComparison(name, ONLY_B)
    for name in first:
        if name not in second and name not in others:
            yield TensorComparison(name, ONLY_A)


class _Pairs(Sequence[Pair]):
    """Tensors to compare, of two checkpoints; each made when it is asked for, and not kept.

    ``names`` are those of the first; ``others`` tells which of these have another one in the second.
    """

    def __init__(
        self, first: TensorMap[Tensor], second: TensorMap[Tensor], names: Sequence[str], others: Mapping[str, str]
    ) -> None:
        self._first = first
        self._second = second
        self._names = names
        self._others = others

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Pair]: ...

    def __getitem__(self, index: int | slice) -> Pair | Sequence[Pair]:
        if isinstance(index, slice):
            return _Pairs(self._first, self._second, self._names[index], self._others)
        name = self._names[index]
        return self._first.get_uncached(name), self._second.get_uncached(self._others.get(name, name))


def renamed(first: Checkpoint, second: Checkpoint) -> dict[str, str]:
    """Return which names of A, without their like in B, are which of B: those that were one before a compression.

    Only where each side has one such name: nothing is guessed.
    """
    sides: list[dict[str, list[str]]] = []
    for checkpoint, other in ((first, second), (second, first)):
        format = FORMATS[checkpoint.format]
        found = dict[str, list[str]]()
        for name in checkpoint:
            if name not in other:
                found.setdefault(format.original_name(name), []).append(name)
        sides.append(found)
    return {
        names[0]: sides[1][key][0] for key, names in sides[0].items() if len(names) == len(sides[1].get(key, ())) == 1
    }


def compare_pair(pair: Pair) -> TensorComparison:
    """Compare two tensors."""
    first, other = pair
    try:
        differ = first.shape != other.shape
        shapes = f"{list(first.shape)} and {list(other.shape)}"
        found = TensorComparison(first.name, SHAPE, shapes) if differ else _values(first, other)
    except UnsupportedError as error:
        found = TensorComparison(first.name, UNKNOWN, str(error))
    if first.name == other.name:
        return found
    return replace(found, detail="; ".join(filter(None, (f"in B {other.name}", found.detail))))


def _values(first: Tensor, other: Tensor) -> TensorComparison:
    numbers = first.dtype in FLOATS and other.dtype in FLOATS
    if not numbers and first.dtype != other.dtype:
        return TensorComparison(first.name, DIFFERS, f"{first.dtype} and {other.dtype}")
    same_dtype = first.dtype == other.dtype
    same_bits = True
    stats = _NONE
    same_values = True
    matrix = matrix_of(first, other.codec)
    step = max(1, _CHUNK // max(matrix[1], 1))
    both = chunks(first, matrix, step, checked=True), chunks(other, matrix, step, checked=True)
    for left, right in zip(*both, strict=True):
        if same_dtype and _same_bits(left, right):
            if numbers:
                stats = _added(stats, measure(left, left))
            continue
        same_bits = False
        if numbers:
            piece = measure(left, right)
            same_values = same_values and piece.different == 0
            stats = _added(stats, piece)
        else:
            same_values = False
    status = IDENTICAL if same_dtype and same_bits else EQUAL if same_values else DIFFERS
    detail = "" if same_dtype else f"{first.dtype} and {other.dtype}"
    return TensorComparison(first.name, status, detail, stats if numbers else None)


def _added(sums: ErrorStats, more: ErrorStats) -> ErrorStats:
    return more if sums is _NONE else sums + more


def _same_bits(left: Array, right: Array) -> bool:
    if left.nbytes <= LIGHT:
        return left.tobytes() == right.tobytes()
    return np.array_equal(_bits(left), _bits(right))


def _bits(rows: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return rows.reshape(-1).view(np.uint8)
