"""What a conversion without a recipe would do with every tensor, for every format: moved, repacked exactly, decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ingot.artifacts.account import account_of_conversion, dropped
from ingot.artifacts.adapter_files import HOLDS_ANY, Adapter, adapter_of
from ingot.artifacts.destination import STEM, Destination
from ingot.artifacts.open import Source, open_found, open_source
from ingot.conversion.model_folder import needs_family, with_model_folder
from ingot.conversion.options import ConvertOptions, MatrixOptions
from ingot.conversion.placement import kept, obstacle
from ingot.conversion.prepare_source import prepare_source
from ingot.conversion.report import action_of, counted, equality, said
from ingot.core.options import takes
from ingot.engine.steps import DECODED, MOVED, REPACKED
from ingot.errors import CodecError, FormatError, IngotError, MissingExtraError, UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.formats.detect import FORMATS
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.tensor import Tensor
from ingot.reporting.report import Bytes, Column, Count, Counts, Figure, Line, Report, Table, Texts, table_of
from ingot.reporting.shown import Shown
from ingot.runtimes.accepts import readable_containers
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location

REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Way:
    """What becomes of one tensor in one format, and why it is not kept as it is stored.

    ``action`` is moved, repacked, decoded or refused; ``nbytes`` are those of the parts. ``equal``, of what is
    repacked: in which grades it is equal (``integers``, ``scales``, ``f32``, ``type``).
    """

    format: str
    name: str
    codec: str
    action: str
    source_nbytes: Bytes
    nbytes: Bytes
    equal: Texts | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """One format: how many tensors, and how many of their stored bytes, go which way; the first obstacle.

    ``grades`` counts the repacked ones that are equal in each grade.
    """

    format: str
    moved: Count = 0
    moved_nbytes: Bytes = 0
    repacked: Count = 0
    repacked_nbytes: Bytes = 0
    decoded: Count = 0
    decoded_nbytes: Bytes = 0
    refused: Count = 0
    refused_nbytes: Bytes = 0
    nbytes: Bytes = 0
    obstacle: str | None = None
    grades: Counts = field(default_factory=lambda: counted(()))


@dataclass(frozen=True, slots=True)
class Matrix(Shown):
    """A checkpoint, and what becomes of it in each format."""

    path: str
    format: str
    targets: Sequence[Target]
    ways: Sequence[Way]

    def report(self) -> Report:
        """Return the targets for people, and all ways for programs."""
        obstacles = Figure("obstacles", _obstacles(self.targets), "texts", data=False)
        figures = [Figure("path", self.path), Figure("format", self.format), obstacles]
        told = table_of("targets", self.targets, Target)
        return Report(
            figures,
            [Line("{path} ({format}): tensors, and bytes as stored now, by what becomes of them")],
            [told, _shown(self.targets), table_of("tensors", self.ways, Way)],
            [Line("{item}", each="obstacles")],
        )


@takes(MatrixOptions, "matrix")
def matrix(options: MatrixOptions) -> Matrix:
    """Tell for every format, or those asked for, what a conversion without a recipe would do with each tensor.

    Reads headers, and what decides whether a tensor can be repacked: scales and zero points.

    Raises
    ------
    UsageError
        ``format.unknown``: a format that there is not.
    UnsupportedError
        ``model.quantized``: words that another program packed and that Ingot does not decode.
    IngotError
        What opening the checkpoint raises.
    """
    names = options.to
    if options.runtime is not None:
        names = [*names, *readable_containers(runtime_named(options.runtime))]
    if names:
        formats = [FORMATS.get_or_refuse(name) for name in names]
    else:
        formats = [format for _, format in FORMATS.available()]
    source = open_source(Location.parse(options.src), io=options.io, verify=options.verify)
    with ExitStack() as stack:
        stack.callback(source.close)
        dialect = source.dialect()
        if dialect is not None:
            raise dialect.refusal()
        config, adapter = source.config(), adapter_of(source)
        formats = [format.for_source(config) for format in formats]
        found = {format.name: list(_ways(source, options, format, stack, adapter)) for format in formats}
    targets = [_target(name, ways) for name, ways in found.items()]
    return Matrix(source.location, source.format.name, targets, [way for ways in found.values() for way in ways])


def _ways(
    source: Source, options: MatrixOptions, format: Format, stack: ExitStack, adapter: Adapter | None
) -> Iterator[Way]:
    """Yield what becomes of each tensor under the names that a conversion gives them; views are closed by ``stack``."""
    place = Destination(Location.parse(""), True, format, format.file_name(STEM))
    keep_names = options.keep_names or adapter is not None
    wanted = ConvertOptions(options.src, "", keep_names=keep_names, no_tokenizer=options.no_tokenizer)
    checkpoint = source.view()
    try:
        if adapter is not None and format.name not in HOLDS_ANY:
            raise adapter.refusal(source.location)
        checkpoint = checkpoint if keep_names else _with_folder(source, checkpoint, place, stack)
        prepared = prepare_source(checkpoint, place, wanted, dropped(checkpoint, options.drop))
        view = prepared.checkpoint
        stack.callback(view.close)
        format = format.for_attachments(view.attachments)
    except (UnsupportedError, UsageError, FormatError, MissingExtraError) as error:
        for tensor in checkpoint.values():
            yield _refused(format, tensor, error)
        return
    account = account_of_conversion(checkpoint, view, view, format, options.drop)
    for name, reason in account.lost.items():
        codec, nbytes = (checkpoint[name].codec, checkpoint[name].nbytes) if name in checkpoint else ("", 0)
        yield Way(format.name, name, codec, REFUSED, nbytes, 0, why=reason)
    yield from (_way(format, view[name], prepared.inexact) for name in view)


def _with_folder(source: Source, checkpoint: Checkpoint, place: Destination, stack: ExitStack) -> Checkpoint:
    """Return the checkpoint with the files of its folder, as a conversion takes it (``with_model_folder``)."""
    if source.is_folder or not needs_family(place):
        return checkpoint
    again = open_found(source.store, source.name, verify=source.verify)
    stack.callback(again.close)
    opened, _ = with_model_folder(again, place, None)
    stack.callback(opened.close)
    return opened.view()


def _way(format: Format, tensor: Tensor, inexact: frozenset[str]) -> Way:
    try:
        step = kept(tensor, format)
    except (UnsupportedError, CodecError) as error:
        return _refused(format, tensor, error)
    why = obstacle(tensor, format) if step.action == DECODED and tensor.codec != DenseLayout.codec else None
    codec = tensor.decoded_from or tensor.codec
    equal = equality(step, format, inexact)
    return Way(format.name, tensor.name, codec, action_of(step), tensor.nbytes, step.out_bytes, equal, why)


def _refused(format: Format, tensor: Tensor, error: IngotError) -> Way:
    return Way(format.name, tensor.name, tensor.codec, REFUSED, tensor.nbytes, 0, why=error.message)


def _target(format: str, ways: Sequence[Way]) -> Target:
    def count(action: str) -> int:
        return sum(way.action == action for way in ways)

    def nbytes(action: str) -> int:
        return sum(way.source_nbytes for way in ways if way.action == action)

    first = next((way for way in ways if way.why), None)
    return Target(
        format,
        count(MOVED),
        nbytes(MOVED),
        count(REPACKED),
        nbytes(REPACKED),
        count(DECODED),
        nbytes(DECODED),
        count(REFUSED),
        nbytes(REFUSED),
        sum(way.nbytes for way in ways),
        f"{first.name}: {first.why}" if first else None,
        counted(way.equal for way in ways),
    )


def _shown(targets: Sequence[Target]) -> Table:
    columns = [Column("", head="format")]
    for action in (MOVED, REPACKED, DECODED, REFUSED):
        columns += [Column("", "count", action), Column("", "bytes", "bytes", drop=1)]
    columns.append(Column("", "bytes", "becomes", drop=2))
    rows = []
    for of in targets:
        pairs = (
            (of.moved, of.moved_nbytes),
            (of.repacked, of.repacked_nbytes),
            (of.decoded, of.decoded_nbytes),
            (of.refused, of.refused_nbytes),
        )
        rows.append((of.format, *(item for pair in pairs for item in pair), of.nbytes))
    return Table("", columns, rows, data=False)


def _obstacles(targets: Sequence[Target]) -> list[str]:
    """Return the first obstacle of each format and the grades of what is repacked, formats of the same together."""
    alike: dict[str, list[str]] = {}
    for of in targets:
        if of.obstacle:
            alike.setdefault(of.obstacle, []).append(of.format)
    for of in targets:
        if of.repacked:
            alike.setdefault(f"equal, {said(of.repacked, of.grades)}", []).append(of.format)
    return [f"{', '.join(formats)}: {told}" for told, formats in alike.items()]
