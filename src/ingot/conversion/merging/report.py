"""The options of a merge of models, its checks before anything is written, and its report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ingot.adapters.options import AdapterRef
from ingot.artifacts.open import open as open_checkpoint
from ingot.conversion.merge_options import MergeOptions
from ingot.conversion.merging.compatibility import require_same_model
from ingot.conversion.merging.methods import LINEAR, METHODS, SLERP, WITH_DENSITY, WITH_SEED, WITHOUT_BASE
from ingot.conversion.merging.operands import Operand, open_operand, require_base_of_deltas
from ingot.conversion.merging.view import ModelMerge, tensor_merges
from ingot.conversion.merging.weights import require_density
from ingot.conversion.report import ConvertReport
from ingot.core.registry import did_you_mean
from ingot.errors import UsageError
from ingot.reporting.report import Figure, Line, Report, Seconds, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location

_RULE = "merge.option"
_MAX_SEED = 1 << 64


@dataclass(frozen=True, slots=True)
class MergedModel:
    """One model of a merge: its location, weight, category (model, delta or adapter), and the codecs of quantized
    tensors.
    """

    model: str
    weight: float | None
    category: str
    codecs: Sequence[str] = ()

    def describe(self) -> str:
        """Return the model's line in the report."""
        weight = "base" if self.weight is None else f"weight {self.weight:g}"
        decoded = f", decoded from {', '.join(self.codecs)}" if self.codecs else ""
        category = "" if self.category == "model" else f", {self.category} of the base"
        return f"{self.model}: {weight}{category}{decoded}"


@dataclass(frozen=True, slots=True)
class CheckedModels:
    """The models of a merge, the number of merged tensors, and notes for the report."""

    models: Sequence[MergedModel]
    tensors: int
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class ModelMergeReport(Reportable):
    """The result of a merge of models.

    Attributes
    ----------
    base, method : str
    models : sequence of MergedModel
        The base first.
    tensors : int
        The number of tensors that were merged; the others are equal in all models.
    density, scale : float
    seed : int or None
        DARE's seed; None for other methods.
    notes : sequence of str
    conversion : ConvertReport
        The report of the conversion, with every tensor.
    """

    base: str
    method: str
    models: Sequence[MergedModel]
    destination: str
    tensors: int
    density: float
    scale: float
    seed: int | None
    weights: str | None
    notes: Sequence[str]
    seconds: Seconds
    conversion: ConvertReport = field(repr=False)

    def report(self) -> Report:
        """Return the report of the conversion with the figures of the merge."""
        inner = self.conversion.report()
        names = {item.name for item in inner.figures}
        skipped = {"conversion", "models", "notes", *names}
        lines: Texts = [item.describe() for item in self.models]
        data = [
            {"model": item.model, "weight": item.weight, "category": item.category, "codecs": list(item.codecs)}
            for item in self.models
        ]
        figures = [
            *(item for item in figures_of(self) if item.name not in skipped),
            Figure("models", data, "data"),
            Figure("model_lines", lines, "texts", data=False),
            Figure("merge_notes", list(self.notes), "texts"),
            Figure("merge_text", self._text(), data=False),
        ]
        merge_lines = [
            Line("{item}", "model", items="model_lines"),
            Line("{merge_text}", "merge"),
            Line("{item}", "note", items="merge_notes"),
        ]
        return Report(
            [*inner.figures, *figures], [inner.lines[0], *merge_lines, *inner.lines[1:]], inner.tables, inner.closing
        )

    def _text(self) -> str:
        parts = [f"{self.method} of {self.tensors} tensors in f32"]
        if self.method in WITH_DENSITY:
            parts.append(f"density {self.density:g}")
        if self.scale != 1:
            parts.append(f"scale {self.scale:g}")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        if self.weights is not None:
            parts.append(f"weights by {self.weights}")
        return ", ".join(parts)


