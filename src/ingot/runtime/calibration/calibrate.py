"""Calibration: what a model's matrices multiply, over samples of its own or a text (``spec/calibration.md``)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, BinaryIO

import numpy as np

from ingot.artifacts.destination import destination, stage
from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.save import plan_tensors, write_tensors
from ingot.core.border import require
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
from ingot.runtime.calibration.calibrate_work import Work
from ingot.runtime.calibration.calibration import BUILT_IN, LENGTH, SAMPLES, SENTENCE, CalibrateOptions, CalibrateReport
from ingot.runtime.calibration.samples import SAMPLES_OF_MODEL, SAMPLES_WITHOUT_TOKENIZER, SEEDS, samples_of, seeded
from ingot.runtime.calibration.skeleton import Skeleton
from ingot.runtime.evaluation.generate import positions, require_vocabulary
from ingot.runtime.evaluation.special_tokens import SpecialToken, Surrounding, named_tokens, surrounding_tokens
from ingot.runtime.evaluation.windows import Windows, cut_windows, read_text, require_room_for_text, sample_prefix
from ingot.runtime.loading.model_source import resolve
from ingot.runtime.loading.transformers_config import EXTRA, version
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.local import LocalTarget
from ingot.stores.location import AnyPath, Location
from ingot.stores.temporary import temporary_folder
from ingot.translate.imatrix import write_imatrix


def spilled_cache(model: Any, length: int, scratch: Callable[[], BinaryIO]) -> Callable[[int], Any]:
    """Return what makes a cache for ``count`` sequences of ``length`` tokens.

    Layers of attention to all tokens are kept in a file that nobody sees and that goes with the cache; those of another
    kind (sliding windows, states) stay small, and in memory.
    """
    known = require("transformers.cache_utils", "transformers")
    torch = require("torch", "torch")

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = [_mapped(torch, scratch, states, length) for states in (key_states, value_states)]
        first = self.get_seq_length()
        last = first + key_states.shape[-2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., first:last, :] = states
        self.keys, self.values = (room[..., :last, :] for room in self.room)
        return self.keys, self.values

    spilled = type("Spilled", (known.DynamicLayer,), {"update": update})

    def made(count: int) -> Any:
        cache = known.DynamicCache(config=model.config)
        cache.layers = [spilled() if type(layer) is known.DynamicLayer else layer for layer in cache.layers]
        return cache

    return made


def _mapped(torch: Any, scratch: Callable[[], BinaryIO], states: Any, length: int) -> Any:
    """Return room for ``length`` tokens of such states, f32 [windows, heads, length, width], in a file."""
    shape = (*states.shape[:-2], length, states.shape[-1])
    with scratch() as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))


_FILE = "calibration.txt"  # written for Ingot; CC0-1.0


def windows_of(options: CalibrateOptions, length: int, *, encoder: bool) -> tuple[Windows, str]:
    """Return windows of a text, and the text's name for reports.

    A causal model's begin with the tokens that the tokenizer puts before a text, in the place of the text's own. An
    encoder's windows are whole texts to it, and have the tokens before and after around the text's own.

    Raises
    ------
    UsageError
        ``eval.text``: no text in UTF-8, or fewer tokens than a window.
    """
    built_in = options.text == BUILT_IN or options.text is None
    text = Location.parse(options.text or "")
    where = "text that Ingot ships" if built_in else f"text {text}"
    content = default_text() if built_in else read_text(text, length * options.samples)
    tokenizer = load_tokenizer(options.model)
    surrounding = surrounding_tokens(tokenizer)
    shape = length, options.samples
    if encoder:
        tokens = cut_windows(tokenizer, content, shape, where, surrounding, contiguous=True)
    else:
        tokens = cut_windows(tokenizer, content, shape, where, Surrounding(surrounding.before))
    return Windows(tokens, named_tokens(tokenizer, surrounding.before)), where


def default_text() -> str:
    """Return the text that Ingot ships: prose in many languages, and code (``spec/calibration.md``)."""
    return resources.files("ingot.runtime.calibration").joinpath(_FILE).read_text("utf-8")


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
    model, out = Location.parse(options.model), Location.parse(options.out)
    place = destination(out, "safetensors")
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
        with Statistics.open(out) as statistics, open_checkpoint(model) as checkpoint:
            write_imatrix(options.imatrix, statistics, checkpoint, overwrite=options.overwrite)
    return CalibrateReport(
        out=out.display,
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
    model = Location.parse(options.model)
    with open_checkpoint(model) as stored:
        identity = content_id(stored)
    source = resolve(model, "torch", False, False)
    with source.checkpoint:
        skeleton = Skeleton(source)
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
            require_room_for_text(length, Surrounding(ids))
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
