"""Run a calibration: sum moments of the inputs of a model's matrices over samples or a text
(``spec/calibration.md``).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ingot.artifacts.destination import CPU, destination, stage
from ingot.artifacts.identity import content_id
from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.save import plan_tensors, write_tensors
from ingot.core.border import require
from ingot.core.files.atomic import require_disk
from ingot.core.options import takes
from ingot.core.runtime.device import free_memory, is_out_of_memory, no_device_memory, release_cached, resolve_device
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.journal import Journal, fingerprint
from ingot.errors import UsageError
from ingot.formats.base import WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.calibration import Calibration, LayerResult, LayerResults, ProcessLayer
from ingot.model.statistics import CHAT_WINDOWS, COUNT, MODEL_KEY, SAME, VERSION, VERSION_KEY, WINDOW_PREFIX, Statistics
from ingot.model.tensor import Array
from ingot.runtime.calibration.calibrate_layers import LayerwiseModel, Settings
from ingot.runtime.calibration.calibrate_passes import Passes
from ingot.runtime.calibration.calibrate_plan import (
    MemoryPlan,
    estimate,
    fits_in_memory,
    plan_memory,
)
from ingot.runtime.calibration.calibrate_time import calibration_seconds, clock
from ingot.runtime.calibration.calibrate_work import Work
from ingot.runtime.calibration.calibration import (
    BUILT_IN,
    LENGTH,
    SAMPLES,
    SENTENCE,
    CalibrateOptions,
    CalibratePlan,
    CalibrateReport,
)
from ingot.runtime.calibration.samples import (
    BATCH,
    SAMPLES_OF_MODEL,
    SAMPLES_WITHOUT_TOKENIZER,
    SEEDS,
    draw_samples,
    seeded,
)
from ingot.runtime.calibration.skeleton import MetaModel
from ingot.runtime.evaluation.beginnings import Beginnings, beginnings_of
from ingot.runtime.evaluation.generate import positions, require_vocabulary
from ingot.runtime.evaluation.special_tokens import Surrounding, named_tokens, surrounding_tokens
from ingot.runtime.evaluation.windows import Windows, cut_windows, read_text
from ingot.runtime.loading.model_source import resolve
from ingot.runtime.loading.transformers_config import EXTRA, version
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.local import LocalTarget
from ingot.stores.location import AnyPath, Location
from ingot.stores.temporary import temporary_folder
from ingot.translate.imatrix import write_imatrix


def spilled_cache(model: Any, length: int, scratch: Callable[[], BinaryIO]) -> Callable[[int], Any]:
    """Return a function that creates a KV cache for ``count`` sequences of ``length`` tokens.

    Layers with attention to all tokens are cached in unnamed files, which are deleted with the cache. Caches of other
    layers (sliding windows, states) are small and stay in memory.
    """
    cache_utils = require("transformers.cache_utils", "transformers")
    torch = require("torch", "torch")

    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = [_mapped(torch, scratch, states, length) for states in (key_states, value_states)]
        first = self.get_seq_length()
        last = first + key_states.shape[-2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., first:last, :] = states.cpu()
        self.keys, self.values = (room[..., :last, :].to(key_states.device) for room in self.room)
        return self.keys, self.values

    spilled = type("Spilled", (cache_utils.DynamicLayer,), {"update": update})

    def create_cache(count: int) -> Any:
        cache = cache_utils.DynamicCache(config=model.config)
        cache.layers = [spilled() if type(layer) is cache_utils.DynamicLayer else layer for layer in cache.layers]
        return cache

    return create_cache


def _mapped(torch: Any, scratch: Callable[[], BinaryIO], states: Any, length: int) -> Any:
    """Return an array in an unnamed file with the shape of ``states`` for ``length`` tokens: f32 [windows, heads,
    length, width].
    """
    shape = (*states.shape[:-2], length, states.shape[-1])
    with scratch() as file:
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))


_FILE = "calibration.txt"  # written for Ingot; CC0-1.0


def windows_of(options: CalibrateOptions, length: int, *, encoder: bool) -> tuple[Windows, str]:
    """Return windows of tokens, i64 [windows, length], and the name of their text for reports.

    For a causal model, tokens that the tokenizer adds before a text replace the first tokens of each window. For an
    encoder, each window is a complete text, with the tokens that the tokenizer adds before and after a text.

    Raises
    ------
    UsageError
        ``eval.text``: the text is not UTF-8, or shorter than a window.
    """
    source = text_name(options)
    built_in = options.text == BUILT_IN or options.text is None
    content = default_text() if built_in else read_text(Location.parse(options.text or ""), length * options.samples)
    tokenizer = load_tokenizer(options.model)
    surrounding = surrounding_tokens(tokenizer)
    shape = length, options.samples
    if encoder:
        tokens = cut_windows(tokenizer, content, shape, source, surrounding, contiguous=True)
    else:
        tokens = cut_windows(tokenizer, content, shape, source, Surrounding(surrounding.before))
    return Windows(tokens, named_tokens(tokenizer, surrounding.before)), source


def text_name(options: CalibrateOptions) -> str:
    """Return the name of a calibration's text for reports."""
    built_in = options.text == BUILT_IN or options.text is None
    return "text that Ingot ships" if built_in else f"text {Location.parse(options.text or '')}"


