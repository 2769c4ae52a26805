"""Compare two checkpoints tensor by tensor: equality and errors."""

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
from ingot.conversion.onnx.graphs import align_orientation
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
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location

_CHUNK = 1 << 20
_NONE = ErrorStats()

Pair = tuple[Tensor, Tensor]
ComparePairs = Callable[[Sequence[Pair], Progress], Iterable[TensorComparison]]
"""A function that compares pairs of tensors and yields the results in order."""


@dataclass(frozen=True, slots=True)
class CompareReport(Reportable):
    """All comparisons, worst first; ``Comparisons`` describes the order.

    ``unread`` are sentences about tensors that Ingot cannot read, which were not compared. ``notes`` describe a
    checkpoint that is an adapter.
    """

    a: str
    b: str
    tensors: Sequence[TensorComparison]
    unread: Texts = ()
    notes: Texts = ()

    @property
    def same(self) -> bool:
        """Whether both checkpoints contain the same tensors with the same values, and all tensors were read."""
        return not self.unread and all(tensor.same for tensor in self.tensors)

    @property
    def total(self) -> ErrorStats:
        """The error sums over all tensors that could be compared as numbers."""
        return sum((tensor.stats for tensor in self.tensors if tensor.stats), ErrorStats())

    @property
    def compared(self) -> int:
        """The number of tensors that could be compared as numbers."""
        return sum(tensor.stats is not None for tensor in self.tensors)

    @property
    def scored(self) -> bool:
        """Whether at least one tensor with numeric values differs, so that ``total`` contains errors."""
        return any(tensor.stats is not None and tensor.status == DIFFERS for tensor in self.tensors)

    def report(self, top: int = 0) -> Report:
        """Return a report of all comparisons; text shows only the first ``top``, or all for 0."""
        built = replace(self, tensors=list(self.tensors))  # the sequence builds an item on each access
        counts = Counter(item.status for item in built.tensors)
        total = built.total
        shown = built.tensors[: top or None]
        figures = [
            Figure("a", self.a),
            Figure("b", self.b),
            Figure("same", built.same, "flag"),
            Figure("unread", self.unread, "texts"),
            Figure("notes", self.notes, "texts"),
            Figure("counts", {_plural(*item): item[1] for item in counts.items()}, "counts", data=False),
            Figure("compared", built.compared, "count", data=False),
            Figure("max_abs", total.max_abs, "number", data=False),
            Figure("rms", total.rms, "number", data=False),
            Figure("snr", total.snr_db, "decibels", data=False),
            Figure("cosine", total.cosine, "cosine", data=False),
            Figure("more", len(built.tensors) - len(shown), "count", data=False),
        ]
        lines = [Line("{item}", "note", items="notes"), Line("{item}", "not compared", items="unread")]
        lines.append(Line("{counts}" if counts else "no tensors"))
        if built.scored:
            scope = "over all" if built.compared == len(built.tensors) else "over the {compared} compared"
            lines.append(Line(f"{scope}: max {{max_abs}}, RMS {{rms}}, SNR {{snr}}, cosine {{cosine}}"))
        closing = [Line("... and {more} more (--top 0 shows all)")] if len(shown) < len(built.tensors) else []
        tables = [_table("tensors", built.tensors, shown=False), _table("", shown, data=False)]
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
        nonfinite = item.stats.odd if item.stats else 0
        detail = "; ".join(filter(None, (item.detail, f"{nonfinite} NaN/Inf mismatches" if nonfinite else "")))
        figures = item.stats.summary().values() if item.stats else (None,) * 4
        rows.append((item.name, item.status, item.detail, detail, *figures, nonfinite))
    return Table(name, _COLUMNS, rows, data=data, shown=shown)


def _plural(status: str, count: int) -> str:
    return status if count == 1 else status.replace("differs", "differ")


