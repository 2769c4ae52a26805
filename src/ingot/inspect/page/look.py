"""Collect the data of the page of ``ingot report`` from headers, samples of tensors, and a comparison.

The data are the tensors with their errors, sums by layer and role, histograms, receipts, and evaluation results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from ingot.artifacts.adapter_files import adapter_of
from ingot.artifacts.open import Source, open_source
from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.stats import ErrorStats
from ingot.core.options import takes
from ingot.core.parsing.strictjson import strict_json
from ingot.core.registry import Instances
from ingot.errors import FormatError
from ingot.inspect.archive import describe_archive
from ingot.inspect.compare import compare_sides, open_sides, renamed_tensors
from ingot.inspect.comparisons import TensorComparison
from ingot.inspect.options import CompareOptions
from ingot.inspect.overview import delta_lines
from ingot.inspect.page.options import ReportOptions
from ingot.inspect.page.sample import Histogram, histogram, select_tensors
from ingot.inspect.receipt import describe_entry, receipt_of
from ingot.inspect.seal import seal_beside
from ingot.model.account import describe_unread
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.table import codec_name
from ingot.model.tensor import Tensor
from ingot.naming.names import ROLES, layer_of, role_of
from ingot.reporting.report import Bits, Bytes, Ratio, Shape, Table, table_of
from ingot.stores.location import Location


class ReportSection(Protocol):
    """An extension's table on the page of a checkpoint.

    ``title`` is the heading on the page, and ``row`` the dataclass of a row. ``heads`` maps fields to column titles.
    The page's data contain the section under the name of the entry point.
    """

    title: str
    row: type[Any]
    heads: Mapping[str, str]

    def rows(self, checkpoint: Checkpoint, options: ReportOptions) -> Sequence[Any]:
        """Return the rows; a section without rows is omitted. Raises ``IngotError``."""
        ...


@dataclass(frozen=True, slots=True)
class FilledSection:
    """A section that an extension adds to the page, with its rows."""

    name: str
    title: str
    data: Table
    page: Table


REPORT_SECTIONS: Instances[ReportSection] = Instances(
    "report section", group="ingot.report_sections", contract=ReportSection
)


def fill_sections(checkpoint: Checkpoint, options: ReportOptions) -> list[FilledSection]:
    """Return the sections of all extensions that have rows about ``checkpoint``."""
    filled = []
    for name, section in REPORT_SECTIONS.available():
        rows = section.rows(checkpoint, options)
        data, page = (table_of(name, rows, section.row, heads) for heads in ({}, section.heads))
        filled.append(FilledSection(name, section.title, data, page))
    return filled


_MAX_JSON_BYTES = 1 << 28
_RULE = "report.json"


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor in the page's table.

    ``error`` is the square root of a quotient: the sum of squared errors divided by the sum of A's squared values.
    ``changed`` is the share of values that differ. ``error``, ``changed`` and ``cosine`` are None if the tensor was not
    compared, or if sums of squares overflow or underflow.
    """

    name: str
    layer: int | None
    role: str
    shape: Shape
    dtype: str
    codec: str
    nbytes: Bytes
    bits: Bits
    action: str = ""
    status: str = ""
    error: float | None = None
    cosine: float | None = None
    changed: Ratio | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the heat map: totals over the tensors of one role in one layer. ``layer`` is None for all tensors
    outside the layers.

    ``squared`` is the sum of the squares of A's compared values.
    """

    layer: int | None
    role: str
    tensors: int
    elements: int
    nbytes: Bytes
    squared: float = 0.0
    error: float | None = None
    changed: Ratio | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The results of `ingot eval` in a JSON file. An optional field is None if the file does not have it."""

    file: str
    model: str
    perplexity: float
    window_prefix: str
    reference_perplexity: float | None = None
    kl: float | None = None
    agreement: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class PageData:
    """The data of a page about the checkpoint at ``path``; ``reference`` is the checkpoint with which it was compared.

    ``unread`` are sentences about unreadable tensors, which no figure includes. ``reference_bytes`` is the number of
    stored bytes of the reference's tensors. If the page is about an adapter, ``adapter`` describes it, and the page
    shows the reference with the adapter's changes.
    """

    path: str
    format: str
    reference: str | None
    rows: Sequence[Row]
    cells: Sequence[Cell]
    histograms: Sequence[Histogram]
    receipts: Sequence[tuple[str, str]]
    scores: Sequence[Score]
    sections: Sequence[FilledSection] = ()
    unread: Sequence[str] = ()
    reference_bytes: Bytes | None = None
    adapter: str = ""

    @property
    def nbytes(self) -> int:
        """The number of stored bytes of all tensors."""
        return sum(row.nbytes for row in self.rows)

    @property
    def elements(self) -> int:
        return sum(prod(row.shape) for row in self.rows)


