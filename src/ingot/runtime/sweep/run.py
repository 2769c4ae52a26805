"""Quantize a model with several presets, and measure each result on the same texts."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open as open_checkpoint
from ingot.conversion.options import ConvertOptions
from ingot.conversion.run import convert, prepare
from ingot.core.border import require
from ingot.core.files.atomic import Staging
from ingot.core.files.system import remove_tree
from ingot.core.options import takes
from ingot.engine.journal import Journal, fingerprint
from ingot.errors import IngotError, printable
from ingot.model.store import OverwritePolicy
from ingot.recipes.recipe import Recipe
from ingot.reporting.report import number
from ingot.runtime.calibration.calibrate import calibrate
from ingot.runtime.calibration.calibration import CalibrateOptions, CalibratePlan
from ingot.runtime.calibration.samples import SAMPLES_OF_MODEL
from ingot.runtime.evaluation.evaluate import require_window, score_windows
from ingot.runtime.evaluation.generate import require_vocabulary, vocabulary_size
from ingot.runtime.evaluation.recorded import RecordedLogits
from ingot.runtime.evaluation.windows import Windows, read_windows
from ingot.runtime.loading.options import LoadOptions, Measures
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_config import EXTRA
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.runtime.quantize.option_names import with_commands
from ingot.runtime.sweep.checks import check_options
from ingot.runtime.sweep.options import SweepOptions
from ingot.runtime.sweep.report import SweepReport, SweepRow, TextScore, report_markdown
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location

_CONTAINER = "zt"
_ORIGINAL = ""
_STATISTICS = "statistics.safetensors"


@takes(SweepOptions, "sweep")
def sweep(options: SweepOptions) -> SweepReport:
    """Quantize a model with several presets, measure each result against the model, and write one report.

    The model reads each text once. Its logits are stored in the folder of ``out`` until the sweep is complete. With
    ``resume`` a killed sweep continues after its last measured preset.

    Returns
    -------
    SweepReport

    Raises
    ------
    UsageError
        The errors of ``check_options``; ``resume.changed``.
    IngotError
        The errors of ``ingot.convert``, ``ingot.calibrate`` and ``ingot.evaluate``. All conversions are planned before
        the first one begins.

    Examples
    --------
    >>> from ingot.runtime.loading.options import Protocol
    >>> report = ingot.sweep("model", "int8", "model/heldout.txt", "s.json", protocol=Protocol(sequences=1))
    >>> [row.preset for row in report.rows]
    ['int8']
    """
    recipes, texts = check_options(options)
    out = Location.parse(options.out)
    try:
        with out.stage(OverwritePolicy(options.overwrite), resume=options.resume) as staging:
            report = _Sweep.start(options, texts, staging).run(recipes)
            content = msgspec.json.format(msgspec.json.encode(report), indent=2)
            (staging.files / out.name).write_bytes(content + b"\n")
            staging.publish([out.name])
    except IngotError as error:
        error.message = with_commands(error.message, SweepOptions)
        raise
    if options.page is not None:
        page = report_markdown(f"Sweep of {report.model}", report.report())
        Location.parse(options.page).write(page.encode(), overwrite=options.overwrite)
    return report


@dataclass(frozen=True, slots=True)
class _Sweep:
    """A sweep in progress: its options, its staging folder, and the windows of each text by label."""

    options: SweepOptions
    staging: Staging
    windows: Mapping[str, Windows]

    @classmethod
    def start(cls, options: SweepOptions, texts: Mapping[str, Location], staging: Staging) -> _Sweep:
        tokenizer = load_tokenizer(options.model)
        windows = {label: read_windows(tokenizer, text, options.protocol) for label, text in texts.items()}
        staging.scratch.mkdir(exist_ok=True)
        return cls(options, staging, windows)

    def run(self, recipes: Mapping[str, Recipe]) -> SweepReport:
        """Measure the model and all presets that an earlier run did not measure."""
        for name, recipe in recipes.items():
            with _located(name):
                prepare(self._conversion(recipe, None)).checkpoint.close()
        with ExitStack() as stack:
            journal = stack.enter_context(closing(Journal(LocalTarget(self.staging.folder), self._fingerprint())))
            records = journal.earlier() if self.options.resume else []
            journal.start(records)
            rows = {(record["key"], record["recipe"]): _row_of(record["row"]) for record in records}
            keys = {name: (name, recipe.fingerprint()) for name, recipe in recipes.items()}
            measured = rows.get((_ORIGINAL, _ORIGINAL))
            remaining = [name for name in recipes if keys[name] not in rows]
            if remaining or measured is None:
                references = {
                    label: stack.enter_context(closing(RecordedLogits(self.staging.scratch))) for label in self.windows
                }
                measured = self._measure_model(references)
                journal.append({"key": _ORIGINAL, "recipe": _ORIGINAL, "row": asdict(measured)})
                statistics = self._statistics([recipes[name] for name in remaining])
                for name in remaining:
                    with _located(name):
                        rows[keys[name]] = self._measure_preset(name, recipes[name], statistics, references)
                    journal.append({"key": name, "recipe": keys[name][1], "row": asdict(rows[keys[name]])})
                    self._announce(rows[keys[name]])
        return SweepReport(
            model=printable(str(Location.parse(self.options.model))),
            runtime=self.options.runtime or "",
            size=measured.size,
            window=self.options.protocol.window,
            tokens=[item.tokens.numel() for item in self.windows.values()],
            statistics=self._source_of_statistics(recipes.values()),
            original=measured.scores,
            rows=[rows[key] for key in keys.values()],
        )

    def _fingerprint(self) -> str:
        """Return a digest of everything that affects a row, except its recipe."""
        options = self.options
        with open_checkpoint(options.model) as checkpoint:
            identities: list[Any] = [content_id(checkpoint)]
        if options.calibration is not None:
            store, name = Location.parse(options.calibration).find_file()
            identities.append(list(store.stat(name)))
        tokens = {label: _digest(windows.tokens) for label, windows in self.windows.items()}
        settings = {"protocol": repr(options.protocol), "tokens": tokens, "for": options.runtime}
        return fingerprint(identities, settings, ())

    def _conversion(self, recipe: Recipe, statistics: Path | Location | None) -> ConvertOptions:
        return ConvertOptions(
            self.options.model,
            self.staging.scratch / "model",
            recipe=recipe,
            format=_CONTAINER if self.options.runtime is None else None,
            runtime=self.options.runtime,
            max_ram=self.options.max_ram,
            overwrite=True,
            allow_requantize=self.options.allow_requantize,
            calibration=statistics if recipe.has_quantizer else None,
            progress=self.options.progress,
            measure=False,
        )

    def _load(self, path: Any, *, keep_packed: bool) -> Any:
        protocol = self.options.protocol
        return load_model(
            LoadOptions(
                path,
                device=protocol.device,
                dtype=protocol.dtype,
                keep_packed=keep_packed,
                cache=False,
                max_ram=self.options.max_ram,
            )
        )

    def _measure_model(self, references: Mapping[str, RecordedLogits]) -> SweepRow:
        """Return the scores of the model, and record its logits for each text."""
        with open_checkpoint(self.options.model) as checkpoint:
            size = sum(tensor.nbytes for tensor in checkpoint.values())
        model = self._load(self.options.model, keep_packed=False)
        require_window(model, self.options.protocol.window)
        vocabulary = vocabulary_size(model)
        for windows in self.windows.values():
            require_vocabulary(model, windows.tokens)
        self.staging.require_room(
            sum(
                RecordedLogits.size(len(windows), windows.length - windows.first_scored, vocabulary)
                for windows in self.windows.values()
            )
        )
        scores = [self._score(model, label, None, record=references[label]) for label in self.windows]
        return SweepRow(_ORIGINAL, "", size, 0.0, 0.0, 0.0, scores)

    def _score(
        self, model: Any, label: str, reference: RecordedLogits | None, record: RecordedLogits | None = None
    ) -> TextScore:
        measures = Measures(progress=self.options.progress)
        windows = self.windows[label].to(model.device)
        _, scores, _ = score_windows(require("torch", EXTRA), model, windows, reference, measures, record)
        figures = scores.figures()
        interval = scores.intervals(measures.resamples, measures.seed).get("kl")
        return TextScore(label, figures["perplexity"], figures.get("kl"), interval, figures.get("agreement"))

    def _measure_preset(
        self,
        name: str,
        recipe: Recipe,
        statistics: Path | Location | None,
        references: Mapping[str, RecordedLogits],
    ) -> SweepRow:
        self._say(f"{name}: quantizing")
        report = convert(self._conversion(recipe, statistics))
        began = time.perf_counter()
        folder = self.staging.scratch / "model"
        model = self._load(folder, keep_packed=self.options.protocol.keep_packed)
        scores = [self._score(model, label, references[label]) for label in self.windows]
        del model  # before its files are removed
        remove_tree(folder)
        seconds = time.perf_counter() - began
        return SweepRow(name, report.format, report.size, report.bits_per_weight, report.seconds, seconds, scores)

    def _statistics(self, recipes: Sequence[Recipe]) -> Path | Location | None:
        """Return the statistics for calibrated presets; collect them unless an earlier run did so."""
        if self.options.calibration is not None:
            return Location.parse(self.options.calibration)
        path = self.staging.scratch / _STATISTICS
        if any(recipe.has_quantizer for recipe in recipes) and not path.exists():
            calibrate(
                CalibrateOptions(
                    self.options.model,
                    path,
                    max_ram=self.options.max_ram,
                    resume=self.options.resume,
                    progress=self.options.progress,
                    plan=self._say_plan,
                )
            )
        return path

    def _source_of_statistics(self, recipes: Any) -> str:
        if not any(recipe.has_quantizer for recipe in recipes):
            return ""
        file = self.options.calibration
        return SAMPLES_OF_MODEL if file is None else printable(str(Location.parse(file)))

    def _announce(self, row: SweepRow) -> None:
        scores = ", ".join(
            f"{number(score.kl if score.kl is not None else math.nan)} ({score.text})" for score in row.scores
        )
        self._say(f"{row.preset}: {row.bits_per_weight:.3f} bits per weight, KL {scores}")

    def _say_plan(self, plan: CalibratePlan) -> None:
        self._say(f"calibrating takes {plan.describe()}")

    def _say(self, text: str) -> None:
        if self.options.announce is not None:
            self.options.announce(text)


@contextmanager
def _located(preset: str) -> Iterator[None]:
    """Add the preset to the location of errors."""
    try:
        yield
    except IngotError as error:
        error.add_location(f"preset {preset}")
        raise


def _row_of(record: Mapping[str, Any]) -> SweepRow:
    row = msgspec.convert(record, SweepRow)
    return replace(row, scores=[msgspec.convert(score, TextScore) for score in record["scores"]])


def _digest(tokens: Any) -> str:
    return hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()
