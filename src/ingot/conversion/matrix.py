"""The action of a conversion without a recipe, for every tensor and format: move, repack exactly, decode, or refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ingot.artifacts.account import account_of_conversion, dropped_omissions
from ingot.artifacts.adapter_files import HOLDS_ANY, Adapter, adapter_of
from ingot.artifacts.destination import STEM, Destination
from ingot.artifacts.open import Source, open_source, open_source_in_store
from ingot.conversion.model_folder import needs_family, with_model_folder
from ingot.conversion.options import ConvertOptions, MatrixOptions
from ingot.conversion.packed_layers import require_layers
from ingot.conversion.placement import plan_without_rule, why_not_exact
from ingot.conversion.prepare_source import prepare_source
from ingot.conversion.report import action_of, count_grades, exactness, exactness_summary
from ingot.core.options import takes
from ingot.engine.steps import DECODED, MOVED, REPACKED
from ingot.engine.work import Step
from ingot.errors import CodecError, FormatError, IngotError, MissingExtraError, UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.formats.detect import FORMATS
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.tensor import Tensor
from ingot.reporting.report import Bytes, Column, Count, Counts, Figure, Line, Report, Table, Texts, table_of
from ingot.reporting.reportable import Reportable
from ingot.runtimes.accepts import accepts_specs, container_name, readable_containers, refusal
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location

REFUSED = "refused"
_LEGEND = (
    "moved: unchanged. repacked: the same numbers in another layout. decoded: values computed from them.",
    "refused: cannot be stored. becomes: the size of the result. equal: in how many repacked tensors each is the same.",
)


@dataclass(frozen=True, slots=True)
class TensorOutcome:
    """The action for one tensor in one format, and the reason if it is decoded or refused.

    ``action`` is ``moved``, ``repacked``, ``decoded`` or ``refused``. ``nbytes`` is the size of the result's parts in
    bytes. ``equal`` lists what is equal after repacking (``integers``, ``scales``, ``f32``, ``type``; see
    ``report.exactness``).
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
class FormatTotals:
    """Totals of one format: for each action, the number of tensors and their stored bytes.

    The first reason for a decoded or refused tensor is included. ``grades`` counts, for each grade of ``exactness``,
    the repacked tensors that have it.
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
    grades: Counts = field(default_factory=lambda: count_grades(()))

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return self.moved + self.repacked + self.decoded + self.refused


@dataclass(frozen=True, slots=True)
class Matrix(Reportable):
    """The outcome of converting a checkpoint to each format: totals of each format, and the outcome of every tensor.

    ``is_chosen`` says whether the user named the formats or the program.
    """

    path: str
    format: str
    targets: Sequence[FormatTotals]
    tensors: Sequence[TensorOutcome]
    is_chosen: bool = False

    def report(self) -> Report:
        """Return the report. Its text shows the totals; its JSON also contains every tensor.

        Formats that store nothing of the model share a line, unless the user chose the formats.
        """
        refusing = [] if self.is_chosen else [item for item in self.targets if item.refused == item.tensors]
        shown = [item for item in self.targets if item not in refusing]
        figures = [
            Figure("path", self.path),
            Figure("format", self.format),
            Figure("obstacles", _obstacles(shown), "texts", data=False),
            Figure("refusing", ", ".join(item.format for item in refusing), data=False),
        ]
        closing = [Line(text) for text in _LEGEND]
        if refusing:
            closing.append(Line("These refuse the model; `ingot matrix MODEL --to FORMAT` says why: {refusing}"))
        return Report(
            figures,
            [Line("{path} ({format}): tensors by what a conversion to each format does with them")],
            [
                table_of("targets", self.targets, FormatTotals),
                _totals_table(shown),
                table_of("tensors", self.tensors, TensorOutcome),
            ],
            [*closing, Line("{item}", items="obstacles")],
        )


@takes(MatrixOptions, "matrix")
def matrix(options: MatrixOptions) -> Matrix:
    """Return the action of a conversion without a recipe on each tensor, for every format or only for the formats
    ``to``.

    Reads headers, and the scales and zero points that decide whether a tensor can be repacked.

    Raises
    ------
    UsageError
        ``format.unknown``: no such format.
    UnsupportedError
        ``model.quantized``: another program packed the weights in a way that Ingot does not decode.
    IngotError
        Errors of opening the checkpoint.
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
        dialect = source.packer()
        if dialect is not None:
            raise dialect.refusal()
        config = source.config()
        adapter = adapter_of(source)
        formats = [format.for_source(config) for format in formats]
        outcomes = {format.name: list(_outcomes(source, options, format, stack, adapter)) for format in formats}
    targets = [_totals(name, tensors) for name, tensors in outcomes.items()]
    tensors = [outcome for tensors in outcomes.values() for outcome in tensors]
    return Matrix(source.location, source.format.name, targets, tensors, bool(names))