def default_text() -> str:
    """Return the default text: prose in many languages, and code (``spec/calibration.md``)."""
    return resources.files("ingot.runtime.calibration").joinpath(_FILE).read_text("utf-8")


_SAMPLED = "samples"
_SHARE_OF_DEVICE = 0.6
"""The share of a device's free memory for weights; activations and moments use the remaining memory."""


@takes(CalibrateOptions, "calibrate")
def calibrate(options: CalibrateOptions) -> CalibrateReport:
    """Collect statistics of a model's matrices, and write them.

    Memory holds one layer's weights and moments, and the activations of a few windows. Activations between layers are
    stored in a folder next to ``out``. If the full model fits into memory, it stays in memory.

    Returns
    -------
    CalibrateReport

    Raises
    ------
    UsageError
        ``eval.text``: no UTF-8, or fewer tokens than a window; ``calibrate.length``: longer than the model's maximum;
        ``calibrate.seed``; ``model.device``; ``resume.changed``.
    UnsupportedError
        ``calibrate.architecture``: the layers do not form a chain.
    ResourceError
        ``calibrate.ram``: the limit is too small for a layer and the second moments of a matrix; ``device.memory``: the
        same for the device; ``disk.guard``.
    IntegrityError
        ``calibrate.value``: NaN or infinity in activations.
    IngotError
        The errors of ``load_model`` and ``ingot.save``.

    Examples
    --------
    >>> report = ingot.calibrate("model", "statistics.safetensors", samples=2, length=16)
    >>> report.tokens
    32
    """
    started = time.perf_counter()
    model = Location.parse(options.model)
    out = Location.parse(options.out)
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
        window_prefix=subject.beginnings.text,
        chat_windows=int(collected.metadata[CHAT_WINDOWS]),
        unseen=collected.unseen,
        resumed=work.resumed,
    )


@dataclass(frozen=True, slots=True)
class ModelCalibration(Calibration):
    """A calibration that a conversion runs without a statistics file; it ignores the options ``out`` and ``resume``."""

    options: CalibrateOptions

    @property
    def source(self) -> str:
        return SAMPLES_OF_MODEL if self.options.text is None else text_name(self.options)

    def plan(self) -> CalibratePlan:
        """Return the estimates for ``run_by_layers``, without the memory that rounding needs."""
        with _subject(self.options) as subject:
            plan = _measured(subject, *_planned(subject, self.options), by_layers=True)
            return replace(plan, seconds=plan.seconds + subject.opening)  # the run opens the model again

    def collect(self) -> Statistics:
        return collect_statistics(self.options)

    def run_by_layers(
        self, process: ProcessLayer, folder: str, *, resume: bool, identity: str, reserve: int
    ) -> LayerResults:
        options = replace(self.options, reserve=reserve)
        with _subject(options) as subject:
            key = fingerprint([subject.fingerprint(options)], {"identity": identity}, ())
            journal = Journal(LocalTarget(folder), key)
            try:
                files = Path(folder) / "files"
                files.mkdir(exist_ok=True)
                work = Work(str(files), journal, resume=resume)
                require_room = partial(require_disk, folder=Path(folder), location=folder)
                collected = _collect(subject, options, work, None if resume else require_room, process)
                subject.skeleton.checkpoint.require_unchanged()
            finally:
                journal.close()
        statistics = Statistics.in_memory(collected.arrays, collected.metadata)
        return LayerResults(statistics, collected.results)


def calibration_of(
    model: AnyPath,
    *,
    max_ram: int | str | None = None,
    progress: ProgressCallback | None = None,
    device: Any = CPU,
) -> ModelCalibration:
    """Return a calibration over samples of the model, without running it."""
    return ModelCalibration(
        CalibrateOptions(model, "", samples=SAMPLES, max_ram=max_ram, progress=progress, device=device)
    )


