"""The reports of ``ingot inspect``: a checkpoint, one of its tensors, or its content id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open_source_in_store, weights_of
from ingot.errors import printable
from ingot.inspect.inspect import Inspection, PartInfo, TensorInfo, inspect_found
from ingot.inspect.options import InspectOptions
from ingot.inspect.receipt import describe_entry, receipt_of
from ingot.model.checkpoint import unknown_tensor
from ingot.model.delta import KEY, delta_of
from ingot.model.layouts.table import codec_name
from ingot.model.store import Store
from ingot.naming.names import equal_layers
from ingot.reporting.report import Column, Figure, Line, Report, Table, figures_of, table_of

_SHOWN_ITEMS = 4
_SHOWN_LENGTH = 60
KEYS = ("layer", "codec", "dtype", "role")

_TENSORS = (
    Column("", head="tensor"),
    Column("", "shape", "shape"),
    Column("", head="dtype", drop=2),
    Column("", head="codec"),
    Column("", head="role", drop=1),
    Column("", "times", "n"),
    Column("", "bytes", "stored"),
    Column("", "bits", "bits"),
)
_PARTS = {
    "role": Column("role", head="part"),
    "dtype": Column("dtype", head="dtype"),
    "type": Column("type", head="type"),
    "encoding": Column("encoding", head="encoding", drop=3),
    "file": Column("file", head="file", drop=1),
    "digest": Column("digest", head="digest"),
    "offset": Column("offset", "position", "offset"),
    "length": Column("length", "position", "stored"),
    "nbytes": Column("nbytes", "position", "decoded", drop=2),
}


def describe(options: InspectOptions, store: Store, name: str) -> Report:
    """Return the report of ``ingot inspect`` that the options select: all headers, one tensor, or the content id.

    ``store`` and ``name`` are the result of ``artifacts.open.find`` for ``options.path``.

    Raises
    ------
    UsageError
        ``tensor.unknown``, and the errors of ``ingot.open``.
    """
    if options.content_id:
        source = open_source_in_store(store, name)
        with weights_of(source) as checkpoint:
            receipt, _ = receipt_of(source)
            identity = content_id(checkpoint, progress=options.progress)
            return identity_report(source.location, identity, None if receipt is None else receipt.weights)
    if options.id:
        from ingot.inspect.manifest_id import manifest_id  # imports a container's code

        with closing(open_source_in_store(store, name)) as source:
            return Report([Figure("path", source.location), Figure("id", manifest_id(source))], [Line("{id}")])
    inspection = inspect_found(store, name)
    if options.tensor is not None:
        return tensor_report(inspection, options.tensor)
    return overview(inspection, options.by, tensors=options.tensors, every=options.every)


def overview(inspection: Inspection, by: str = "layer", *, tensors: bool = True, every: bool = False) -> Report:
    """Return a report of all headers. Its text shows totals for each value of ``by``; equal layers share a row.

    Parameters
    ----------
    inspection : Inspection
    by : {"layer", "codec", "dtype", "role"}
    tensors : bool
        Whether the text shows tensors.
    every : bool
        Whether the text has a row for every tensor.
    """
    hidden_figures = ("tensors", "details", "archive")
    archive = inspection.archive
    figures = [item for item in figures_of(inspection, "elements", "nbytes") if item.name not in hidden_figures]
    measured = [describe_entry(entry) for entry in inspection.receipt]
    delta, hidden_key = delta_lines(inspection.metadata, inspection.path)
    texts = [f"{key}: {_value_text(value)}" for key, value in inspection.metadata.items() if key != hidden_key]
    figures += [
        Figure("totals", {key: inspection.totals(key) for key in KEYS}, "data"),
        Figure("details", [_detail(item) for item in inspection.details], "data"),
        Figure("count", len(inspection.tensors), "count", data=False),
        Figure("bits", 8 * inspection.file_size / max(inspection.elements, 1), "bits", data=False),
        Figure("parted", len(inspection.files), "count", data=False),
        Figure("delta", delta, "texts", data=False),
        Figure("measured", measured, "texts", data=False),
        Figure("described", texts, "texts", data=False),
        Figure("archived", [] if archive is None else archive.texts(), "texts", data=False),
    ]
    figures += [] if archive is None else [Figure("archive", archive.data(), "data")]
    lines = [
        Line("{path}: {format}, {count} tensors, {elements} elements"),
        Line("  {item}", items="archived"),
        *(
            [Line("  {file_size} in {parted} file(s), {bits} bits per element, read by {io}")]
            if inspection.tensors
            else []
        ),
        Line("  {item}", items="delta"),
        Line("  {item}", items="described"),
    ]
    if inspection.companions:
        lines.append(Line("  companions: {companions}"))
    lines.append(Line("  receipt: {item}", items="measured"))
    lines.append(Line("  note: {item}", items="notes"))
    shown = [] if archive is None else [archive.table()]
    if inspection.tensors or archive is None:
        shown += [_totals(inspection, key) for key in dict.fromkeys((by, "codec"))] + list(inspection.details)
        shown += [_tensors(inspection.tensors, every)] if tensors else []
    tables = [table_of("tensors", inspection.tensors, TensorInfo), *(_without_data(item) for item in shown)]
    return Report(figures, lines, tables)


def _value_text(value: Any) -> str:
    """Return a metadata value as short text: the beginning of a text, the length of a list or object."""
    if isinstance(value, Mapping):
        return f"{len(value)} entries"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > _SHOWN_ITEMS:
        return f"{len(value):,} items"
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 3]}..."


def tensor_report(inspection: Inspection, name: str) -> Report:
    """Return a report of a tensor's parameters and parts; raise ``UsageError`` ``tensor.unknown``."""
    item = next((tensor for tensor in inspection.tensors if tensor.name == name), None)
    if item is None:
        raise unknown_tensor(name, (tensor.name for tensor in inspection.tensors), inspection.path)
    params = [f"{key}: {value}" for key, value in item.params.items()]
    figures = [figure for figure in figures_of(item) if figure.name != "parts"]
    figures += [Figure("codec_label", _codec(item), data=False), Figure("param_texts", params, "texts", data=False)]
    lines = [Line("{name}: {shape} {dtype}, {codec_label}, {nbytes} stored"), Line("  {item}", items="param_texts")]
    columns = list(_PARTS.values())
    rows = [[getattr(part, column.name) for column in columns] for part in item.parts]
    digest = list(_PARTS).index("digest")
    for row in rows:
        row[digest] = row[digest] or "none"
    return Report(figures, lines, [table_of("parts", item.parts, PartInfo), Table("", columns, rows, data=False)])