def _outcomes(
    source: Source, options: MatrixOptions, format: Format, stack: ExitStack, adapter: Adapter | None
) -> Iterator[TensorOutcome]:
    """Yield the outcome of each tensor, under its name in the result; the caller closes the views through ``stack``."""
    target = Destination(Location.parse(""), True, format, format.file_name(STEM))
    keep_names = options.keep_names or adapter is not None
    convert_options = ConvertOptions(options.src, "", keep_names=keep_names, no_tokenizer=options.no_tokenizer)
    checkpoint = source.view()
    try:
        if adapter is not None and format.name not in HOLDS_ANY:
            raise adapter.refusal(source.location)
        checkpoint = checkpoint if keep_names else _with_folder(source, checkpoint, target, stack)
        prepared = prepare_source(checkpoint, target, convert_options, dropped_omissions(checkpoint, options.drop))
        view = prepared.checkpoint
        stack.callback(view.close)
        format = format.for_attachments(view.attachments)
    except (UnsupportedError, UsageError, FormatError, MissingExtraError) as error:
        for tensor in checkpoint.values():
            yield _refused(format, tensor, error)
        return
    obstacle = _obstacle([step for name in view if (step := _step(format, view[name]))], format, options.runtime)
    if obstacle is not None:
        yield from (_refused(format, view[name], obstacle) for name in view)
        return
    account = account_of_conversion(checkpoint, view, view, format, options.drop)
    for name, reason in account.missing.items():
        codec, nbytes = (checkpoint[name].codec, checkpoint[name].nbytes) if name in checkpoint else ("", 0)
        yield TensorOutcome(format.name, name, codec, REFUSED, nbytes, 0, why=reason)
    yield from (_outcome(format, view[name], prepared.inexact) for name in view)


def _step(format: Format, tensor: Tensor) -> Step | None:
    """Return the step of a tensor; None if the format cannot store it."""
    try:
        return plan_without_rule(tensor, format)
    except (UnsupportedError, CodecError):
        return None


def _obstacle(steps: Sequence[Step], format: Format, runtime: str | None) -> IngotError | None:
    """Return the error that a conversion without a recipe would raise; None if it would succeed.

    There are two such errors: a format for packed layers would get no packed tensor, or the program would refuse the
    result.
    """
    try:
        require_layers(steps, format)
    except UnsupportedError as error:
        return error
    if runtime is None:
        return None
    container = container_name(format.name)
    answer = accepts_specs(runtime_named(runtime), container, [step.spec for step in steps])
    return None if answer.accepted else refusal(answer, format.name)


def _with_folder(source: Source, checkpoint: Checkpoint, target: Destination, stack: ExitStack) -> Checkpoint:
    """Return the checkpoint with the other files of its folder, if a conversion to the target needs them."""
    if source.is_folder or not needs_family(target):
        return checkpoint
    again = open_source_in_store(source.store, source.name, verify=source.verify)
    stack.callback(again.close)
    opened, _ = with_model_folder(again, target, None)
    stack.callback(opened.close)
    return opened.view()


def _outcome(format: Format, tensor: Tensor, inexact: frozenset[str]) -> TensorOutcome:
    try:
        step = plan_without_rule(tensor, format)
    except (UnsupportedError, CodecError) as error:
        return _refused(format, tensor, error)
    why = why_not_exact(tensor, format) if step.action == DECODED and tensor.codec != DenseLayout.codec else None
    codec = tensor.decoded_from or tensor.codec
    equal = exactness(step, format, inexact)
    return TensorOutcome(format.name, tensor.name, codec, action_of(step), tensor.nbytes, step.out_bytes, equal, why)


def _refused(format: Format, tensor: Tensor, error: IngotError) -> TensorOutcome:
    return TensorOutcome(format.name, tensor.name, tensor.codec, REFUSED, tensor.nbytes, 0, why=error.message)


def _totals(format: str, tensors: Sequence[TensorOutcome]) -> FormatTotals:
    def count(action: str) -> int:
        return sum(item.action == action for item in tensors)

    def nbytes(action: str) -> int:
        return sum(item.source_nbytes for item in tensors if item.action == action)

    first = next((item for item in tensors if item.why), None)
    return FormatTotals(
        format,
        count(MOVED),
        nbytes(MOVED),
        count(REPACKED),
        nbytes(REPACKED),
        count(DECODED),
        nbytes(DECODED),
        count(REFUSED),
        nbytes(REFUSED),
        sum(item.nbytes for item in tensors),
        f"{first.name}: {first.why}" if first else None,
        count_grades(item.equal for item in tensors),
    )


def _totals_table(targets: Sequence[FormatTotals]) -> Table:
    heads = (MOVED, REPACKED, DECODED, REFUSED)
    columns = [
        Column("", head="format"),
        *(Column("", "count", head) for head in heads),
        Column("", "bytes", "becomes"),
    ]
    rows = [
        (item.format, item.moved, item.repacked, item.decoded, item.refused, item.nbytes if item.refused == 0 else None)
        for item in targets
    ]
    return Table("", columns, rows, data=False)


def _obstacles(targets: Sequence[FormatTotals]) -> list[str]:
    """Return lines that begin with names of formats, followed by what applies to these formats.

    The text after the names is an obstacle, or a summary of what is equal after repacking. Formats with the same text
    share a line.
    """
    formats_by_text: dict[str, list[str]] = {}
    for totals in targets:
        if totals.obstacle:
            formats_by_text.setdefault(totals.obstacle, []).append(totals.format)
    for totals in targets:
        if totals.repacked:
            text = f"equal, {exactness_summary(totals.repacked, totals.grades)}"
            formats_by_text.setdefault(text, []).append(totals.format)
    return [f"{', '.join(formats)}: {text}" for text, formats in formats_by_text.items()]
