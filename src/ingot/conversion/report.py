"""What a conversion did, tensor by tensor."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.artifacts.destination import Destination
from ingot.artifacts.open import Source
from ingot.codecs.base import GRADES, IN_F32, IN_TYPE, INTEGERS, SCALES
from ingot.conversion.budget.report import BudgetReport
from ingot.conversion.plan import ConvertPlan
from ingot.conversion.run_commands import run_commands
from ingot.core.numeric.dtypes import FLOATS
from ingot.core.numeric.stats import ErrorStats
from ingot.engine.execute import Executed
from ingot.engine.steps import DECODED, ENCODED, MOVED, REPACKED, Repack
from ingot.engine.work import Done, Step
from ingot.formats.base import PROMPT, Format, WrittenArtifact, in_python
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.reading.lazy import as_many
from ingot.naming.config import CONFIG
from ingot.quantization.tensor import Outcome
from ingot.reporting.report import (
    Bits,
    Bytes,
    Counts,
    Figure,
    Line,
    Ratio,
    Report,
    Seconds,
    Shape,
    Texts,
    data_of,
    figures_of,
    loss,
    table_of,
    worst_of,
)
from ingot.reporting.shown import Shown


def unsaid(source: Source, plan: ConvertPlan) -> str:
    """Return a note of what is not carried; empty where nothing is lost."""
    said = source.format.activations(source.config()) if source.format.traits.config_keys else {}
    if not said:
        return ""
    if plan.config is not None:
        lost = plan.format.dropped_settings(plan.artifact, said)
    else:
        lost = [f"{key} ({value})" for key, value in said.items()]
    if not lost:
        return ""
    return f"not carried into {plan.format.name}: what the source's {CONFIG} says of {', '.join(lost)}"


_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a report says of a source, taken before the result is published: nothing may fail afterwards.

    ``size`` and ``nbytes`` are the bytes of its files and of its tensors' parts, ``architectures`` those that its
    ``config.json`` names, ``companions`` the names of the files beside its weights.
    """

    location: str
    size: int
    nbytes: int
    architectures: Sequence[str]
    companions: frozenset[str]

    @classmethod
    def from_source(cls, source: Source) -> SourceFacts:
        """Read the facts; errors as those of the source's store."""
        architectures = source.config().get("architectures")
        return cls(
            source.location,
            source.stored(),
            sum(tensor.nbytes for tensor in as_many(source.catalog.tensors).uncached()),
            [str(name) for name in architectures] if isinstance(architectures, list) else (),
            frozenset(source.companions().files),
        )

    def generates(self, files: Collection[str]) -> bool:
        """Whether files make the weights a model that continues a text, as far as the source says what it is."""
        writes_text = not self.architectures or any(name.endswith(_TEXT) for name in self.architectures)
        return CONFIG in files and writes_text and any(name.startswith("tokenizer") for name in files)


def commands_for(
    place: Destination, plan: ConvertPlan, executed: Executed, source: SourceFacts, runtime: str | None = None
) -> list[str]:
    """Return the commands that run what was made; one that checks it where nothing is known to."""
    path = _plain(place.display)
    made = WrittenArtifact(
        path,
        path if not (place.directory and executed.files) else f"{path.rstrip('/')}/{executed.files[0]}",
        place.directory,
        place.directory and source.generates({*executed.companions, *executed.files}),
        plan.metadata,
    )
    lines: list[str] = []
    found: list[Sequence[str]] = []
    if place.is_local:
        lines += run_commands(place.display, plan.format, made, runtime)
    if made.generates:
        found.append(("ingot", "generate", path, PROMPT))
    elif not lines and not place.directory and source.generates(source.companions):
        call = "import ingot; print(ingot.load_model({}, model_dir={}))"
        found.append(in_python(call, path, source.location))
    lines += [shlex.join(words) for words in found]
    return lines or [shlex.join(("ingot", "verify", path))]


def _plain(path: str) -> str:
    """Return a path that no program takes for an option."""
    return f"./{path}" if path.startswith("-") else path


_SAID: Mapping[str, str] = {
    INTEGERS: "integers",
    SCALES: "scales",
    IN_F32: "values in f32",
    IN_TYPE: "values in the target's type",
}