def identity_report(path: str, content_id: str, receipt: str | None = None) -> Report:
    """Return a report of a checkpoint's content id.

    ``receipt`` is the content id in the checkpoint's receipt; the report states whether both are equal.
    """
    figures = [Figure("path", path), Figure("content_id", content_id)]
    lines = [Line("{content_id}")]
    if receipt is not None:
        same = receipt == content_id
        figures.append(Figure("receipt_fits", same, "flag"))
        lines.append(Line("its receipt is of these weights" if same else "its receipt is of OTHER weights: {receipt}"))
        figures.append(Figure("receipt", receipt[:160], data=False))
    return Report(figures, lines)


def delta_lines(metadata: Mapping[str, Any], path: str) -> tuple[list[str], str | None]:
    """Return lines that describe a delta, and the metadata key of its description.

    Returns ([], None) if the checkpoint is not a delta.
    """
    info = delta_of(metadata, path)
    if info is None:
        return [], None
    counts = Counter(change.op for change in info.tensors.values())
    ops = ", ".join(f"{count} {op}" for op, count in counts.items()) or "no tensors"
    removed = f"; removes {len(info.removed)}" if info.removed else ""
    lines = [f"a delta, strategy {printable(info.strategy)[:80]}: {ops}{removed}"]
    retyped = sum(change.base_dtype is not None for change in info.tensors.values())
    resized = sum(change.base_shape is not None for change in info.tensors.values())
    if retyped or resized:
        lines.append(f"of these {retyped} have another element type in the base, {resized} another number of rows")
    for label, identity in (("base", info.base), ("result", info.result)):
        hashes = [f"{name}:{value}" for name, value in identity.hashes.items()]
        text = ", ".join([*([identity.content] if identity.content else []), *hashes]) or "not stated"
        lines.append(f"{label}: {text[:200]}")
    return lines, KEY


def _detail(item: Table) -> dict[str, Any]:
    return {"title": item.title, "columns": [column.head for column in item.columns], "rows": item.rows}


def _without_data(item: Table) -> Table:
    """Return the table for the text of a report, so that it is left out of the JSON."""
    return item if not item.data else Table(item.name, item.columns, item.rows, item.title, data=False)


def _totals(inspection: Inspection, key: str) -> Table:
    columns = (
        Column("", head=key),
        Column("", "count", "tensors"),
        Column("", "count", "elements"),
        Column("", "bytes", "stored"),
        Column("", "bits", "bits"),
        Column("", "ratio", "share"),
    )
    rows = [
        (label, count, elements, nbytes, _bits(nbytes, elements), nbytes / max(inspection.nbytes, 1))
        for label, (count, elements, nbytes) in _sorted_totals(inspection.totals(key))
    ]
    return Table("", columns, rows, data=False)


def _tensors(tensors: Sequence[TensorInfo], every: bool) -> Table:
    def key(item: TensorInfo) -> tuple[Any, ...]:
        return (item.shape, item.dtype, _codec(item), item.role)

    def ungrouped(item: TensorInfo) -> tuple[Any, ...]:
        return (*key(item), item.name)

    rows = []
    for name, group in equal_layers(tensors, lambda item: item.name, ungrouped if every else key):
        nbytes = sum(item.nbytes for item in group)
        bits = _bits(nbytes, sum(item.size for item in group))
        rows.append((name, *key(group[0]), len(group), nbytes, bits))
    return Table("", _TENSORS, rows, data=False)


def _sorted_totals(totals: dict[str, tuple[int, int, int]]) -> list[tuple[str, tuple[int, int, int]]]:
    """Return the items of ``totals`` sorted by label: first numbers by value, then text."""
    return sorted(
        totals.items(), key=lambda item: (not item[0].isdigit(), int(item[0]) if item[0].isdigit() else 0, item[0])
    )


def _bits(nbytes: int, elements: int) -> float | None:
    return 8 * nbytes / elements if elements else None


def _codec(item: TensorInfo) -> str:
    return codec_name(item.codec, item.params, (part.encoding for part in item.parts))
