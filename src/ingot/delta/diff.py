"""Diff: compute the delta from a base to a fine-tune, in bounded memory.

Equal tensors are read once. Other tensors are first read up to the first difference, in chunks of a million elements.
Then they are read once per fit pass of their codec, and once for encoding. Hashes are computed in the same passes.
Strategy ``auto`` first reads a sample, and a full matrix twice if the sample suggests a low rank. For a sparse patch,
changes are counted first. For a ``.wdelta`` of a sharded base, the base is read once more, in the order of its shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ingot.artifacts.account import account_of_reading
from ingot.artifacts.adapter_files import refuse_adapter
from ingot.artifacts.companions import copy_companions
from ingot.artifacts.destination import Destination, destination, is_distributed, stage
from ingot.artifacts.open import Source, weights_of
from ingot.artifacts.state_dict import open_weights
from ingot.conversion.prepared import refuse_same
from ingot.conversion.statistics_files import statistics_of_one
from ingot.core.options import takes
from ingot.core.runtime.memory import anonymous_in_use, format_size, parse_size
from ingot.core.runtime.parallel import ordered
from ingot.core.runtime.progress import Progress
from ingot.delta.auto import (
    PER_PAIR,
    Measured,
    choose,
    choose_storages,
    estimate,
    measure,
    measure_pair,
    require_one,
    target_bytes,
)
from ingot.delta.compare_inputs import changed_elements, check_inputs, is_cast, require_same_keys, same_tensors
from ingot.delta.explain import note_lines
from ingot.delta.observe import PARENT, Identify
from ingot.delta.options import DiffOptions
from ingot.delta.pairs import LocalExecutor, PairExecutor, PairFiles, PairMap, TensorPair, digest_of
from ingot.delta.parent import parent_orders
from ingot.delta.plan import DiffPlanner, PlannedDiff
from ingot.delta.report import DiffReport, tensor_diffs
from ingot.delta.strategy import (
    AUTO,
    BY_CONTAINER,
    CALIBRATED,
    DEFAULTS,
    EVERY,
    EXACT,
    Storage,
    choices,
    estimate_rounding_time,
    is_matrix,
)
from ingot.engine.data import bind_steps
from ingot.engine.execute import Executed, Target, execute
from ingot.engine.fit import is_opaque
from ingot.engine.resources import RESERVE, Resources
from ingot.engine.work import Plan
from ingot.errors import UsageError
from ingot.formats.base import WriteOptions
from ingot.model.account import Account
from ingot.model.delta import KEY, Change, DeltaInfo, Identity, version_for
from ingot.model.reading.limits import require_in_proportion
from ingot.model.statistics import Statistics
from ingot.model.tensor import Tensor
from ingot.quantization.outcome_text import few, outcome_lines
from ingot.quantization.tensor import Outcome, has_statistics
from ingot.stores.location import AnyPath, Location

if TYPE_CHECKING:
    from ingot.cluster.pool import Pool


STRATEGIES = ("exact", "int8", "int4", "int3", "int2", "int1")
"""Strategies of a ``.zt`` that the error for a too large delta may propose, beginning with the most exact."""
_SPARE = 4096
_SPARE_PER_TENSOR = 64
"""A delta may be larger than the fine-tune by ``_SPARE`` bytes plus this number of bytes per stored tensor, because
tiny tensors have overhead."""


def require_smaller(
    nbytes: int,
    tuned_nbytes: int,
    changed: Iterable[TensorPair],
    count: int,
    strategy: str,
    location: str,
    workers: int,
) -> None:
    """Raise ``UsageError`` ``delta.larger`` if the parts of a delta need more bytes than the parts of the fine-tune.

    The message proposes the first of ``STRATEGIES`` that needs fewer bytes.

    Parameters
    ----------
    nbytes, tuned_nbytes : int
        Stored bytes of all parts of the delta, and of the fine-tune.
    changed : iterable of TensorPair
        The tensors that the delta stores; read only if the error is raised.
    count : int
        The number of ``changed``.
    strategy : str
        The delta's strategy, which the message does not propose.
    """
    if nbytes <= tuned_nbytes + _SPARE + _SPARE_PER_TENSOR * count:
        return
    advice = _advice([*changed], strategy, tuned_nbytes, workers)
    raise UsageError(
        f"the delta would take {format_size(nbytes)}, the fine-tune itself takes {format_size(tuned_nbytes)}; "
        f"{advice}; --allow-larger (allow_larger=True) writes it all the same",
        rule="delta.larger",
        where=location,
    )


def _advice(changed: list[TensorPair], refused: str, limit: int, workers: int) -> str:
    for strategy in (name for name in STRATEGIES if name != refused):
        size = sum(ordered(partial(_size, strategy=strategy), changed, workers))
        if size < limit:
            exactness = "exact" if strategy == "exact" else "not exact"
            return f"--strategy {strategy} into a .zt would take about {format_size(int(size))} ({exactness})"
    return "no strategy is smaller: keep the fine-tune as it is"


def _size(pair: TensorPair, strategy: str) -> float:
    """Return the estimated number of bytes of a tensor in a ``.zt`` with ``strategy``; see ``auto.estimate``."""
    assert pair.tuned is not None
    tuned = pair.tuned
    if not (pair.is_same_type or pair.is_comparable):
        return tuned.nbytes
    base, shared = pair.shared()
    storage = choices(strategy, tuned.name, tuned.shape, tuned.dtype)
    return estimate(base, shared, storage) + pair.added_nbytes


PATCH = "safetensors"
"""The format whose deltas are sparse patches."""
_MIN_MEMORY = 256 << 20


@takes(DiffOptions, "diff")
def diff(options: DiffOptions) -> DiffReport:
    """Write the delta that turns ``base`` into ``finetuned``.

    The layouts, containers and lossless codecs of the inputs do not matter. Either input may be a state dict: arrays,
    torch tensors or ``Tensor`` objects by name, or an open checkpoint. Strategy ``exact`` restores the fine-tune bit
    for bit; other strategies need fewer bytes (``delta.strategy``). New, reshaped and retyped tensors are stored in
    full, equal tensors not at all. A ``.wdelta`` has its own strategies, a ``.safetensors`` file only sparse patches.
    With ``resume``, and with any ``engine``, the output has the same bytes.

    Returns
    -------
    DiffReport

    Raises
    ------
    UsageError
        ``cluster.engine``, ``delta.container``, ``delta.strategy``, an option; ``delta.resume``: a diff of state dicts
        cannot be resumed.
    CodecError
        A value that the strategy cannot store, such as a NaN in a quantized difference.
    UnsupportedError
        ``delta.keys``: the inputs have different tensors, which the container cannot represent.
    FormatError, IntegrityError, ResourceError
        As ``ingot.convert``. No file remains under the final name.

    Examples
    --------
    >>> report = ingot.diff("model", "tuned.safetensors", "tuned.zt")
    >>> report.strategy, report.ops
    ('exact', {'same': 38, 'apply': 1})
    """
    started = time.perf_counter()
    target = destination(Location.parse(options.out))
    if target.format.name not in BY_CONTAINER:
        raise UsageError(
            f"expected a delta's container, {' or '.join(BY_CONTAINER)}, found {target.format.name}",
            rule="delta.container",
            where=target.display,
        )
    distributed = is_distributed(options.engine, options.address)
    with ExitStack() as stack:
        sources = []
        for weights in (options.base, options.finetuned):
            _require_file(weights, options, is_distributed=distributed)
            source = open_weights(
                weights, io=options.io, verify=options.verify, max_decompressed=options.max_decompressed
            )
            stack.callback(source.close)
            refuse_adapter(source)
            refuse_same(source, target)
            sources.append(source)
        _require_calibrated(options, target, is_distributed=distributed)
        calibration = options.calibration
        statistics = (
            None
            if calibration is None
            else statistics_of_one(calibration, [weights_of(sources[1]), weights_of(sources[0])])
        )
        if statistics is not None and statistics is not calibration:
            stack.callback(statistics.close)
        pool = stack.enter_context(closing(_pool(options))) if distributed else None
        report = _Diff(sources, target, options, pool, statistics).run()
    return replace(report, seconds=time.perf_counter() - started)


def _require_file(weights: AnyPath | Mapping[str, Any], options: DiffOptions, *, is_distributed: bool) -> None:
    """Raise ``UsageError`` if ``weights`` is a state dict, and the run needs files.

    ``cluster.engine``: workers must open the files. ``delta.resume``: the options set ``resume``.
    """
    if not isinstance(weights, Mapping):
        return
    if is_distributed:
        raise UsageError("expected files that workers can open, found a state dict", rule="cluster.engine")
    if options.resume:
        raise UsageError("expected files, which resume needs, found a state dict", rule="delta.resume")


def _require_calibrated(options: DiffOptions, target: Destination, *, is_distributed: bool) -> None:
    """Raise ``UsageError`` ``delta.calibration`` if strategy, container or engine would ignore the statistics."""
    if options.calibration is None:
        return
    strategies = (*CALIBRATED, AUTO)
    is_calibrated = options.strategy in strategies or any(item.quantizer for item in options.storages.values())
    if target.format.name != "zt" or not is_calibrated or is_distributed:
        raise UsageError(
            f"expected --calibration with a strategy that uses it ({', '.join(strategies)}), in .zt, without an "
            f"engine; found {options.strategy or DEFAULTS[target.format.name]} in {target.format.name}, engine "
            f"{options.engine}",
            rule="delta.calibration",
        )


def _pool(options: DiffOptions) -> Pool:
    """Start or connect to the workers; raises the errors of ``pool_of``."""
    from ingot.cluster.pool import pool_of

    return pool_of(options.engine, options.address, options.threads or 1)


@dataclass(frozen=True, slots=True)
class _Planned:
    """The result of planning: the steps of the stored tensors, the delta's description, and exactness by tensor."""

    plan: Plan
    info: DeltaInfo
    exact: Sequence[bool]


