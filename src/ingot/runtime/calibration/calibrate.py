"""Calibration: moments of the inputs of a model's matrices, over samples or a text (``spec/calibration.md``)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ingot.artifacts.destination import destination, stage
from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.save import plan_tensors, write_tensors
from ingot.core.extras import require
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.journal import Journal, fingerprint
from ingot.errors import UsageError
from ingot.formats.base import WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.statistics import COUNT, MODEL_KEY, SAME, VERSION, VERSION_KEY, WINDOW_PREFIX, Statistics
from ingot.model.tensor import Array
from ingot.runtime.calibration.calibrate_layers import LayerwiseModel, Settings
from ingot.runtime.calibration.calibrate_passes import Passes
from ingot.runtime.calibration.calibrate_plan import MemoryPlan, estimate, plan_memory
from ingot.runtime.calibration.calibrate_text import windows_of
from ingot.runtime.calibration.calibrate_work import Work
from ingot.runtime.calibration.calibration import LENGTH, SAMPLES, SENTENCE, CalibrateOptions, CalibrateReport
from ingot.runtime.calibration.samples import SAMPLES_OF_MODEL, SAMPLES_WITHOUT_TOKENIZER, SEEDS, draw_samples, seeded
from ingot.runtime.calibration.skeleton import MetaModel
from ingot.runtime.calibration.spilled_cache import spilled_cache
from ingot.runtime.evaluation.generate import positions, require_vocabulary
from ingot.runtime.evaluation.special_tokens import SpecialToken, Surrounding
from ingot.runtime.evaluation.windows import sample_prefix, text_length_of_window
from ingot.runtime.loading.model_source import resolve
from ingot.runtime.loading.transformers_config import EXTRA, version
from ingot.stores.local import LocalTarget
from ingot.stores.location import AnyPath, Location
from ingot.stores.temporary import temporary_folder
from ingot.translate.imatrix import write_imatrix

_SAMPLED = "samples"


@takes(CalibrateOptions, "calibrate")
def calibrate(options: CalibrateOptions) -> CalibrateReport:
    """Collect statistics of a model's matrices, and write them.

    Memory holds the weights of one layer, the activations of a few windows and the moments of the layer. Activations
    between layers are stored in a folder next to ``out``. If the model fits into memory, it stays there.

    Returns
    -------
    CalibrateReport

    Raises
    ------
    UsageError
        ``eval.text``: no UTF-8, or fewer tokens than a window; ``calibrate.length``: longer than the model's maximum;
        ``calibrate.seed``; ``resume.changed``.
    UnsupportedError
        ``calibrate.architecture``: the layers do not form a chain.
    ResourceError
        ``calibrate.ram``: the limit is too small for a layer and the second moments of a matrix; ``disk.guard``.
    IntegrityError
        ``calibrate.value``: NaN or infinity in activations.
    IngotError
        The errors of ``load_model`` and ``ingot.save``.
    """
    started = time.perf_counter()
    model, out = Location.parse(options.model), Location.parse(options.out)
    target = destination(out, "safetensors")
    with _subject(options) as subject, stage(target, overwrite=options.overwrite, resume=options.resume) as staging:
        journal = Journal(LocalTarget(staging.folder), subject.fingerprint(options))
        work = Work(str(staging.files), journal, resume=options.resume)
        collected = _collect(subject, options, work, staging.require_room)
        planned = plan_tensors(target.format, collected.arrays)
        artifact = Artifact([spec for _, spec in planned], collected.metadata)
        writer = target.format.writer(LocalTarget(staging.files), target.name, artifact, WriteOptions())
        names = write_tensors(writer, planned)
        subject.skeleton.checkpoint.require_unchanged()
        staging.publish(names)
    if options.imatrix is not None:
        with Statistics.open(out) as statistics, open_checkpoint(model) as checkpoint:
            write_imatrix(options.imatrix, statistics, checkpoint, overwrite=options.overwrite)
    return CalibrateReport(
        out=out.display,
        matrices=collected.matrices,
        tokens=collected.tokens,
        source=collected.metadata["source"],
        fisher=options.fisher,
        passes=collected.passes,
        size=sum(array.nbytes for array in collected.arrays.values()),
        seconds=round(time.perf_counter() - started, 3),
        window_prefix=subject.prefix,
        unseen=collected.unseen,
        resumed=work.resumed,
    )


def statistics_of(
    model: AnyPath, *, max_ram: int | str | None = None, progress: ProgressCallback | None = None
) -> Statistics:
    """Return the statistics of a calibration over samples, for a conversion without a statistics file."""
    options = CalibrateOptions(model, "", samples=SAMPLES, max_ram=max_ram, progress=progress)
    with _subject(options) as subject, temporary_folder() as folder:
        collected = _collect(subject, options, Work(folder), None)
        return Statistics.in_memory(collected.arrays, collected.metadata)  # mapped: deleted files stay readable


@dataclass(frozen=True, slots=True)
class _Collected:
    arrays: Mapping[str, Array]
    metadata: Mapping[str, str]
    matrices: int
    tokens: int
    passes: int
    unseen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model and its input: the tokens of a text, or None if the model reads samples of its own.

    ``prefix`` has the tokens that each window begins with.
    """

    skeleton: MetaModel
    identity: str
    length: int
    tokens: Any
    source: str
    prefix: Sequence[SpecialToken]

    def fingerprint(self, options: CalibrateOptions) -> str:
        """Return a digest of everything that affects the statistics."""
        tokens_digest = None if self.tokens is None else _digest(self.tokens)
        settings = {
            "samples": options.samples,
            "length": self.length,
            "seed": options.seed,
            "fisher": options.fisher,
            "largest": options.largest,
            "tokens": tokens_digest,
            "prefix": [token.id for token in self.prefix],
            "torch": str(require("torch", EXTRA).__version__),
            "transformers": version(),
        }
        return fingerprint([self.identity], settings, ())


