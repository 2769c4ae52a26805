"""Merging of adapters or models into a base, as a conversion of the changed base."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import numpy as np

from ingot.adapters.match import match
from ingot.adapters.options import AdapterRef
from ingot.adapters.read import open_adapter
from ingot.adapters.view import Term, Terms
from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.destination import destination
from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.open import open_source
from ingot.conversion.merge_options import MergeOptions
from ingot.conversion.merging.report import ModelMergeReport, check_models, model_merge, models_report
from ingot.conversion.options import ConvertOptions
from ingot.conversion.report import ConvertReport
from ingot.conversion.run import convert
from ingot.core.options import takes
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Tensor
from ingot.recipes.llama_types import preset_of_type
from ingot.recipes.recipe import Recipe
from ingot.reporting.report import Figure, Line, Report, Seconds, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location
from ingot.translate.view import to_model

_SAMPLE_ROWS = 32  # rows of a sample; up to three samples are taken from a tensor
_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class MergedAdapter:
    """One adapter of a merge: its weight, method, ranks, and the number of tensors that it changes."""

    adapter: str
    weight: float
    method: str
    ranks: Sequence[int]
    tensors: int

    def describe(self) -> str:
        """Return the adapter's line in the report."""
        ranks = ", ".join(map(str, self.ranks))
        rank = f" of rank {ranks}" if ranks else ""
        weight = "" if self.weight == 1 else f", weight {self.weight:g}"
        return f"{self.adapter}: {self.method}{rank}, {self.tensors} tensors{weight}"


@dataclass(frozen=True, slots=True)
class MergeReport(Reportable):
    """The result of a merge of adapters.

    Attributes
    ----------
    adapters : sequence of MergedAdapter
    changed : int
        The number of tensors that the adapters change.
    error : float or None
        The RMS error of the changed tensors, divided by the RMS value of the exact merge in f32; None if it was not
        measured.
    survived : float or None
        The share of the adapters' change that the stored values contain: the component of the stored change along the
        exact change. It is 1 if rounding removed nothing, and 0 if every value was rounded back to the base's. It is
        measured on ``sampled`` values; None if the change is zero.
    lowest : str
        The tensor with the smallest share.
    conversion : ConvertReport
        The report of the conversion, with every tensor.
    """

    base: str
    adapters: Sequence[MergedAdapter]
    destination: str
    changed: int
    error: float | None
    survived: float | None
    lowest: str
    lowest_survived: float | None
    sampled: int
    seconds: Seconds
    conversion: ConvertReport = field(repr=False)

    def report(self) -> Report:
        """Return the report of the conversion with the figures of the merge."""
        inner = self.conversion.report()
        names = {item.name for item in inner.figures}
        merge_figures = [
            item for item in figures_of(self) if item.name not in ("conversion", "adapters") and item.name not in names
        ]
        adapters: Texts = [item.describe() for item in self.adapters]
        texts = [
            Figure("adapters", [_data(item) for item in self.adapters], "data"),
            Figure("adapter_lines", adapters, "texts", data=False),
            Figure("merge_text", self._error_text(), data=False),
            Figure("survived_text", self._survived_text(), data=False),
        ]
        lines = [Line("{item}", "adapter", items="adapter_lines"), Line("{merge_text}", "merge")]
        if self.survived is not None:
            lines.append(Line("{survived_text}", "kept"))
        return Report(
            [*inner.figures, *merge_figures, *texts],
            [inner.lines[0], *lines, *inner.lines[1:]],
            inner.tables,
            inner.closing,
        )

    def _error_text(self) -> str:
        if self.error is None:
            return f"{self.changed} tensors changed"
        return f"{self.changed} tensors changed; error {100 * self.error:.3g} % of the exact merge (RMS)"

    def _survived_text(self) -> str:
        share = 100 * (self.survived or 0.0)
        lowest = "" if self.lowest_survived is None else f"; lowest {100 * self.lowest_survived:.1f} %, {self.lowest}"
        return f"{share:.1f} % of the adapters' change survived rounding ({self.sampled} values sampled){lowest}"


def _data(item: MergedAdapter) -> Mapping[str, Any]:
    return {
        "adapter": item.adapter,
        "weight": item.weight,
        "method": item.method,
        "ranks": list(item.ranks),
        "tensors": item.tensors,
    }