@takes(CompareOptions, "compare")
def compare(options: CompareOptions) -> CompareReport:
    """Compare two checkpoints in any of the formats that ``ingot.open`` opens; A is the reference.

    If one is a GGUF file and the other a model folder, tensors are compared under the folder's names. ``progress``
    counts stored bytes of both. Decoded values are compared in chunks, so memory does not grow with the size of
    tensors.

    Returns
    -------
    CompareReport
        The report does not depend on the ``engine``.

    Raises
    ------
    UsageError
        ``cluster.engine``.
    IngotError
        Errors of opening and decoding, and with workers those of ``cluster.driver.spread.ask``.

    Examples
    --------
    >>> report = ingot.compare("model", "int4.zt")
    >>> report.same, report.tensors[0].status
    (False, 'differs')
    """
    is_distributed(options.engine, options.address)  # raises for an invalid engine before anything is read
    a = Location.parse(options.a)
    b = Location.parse(options.b)
    with open_sides(options) as (first, second):
        results = compare_sides(first, second, options.progress, _pair_comparer(options, (a, b), (first, second)))
        unread = [
            f"{checkpoint.location}: {describe_unread(checkpoint.unread)}"
            for checkpoint in (first, second)
            if checkpoint.unread
        ]
        adapters = {location: adapter_in(side, location) for location, side in ((a, first), (b, second))}
    notes = [f"{location}: {adapter.describe()}" for location, adapter in adapters.items() if adapter is not None]
    return CompareReport(a.display, b.display, results, unread, notes)


@contextmanager
def open_sides(options: CompareOptions, *, check_files: bool = True) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Open both checkpoints as views with comparable names and orientations.

    If a format has digests over full files, they are checked unless ``check_files`` is False.
    """
    limit = options.max_decompressed
    with (
        open_checkpoint(options.a, io="pread", max_decompressed=limit) as first,
        open_checkpoint(options.b, io="pread", max_decompressed=limit) as second,
    ):
        for checkpoint in (first, second):
            require_in_proportion(checkpoint.tensor_map.uncached(), checkpoint.location)
            if check_files:
                checkpoint.require_whole()
        with ExitStack() as stack:
            a, b = _as_models(first, second, stack)
            yield align_orientation(a, b), align_orientation(b, a)


def compare_sides(
    first: Checkpoint,
    second: Checkpoint,
    progress: ProgressCallback | None = None,
    compare_pairs: ComparePairs | None = None,
) -> Comparisons:
    """Return all comparisons of the checkpoints of ``open_sides``, worst first.

    ``compare_pairs`` compares pairs of tensors; the default compares them in this process.
    """
    pairs, unpaired = pairs_of(first, second)
    state = Progress(first.nbytes + second.nbytes, progress)
    return Comparisons(chain(unpaired, (compare_pairs or _compare_locally)(pairs, state)))


def _pair_comparer(
    options: CompareOptions, locations: tuple[Location, Location], checkpoints: tuple[Checkpoint, Checkpoint]
) -> ComparePairs:
    """Return a function that compares pairs of tensors in this process, or by workers if the engine has them."""
    if not is_distributed(options.engine, options.address):
        return _compare_locally

    def compare_by_workers(pairs: Sequence[Pair], state: Progress) -> Iterable[TensorComparison]:
        from ingot.cluster.driver.spread import Query, ask, files_of
        from ingot.cluster.pool import pool_of

        a, b = locations
        opened = ComparedFiles(a.text, b.text, options.max_decompressed)
        addresses = {"a": address_of(a), "b": address_of(b)}
        files = files_of(opened, addresses, [checkpoint.identity() for checkpoint in checkpoints])
        queries = [Query(index, a.name, a.nbytes + b.nbytes) for index, (a, b) in enumerate(pairs)]
        with closing(pool_of(options.engine, options.address)) as pool:
            return ask("compare", files, queries, pool, state)

    return compare_by_workers


def _compare_locally(pairs: Sequence[Pair], state: Progress) -> Iterator[TensorComparison]:
    """Compare pairs of tensors in this process."""

    def compare_with_size(pair: Pair) -> tuple[TensorComparison, int]:
        return compare_pair(pair), pair[0].nbytes + pair[1].nbytes

    for result, nbytes in ordered_together(compare_with_size, pairs, lambda pair: weight(pair[0]) + weight(pair[1])):
        state.advance(nbytes, result.name)
        yield result


def _as_models(first: Checkpoint, second: Checkpoint, stack: ExitStack) -> tuple[Checkpoint, Checkpoint]:
    """Return both checkpoints with comparable names: a GGUF checkpoint gets the names of a model folder.

    No names are translated if the checkpoints have a name in common. A checkpoint is not translated if tensors would be
    dropped.
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
    """Return the pairs of tensors to compare, and results for the tensors that only one checkpoint has."""
    renamed = renamed_tensors(first, second)
    names = [name for name in first if name in second]
    return _Pairs(first.tensor_map, second.tensor_map, [*names, *renamed], renamed), _unpaired(first, second, renamed)


