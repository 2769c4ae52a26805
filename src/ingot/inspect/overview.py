"""What ``ingot inspect`` reports of a checkpoint, and of one tensor of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open_source_in_store, weights_of
from ingot.errors import printable
from ingot.inspect.inspect import Inspection, PartInfo, TensorInfo, inspect_found
from ingot.inspect.options import InspectOptions
from ingot.inspect.receipt import receipt_of, told
from ingot.model.checkpoint import unknown_tensor
from ingot.model.delta import KEY, delta_of
from ingot.model.layouts.table import codec_name
from ingot.model.store import Store
from ingot.naming.names import equal_layers
from ingot.reporting.report import Column, Figure, Line, Report, Table, figures_of, table_of

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
    """Return what ``ingot inspect`` tells of a checkpoint: all that headers tell, one tensor, or the content id.

    ``store`` and ``name`` are what ``artifacts.open.find`` has found at ``options.path``.

    Raises
    ------
    UsageError
        ``tensor.unknown``, and those of ``ingot.open``.
    """
    if options.content_id:
        source = open_source_in_store(store, name)
        with weights_of(source) as checkpoint:
            receipt, _ = receipt_of(source)
            identity = content_id(checkpoint, progress=options.progress)
            return identity_report(source.location, identity, None if receipt is None else receipt.weights)
    found = inspect_found(store, name)
    if options.tensor is not None:
        return one_tensor(found, options.tensor)
    return overview(found, options.by, tensors=options.tensors, every=options.every)


def overview(found: Inspection, by: str = "layer", *, tensors: bool = True, every: bool = False) -> Report:
    """Return all that headers tell; people get totals by one key, and the tensors, equal layers as one.

    Parameters
    ----------
    found : Inspection
    by : {"layer", "codec", "dtype", "role"}
    tensors, every : bool
        People get the tensors; each of them.
    """
    figures = [item for item in figures_of(found, "elements", "nbytes") if item.name not in ("tensors", "details")]
    measured = [told(entry) for entry in found.receipt]
    delta, hidden = delta_lines(found.metadata, found.path)
    texts = [f"{key}: {str(value)[:160]}" for key, value in found.metadata.items() if key != hidden]
    figures += [
        Figure("totals", {key: found.totals(key) for key in KEYS}, "data"),
        Figure("details", [_detail(item) for item in found.details], "data"),
        Figure("count", len(found.tensors), "count", data=False),
        Figure("bits", 8 * found.file_size / max(found.elements, 1), "bits", data=False),
        Figure("parted", len(found.files), "count", data=False),
        Figure("delta", delta, "texts", data=False),
        Figure("measured", measured, "texts", data=False),
        Figure("described", texts, "texts", data=False),
    ]
    lines = [
        Line("{path}: {format}, {count} tensors, {elements} elements"),
        Line("  {file_size} in {parted} file(s), {bits} bits per element, read by {io}"),
        Line("  {item}", each="delta"),
        Line("  {item}", each="described"),
    ]
    if found.companions:
        lines.append(Line("  companions: {companions}"))
    lines.append(Line("  receipt: {item}", each="measured"))
    lines.append(Line("  note: {item}", each="notes"))
    shown = [_totals(found, key) for key in dict.fromkeys((by, "codec"))] + list(found.details)
    shown += [_tensors(found.tensors, every)] if tensors else []
    tables = [table_of("tensors", found.tensors, TensorInfo), *(_people(item) for item in shown)]
    return Report(figures, lines, tables)


def one_tensor(found: Inspection, name: str) -> Report:
    """Return a tensor's parameters and parts; raises ``UsageError`` ``tensor.unknown``."""
    item = next((tensor for tensor in found.tensors if tensor.name == name), None)
    if item is None:
        raise unknown_tensor(name, (tensor.name for tensor in found.tensors), found.path)
    params = [f"{key}: {value}" for key, value in item.params.items()]
    figures = [figure for figure in figures_of(item) if figure.name != "parts"]
    figures += [Figure("called", _codec(item), data=False), Figure("told", params, "texts", data=False)]
    lines = [Line("{name}: {shape} {dtype}, {called}, {nbytes} stored"), Line("  {item}", each="told")]
    columns = list(_PARTS.values())
    rows = [[getattr(part, column.name) for column in columns] for part in item.parts]
    digest = list(_PARTS).index("digest")
    for row in rows:
        row[digest] = row[digest] or "none"
    return Report(figures, lines, [table_of("parts", item.parts, PartInfo), Table("", columns, rows, data=False)])


def identity_report(path: str, content_id: str, receipt: str | None = None) -> Report:
    """Return the content id of a checkpoint, and whether its ``receipt`` is of the same one."""
    figures = [Figure("path", path), Figure("content_id", content_id)]
    lines = [Line("{content_id}")]
    if receipt is not None:
        same = receipt == content_id
        figures.append(Figure("receipt_fits", same, "flag"))
        lines.append(Line("its receipt is of these weights" if same else "its receipt is of OTHER weights: {receipt}"))
        figures.append(Figure("receipt", receipt[:160], data=False))
    return Report(figures, lines)


def delta_lines(metadata: Mapping[str, Any], path: str) -> tuple[list[str], str | None]:
    """Return what a delta says of itself, and the metadata that says so; nothing of an ordinary checkpoint."""
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


def _people(item: Table) -> Table:
    return item if not item.data else Table(item.name, item.columns, item.rows, item.title, data=False)


def _totals(found: Inspection, key: str) -> Table:
    columns = (
        Column("", head=key),
        Column("", "count", "tensors"),
        Column("", "count", "elements"),
        Column("", "bytes", "stored"),
        Column("", "bits", "bits"),
        Column("", "ratio", "share"),
    )
    rows = [
        (label, count, elements, nbytes, _bits(nbytes, elements), nbytes / max(found.nbytes, 1))
        for label, (count, elements, nbytes) in _ordered(found.totals(key))
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


def _ordered(totals: dict[str, tuple[int, int, int]]) -> list[tuple[str, tuple[int, int, int]]]:
    return sorted(
        totals.items(), key=lambda item: (not item[0].isdigit(), int(item[0]) if item[0].isdigit() else 0, item[0])
    )


def _bits(nbytes: int, elements: int) -> float | None:
    return 8 * nbytes / elements if elements else None


def _codec(item: TensorInfo) -> str:
    return codec_name(item.codec, item.params, (part.encoding for part in item.parts))