@takes(MergeOptions, "merge")
def merge(options: MergeOptions) -> MergeReport | ModelMergeReport:
    """Merge adapters into their base, or models by a ``method``, tensor by tensor.

    The base may be quantized. Several adapters are added with their weights. Each changed tensor is computed in f32 and
    rounded once: by the rules of the recipe, else to the codec, bits and group size of the base's tensor, with scales
    fitted again. With one adapter, dense results equal those of PEFT's ``merge_and_unload`` in f32, rounded to the
    element type. With ``resume`` the output has the same bytes as that of an uninterrupted run.

    With a ``method``, the operands are models with the tensors of the base: checkpoints in any container, deltas of the
    base, or adapters of the base. ``linear`` divides the weighted sum of all models, the base included, by the sum of
    the weights; ``slerp`` interpolates between two models. The other methods add a weighted sum of the differences to
    the base: ``task-arithmetic`` adds all of them; ``ties`` adds the share ``density`` of the largest, if they have the
    elected sign; ``dare-linear`` and ``dare-ties`` add a random share ``density``, scaled up (``spec/merging.md``).

    Returns
    -------
    MergeReport or ModelMergeReport

    Raises
    ------
    UsageError
        ``merge.option``, ``merge.weights``, ``adapter.none``, ``adapter.weight``, ``quantize.type``.
    UnsupportedError
        ``merge.tensors``, ``merge.model``, ``adapter.base``, ``adapter.shape``, ``adapter.method``,
        ``adapter.config``, ``adapter.unsupported``,
        ``convert.like-stored``.
    IngotError
        The errors of ``ingot.convert``. If an error is raised, nothing is written under the final name.

    Examples
    --------
    >>> report = ingot.merge("model", ["style"], "merged")
    >>> report.changed
    4
    """
    started = time.perf_counter()
    operands = options.operands
    values = [operands] if isinstance(operands, str | PathLike | Location) else list(operands)
    references = [AdapterRef.parse(value) for value in values]
    if not references:
        raise UsageError("expected at least one adapter or model, but the list is empty", rule="merge.option")
    if options.method is not None:
        return _merge_models(options, references, started)
    _refuse_model_options(options)
    merged = _check(options, references)
    report = convert(replace(_convert_options(options), adapters=references))
    survival = _measure(options, references)
    return MergeReport(
        base=report.source,
        adapters=merged,
        destination=report.destination,
        changed=len(survival.shares),
        error=survival.error,
        survived=survival.share,
        lowest=survival.lowest,
        lowest_survived=survival.shares.get(survival.lowest),
        sampled=survival.sampled,
        seconds=time.perf_counter() - started,
        conversion=report,
    )


def _convert_options(options: MergeOptions) -> ConvertOptions:
    """Return the options of the conversion that writes the result, without adapters and models."""
    return ConvertOptions(
        options.base,
        options.out,
        _recipe(options),
        _format(options),
        options.max_ram,
        options.resume,
        options.progress,
        runtime=options.runtime,
        allow_requantize=options.allow_requantize,
        overwrite=options.overwrite,
        threads=options.threads,
        digest=options.digest,
        max_shard=options.max_shard,
        verify=options.verify,
        max_decompressed=options.max_decompressed,
        calibration=options.calibration,
        device=options.device,
        keep_names=options.keep_names,
        no_tokenizer=options.no_tokenizer,
        drop=options.drop,
        metadata=options.metadata,
        io=options.io,
    )


def _merge_models(options: MergeOptions, references: Sequence[AdapterRef], started: float) -> ModelMergeReport:
    base = AdapterRef.parse(options.base)
    merge = model_merge(options, base, references)
    options = replace(options, base=base.path)
    checked = check_models(merge)
    report = convert(replace(_convert_options(options), models=merge))
    return models_report(merge, checked, report, time.perf_counter() - started)


def _refuse_model_options(options: MergeOptions) -> None:
    """Raise ``UsageError`` ``merge.option`` for an option that applies only to merges of models."""
    for name in ("density", "scale", "seed", "weights"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} needs --method, which merges models", rule="merge.option")


def _check(options: MergeOptions, references: Sequence[AdapterRef]) -> list[MergedAdapter]:
    """Match every adapter with the base, before anything is written; return descriptions of the adapters."""
    merged = []
    with open_checkpoint(options.base, io=options.io, max_decompressed=options.max_decompressed) as base:
        for reference in references:
            with open_adapter(reference.path) as adapter:
                count = len(match(adapter, base))
                merged.append(MergedAdapter(adapter.location, reference.weight, adapter.method, adapter.ranks, count))
    return merged


