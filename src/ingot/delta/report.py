"""Reports of a diff or a patch, with a row per tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ingot.delta.explain import note_of
from ingot.engine.work import CompletedStep
from ingot.model.delta import Change
from ingot.model.tensor import Tensor
from ingot.quantization.tensor import Outcome
from ingot.reporting.report import (
    Bytes,
    Column,
    Counts,
    Figure,
    Line,
    Ratio,
    Report,
    Seconds,
    Shape,
    Table,
    Texts,
    data_of,
    figures_of,
    loss,
    table_of,
    worst_of,
)
from ingot.reporting.reportable import Reportable

HALF = 0.5
SAME = "same"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor of the fine-tune, as stored in a delta.

    ``op`` is ``apply``, ``replace`` or ``same``. ``nbytes`` are its bytes in the delta, ``tuned_nbytes`` its bytes in
    the fine-tune. ``exact`` states whether patching restores its values bit for bit.

    ``error`` describes the error of the patched weights (``max_abs``, ``rms``, ``snr_db``, ``cosine``). It is None if
    the result is exact or was not measured. ``unrestored`` is the share of the difference's squared norm that patching
    does not restore: 0 for an exact result, 1 for the base. ``note`` describes a difference to a base of another type
    or shape, or the reason why the full tensor is stored.
    """

    name: str
    shape: Shape
    dtype: str
    op: str
    codec: str
    nbytes: Bytes
    tuned_nbytes: Bytes
    exact: bool
    error: Mapping[str, float] | None = None
    unrestored: Ratio | None = None
    note: str = ""


def tensor_diffs(
    changes: Mapping[str, Change],
    exact: Sequence[bool],
    completed: Sequence[CompletedStep],
    base: Mapping[str, Tensor],
    tuned: Mapping[str, Tensor],
) -> list[TensorDiff]:
    """Describe every tensor of a fine-tune: its change, whether patching is exact, and its stored bytes.

    ``exact`` has the order of ``changes``. ``completed`` contains the steps of the stored tensors, in any order.
    """
    stored = {item.step.spec.name: item for item in completed}
    return [
        _tensor_diff(base.get(name), tuned[name], change.op, is_exact, stored.get(name))
        for (name, change), is_exact in zip(changes.items(), exact, strict=True)
    ]


def _tensor_diff(base: Tensor | None, tensor: Tensor, op: str, exact: bool, step: CompletedStep | None) -> TensorDiff:
    lossy = step is not None and not exact and step.error.count > 0
    moved = step.notes.get("moved", 0.0) if step else 0.0
    return TensorDiff(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        op=op,
        codec=step.step.spec.codec if step else "",
        nbytes=step.nbytes if step else 0,
        tuned_nbytes=tensor.nbytes,
        exact=exact,
        note=note_of(base, tensor, op, step.step.spec.dtype if step and exact else None),
        error=step.error.summary() if step and lossy else None,
        unrestored=step.error.squared_error / moved if step and lossy and moved else None,
    )


