"""The report of a finished conversion, tensor by tensor, with the commands that run the result."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.artifacts.destination import Destination
from ingot.artifacts.open import Source, open_source
from ingot.codecs.base import GRADES, IN_F32, IN_TYPE, INTEGERS, SCALES
from ingot.conversion.budget.report import BudgetReport
from ingot.conversion.plan import ConvertPlan
from ingot.core.numeric.dtypes import FLOATS
from ingot.core.numeric.stats import ErrorStats
from ingot.engine.execute import Executed
from ingot.engine.steps import DECODED, ENCODED, MOVED, REPACKED, Repack
from ingot.engine.work import CompletedStep, Step
from ingot.errors import IngotError
from ingot.formats.base import PROMPT, Format, WrittenArtifact, in_python
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.reading.lazy import as_tensor_map
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
from ingot.reporting.reportable import Reportable
from ingot.runtimes.accepts import accepts, container_name
from ingot.runtimes.profile import PROJECTOR
from ingot.runtimes.table import BUILT_IN, RUNTIMES, command_lines, runtime_named
from ingot.stores.location import Location


def dropped_settings_note(source: Source, plan: ConvertPlan) -> str:
    """Return a note on activation and KV-cache settings that the target cannot express; empty if there are none."""
    settings = source.format.activations(source.config()) if source.format.traits.config_keys else {}
    if not settings:
        return ""
    if plan.config is not None:
        dropped = plan.format.dropped_settings(plan.artifact, settings)
    else:
        dropped = [f"{key} ({value})" for key, value in settings.items()]
    if not dropped:
        return ""
    return f"not carried into {plan.format.name}: settings of the source's {CONFIG}: {', '.join(dropped)}"


_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """The properties of a source for the report.

    They are read before the result is published, so that no error occurs after publication. ``size`` is the number of
    bytes of the source's files. ``nbytes`` is the number of bytes of its tensors' parts. ``architectures`` are listed
    in its ``config.json``. ``companions`` are the names of the files next to its weights.
    """

    location: str
    size: int
    nbytes: int
    architectures: Sequence[str]
    companions: frozenset[str]

    @classmethod
    def from_source(cls, source: Source) -> SourceFacts:
        """Return the properties of a source; raises the errors of the source's store."""
        architectures = source.config().get("architectures")
        return cls(
            source.location,
            source.stored(),
            sum(tensor.nbytes for tensor in as_tensor_map(source.catalog.tensors).uncached()),
            [str(name) for name in architectures] if isinstance(architectures, list) else (),
            frozenset(source.companions().files),
        )

    def generates(self, files: Collection[str]) -> bool:
        """Return whether the result can generate text: it is a language model with a config and a tokenizer."""
        writes_text = not self.architectures or any(name.endswith(_TEXT) for name in self.architectures)
        return CONFIG in files and writes_text and any(name.startswith("tokenizer") for name in files)


def commands_for(
    target: Destination, plan: ConvertPlan, executed: Executed, source: SourceFacts, runtime: str | None = None
) -> list[str]:
    """Return shell commands that run the result; ``ingot verify`` if no program runs it."""
    path = _not_an_option(target.display)
    artifact = WrittenArtifact(
        path,
        path if not (target.directory and executed.files) else f"{path.rstrip('/')}/{executed.files[0]}",
        target.directory,
        target.directory and source.generates({*executed.companions, *executed.files}),
        plan.metadata,
    )
    lines: list[str] = []
    if target.is_local:
        lines += run_commands(target.display, plan.format, artifact, runtime)
    if artifact.generates:
        lines.append(shlex.join(("ingot", "generate", path, PROMPT)))
    elif not lines and not target.directory and source.generates(source.companions):
        call = "import ingot; print(ingot.load_model({}, model_dir={}))"
        lines.append(shlex.join(in_python(call, path, source.location)))
    return lines or [shlex.join(("ingot", "verify", path))]


def _not_an_option(path: str) -> str:
    """Return the path with a prefix, if necessary, so that command lines do not parse it as an option."""
    return f"./{path}" if path.startswith("-") else path


_GRADE_LABELS: Mapping[str, str] = {
    INTEGERS: "integers",
    SCALES: "scales",
    IN_F32: "values in f32",
    IN_TYPE: "values in the target's type",
}