def collect_statistics(options: CalibrateOptions) -> Statistics:
    """Return the statistics of a calibration without writing a file; ``options.out`` is ignored.

    An exception that ``options.plan`` raises ends the calibration before it begins.
    """
    with _subject(options) as subject, temporary_folder() as folder:
        collected = _collect(subject, options, Work(folder), None)
        # the arrays are mapped, so deleted files stay readable
        return Statistics.in_memory(collected.arrays, collected.metadata)


@dataclass(frozen=True, slots=True)
class _Collected:
    arrays: Mapping[str, Array]
    metadata: Mapping[str, str]
    matrices: int
    tokens: int
    passes: int
    unseen: tuple[str, ...]
    results: Sequence[LayerResult] = ()


@dataclass(frozen=True, slots=True)
class _Subject:
    """The model to calibrate, and the tokens of its text.

    ``tokens``, i64 [windows, length], are None if the model samples its text. ``beginnings`` are the tokens with which
    windows begin.
    """

    skeleton: MetaModel
    identity: str
    length: int
    tokens: Any
    source: str
    beginnings: Beginnings
    opening: float
    """Seconds that opening the model took."""

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
            "prefix": [token.id for token in self.beginnings.text],
            "chat": [token.id for token in self.beginnings.chat],
            "torch": str(require("torch", EXTRA).__version__),
            "transformers": version(),
        }
        if self.skeleton.device.type != "cpu":
            settings["device"] = self.skeleton.device.type
        return fingerprint([self.identity], settings, ())


@contextmanager
def _subject(options: CalibrateOptions) -> Iterator[_Subject]:
    torch = require("torch", EXTRA)
    device = resolve_device(options.device)
    if options.seed >= SEEDS:
        raise UsageError(
            f"expected a seed below {SEEDS}, because larger seeds are reserved for measuring budgets; "
            f"found {options.seed}",
            rule="calibrate.seed",
        )
    model = Location.parse(options.model)
    started = clock()
    with open_checkpoint(model) as stored:
        identity = content_id(stored)
    opening = clock() - started
    source = resolve(model, "torch", False, False)
    with source.checkpoint:
        skeleton = MetaModel(source, device)
        encoder = not skeleton.model.can_generate()
        length = _length(skeleton.model, options, encoder=encoder)
        large = options.text_if_large and not fits_in_memory(skeleton, options)
        if options.text is not None or encoder or large:
            windows, text_name = windows_of(options, length, encoder=encoder)
            require_vocabulary(skeleton.model, windows.tokens)
            yield _Subject(skeleton, identity, length, windows.tokens, text_name, Beginnings(windows.prefix), opening)
        else:
            sampled = beginnings_of(model)
            beginnings = (sampled or Beginnings()).within(length)
            require_vocabulary(
                skeleton.model, torch.tensor([token.id for token in (*beginnings.text, *beginnings.chat)])
            )
            source_name = SAMPLES_WITHOUT_TOKENIZER if sampled is None else SAMPLES_OF_MODEL
            yield _Subject(skeleton, identity, length, None, source_name, beginnings, opening)


def _length(model: Any, options: CalibrateOptions, *, encoder: bool) -> int:
    max_positions = positions(model)
    default = SENTENCE if encoder else LENGTH
    if options.length is None:
        return default if max_positions is None else min(default, max_positions)
    if max_positions is not None and options.length > max_positions:
        raise UsageError(
            f"expected windows of at most {max_positions} tokens, the model's number of positions, found "
            f"{options.length}",
            rule="calibrate.length",
        )
    return options.length


def _planned(subject: _Subject, options: CalibrateOptions) -> tuple[LayerwiseModel, MemoryPlan]:
    """Return the model for the calibration, and the plan of its memory."""
    model = LayerwiseModel(subject.skeleton, Settings(options.fisher, options.largest, options.seed))
    count = options.samples if subject.tokens is None else len(subject.tokens)
    memory_plan = plan_memory(model, options, (count, subject.length), sampling=subject.tokens is None)
    _keep(model, memory_plan)
    return model, memory_plan


def _measured(subject: _Subject, model: LayerwiseModel, memory_plan: MemoryPlan, *, by_layers: bool) -> CalibratePlan:
    """Return the estimates for a calibration, with a time measured on a few windows."""
    prefix = [token.id for token in subject.beginnings.text]
    seconds = calibration_seconds(model, memory_plan, subject.tokens, prefix)
    return replace(estimate(model, memory_plan, seconds, by_layers=by_layers), source=subject.source)