@dataclass(frozen=True, slots=True)
class DiffReport(Reportable):
    """The report of a diff.

    ``size`` is the size of the delta's file in bytes, and ``tuned_nbytes`` the stored bytes of the fine-tune's tensors.
    ``base_id`` and ``result_id`` are content ids (``artifacts.identity``), or None if the container does not state
    them. ``parent_hash`` is the parent hash that a ``.wdelta`` states.

    ``resumed`` counts tensors from an earlier run. ``rounded`` are the results of quantizers by matrix. ``notes`` are
    sentences about the delta. ``dropped`` are tensors that the caller decided not to read.
    """

    base: str
    tuned: str
    destination: str
    format: str
    strategy: str
    tensors: Sequence[TensorDiff]
    removed: Texts
    tuned_nbytes: Bytes
    size: Bytes
    seconds: Seconds
    base_id: str | None = None
    result_id: str | None = None
    parent_hash: str | None = None
    resumed: int = 0
    rounded: Sequence[Outcome] = ()
    notes: Texts = ()
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> Ratio:
        """The delta's size as a share of the fine-tune's tensors."""
        return self.size / max(self.tuned_nbytes, 1)

    @property
    def exact(self) -> bool:
        """Whether patching restores the fine-tune bit for bit: every tensor is exact, and none was dropped."""
        return not self.dropped and all(tensor.exact for tensor in self.tensors)

    @property
    def ops(self) -> Counts:
        """The number of tensors with each operation: apply, replace, same."""
        return dict(Counter(tensor.op for tensor in self.tensors))

    @property
    def short(self) -> list[TensorDiff]:
        """The tensors for which patching restores less than half of the difference; the smallest share is first."""
        lossy = [tensor for tensor in self.tensors if tensor.unrestored is not None and tensor.unrestored > HALF]
        return sorted(lossy, key=lambda tensor: -(tensor.unrestored or 0))

    @property
    def worst(self) -> TensorDiff | None:
        """The tensor with the lowest signal-to-noise ratio."""
        return worst_of(self.tensors)

    def report(self, *, tensors: bool = False) -> Report:
        """Return all figures and the tensors; the text shows the tensors if ``tensors`` is true."""
        separate = ("tensors", "rounded", "dropped")
        figures = [item for item in figures_of(self, "share", "exact", "ops") if item.name not in separate]
        figures.append(Figure("dropped", dict(self.dropped), "data"))
        if self.rounded:
            figures.append(Figure("rounded", [data_of(item) for item in self.rounded], "data"))
        short = self.short
        figures += [
            Figure("short", [item.name for item in short], "texts"),
            Figure("count", len(self.tensors), "count", data=False),
            Figure("gone", len(self.removed), "count", data=False),
            Figure("named", self.base_id or f"wdelta:{self.parent_hash}", data=False),
        ]
        removed = "; {gone} removed" if self.removed else ""
        lines = [
            Line("{base} -> {tuned}: {destination} ({format}, strategy {strategy})"),
            Line(f"{{count}}: {{ops}}{removed}", "tensors"),
            Line("{size}, {share} of the fine-tune", "size"),
            Line("{seconds}", "time"),
            Line("{named}", "base"),
        ]
        measured, loss_lines = loss(self.tensors, "patching gives the fine-tune bit for bit" if self.exact else None)
        figures += measured
        lines += loss_lines
        if short:
            figures += [
                Figure("lost", len(short), "count", data=False),
                Figure("most", short[0].name, data=False),
                Figure("unrestored", short[0].unrestored, "ratio", data=False),
            ]
            text = "{lost} tensors keep less than half of their difference, worst {most}: {unrestored} not restored"
            lines.append(Line(f"{text}; use a finer strategy", "lost"))
        lines.append(Line("{item}", "note", items="notes"))
        shown = [tensors_table(self.tensors)] if tensors else []
        return Report(figures, lines, [table_of("tensors", self.tensors, TensorDiff), *shown])


@dataclass(frozen=True, slots=True)
class PatchReport(Reportable):
    """The report of a patch. ``verified_base`` and ``verified`` state whether base and result were checked.

    ``result_id`` is the content id of the result in the fine-tune's element types, if computed. ``resumed`` counts
    tensors from an earlier run. ``cast`` is the element type to which floats were rounded afterwards, if any.
    """

    base: str
    deltas: Texts
    destination: str
    format: str
    tensors: int
    ops: Counts
    size: Bytes
    seconds: Seconds
    verified_base: bool
    verified: bool
    files: Texts
    companions: Texts = ()
    result_id: str | None = None
    resumed: int = 0
    notes: Texts = ()
    cast: str | None = None

    def report(self) -> Report:
        """Return all figures as a ``Report``."""
        lines = [
            Line("{base} + {chain} -> {destination} ({format})"),
            Line("{tensors}: {ops}", "tensors"),
            Line("{size}", "size"),
            Line("{seconds}", "time"),
        ]
        if self.companions:
            lines.append(Line("{companions}", "with"))
        lines.append(Line("proven to be the right one" if self.verified_base else "not checked", "base"))
        if self.verified:
            before = ", before floats were rounded to {cast}" if self.cast else ""
            lines.append(Line(f"{{result_id}}, as the delta promises{before}", "result"))
        lines.append(Line("{item}", "note", items="notes"))
        return Report([*figures_of(self), Figure("chain", " + ".join(self.deltas), data=False)], lines)


_TENSORS = (
    Column("", head="tensor"),
    Column("", "shape", "shape", drop=2),
    Column("", head="dtype", drop=1),
    Column("", head="op"),
    Column("", head="codec"),
    Column("", "bytes", "stored"),
    Column("", "ratio", "share"),
    Column("", "error", "RMS error"),
    Column("", "decibels", "SNR dB"),
)


def tensors_table(tensors: Sequence[TensorDiff]) -> Table:
    """Return the text table of a delta's tensors: stored bytes and errors."""
    rows = []
    for item in tensors:
        error = None if item.exact else item.error
        rms = 0.0 if item.exact else error["rms"] if error else None
        share = item.nbytes / max(item.tuned_nbytes, 1)
        cells = (item.name, item.shape, item.dtype, item.op, item.codec, item.nbytes, share)
        rows.append((*cells, rms, error["snr_db"] if error else None))
    return Table("", _TENSORS, rows, data=False)
