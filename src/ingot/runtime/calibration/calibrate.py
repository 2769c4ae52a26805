"""Calibration: what a model's matrices multiply, over samples of its own or a text (``spec/calibration.md``)."""

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
from ingot.runtime.calibration.calibrate_layers import Layered, Settings
from ingot.runtime.calibration.calibrate_passes import Passes
from ingot.runtime.calibration.calibrate_plan import Means, estimated, means_of
from ingot.runtime.calibration.calibrate_text import windows_of
from ingot.runtime.calibration.calibrate_work import Work
from ingot.runtime.calibration.calibration import LENGTH, SAMPLES, SENTENCE, CalibrateOptions, CalibrateReport
from ingot.runtime.calibration.samples import SAMPLES_OF_MODEL, SAMPLES_WITHOUT_TOKENIZER, SEEDS, samples_of, seeded
from ingot.runtime.calibration.skeleton import Skeleton
from ingot.runtime.calibration.spilled_cache import spilled_cache
from ingot.runtime.evaluation.generate import positions, require_vocabulary
from ingot.runtime.evaluation.special_tokens import SpecialToken, Surrounding
from ingot.runtime.evaluation.windows import sample_prefix, text_length_of_window
from ingot.runtime.loading.model_source import AnyPath, resolve
from ingot.runtime.loading.transformers_config import EXTRA, version
from ingot.stores.local import LocalTarget
from ingot.stores.table import location_of
from ingot.stores.temporary import temporary_folder
from ingot.translate.imatrix import write_imatrix

_SAMPLED = "samples"


@takes(CalibrateOptions, "calibrate")
def calibrate(options: CalibrateOptions) -> CalibrateReport:
    """Take statistics of a model's matrices, and write them.

    One layer's weights, the activations of a few windows and what is summed of the layer are in memory; activations
    between layers wait in a folder beside ``out``. Where the model fits into memory it stays there.

    Returns
    -------
    CalibrateReport

    Raises
    ------
    UsageError
        ``eval.text``: no UTF-8, or fewer tokens than a window; ``calibrate.length``: more tokens than the model has
        positions for; ``calibrate.seed``; ``resume.changed``.
    UnsupportedError
        ``calibrate.architecture``: layers that do not run one after the other.
    ResourceError
        ``calibrate.ram``: the ceiling has no room for a layer and one matrix's second moments; ``disk.guard``.
    IntegrityError
        ``calibrate.value``: NaN or infinity on the way through the model.
    IngotError
        As ``load_model`` and ``ingot.save``.
    """
    started = time.perf_counter()
    place = destination(options.out, "safetensors")
    with _subject(options) as subject, stage(place, overwrite=options.overwrite, resume=options.resume) as staging:
        journal = Journal(LocalTarget(staging.folder), subject.fingerprint(options))
        work = Work(str(staging.files), journal, resume=options.resume)
        taken = _take(subject, options, work, staging.require_room)
        planned = plan_tensors(place.format, taken.arrays)
        artifact = Artifact([spec for _, spec in planned], taken.metadata)
        writer = place.format.writer(LocalTarget(staging.files), place.name, artifact, WriteOptions())
        names = write_tensors(writer, planned)
        subject.skeleton.checkpoint.require_unchanged()
        staging.publish(names)
    if options.imatrix is not None:
        with Statistics.open(options.out) as statistics, open_checkpoint(options.model) as checkpoint:
            write_imatrix(options.imatrix, statistics, checkpoint, overwrite=options.overwrite)
    return CalibrateReport(
        out=location_of(options.out),
        matrices=taken.matrices,
        tokens=taken.tokens,
        source=taken.metadata["source"],
        fisher=options.fisher,
        passes=taken.passes,
        size=sum(array.nbytes for array in taken.arrays.values()),
        seconds=round(time.perf_counter() - started, 3),
        window_prefix=subject.prefix,
        unseen=taken.unseen,
        resumed=work.resumed,
    )


def statistics_of(
    model: AnyPath, *, max_ram: int | str | None = None, progress: ProgressCallback | None = None
) -> Statistics:
    """Return the statistics that ``calibrate`` takes of samples, for a conversion that was given none."""
    options = CalibrateOptions(model, "", samples=SAMPLES, max_ram=max_ram, progress=progress)
    with _subject(options) as subject, temporary_folder() as folder:
        taken = _take(subject, options, Work(folder), None)
        return Statistics.in_memory(taken.arrays, taken.metadata)  # mapped: the files go when these do