@contextmanager
def _subject(options: CalibrateOptions) -> Iterator[_Subject]:
    torch = require("torch", EXTRA)
    if options.seed >= SEEDS:
        raise UsageError(
            f"expected a seed below {SEEDS}, because larger seeds are reserved for measuring budgets; "
            f"found {options.seed}",
            rule="calibrate.seed",
        )
    model = Location.parse(options.model)
    with open_checkpoint(model) as stored:
        identity = content_id(stored)
    source = resolve(model, "torch", False, False)
    with source.checkpoint:
        skeleton = MetaModel(source)
        encoder = not skeleton.model.can_generate()
        length = _length(skeleton.model, options, encoder=encoder)
        if options.text is not None or encoder:
            windows, text_name = windows_of(options, length, encoder=encoder)
            require_vocabulary(skeleton.model, windows.tokens)
            yield _Subject(skeleton, identity, length, windows.tokens, text_name, windows.prefix)
        else:
            prefix = sample_prefix(model)
            ids = tuple(token.id for token in prefix or ())
            require_vocabulary(skeleton.model, torch.tensor(ids))
            text_length_of_window(length, Surrounding(ids))
            source_name = SAMPLES_WITHOUT_TOKENIZER if prefix is None else SAMPLES_OF_MODEL
            yield _Subject(skeleton, identity, length, None, source_name, prefix or ())


def _length(model: Any, options: CalibrateOptions, *, encoder: bool) -> int:
    max_positions, default = positions(model), SENTENCE if encoder else LENGTH
    if options.length is None:
        return default if max_positions is None else min(default, max_positions)
    if max_positions is not None and options.length > max_positions:
        raise UsageError(
            f"expected windows of at most {max_positions} tokens, the model's number of positions, found "
            f"{options.length}",
            rule="calibrate.length",
        )
    return options.length


def _collect(subject: _Subject, options: CalibrateOptions, work: Work, require_room: Any) -> _Collected:
    torch = require("torch", EXTRA)
    model = LayerwiseModel(subject.skeleton, Settings(options.fisher, options.largest, options.seed))
    count = options.samples if subject.tokens is None else len(subject.tokens)
    memory_plan = plan_memory(model, options, (count, subject.length), sampling=subject.tokens is None)
    if memory_plan.in_memory:
        model.keep()
    plan = estimate(model, memory_plan)
    if options.plan is not None:
        options.plan(plan)
    if require_room is not None:
        require_room(plan.disk)
    progress = Progress(memory_plan.work, options.progress)
    with seeded(torch, options.seed):
        tokens = subject.tokens
        if tokens is None:
            tokens = _samples(torch, model, memory_plan, [token.id for token in subject.prefix], work, progress)
        passes = Passes(model, work, tokens, memory_plan.batch, memory_plan.moment_bytes, progress)
        arrays = passes.run()
    metadata = {
        VERSION_KEY: VERSION,
        MODEL_KEY: subject.identity,
        "source": subject.source,
        WINDOW_PREFIX: json.dumps([asdict(token) for token in subject.prefix], ensure_ascii=False),
        "samples": str(len(tokens)),
        "length": str(subject.length),
        "tokens": f"sha256:{_digest(tokens)}",
        "seed": str(options.seed),
        "fisher": str(options.fisher).lower(),
        **{f"{name}:{SAME}": other for name, other in sorted(passes.same.items())},
    }
    counts = {key.rpartition(":")[0]: int(array[0]) for key, array in arrays.items() if key.endswith(f":{COUNT}")}
    unseen = tuple(sorted(name for name, seen in counts.items() if not seen))
    return _Collected(arrays, metadata, len(counts), tokens.numel(), max(passes.passes, 1), unseen)


def _digest(tokens: Any) -> str:
    return hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()


def _samples(
    torch: Any, model: LayerwiseModel, memory_plan: MemoryPlan, prefix: Sequence[int], work: Work, progress: Progress
) -> Any:
    """Return sequences sampled from the model, or those of an earlier run: i64 [windows, length]."""
    if work.finished(_SAMPLED) is None:
        cache = (
            spilled_cache(model.skeleton.model, memory_plan.length, work.scratch)
            if memory_plan.spilled
            else lambda count: None
        )
        with model.streaming() as streamed_model:
            drawn = draw_samples(
                torch, streamed_model, memory_plan.windows, memory_plan.length, progress, prefix, cache
            )
        out = work.writer(_SAMPLED)
        out.add(drawn.numpy())
        work.finish(_SAMPLED, [out])
    else:
        progress.advance(memory_plan.windows * memory_plan.length, "samples")
    return torch.from_numpy(work.read(_SAMPLED, 0, (memory_plan.windows, memory_plan.length), np.int64))
