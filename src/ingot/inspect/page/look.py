"""What a page shows, as data: tensors with errors, sums by layer and role, histograms, receipts, evaluations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.open import open_source
from ingot.core.numeric.stats import ErrorStats
from ingot.core.options import takes
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError
from ingot.inspect.compare import compared, renamed, sides
from ingot.inspect.comparisons import TensorComparison
from ingot.inspect.options import CompareOptions
from ingot.inspect.overview import delta_lines
from ingot.inspect.page.options import ReportOptions
from ingot.inspect.page.sample import Histogram, chosen, histogram
from ingot.inspect.page.sections import FilledSection, fill_sections
from ingot.inspect.receipt import receipt_of, told
from ingot.inspect.seal import seal_beside
from ingot.model.account import describe_unread
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.short_name import codec_name
from ingot.model.tensor import Tensor
from ingot.naming.names import ROLES, layer_of, role_of
from ingot.reporting.report import Bits, Bytes, Ratio, Shape
from ingot.stores.location import Location

_MOST_JSON = 1 << 28
_RULE = "report.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor. ``error`` is the root of the sum of squared errors over that of squared values of A, ``changed`` the
    share of values that are others; these and ``cosine`` are None where nothing was compared, or where squares of
    values are too small or too large to be numbers."""

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
    """The tensors of one layer (None: outside the layers) and one role together.

    ``squared`` is the sum of the squares of A's values, as far as they were compared.
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
    """What `ingot eval` found, as far as a file tells; None where it does not."""

    file: str
    model: str
    perplexity: float
    window_prefix: str
    reference_perplexity: float | None = None
    kl: float | None = None
    agreement: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """All that a page shows of the checkpoint at ``path``; ``reference`` is what it was compared with.

    ``unread``: sentences about tensors that could not be read and are in no figure.
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

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(row.nbytes for row in self.rows)

    @property
    def elements(self) -> int:
        return sum(prod(row.shape) for row in self.rows)


@takes(ReportOptions, "report")
def look(options: ReportOptions) -> Look:
    """Look at a checkpoint, B where there is one, and compare it with A.

    Reads headers and samples of some tensors; with B all values of both, chunk by chunk.

    Raises
    ------
    FormatError
        ``report.json``: a file of ``evaluations`` or ``conversion`` is not what it should be. Others as
        ``ingot.open`` and ``ingot.compare``.
    """
    scores = [_score(Location.parse(path)) for path in options.evaluations]
    actions = {} if options.conversion is None else _actions(Location.parse(options.conversion))
    with _opened(options) as (reference, subject):
        found = [] if reference is None else compared(reference, subject, options.progress)
        names = {} if reference is None else _names(reference, subject)
        by_name = {names.get(item.name, item.name): item for item in found}
        rows = [_row(subject[name], by_name.get(name), actions.get(name, "")) for name in subject]
        rows += [_missing(item) for item in found if names.get(item.name, item.name) not in subject]
        errors = {row.name: row.error for row in rows if row.error is not None}
        back = {other: name for name, other in names.items()}
        drawn = []
        for name in chosen(subject, errors, options.histograms):
            beside = None if reference is None or not errors.get(name) else reference.get(back.get(name, name))
            drawn.append(histogram(subject[name], beside))
        return Look(
            path=subject.location,
            format=subject.format,
            reference=None if reference is None else reference.location,
            rows=rows,
            cells=_cells(subject, by_name),
            histograms=[item for item in drawn if item is not None],
            receipts=[*_receipts(subject), *_measured(Location.parse(options.a if options.b is None else options.b))],
            scores=scores,
            sections=fill_sections(subject, options),
            unread=[
                f"{item.location}: {describe_unread(item.unread)}"
                for item in (reference, subject)
                if item is not None and item.unread
            ],
        )


@contextmanager
def _opened(options: ReportOptions) -> Iterator[tuple[Checkpoint | None, Checkpoint]]:
    if options.b is None:
        with open_checkpoint(options.a, io="pread", max_decompressed=options.max_decompressed) as only:
            yield None, only
        return
    with sides(CompareOptions(options.a, options.b, max_decompressed=options.max_decompressed)) as (first, second):
        yield first, second


def _names(reference: Checkpoint, subject: Checkpoint) -> Mapping[str, str]:
    return renamed(reference, subject)


def _row(tensor: Tensor, found: TensorComparison | None, action: str) -> Row:
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
    if found is None:
        return row
    stats = found.stats
    if stats is None:
        return replace(row, status=found.status)
    cosine = stats.cosine if math.isfinite(stats.cosine) else None
    return replace(row, status=found.status, error=_relative(stats), cosine=cosine, changed=_changed(stats))