def equality(step: Step, format: Format, inexact: Collection[str]) -> Texts | None:
    """Return the grades in which a tensor is equal in ``format``; None for what is not repacked.

    ``inexact`` are tensors of which a view has changed the values in f32.
    """
    if not isinstance(step, Repack):
        return None
    found = step.repack.equal(steps=format.traits.rounds_steps)
    return [grade for grade in found if grade != IN_F32 or step.spec.name not in inexact]


def counted(found: Iterable[Texts | None]) -> Counts:
    """Return how many repacked tensors are equal in each grade."""
    repacked = [grades for grades in found if grades is not None]
    return {grade: sum(grade in grades for grades in repacked) for grade in GRADES}


def said(count: int, grades: Counts) -> str:
    """Return a sentence with the number of repacked tensors of each grade; ``count`` is their total."""
    return f"of {count} repacked: " + ", ".join(f"{_SAID[grade]} of {number}" for grade, number in grades.items())


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor: what happened (``moved``, ``repacked``, ``decoded``, ``encoded``), by which rule, sizes in bytes,
    error where lossy.

    ``error`` has ``max_abs``, ``rms``, ``snr_db`` and ``cosine``; None where ``exact`` or where it was not measured.
    ``equal``, of what was repacked: in which grades it is equal (``integers``, ``scales``, ``f32``, ``type``).
    ``sparsity`` is the share of the values that structured pruning left out, 0 to 1; they count in the error.
    """

    name: str
    shape: Shape
    dtype: str
    codec: str
    source_codec: str
    action: str
    rule: str
    exact: bool
    source_nbytes: Bytes
    nbytes: Bytes
    error: Mapping[str, float] | None = None
    sparsity: Ratio = 0.0
    equal: Texts | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ConvertReport(Shown):
    """A finished conversion.

    Sizes in bytes: ``source_size`` and ``size`` of all weight files, ``source_nbytes`` of the source's stored parts
    alone; ``seconds`` of wall time. ``warnings`` say what was asked for and had no effect, ``commands`` what runs the
    result, ``rounded`` what quantizers did to each matrix. ``superseded`` and ``dropped`` are source tensors that the
    result does not hold, with the reason (``model.account``).
    """

    source: str
    destination: str
    format: str
    recipe: str
    tensors: Sequence[TensorReport]
    source_nbytes: Bytes
    source_size: Bytes
    size: Bytes
    seconds: Seconds
    files: Texts
    companions: Texts = ()
    resumed: int = 0
    notes: Texts = ()
    warnings: Texts = ()
    commands: Texts = ()
    budget: BudgetReport | None = None
    rounded: Sequence[Outcome] = ()
    superseded: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> Bits:
        """Bits of the result's files per element of its tensors."""
        return 8 * self.size / max(self.elements, 1)

    @property
    def exact(self) -> bool:
        """Whether the result holds every tensor of the source, each exactly: its values, or its codes and scales."""
        return not self.dropped and all(tensor.exact for tensor in self.tensors)

    @property
    def actions(self) -> Counts:
        """How many tensors were moved, repacked, decoded, encoded."""
        return dict(Counter(tensor.action for tensor in self.tensors))

    @property
    def grades(self) -> Counts:
        """How many of the repacked tensors are equal in each grade."""
        return counted(tensor.equal for tensor in self.tensors)

    @property
    def pruned(self) -> Sequence[TensorReport]:
        """The tensors that lack blocks."""
        return [tensor for tensor in self.tensors if tensor.sparsity]

    @property
    def sparsity(self) -> Ratio:
        """Share of the pruned tensors' values that is left out, 0 to 1."""
        return sum(item.sparsity * item.elements for item in self.pruned) / max(
            sum(item.elements for item in self.pruned), 1
        )

    @property
    def worst(self) -> TensorReport | None:
        """The lossy tensor with the lowest signal-to-noise ratio."""
        return worst_of(self.tensors)

    def report(self) -> Report:
        """Return all figures and the tensors."""
        beside = ("tensors", "commands", "budget", "rounded", "superseded", "dropped")
        figures = [item for item in figures_of(self, *_COMPUTED) if item.name not in beside]
        speed = self.source_nbytes / max(self.seconds, 1e-9)
        share = self.size / max(self.source_size, 1)
        figures += [
            Figure("count", len(self.tensors), "count", data=False),
            Figure("speed", speed, "speed", data=False),
            Figure("share", share, "ratio", data=False),
            Figure("pruned", len(self.pruned), "count", data=False),
            Figure("commands", self.commands, "texts", data=False),
            Figure("equal", said(self.actions.get(REPACKED, 0), self.grades), data=False),
        ]
        figures += [Figure("superseded", dict(self.superseded), "data"), Figure("dropped", dict(self.dropped), "data")]
        if self.rounded:
            figures.append(Figure("rounded", [data_of(item) for item in self.rounded], "data"))
        resumed = "; {resumed} from an earlier run" if self.resumed else ""
        lines = [
            Line("{source} -> {destination} ({format}, recipe {recipe})"),
            Line(f"{{count}}: {{actions}}{resumed}", "tensors"),
            Line("{source_size} -> {size} ({share}), {bits_per_weight} bits per weight", "size"),
            Line("{seconds}, {speed}", "time"),
        ]
        if REPACKED in self.actions:
            lines.append(Line("{equal}", "equal"))
        if self.pruned:
            lines.append(Line("{pruned} tensors, {sparsity} of their weights, in whole blocks of channels", "pruned"))
        if self.companions:
            lines.append(Line("{companions}", "with"))
        measured, told = loss(self.tensors, _KEPT[REPACKED in self.actions] if self.exact else None)
        figures += measured
        lines += told
        lines.append(Line("{item}", "note", each="notes"))
        if self.commands:
            lines += [Line("next:"), Line("  {item}", each="commands", whole=True)]
        report = Report(figures, lines, [table_of("tensors", self.tensors, TensorReport)])
        return report if self.budget is None else self.budget.around(report)