def _unpaired(first: Checkpoint, second: Checkpoint, renamed: Mapping[str, str]) -> Iterator[TensorComparison]:
    new_names = set(renamed.values())
    for name in second:
        if name not in first and name not in new_names:
            yield TensorComparison(name, ONLY_B)
    for name in first:
        if name not in second and name not in renamed:
            yield TensorComparison(name, ONLY_A)


class _Pairs(Sequence[Pair]):
    """Pairs of tensors of two checkpoints, built on each access and not cached.

    ``names`` are the names in the first checkpoint. ``renamed`` maps a name to the name in the second checkpoint if
    that is different.
    """

    def __init__(
        self, first: TensorMap[Tensor], second: TensorMap[Tensor], names: Sequence[str], renamed: Mapping[str, str]
    ) -> None:
        self._first = first
        self._second = second
        self._names = names
        self._renamed = renamed

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Pair]: ...

    def __getitem__(self, index: int | slice) -> Pair | Sequence[Pair]:
        if isinstance(index, slice):
            return _Pairs(self._first, self._second, self._names[index], self._renamed)
        name = self._names[index]
        return self._first.get_uncached(name), self._second.get_uncached(self._renamed.get(name, name))


def renamed_tensors(first: Checkpoint, second: Checkpoint) -> dict[str, str]:
    """Return a map from names in A to names in B, for tensors that a packed format has renamed.

    Two tensors match if they have the same original name, and no other unmatched tensor of A or B has this original
    name.
    """
    by_original: list[dict[str, list[str]]] = []
    for checkpoint, counterpart in ((first, second), (second, first)):
        format = FORMATS[checkpoint.format]
        names_by_original = dict[str, list[str]]()
        for name in checkpoint:
            if name not in counterpart:
                names_by_original.setdefault(format.original_name(name), []).append(name)
        by_original.append(names_by_original)
    names_a, names_b = by_original
    return {names[0]: names_b[key][0] for key, names in names_a.items() if len(names) == len(names_b.get(key, ())) == 1}


def compare_pair(pair: Pair) -> TensorComparison:
    """Compare two tensors by shape and values."""
    first, second = pair
    try:
        differ = first.shape != second.shape
        shapes = f"{list(first.shape)} and {list(second.shape)}"
        result = TensorComparison(first.name, SHAPE, shapes) if differ else _compare_values(first, second)
    except UnsupportedError as error:
        result = TensorComparison(first.name, UNKNOWN, str(error))
    if first.name == second.name:
        return result
    return replace(result, detail="; ".join(filter(None, (f"in B {second.name}", result.detail))))


def _compare_values(first: Tensor, second: Tensor) -> TensorComparison:
    are_floats = first.dtype in FLOATS and second.dtype in FLOATS
    if not are_floats and first.dtype != second.dtype:
        return TensorComparison(first.name, DIFFERS, f"{first.dtype} and {second.dtype}")
    same_dtype = first.dtype == second.dtype
    same_bits = True
    stats = _NONE
    same_values = True
    matrix = matrix_of(first, second.codec)
    step = max(1, _CHUNK // max(matrix[1], 1))
    chunk_pairs = zip(
        chunks(first, matrix, step, checked=True), chunks(second, matrix, step, checked=True), strict=True
    )
    for chunk_a, chunk_b in chunk_pairs:
        if same_dtype and _same_bits(chunk_a, chunk_b):
            if are_floats:
                stats = _add(stats, measure(chunk_a, chunk_a))
            continue
        same_bits = False
        if are_floats:
            chunk_stats = measure(chunk_a, chunk_b)
            same_values = same_values and chunk_stats.different == 0
            stats = _add(stats, chunk_stats)
        else:
            same_values = False
    status = IDENTICAL if same_dtype and same_bits else EQUAL if same_values else DIFFERS
    detail = "" if same_dtype else f"{first.dtype} and {second.dtype}"
    return TensorComparison(first.name, status, detail, stats if are_floats else None)


def _add(sums: ErrorStats, stats: ErrorStats) -> ErrorStats:
    return stats if sums is _NONE else sums + stats


def _same_bits(a: Array, b: Array) -> bool:
    if a.nbytes <= LIGHT:
        return a.tobytes() == b.tobytes()
    return np.array_equal(_bits(a), _bits(b))


def _bits(rows: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return rows.reshape(-1).view(np.uint8)