def _missing(found: TensorComparison) -> Row:
    """Return the row of a tensor of A that B lacks."""
    return Row(found.name, layer_of(found.name), role_of(found.name), (), "", "", 0, 0.0, status=found.status)


def _relative(stats: ErrorStats) -> float | None:
    if not stats.squared_reference:
        return 0.0 if not stats.squared_error else None
    ratio = math.sqrt(stats.squared_error / stats.squared_reference)
    return ratio if math.isfinite(ratio) else None


def _changed(stats: ErrorStats) -> float:
    return (stats.different + stats.odd) / max(stats.count + stats.odd, 1)


def _cells(subject: Checkpoint, found: Mapping[str, TensorComparison]) -> list[Cell]:
    groups: dict[tuple[int | None, str], list[Tensor]] = {}
    for name, tensor in subject.items():
        groups.setdefault((layer_of(name), role_of(name)), []).append(tensor)
    cells = []
    for (layer, role), tensors in sorted(groups.items(), key=lambda group: _place(*group[0])):
        stats = [item.stats for tensor in tensors if (item := found.get(tensor.name)) is not None and item.stats]
        total = sum(stats, ErrorStats())
        cells.append(
            Cell(
                layer,
                role,
                len(tensors),
                sum(tensor.size for tensor in tensors),
                sum(tensor.occupies for tensor in tensors),
                total.squared_reference,
                _relative(total) if stats else None,
                _changed(total) if stats else None,
            )
        )
    return cells


def _place(layer: int | None, role: str) -> tuple[bool, int, int]:
    return layer is not None, layer or 0, ROLES.index(role)


def _receipts(subject: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield what tells these bytes from others, and where they came from, as far as the files say."""
    kinds = Counter(
        part.digest.partition(":")[0] if part.digest else "none"
        for tensor in subject.values()
        for part in tensor.parts.values()
    )
    yield "digests of parts", ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
    lines, hidden = delta_lines(subject.metadata, subject.location)
    for line in lines:
        yield "delta", line
    for key, value in subject.metadata.items():
        if key != hidden:
            yield f"metadata {key[:80]}", str(value)[:160]
    if subject.companions:
        yield "companions", ", ".join(sorted(subject.companions))[:400]


def _measured(location: Location) -> Iterator[tuple[str, str]]:
    """Yield what was measured of the artifact, and what its seal says, where it has these."""
    with closing(open_source(location)) as source:
        receipt, unreadable = receipt_of(source)
        seal = seal_beside(source.store, source.entry) if source.entry else None
    if unreadable:
        yield "receipt", unreadable[1]
    if receipt is not None:
        yield "receipt of the weights", receipt.weights[:160]
        for entry in receipt.entries:
            yield "measured", told(entry)
    if seal is not None:
        yield "sealed file", seal.digest
        if seal.content_id:
            yield "content id", seal.content_id


def _actions(location: Location) -> dict[str, str]:
    tensors = _json(location).get("tensors")
    if not isinstance(tensors, list) or not all(isinstance(item, dict) for item in tensors):
        raise FormatError(_RULE, "expected what `ingot convert --json` prints, with tensors", where=location.display)
    return {str(item.get("name")): str(item.get("action", ""))[:40] for item in tensors}


def _score(location: Location) -> Score:
    data = _json(location)
    numbers: dict[str, float | None] = {}
    for key in ("perplexity", "reference_perplexity", "kl", "agreement", "tokens_per_second"):
        value = data.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise FormatError(_RULE, f"expected a number as {key}, found {str(value)[:40]!r}", where=location.display)
        numbers[key] = None if value is None else float(value)
    perplexity = numbers.pop("perplexity")
    if perplexity is None:
        raise FormatError(_RULE, "expected what `ingot eval --json` prints, with perplexity", where=location.display)
    return Score(location.display, str(data.get("model", ""))[:200], perplexity, _prefix(data), **numbers)


def _prefix(data: dict[str, Any]) -> str:
    """Return what an evaluation states that each window begins with."""
    tokens = data.get("window_prefix")
    if not isinstance(tokens, list):
        return "not stated"
    texts = [str(token.get("text", ""))[:40] for token in tokens[:8] if isinstance(token, dict)]
    return " ".join(texts) or "no added token"


def _json(location: Location) -> dict[str, Any]:
    store, name = location.find()
    return strict_json(store.read(name, _MOST_JSON, _RULE), _RULE, _RULE, location.display)