@takes(ReportOptions, "report")
def collect_page_data(options: ReportOptions) -> PageData:
    """Collect the data of a page about A; with B, about B and its errors against A.

    Headers and samples of some tensors are read. With B, all values of both checkpoints are read in chunks.

    Raises
    ------
    FormatError
        ``report.json``: a file of ``evaluations`` or ``conversion`` has other contents. Also the errors of
        ``ingot.open`` and ``ingot.compare``.
    """
    scores = [_score(Location.parse(path)) for path in options.evaluations]
    actions = {} if options.conversion is None else _actions(Location.parse(options.conversion))
    with _open(options) as (reference, subject, adapter):
        comparisons = [] if reference is None else compare_sides(reference, subject, options.progress)
        names = {} if reference is None else renamed_tensors(reference, subject)
        by_name = {names.get(item.name, item.name): item for item in comparisons}
        rows = [_row(subject[name], by_name.get(name), actions.get(name, "")) for name in subject]
        rows += [_missing_row(item) for item in comparisons if names.get(item.name, item.name) not in subject]
        errors = {row.name: row.error for row in rows if row.error is not None}
        names_in_reference = {name_b: name_a for name_a, name_b in names.items()}
        histograms = []
        for name in select_tensors(subject, errors, options.histograms):
            compared_tensor = None
            if reference is not None and errors.get(name):
                compared_tensor = reference.get(names_in_reference.get(name, name))
            histograms.append(histogram(subject[name], compared_tensor))
        return PageData(
            path=Location.parse(options.b or options.a).display if adapter else subject.location,
            format=subject.format,
            reference=None if reference is None else reference.location,
            rows=rows,
            cells=_cells(subject, by_name),
            histograms=[item for item in histograms if item is not None],
            receipts=[
                *_origin_rows(subject),
                *_receipt_rows(Location.parse(options.a if options.b is None else options.b)),
            ],
            scores=scores,
            sections=[*_archive_section(subject), *fill_sections(subject, options)],
            unread=[
                f"{item.location}: {describe_unread(item.unread)}"
                for item in (reference, subject)
                if item is not None and item.unread
            ],
            reference_bytes=None if reference is None else sum(tensor.occupies for tensor in reference.values()),
            adapter=adapter,
        )


def _archive_section(subject: Checkpoint) -> Iterator[FilledSection]:
    """Yield the section about the archive that contains the checkpoint, if it is in one."""
    source = subject.source
    archive = describe_archive(source.store) if isinstance(source, Source) else None
    if archive is not None:
        page = replace(archive.table(), title="; ".join(archive.texts()))
        yield FilledSection("archive", "Archive", replace(page, name="archive", data=True, shown=False), page)


@contextmanager
def _open(options: ReportOptions) -> Iterator[tuple[Checkpoint | None, Checkpoint, str]]:
    """Open the checkpoints of the page; yield the reference or None, the checkpoint, and the description of an adapter.

    If B is an adapter, the checkpoint is A with the adapter's changes.
    """
    limit = options.max_decompressed
    adapter = _adapter_text(options)
    if options.b is None:
        with open_checkpoint(options.a, io="pread", max_decompressed=limit) as subject:
            yield None, subject, adapter
    elif adapter:
        with (
            open_checkpoint(options.a, io="pread", max_decompressed=limit) as reference,
            open_checkpoint(options.a, io="pread", max_decompressed=limit).with_adapters([options.b]) as merged,
        ):
            yield reference, merged, adapter
    else:
        compare_options = CompareOptions(options.a, options.b, max_decompressed=limit)
        with open_sides(compare_options) as (reference, subject):
            yield reference, subject, ""


def _adapter_text(options: ReportOptions) -> str:
    """Return a description of B, or of A without B, if that is an adapter; otherwise an empty text."""
    with closing(open_source(Location.parse(options.b or options.a))) as source:
        adapter = adapter_of(source)
        return "" if adapter is None else adapter.describe().removeprefix("found an adapter, not a model: ")


def _row(tensor: Tensor, comparison: TensorComparison | None, action: str) -> Row:
    encodings = [part.encoding for part in tensor.parts.values()]
    row = Row(
        name=tensor.name,
        layer=layer_of(tensor.name),
        role=role_of(tensor.name),
        shape=tensor.shape,
        dtype=tensor.dtype,
        codec=codec_name(tensor.codec, tensor.params, encodings),
        nbytes=tensor.occupies,
        bits=8 * tensor.occupies / max(tensor.size, 1),
        action=action,
    )
    if comparison is None:
        return row
    stats = comparison.stats
    if stats is None:
        return replace(row, status=comparison.status)
    cosine = stats.cosine if math.isfinite(stats.cosine) else None
    error = _relative_error(stats)
    return replace(row, status=comparison.status, error=error, cosine=cosine, changed=_changed_share(stats))