class _Diff:
    """The state of one call of ``diff``."""

    def __init__(
        self,
        sources: Sequence[Source],
        target: Destination,
        options: DiffOptions,
        pool: Pool | None,
        statistics: Statistics | None,
    ) -> None:
        self._sources = sources
        self._destination = target
        self._options = options
        self._pool = pool
        self._statistics = statistics
        container = target.format.name
        strategy = self._strategy = options.strategy or DEFAULTS[container]
        identity = "" if statistics is None else f"{statistics.location} {sorted(statistics.metadata.items())}"
        is_default = options.strategy is None
        self._planner = DiffPlanner(container, strategy, is_default, options.options, statistics, identity)
        self._planner.matrix_storage()  # raises UsageError for an unknown strategy
        self._base, self._tuned = (weights_of(source) for source in sources)
        self._pairs = PairMap(self._base, self._tuned)
        self._wdelta = container == PARENT
        self._patch = container == PATCH
        if not self._planner.auto and (options.target_size, options.max_error) != (None, None):
            raise UsageError("expected strategy auto, in .zt, with a target size or largest error", rule="delta.target")
        self._storages: Mapping[str, Storage] = {}
        self._progress = Progress(self._base.nbytes + self._tuned.nbytes, options.progress)
        self._resources = Resources(options.max_ram, options.threads, self._progress, _MIN_MEMORY)
        self._executor: PairExecutor = LocalExecutor(self._pairs, self._resources.workers)
        if pool is not None:
            from ingot.delta.questions import ClusterExecutor

            weights = (options.base, options.finetuned)
            texts = [Location.parse(path).text for path in weights if not isinstance(path, Mapping)]
            reading = (options.io, options.verify, options.max_decompressed)
            files = PairFiles(texts[0], texts[1], *reading)
            self._executor = ClusterExecutor(self._pairs, sources, files, pool, self._progress)
        self._shards: Sequence[str] | None = None  # the order of tensors in the parent hash of a sharded base
        self._counts: Mapping[str, int] = {}
        self._account = Account()
        self._same: dict[str, str] = {}
        self._copied: dict[str, str] = {}

    def run(self) -> DiffReport:
        check_inputs(self._base, self._tuned)
        self._account = account_of_reading((self._base, self._tuned), self._tuned.location, self._options.drop)
        for checkpoint in (self._base, self._tuned):
            require_in_proportion(checkpoint.values(), checkpoint.location)
        destination = self._destination
        if self._wdelta or self._patch:
            require_same_keys(self._base, self._tuned, destination.format.name)
        companions = self._tuned.companions if destination.directory else {}
        overwrite = self._options.overwrite
        resume = self._options.resume
        with stage(destination, overwrite=overwrite, resume=resume, names=companions) as staging:
            planned = self._plan()
            observer = Identify(
                self._base,
                self._tuned,
                planned.info,
                digests=self._same | self._copied,
                same=self._same,
                metadata=self._metadata,
                compute_digests=self._digests,
                require_size=self._require_smaller,
                progress=self._progress,
                wdelta=self._wdelta,
                shards=self._shards,
            )
            target = Target(staging, destination.name, lambda output, _: copy_companions(companions, output))
            executed = self._execute(planned.plan, target, observer)
        return self._report(planned, observer.info, executed)

    def _execute(self, plan: Plan, target: Target, observer: Identify) -> Executed:
        if self._pool is None:
            return execute(plan, self._sources, target, self._resources, observer)
        from ingot.cluster.driver.distribute import Cluster, distribute
        from ingot.delta.planfile import delta_plan_json, source_data

        pool = self._pool
        options = self._options
        read = [
            source_data(checkpoint, source.url, options.io, options.verify, options.max_decompressed)
            for checkpoint, source in zip((self._base, self._tuned), self._sources, strict=True)
        ]
        plan_json = delta_plan_json("diff", plan, read, self._destination, observer.points)
        cluster = Cluster(lambda: pool, options.max_ram, options.threads or 1, plan_json, "delta")
        return distribute(plan, self._sources, target, self._resources, cluster, observer)

    def _digests(self, side: int, names: Sequence[str]) -> Mapping[str, str]:
        return dict(zip(names, self._executor.map(digest_of, names, [(side,)] * len(names)), strict=True))

    def _plan(self) -> _Planned:
        """Find equal tensors, choose how to store the others, and return the plan of their steps."""
        if self._wdelta:
            self._shards = parent_orders(self._base, sorted(self._tuned)).get("shards")
        else:
            self._same = same_tensors(self._pairs, self._executor, self._progress)
        if self._patch:  # the header, which is written first, contains the counts
            self._counts = changed_elements(self._pairs, self._same, self._executor)
        by_measure = self._choose_auto() if self._planner.auto else {}
        self._storages = {**by_measure, **self._exact_casts(), **self._options.storages}
        names = sorted(self._tuned) if self._wdelta else list(self._tuned)
        planned = self._plan_tensors(names)
        self._copied = {name: item.digest for name, item in planned.items() if item.digest is not None}
        unordered = [item.step for item in planned.values()]
        steps = [unordered[index] for index in self._destination.format.order([step.spec for step in unordered])]
        changes = {
            name: planned[name].change if name in planned else Change("same", self._tuned[name].dtype) for name in names
        }
        if any(step.spec.params.get("layout") == 2 for step in steps):
            self._shards = None  # version 2 of .wdelta hashes names in sorted order, regardless of shards
        removed = [name for name in self._base if name not in self._tuned]
        info = DeltaInfo(
            version_for(changes.values()),
            self._strategy,
            self._placeholder_identity(),
            self._placeholder_identity() if self._patch else Identity(),
            tensors=changes,
            removed=removed,
        )
        options = WriteOptions(digest=self._options.digest)
        measured = self._options.measure
        plan = Plan(steps, self._destination.format, self._metadata(info), options, measured)
        min_bytes = sum(part.length or 0 for step in steps for part in step.spec.parts)
        self._require_smaller(min_bytes)
        return _Planned(plan, info, [name not in planned or planned[name].step.exact for name in names])

    def _require_smaller(self, nbytes: int) -> None:
        """Raise an error for a delta of ``nbytes`` that is larger than the fine-tune, unless the caller allows it."""
        if not self._options.allow_larger:
            changed = (pair for name, pair in self._pairs.items() if pair.tuned is not None and name not in self._same)
            count = len(self._tuned) - len(self._same)
            workers = self._resources.workers
            strategy = "" if self._wdelta else self._strategy  # int4 of a .wdelta differs from int4 of a .zt
            require_smaller(nbytes, self._tuned.nbytes, changed, count, strategy, self._destination.display, workers)

    def _metadata(self, info: DeltaInfo) -> Mapping[str, Any]:
        """Return the metadata of a delta with the description ``info``."""
        metadata = {key: value for key, value in self._tuned.metadata.items() if key != KEY}
        return self._destination.format.metadata({**metadata, KEY: info.to_metadata()})

    def _choose_auto(self) -> dict[str, Storage]:
        """Return the storage of each tensor's difference for strategy ``auto``."""
        changed = [tensor for name, tensor in self._tuned.items() if name not in self._same]
        measured = {item.name: self._pairs[item.name] for item in changed if self._is_measured(item)}
        pairs = [pair.shared() for pair in measured.values()]
        fixed_bytes = sum(pair.added_nbytes for pair in measured.values())
        fixed_bytes += sum(item.nbytes for item in changed if item.name not in measured)
        size = self._options.target_size
        error = self._options.max_error
        budget = None if size is None else target_bytes(size, self._tuned.nbytes) - fixed_bytes
        if self._pool is not None:
            require_one(budget, error)
            return choose_storages(list(self._executor.map(measure_pair, list(measured))), budget, error)
        self._progress.total += sum(base.nbytes + tuned.nbytes for base, tuned in pairs)
        self._progress.advance(0)
        workers = self._resources.workers
        max_ram = self._options.max_ram
        if max_ram is not None:
            workers = max(1, min(workers, (parse_size(max_ram) - anonymous_in_use() - RESERVE) // PER_PAIR))
        limits: dict[str, Any] = {"target_size": budget, "max_error": error, "progress": self._progress}
        if self._statistics is not None:
            limits["measuring"] = self._measure_calibrated
        return choose(pairs, workers=workers, **limits)

    def _measure_calibrated(self, base: Tensor, tuned: Tensor) -> Measured:
        """Return the trials of a pair: of calibrated storages if the shapes of the full tensors are equal, else plain.

        ``base`` and ``tuned`` are the leading rows that exist in both tensors.
        """
        from ingot.delta.calibrated_auto import measure_calibrated

        full_base, full_tuned = self._pairs[tuned.name].tensors
        if full_base.shape != full_tuned.shape:
            return measure(base, tuned)
        assert self._statistics is not None
        return measure_calibrated(base, tuned, self._statistics)

    def _is_measured(self, tensor: Tensor) -> bool:
        pair = self._pairs[tensor.name]
        return (pair.is_same_type or pair.is_comparable) and not is_opaque(tensor)

    def _exact_casts(self) -> dict[str, Storage]:
        """Return the storage ``EXACT`` for each tensor that differs from the base only in element type or row count.

        Exact differences of these tensors need few bytes.
        """
        if self._destination.format.name != "zt" or self._strategy in ("exact", *EVERY):
            return {}
        names = [name for name, pair in self._pairs.items() if pair.is_comparable]
        return {name: EXACT for name, cast in zip(names, self._executor.map(is_cast, names), strict=True) if cast}

    def _plan_tensors(self, names: Sequence[str]) -> dict[str, PlannedDiff]:
        """Return the changes and steps of the tensors in ``names`` that differ from the base, by name."""
        changed = [name for name in names if name not in self._same]
        requests = [(self._storages.get(name), self._counts.get(name)) for name in changed]
        if self._pool is None:
            planned = list(self._executor.map(self._planner.plan, changed, requests))
        else:
            from ingot.delta.plan import DiffPlannerData

            items = list(self._executor.map(DiffPlannerData.from_planner(self._planner), changed, requests))
            steps = bind_steps([item.step for item in items], [self._base, self._tuned], self._destination.format)
            planned = [PlannedDiff(item.change, step, item.digest) for item, step in zip(items, steps, strict=True)]
        rounded = [(item.step.tensor.size, item.rounded) for item in planned if item.rounded is not None]
        if rounded and self._options.plan is not None:
            self._options.plan(estimate_rounding_time(rounded, self._resources.workers))
        return dict(zip(changed, planned, strict=True))

    def _placeholder_identity(self) -> Identity:
        """Return an identity as long as the base's, for a header that is written before the base is hashed."""
        unknown = "0" * 64
        has_content = self._patch if not self._wdelta else self._shards
        return Identity(f"blake3:{unknown}" if has_content else None, {PARENT: unknown} if self._wdelta else {})

    def _report(self, planned: _Planned, info: DeltaInfo, executed: Executed) -> DiffReport:
        rounded = [self._planner.outcomes[name] for name in sorted(self._planner.outcomes)]
        tensors = tensor_diffs(info.tensors, planned.exact, executed.completed, self._base, self._tuned)
        return DiffReport(
            base=self._sources[0].location,
            tuned=self._sources[1].location,
            destination=self._destination.display,
            format=self._destination.format.name,
            strategy=self._strategy,
            tensors=tensors,
            removed=info.removed,
            tuned_nbytes=self._tuned.nbytes,
            size=executed.size,
            seconds=0.0,
            base_id=info.base.content,
            result_id=info.result.content,
            parent_hash=info.base.hashes.get(PARENT),
            resumed=executed.resumed,
            rounded=rounded,
            notes=[
                *self._account.notes(),
                *note_lines(tensors),
                *([] if self._statistics is None else self._calibration_notes(rounded, self._statistics)),
            ],
            dropped=self._account.dropped,
        )

    def _calibration_notes(self, rounded: Sequence[Outcome], statistics: Statistics) -> list[str]:
        """Return notes on rounded matrices, and on changed matrices without statistics."""
        changed = [tensor for name, tensor in self._tuned.items() if name not in self._same]
        names = [
            item.name
            for item in changed
            if is_matrix(item.shape, item.dtype) and not has_statistics(statistics, item.name, item.shape)
        ]
        missing = [f"without statistics, stored as without --calibration: {few(names)}"] if names else []
        return [*outcome_lines(rounded, statistics.location), *missing]