def _collect(
    subject: _Subject,
    options: CalibrateOptions,
    work: Work,
    require_room: Any,
    process: ProcessLayer | None = None,
) -> _Collected:
    torch = require("torch", EXTRA)
    model, memory_plan = _planned(subject, options)
    if options.plan is not None:
        options.plan(_measured(subject, model, memory_plan, by_layers=process is not None))
    if require_room is not None:
        require_room(estimate(model, memory_plan, by_layers=process is not None).disk)
    progress = Progress(memory_plan.work, options.progress)
    with seeded(torch, options.seed):
        tokens = subject.tokens
        if tokens is None:
            tokens = _samples(torch, model, memory_plan, subject.beginnings, work, progress)
        passes = Passes(model, work, tokens, memory_plan.batch, memory_plan.moment_bytes, progress, process)
        arrays = passes.run()
    metadata = {
        VERSION_KEY: VERSION,
        MODEL_KEY: subject.identity,
        "source": subject.source,
        WINDOW_PREFIX: json.dumps([asdict(token) for token in subject.beginnings.text], ensure_ascii=False),
        CHAT_WINDOWS: str(subject.beginnings.chat_windows(len(tokens))),
        "samples": str(len(tokens)),
        "length": str(subject.length),
        "tokens": f"sha256:{_digest(tokens)}",
        "seed": str(options.seed),
        "fisher": str(options.fisher).lower(),
        **{f"{name}:{SAME}": same_as for name, same_as in sorted(passes.same.items())},
    }
    counts = {key.rpartition(":")[0]: int(array[0]) for key, array in arrays.items() if key.endswith(f":{COUNT}")}
    unseen = tuple(sorted(name for name, seen in counts.items() if not seen))
    results = passes.results()
    return _Collected(arrays, metadata, len(counts), tokens.numel(), max(passes.passes, 1), unseen, results)


def _keep(model: LayerwiseModel, memory_plan: MemoryPlan) -> None:
    """Keep the model in the device's memory if it fits, else its layers in the host's memory if they fit."""
    skeleton = model.skeleton
    if skeleton.device.type == "cpu":
        if memory_plan.in_memory:
            model.keep()
        return
    ends = (site.tensor.size * 4 for site in (model.embedding, model.head) if site is not None)
    weights = sum(map(skeleton.nbytes, model.layers)) + sum(ends)
    free = free_memory(model.torch, skeleton.device)
    if free is not None and weights <= free * _SHARE_OF_DEVICE:
        model.keep()
    else:
        skeleton.caches_on_host = memory_plan.in_memory


def _digest(tokens: Any) -> str:
    return hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest()


def _draw(
    torch: Any,
    model: LayerwiseModel,
    memory_plan: MemoryPlan,
    beginnings: Beginnings,
    progress: Progress,
    cache: Callable[[int], Any],
) -> Any:
    """Return sequences sampled from the model, i64 [windows, length]; sample fewer together if memory runs out."""
    together = BATCH
    state = torch.random.get_rng_state()
    while True:
        try:
            with model.streaming() as streamed_model:
                drawn = [
                    draw_samples(
                        torch,
                        streamed_model,
                        (count, memory_plan.length),
                        progress,
                        ids,
                        cache,
                        device=model.device,
                        together=together,
                    )
                    for count, ids in beginnings.by_count(memory_plan.windows)
                ]
            return torch.cat(drawn)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if together == 1:
                raise no_device_memory(model.device, error) from error
        together = max(1, min(together, memory_plan.windows) // 2)
        torch.random.set_rng_state(state)
        release_cached(torch, model.device)


def _samples(
    torch: Any, model: LayerwiseModel, memory_plan: MemoryPlan, beginnings: Beginnings, work: Work, progress: Progress
) -> Any:
    """Return sequences sampled from the model, or the sequences that an earlier run sampled: i64 [windows, length]."""
    if work.finished(_SAMPLED) is None:
        cache = (
            spilled_cache(model.skeleton.model, memory_plan.length, work.scratch)
            if memory_plan.spilled
            else lambda count: None
        )
        drawn = _draw(torch, model, memory_plan, beginnings, progress, cache)
        out = work.writer(_SAMPLED)
        out.add(drawn.numpy())
        work.finish(_SAMPLED, [out])
    else:
        progress.advance(memory_plan.windows * memory_plan.length, "samples")
    return torch.from_numpy(work.read(_SAMPLED, 0, (memory_plan.windows, memory_plan.length), np.int64))