@dataclass(frozen=True, slots=True)
class _Taken:
    arrays: Mapping[str, Array]
    metadata: Mapping[str, str]
    matrices: int
    tokens: int
    passes: int
    unseen: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model, and what is read: the tokens of a text, None where it reads samples of its own.

    ``prefix`` has the tokens that each window begins with.
    """

    skeleton: Skeleton
    identity: str
    length: int
    tokens: Any
    source: str
    prefix: Sequence[SpecialToken]

    def fingerprint(self, options: CalibrateOptions) -> str:
        """Return a digest of all that decides what is taken."""
        read = None if self.tokens is None else _digest(self.tokens)
        what = {
            "samples": options.samples,
            "length": self.length,
            "seed": options.seed,
            "fisher": options.fisher,
            "largest": options.largest,
            "tokens": read,
            "prefix": [token.id for token in self.prefix],
            "torch": str(require("torch", EXTRA).__version__),
            "transformers": version(),
        }
        return fingerprint([self.identity], what, ())


@contextmanager
def _subject(options: CalibrateOptions) -> Iterator[_Subject]:
    torch = require("torch", EXTRA)
    if options.seed >= SEEDS:
        raise UsageError(
            f"expected a seed below {SEEDS}: those above draw what budgets are measured on, found {options.seed}",
            rule="calibrate.seed",
        )
    with open_checkpoint(options.model) as stored:
        identity = content_id(stored)
    source = resolve(options.model, "torch", False, False)
    with source.checkpoint:
        skeleton = Skeleton(source)
        encoder = not skeleton.model.can_generate()
        length = _length(skeleton.model, options, encoder=encoder)
        if options.text is not None or encoder:
            windows, text_name = windows_of(options, length, encoder=encoder)
            require_vocabulary(skeleton.model, windows.tokens)
            yield _Subject(skeleton, identity, length, windows.tokens, text_name, windows.prefix)
        else:
            prefix = sample_prefix(options.model)
            ids = tuple(token.id for token in prefix or ())
            require_vocabulary(skeleton.model, torch.tensor(ids))
            text_length_of_window(length, Surrounding(ids))
            source_name = SAMPLES_WITHOUT_TOKENIZER if prefix is None else SAMPLES_OF_MODEL
            yield _Subject(skeleton, identity, length, None, source_name, prefix or ())


def _length(model: Any, options: CalibrateOptions, *, encoder: bool) -> int:
    most, usual = positions(model), SENTENCE if encoder else LENGTH
    if options.length is None:
        return usual if most is None else min(usual, most)
    if most is not None and options.length > most:
        raise UsageError(
            f"expected windows of at most {most} tokens, which the model has positions for, found {options.length}",
            rule="calibrate.length",
        )
    return options.length


def _take(subject: _Subject, options: CalibrateOptions, work: Work, require_room: Any) -> _Taken:
    torch = require("torch", EXTRA)
    model = Layered(subject.skeleton, Settings(options.fisher, options.largest, options.seed))
    count = options.samples if subject.tokens is None else len(subject.tokens)
    means = means_of(model, options, (count, subject.length), sampling=subject.tokens is None)
    if means.kept:
        model.keep()
    plan = estimated(model, means)
    if options.plan is not None:
        options.plan(plan)
    if require_room is not None:
        require_room(plan.disk)
    progress = Progress(means.work, options.progress)
    with seeded(torch, options.seed):
        tokens = subject.tokens
        if tokens is None:
            tokens = _samples(torch, model, means, [token.id for token in subject.prefix], work, progress)
        passes = Passes(model, work, tokens, means.batch, means.room, progress)
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
    return _Taken(arrays, metadata, len(counts), tokens.numel(), max(passes.passes, 1), unseen)


def _digest(tokens: Any) -> str:
    return hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()


def _samples(torch: Any, model: Layered, means: Means, prefix: Sequence[int], work: Work, progress: Progress) -> Any:
    """Return sequences that the model draws, or those that an earlier run drew: i64 [windows, length]."""
    if work.found(_SAMPLED) is None:
        cache = spilled_cache(model.skeleton.model, means.length, work.scratch) if means.spilled else lambda count: None
        with model.streaming() as whole:
            drawn = samples_of(torch, whole, means.windows, means.length, progress, prefix, cache)
        out = work.writer(_SAMPLED)
        out.add(drawn.numpy())
        work.finish(_SAMPLED, [out])
    else:
        progress.advance(means.windows * means.length, "samples")
    return torch.from_numpy(work.read(_SAMPLED, 0, (means.windows, means.length), np.int64))