def exactness(step: Step, format: Format, inexact: Collection[str]) -> Texts | None:
    """Return what is equal after a tensor was repacked for ``format``; None for steps without repacking.

    The grades are ``integers``, ``scales``, ``f32`` (the values in f32) and ``type`` (the values in the target's type).
    ``inexact`` contains the tensors whose values a view has changed in f32.
    """
    if not isinstance(step, Repack):
        return None
    grades = step.repack.equal(steps=format.traits.rounds_steps)
    return [grade for grade in grades if grade != IN_F32 or step.spec.name not in inexact]


def count_grades(grades_by_tensor: Iterable[Texts | None]) -> Counts:
    """Return, for each grade of ``exactness``, the number of repacked tensors that have it."""
    repacked = [grades for grades in grades_by_tensor if grades is not None]
    return {grade: sum(grade in grades for grades in repacked) for grade in GRADES}


def exactness_summary(count: int, grades: Counts) -> str:
    """Return a sentence with the number of repacked tensors of each grade; ``count`` is the number of all."""
    return f"of {count} repacked: " + ", ".join(f"{_GRADE_LABELS[grade]} of {n}" for grade, n in grades.items())


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of the result: its action, the rule, sizes in bytes, and the error if it is lossy.

    ``action`` is ``moved``, ``repacked``, ``decoded`` or ``encoded``. ``error`` has ``max_abs``, ``rms``, ``snr_db``
    and ``cosine``; it is None if the tensor is ``exact`` or was not measured. ``equal`` lists what is equal after
    repacking (``integers``, ``scales``, ``f32``, ``type``). ``sparsity`` is the share of the values, 0 to 1, that
    structured pruning omitted; the error includes these values.
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
class ConvertReport(Reportable):
    """The result of a conversion.

    Attributes
    ----------
    source_size, size : int
        Bytes of all weight files.
    source_nbytes : int
        Bytes of the source's stored parts alone.
    seconds : float
        Wall time.
    warnings : sequence of str
        Options and rules without effect.
    commands : sequence of str
        Shell commands that run the result.
    rounded : sequence of Outcome
        The results of quantizers, one per matrix.
    superseded, dropped : mapping of str to str
        The source tensors that the result does not contain, with the reasons (``model.account``).
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
        """The size of the result's files in bits, divided by the number of elements of its tensors."""
        return 8 * self.size / max(self.elements, 1)

    @property
    def exact(self) -> bool:
        """Whether the result contains every tensor of the source exactly: its values, or its codes and scales."""
        return not self.dropped and all(tensor.exact for tensor in self.tensors)

    @property
    def actions(self) -> Counts:
        """The number of tensors for each action: moved, repacked, decoded or encoded."""
        return dict(Counter(tensor.action for tensor in self.tensors))

    @property
    def grades(self) -> Counts:
        """The number of repacked tensors for each grade of ``exactness``."""
        return count_grades(tensor.equal for tensor in self.tensors)

    @property
    def pruned(self) -> Sequence[TensorReport]:
        """The tensors with pruned blocks."""
        return [tensor for tensor in self.tensors if tensor.sparsity]

    @property
    def sparsity(self) -> Ratio:
        """The share of the pruned tensors' values that pruning omitted, 0 to 1."""
        return sum(item.sparsity * item.elements for item in self.pruned) / max(
            sum(item.elements for item in self.pruned), 1
        )

    @property
    def worst(self) -> TensorReport | None:
        """The lossy tensor with the lowest signal-to-noise ratio."""
        return worst_of(self.tensors)

    def report(self) -> Report:
        """Return all figures and the tensors."""
        separate = ("tensors", "commands", "budget", "rounded", "superseded", "dropped")
        figures = [item for item in figures_of(self, *_COMPUTED) if item.name not in separate]
        speed = self.source_nbytes / max(self.seconds, 1e-9)
        share = self.size / max(self.source_size, 1)
        figures += [
            Figure("count", len(self.tensors), "count", data=False),
            Figure("speed", speed, "speed", data=False),
            Figure("share", share, "ratio", data=False),
            Figure("pruned", len(self.pruned), "count", data=False),
            Figure("commands", self.commands, "texts", data=False),
            Figure("equal", exactness_summary(self.actions.get(REPACKED, 0), self.grades), data=False),
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
        loss_figures, loss_lines = loss(self.tensors, _EXACT_TEXTS[REPACKED in self.actions] if self.exact else None)
        figures += loss_figures
        lines += loss_lines
        lines.append(Line("{item}", "note", items="notes"))
        closing = [Line("next:"), Line("  {item}", items="commands", copyable=True)] if self.commands else []
        report = Report(figures, lines, [table_of("tensors", self.tensors, TensorReport)], closing)
        return report if self.budget is None else self.budget.around(report)


_COMPUTED = ("bits_per_weight", "exact", "sparsity", "actions", "grades")
_EXACT_TEXTS = {  # the key is whether tensors were repacked
    False: "every value is kept bit for bit",
    True: "every number is kept bit for bit: values, or codes with their scales",
}


def action_of(step: Step) -> str:
    """Return the action for the report.

    If a view computes the values, the action is encoded or decoded, even if the step only moves or compresses them.
    """
    compressed = isinstance(step, Repack) and step.compress_parts and bool(step.tensor.source_bits)
    if step.action != MOVED and not compressed:
        return step.action
    return ENCODED if step.tensor.source_bits else DECODED if step.tensor.decoded_from else MOVED


def exact(step: Step) -> bool:
    """Return whether the result has the source's values; false if a view has changed them."""
    return step.exact and not step.tensor.source_bits


def source_nbytes(step: Step) -> int:
    """Return the number of stored bytes of the step's tensor in the source; for a slice, only those of the slice."""
    tensor = step.tensor
    return round(tensor.size * tensor.source_bits / 8) or step.in_bytes


def tensor_reports(completed: Sequence[CompletedStep], equal: Callable[[Step], Texts | None]) -> list[TensorReport]:
    """Return the reports of completed steps; ``equal`` returns what is equal after a step (``exactness``)."""
    return [tensor_report(item.step, item.nbytes, item.error, equal(item.step)) for item in completed]


def tensor_report(step: Step, nbytes: int, error: ErrorStats | None, equal: Texts | None) -> TensorReport:
    """Return the report of a completed step; ``equal`` is the result of ``exactness`` for it."""
    return TensorReport(
        name=step.tensor.name,
        shape=step.tensor.shape,
        dtype=step.spec.dtype,
        codec=step.spec.codec,
        source_codec=step.tensor.decoded_from or (step.tensor.stored_like or step.tensor).codec,
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
    """Return how float dtypes change, as a mapping from source to result, and the most common float dtype of the
    result.

    Dtypes are weighted by the number of elements. The second value is empty if the result has no floats.
    """
    counts: dict[str, Counter[str]] = {}
    for step in steps:
        source = step.tensor.stored_like or step.tensor
        if source.dtype in FLOATS and step.spec.dtype in FLOATS:
            counts.setdefault(source.dtype, Counter())[step.spec.dtype] += step.tensor.size
    common = {before: count.most_common(1)[0][0] for before, count in counts.items()}
    total: Counter[str] = sum(counts.values(), Counter())
    changed = {before: after for before, after in common.items() if before != after}
    return changed, total.most_common(1)[0][0] if total else ""


def _sparsity(params: Mapping[str, Any]) -> float:
    return 1.0 - int(params["kept"]) / max(int(params["channels"]), 1)


_FIRST = ("llama.cpp", "vllm", "mlx", "onnxruntime", "coreml")
"""The programs whose commands come first if the user names none."""
_SELF_CONTAINED = ("gguf", "onnx", "coreml")
"""Containers that programs run without a ``config.json`` and a tokenizer in the folder."""


def run_commands(location: str, format: Format, written: WrittenArtifact, runtime: str | None = None) -> list[str]:
    """Return the shell lines that run a written result; empty if no program accepts it.

    Parameters
    ----------
    location : str
        The result, which is opened for the checks.
    format : Format
        The result's format; if no profile covers it, its own ``Format.commands`` are returned.
    written : WrittenArtifact
    runtime : str, optional
        The program; by default the first one whose profile accepts the result.
    """
    container = container_name(format.name)
    names = dict.fromkeys((*_FIRST, *BUILT_IN))
    profiles = [RUNTIMES[name] for name in names] if runtime is None else [runtime_named(runtime)]
    if not any(container in profile.containers for profile in profiles):
        return [shlex.join(words) for words in format.commands(written)]
    if container not in _SELF_CONTAINED and not written.generates:
        return []
    with suppress(IngotError):
        source = open_source(Location.parse(location))
        try:
            is_projector = source.catalog.metadata.get("general.type") == PROJECTOR
            key = PROJECTOR if is_projector else container
            for profile in profiles:
                if (key in profile.commands or not is_projector) and accepts(profile, source).accepted:
                    return command_lines(profile, key, written.path, written.first)
        finally:
            source.close()
    return []