def _recipe(options: MergeOptions) -> Any:
    if options.type is None:
        return options.recipe
    if options.recipe is not None:
        raise UsageError("expected one of --type and --recipe, found both", rule="merge.option")
    plain, calibrated = preset_of_type(options.type)
    return calibrated if (options.calibration is not None and calibrated) or not plain else plain


def _format(options: MergeOptions) -> str | None:
    """Return the format of the result; for a folder without a requested format, the format of the base."""
    if options.format is not None or options.runtime is not None:
        return options.format
    target = destination(Location.parse(options.out))
    if not target.directory or Location.parse(options.out).display.rstrip("/").endswith(f".{target.format.name}"):
        return None
    if options.type is not None or isinstance(options.recipe, Recipe):
        return None
    source = open_source(Location.parse(options.base), io=options.io, max_decompressed=options.max_decompressed)
    try:
        name = source.format.name
    finally:
        source.close()
    return None if has_model_metadata(name) or options.recipe is not None else name


@dataclass(slots=True)
class _Survival:
    """Sums over samples of the changed tensors, from which the error and the surviving share are computed."""

    shares: dict[str, float] = field(default_factory=dict)
    sampled: int = 0
    _component: float = 0.0
    _change: float = 0.0
    _error: float = 0.0
    _exact: float = 0.0

    def add(self, name: str, base: Any, exact: Any, stored: Any) -> None:
        """Add rows of one tensor: their values in the base, after the exact merge, and as stored."""
        wide = [np.asarray(values, np.float64).reshape(-1) for values in (base, exact, stored)]
        change = wide[1] - wide[0]
        component = float(change @ (wide[2] - wide[0]))
        energy = float(change @ change)
        self.shares[name] = component / energy if energy else 1.0
        self._component += component
        self._change += energy
        self._error += float(np.square(wide[2] - wide[1]).sum())
        self._exact += float(wide[1] @ wide[1])
        self.sampled += wide[0].size

    @property
    def share(self) -> float | None:
        return self._component / self._change if self._change else None

    @property
    def error(self) -> float | None:
        return float(np.sqrt(self._error / self._exact)) if self._exact else None

    @property
    def lowest(self) -> str:
        return min(self.shares, key=lambda name: self.shares[name], default="")


def _measure(options: MergeOptions, references: Sequence[AdapterRef]) -> _Survival:
    """Compare samples of the result with the base and the exact merge, under the names of a model folder."""
    survival = _Survival()
    with ExitStack() as stack:
        base = stack.enter_context(open_checkpoint(options.base, io="pread", max_decompressed=options.max_decompressed))
        result = stack.enter_context(open_checkpoint(options.out, io="pread"))
        base, result = _same_names(base, result)
        terms: dict[str, list[Term]] = {}
        for reference in references:
            adapter = stack.enter_context(open_adapter(reference.path))
            for name, changes in match(adapter, base).items():
                terms.setdefault(name, []).append(Term(reference.weight, changes))
        for name, items in terms.items():
            if name in result and result[name].shape == base[name].shape:
                _sample(survival, base[name], result[name], Terms(name, base[name].shape, items))
    return survival


def _same_names(base: Checkpoint, result: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return both checkpoints, with the tensor names of a model folder if exactly one of them is a GGUF file."""
    if has_model_metadata(base.format) == has_model_metadata(result.format) or any(name in base for name in result):
        return base, result
    if has_model_metadata(base.format):
        return to_model(base, no_tokenizer=True).checkpoint, result
    return base, to_model(result, no_tokenizer=True).checkpoint


def _sample(survival: _Survival, base: Tensor, stored: Tensor, terms: Terms) -> None:
    """Add the first, middle and last rows of a tensor to ``survival``; for a stack, only rows of one matrix."""
    rows = base.shape[-2] if terms.is_stack else base.shape[0]
    count = min(_SAMPLE_ROWS, rows)
    starts = sorted({0, (rows - count) // 2, rows - count})[:_SAMPLES]
    matrix = base.shape[0] // 2 if terms.is_stack else 0
    samples = []
    for start in [0] if terms.needs_all_rows else starts:
        index: Any = slice(None) if terms.needs_all_rows else slice(start, start + count)
        if terms.is_stack:
            index = (matrix, index)
        old = np.asarray(base[index], np.float32)
        flat = old.reshape(-1, terms.cols)
        first = matrix * rows + start if terms.is_stack else start
        samples.append((flat, terms.apply(flat, first), np.asarray(stored[index], np.float32).reshape(flat.shape)))
    parts = [np.concatenate([sample[part] for sample in samples]) for part in range(3)]
    survival.add(base.name, *parts)