def model_merge(options: MergeOptions, base: AdapterRef, models: Sequence[AdapterRef]) -> ModelMerge:
    """Return the merge that the options describe.

    Raises ``UsageError`` ``merge.option``, ``merge.weights``: options that the method does not have, or invalid values.
    """
    method = options.method or LINEAR
    if method not in METHODS:
        hint = did_you_mean(method, METHODS) or f"; expected one of {', '.join(METHODS)}"
        raise UsageError(f"there is no merging method {method[:80]!r}{hint}", rule=_RULE)
    if method == SLERP and len(models) != 1:
        raise UsageError(f"slerp interpolates between two models, found {1 + len(models)}", rule=_RULE)
    if method not in WITHOUT_BASE and base.weight != 1:
        raise UsageError(f"the base has no weight in {method}; found {base.weight:g}", rule=_RULE, where=base.path)
    if options.density is not None:
        require_density(options.density, method)
    if options.seed is not None and (method not in WITH_SEED or not 0 <= options.seed < _MAX_SEED):
        problem = "expected a seed from 0 to 2^64 - 1" if method in WITH_SEED else f"{method} has no seed"
        raise UsageError(f"{problem}, found {options.seed}", rule=_RULE)
    if options.scale is not None and (method in WITHOUT_BASE or not math.isfinite(options.scale)):
        problem = f"{method} has no scale" if method in WITHOUT_BASE else "expected a finite scale"
        raise UsageError(f"{problem}, found {options.scale:g}", rule=_RULE)
    return ModelMerge(
        method,
        base.path,
        tuple(models),
        base.weight,
        1.0 if options.density is None else options.density,
        1.0 if options.scale is None else options.scale,
        options.seed or 0,
        None if options.weights is None else Location.parse(options.weights).user_text,
        tuple(options.drop),
        options.io,
        options.max_decompressed,
    )


def check_models(merge: ModelMerge) -> CheckedModels:
    """Open every model and compare it with the base before anything is written.

    Reads headers, configs, tokenizers, tensors that must be equal in all models, and for a delta the full base.

    Raises
    ------
    UsageError
        ``merge.weights``
    UnsupportedError
        ``merge.tensors``, ``merge.model``
    IntegrityError
        ``delta.base``
    """
    merge.rules()
    with ExitStack() as stack:
        base = stack.enter_context(open_checkpoint(merge.base, io=merge.io, max_decompressed=merge.max_decompressed))
        operands: list[Operand] = []
        notes: list[str] = []
        for reference in merge.models:
            operand = open_operand(reference, base, merge.drop, merge.io, merge.max_decompressed)
            stack.callback(operand.close)
            operands.append(operand)
            notes += operand.notes
            if operand.category == "model":
                notes += require_same_model(base, operand.checkpoint, operand.location)
        require_base_of_deltas(base, operands)
        count = len(tensor_merges(base, merge))
        base_weight = merge.base_weight if merge.method in WITHOUT_BASE else None
        codecs = sorted({tensor.codec for tensor in base.values() if tensor.codec != "dense"})
        models = [MergedModel(base.location, base_weight, "model", codecs)]
        for operand, reference in zip(operands, merge.models, strict=True):
            models.append(MergedModel(operand.location, reference.weight, operand.category, operand.codecs))
    return CheckedModels(models, count, notes)


def models_report(
    merge: ModelMerge, checked: CheckedModels, conversion: ConvertReport, seconds: float
) -> ModelMergeReport:
    """Return the report of a merge, which the conversion ``conversion`` has written."""
    return ModelMergeReport(
        base=conversion.source,
        method=merge.method,
        models=checked.models,
        destination=conversion.destination,
        tensors=checked.tensors,
        density=merge.density,
        scale=merge.scale,
        seed=merge.seed if merge.method in WITH_SEED else None,
        weights=merge.weights,
        notes=checked.notes,
        seconds=seconds,
        conversion=conversion,
    )