_COMPUTED = ("bits_per_weight", "exact", "sparsity", "actions", "grades")
_KEPT = {
    False: "every value is kept bit for bit",
    True: "every number is kept bit for bit: values, or codes with their scales",
}


def action_of(step: Step) -> str:
    """Return what happens to a tensor: what a view computes is not moved, though the step only copies its bytes."""
    if step.action != MOVED:
        return step.action
    return ENCODED if step.tensor.source_bits else DECODED if step.tensor.decoded_from else MOVED


def exact(step: Step) -> bool:
    """Whether what is written has the values of the source: not where a view has computed others."""
    return step.exact and not step.tensor.source_bits


def source_nbytes(step: Step) -> int:
    """Return the stored bytes of the source's tensor, or of as much of it as this one is."""
    tensor = step.tensor
    return round(tensor.size * tensor.source_bits / 8) or step.in_bytes


def tensor_reports(done: Sequence[Done], equal: Callable[[Step], Texts | None]) -> list[TensorReport]:
    """Describe finished steps; ``equal`` returns the grades in which one that was repacked is equal."""
    return [tensor_report(item.step, item.nbytes, item.error, equal(item.step)) for item in done]


def tensor_report(step: Step, nbytes: int, error: ErrorStats | None, equal: Texts | None) -> TensorReport:
    """Describe a finished step, of which ``equal`` are the grades in which what was repacked is equal."""
    return TensorReport(
        name=step.tensor.name,
        shape=step.tensor.shape,
        dtype=step.spec.dtype,
        codec=step.spec.codec,
        source_codec=step.tensor.decoded_from or step.tensor.codec,
        action=action_of(step),
        rule=step.rule,
        exact=exact(step),
        source_nbytes=source_nbytes(step),
        nbytes=nbytes,
        error=error.summary() if error is not None and error.count else None,
        sparsity=_sparsity(step.spec.params) if step.spec.codec == BlocksLayout.codec else 0.0,
        equal=equal,
    )


def retyped(steps: Sequence[Step]) -> tuple[dict[str, str], str]:
    """Return which floating-point type most elements of each became where that is another, and which most have now."""
    became: dict[str, Counter[str]] = {}
    for step in steps:
        if step.tensor.dtype in FLOATS and step.spec.dtype in FLOATS:
            became.setdefault(step.tensor.dtype, Counter())[step.spec.dtype] += step.tensor.size
    most = {was: count.most_common(1)[0][0] for was, count in became.items()}
    total: Counter[str] = sum(became.values(), Counter())
    changed = {was: now for was, now in most.items() if was != now}
    return changed, total.most_common(1)[0][0] if total else ""


def _sparsity(params: Mapping[str, Any]) -> float:
    return 1.0 - int(params["kept"]) / max(int(params["channels"]), 1)