def _missing_row(comparison: TensorComparison) -> Row:
    """Return the row for a tensor that A has and B lacks."""
    name = comparison.name
    return Row(name, layer_of(name), role_of(name), (), "", "", 0, 0.0, status=comparison.status)


def _relative_error(stats: ErrorStats) -> float | None:
    if not stats.squared_reference:
        return 0.0 if not stats.squared_error else None
    ratio = math.sqrt(stats.squared_error / stats.squared_reference)
    return ratio if math.isfinite(ratio) else None


def _changed_share(stats: ErrorStats) -> float:
    return (stats.different + stats.odd) / max(stats.count + stats.odd, 1)


def _cells(subject: Checkpoint, comparisons: Mapping[str, TensorComparison]) -> list[Cell]:
    groups: dict[tuple[int | None, str], list[Tensor]] = {}
    for name, tensor in subject.items():
        groups.setdefault((layer_of(name), role_of(name)), []).append(tensor)
    cells = []
    for (layer, role), tensors in sorted(groups.items(), key=lambda group: _sort_key(*group[0])):
        items = [item for tensor in tensors if (item := comparisons.get(tensor.name)) is not None]
        stats = [item.stats for item in items if item.stats]
        total = sum(stats, ErrorStats())
        cells.append(
            Cell(
                layer,
                role,
                len(tensors),
                sum(tensor.size for tensor in tensors),
                sum(tensor.occupies for tensor in tensors),
                total.squared_reference,
                _relative_error(total) if stats else None,
                _changed_share(total) if stats else None,
            )
        )
    return cells


def _sort_key(layer: int | None, role: str) -> tuple[bool, int, int]:
    return layer is not None, layer or 0, ROLES.index(role)


def _origin_rows(subject: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about digests, a delta's base, metadata and companions."""
    algorithms = Counter(
        part.digest.partition(":")[0] if part.digest else "none"
        for tensor in subject.values()
        for part in tensor.parts.values()
    )
    counts = ", ".join(f"{count} {algorithm}" for algorithm, count in algorithms.items())
    yield "digests of parts", counts or "none"
    lines, hidden_key = delta_lines(subject.metadata, subject.location)
    for line in lines:
        yield "delta", line
    for key, value in subject.metadata.items():
        if key != hidden_key:
            yield f"metadata {key[:80]}", str(value)[:160]
    if subject.companions:
        yield "companions", ", ".join(sorted(subject.companions))[:400]


def _receipt_rows(location: Location) -> Iterator[tuple[str, str]]:
    """Yield labels and texts about the artifact's receipt and its seal, if it has them."""
    with closing(open_source(location)) as source:
        receipt, unreadable = receipt_of(source)
        seal = seal_beside(source.store, source.entry) if source.entry else None
    if unreadable:
        yield "receipt", unreadable[1]
    if receipt is not None:
        yield "receipt of the weights", receipt.weights[:160]
        for entry in receipt.entries:
            yield "measured", describe_entry(entry)
    if seal is not None:
        yield "sealed file", seal.digest
        if seal.content_id:
            yield "content id", seal.content_id


def _actions(location: Location) -> dict[str, str]:
    """Return the action of a conversion for each tensor name, read from the JSON report of `ingot convert`."""
    tensors = _json(location).get("tensors")
    if not isinstance(tensors, list) or not all(isinstance(item, dict) for item in tensors):
        raise FormatError(_RULE, "expected the output of `ingot convert --json`, with tensors", where=location.display)
    return {str(item.get("name")): str(item.get("action", ""))[:40] for item in tensors}


def _score(location: Location) -> Score:
    """Return the results in a JSON file of `ingot eval`. Raises ``FormatError`` ``report.json``."""
    data = _json(location)
    numbers: dict[str, float | None] = {}
    for key in ("perplexity", "reference_perplexity", "kl", "agreement", "tokens_per_second"):
        value = data.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise FormatError(_RULE, f"expected a number as {key}, found {str(value)[:40]!r}", where=location.display)
        numbers[key] = None if value is None else float(value)
    perplexity = numbers.pop("perplexity")
    if perplexity is None:
        raise FormatError(_RULE, "expected the output of `ingot eval --json`, with perplexity", where=location.display)
    return Score(location.display, str(data.get("model", ""))[:200], perplexity, _prefix(data), **numbers)


def _prefix(data: dict[str, Any]) -> str:
    """Return the text with which each window of an evaluation began, from the JSON of the evaluation."""
    tokens = data.get("window_prefix")
    if not isinstance(tokens, list):
        return "not stated"
    texts = [str(token.get("text", ""))[:40] for token in tokens[:8] if isinstance(token, dict)]
    return " ".join(texts) or "no added token"


def _json(location: Location) -> dict[str, Any]:
    store, name = location.find()
    return strict_json(store.read(name, _MAX_JSON_BYTES, _RULE), _RULE, _RULE, location.display)
