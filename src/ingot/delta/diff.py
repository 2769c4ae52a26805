"""Diff: what turns a base into a fine-tune, as a delta, in bounded memory.

What is equal is read once. What differs is read up to the first difference (a chunk of a million elements), then once
for every fit pass that its codec asks for, and once to be encoded; hashes are taken on the way. Strategy ``auto`` reads
a sample before, and twice all of a matrix whose sample speaks for a low rank; a sparse patch counts the changes before;
a ``.wdelta`` of a sharded base reads the base once more, in the order of its shards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
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
from ingot.core.runtime.memory import anonymous_in_use, parse_size
from ingot.core.runtime.progress import Progress
from ingot.delta.auto import (
    PER_PAIR,
    Measured,
    choose,
    chosen,
    measure,
    measure_both,
    require_one,
    target_bytes,
)
from ingot.delta.compare_inputs import changed_elements, check_inputs, is_cast, require_same_keys, same_tensors
from ingot.delta.explain import note_lines
from ingot.delta.observe import PARENT, Identify
from ingot.delta.options import DiffOptions
from ingot.delta.pairs import Asking, Here, PairFiles, digest_of, pairs_of
from ingot.delta.parent import parent_orders
from ingot.delta.plan import Draft, Drafted
from ingot.delta.report import DiffReport, tensor_diffs
from ingot.delta.strategy import AUTO, BY_CONTAINER, CALIBRATED, DEFAULTS, EVERY, EXACT, Storage, expected, is_matrix
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
from ingot.quantization.tensor import has_statistics
from ingot.stores.location import AnyPath, Location

if TYPE_CHECKING:
    from ingot.cluster.pool import Pool


from collections.abc import Iterable
from functools import partial

from ingot.core.runtime.memory import format_size
from ingot.core.runtime.parallel import ordered
from ingot.delta.auto import estimate
from ingot.delta.pairs import Both
from ingot.delta.strategy import choices

STRATEGIES = ("exact", "int8", "int4", "int3", "int2", "int1")
"""Strategies of a ``.zt`` that are proposed, the nearest to the fine-tune first."""
_SPARE, _PER_TENSOR = 4096, 64
"""Bytes by which a delta may exceed the fine-tune, in total and per tensor: overhead of tiny tensors."""


def require_smaller(
    nbytes: int, tuned_nbytes: int, changed: Iterable[Both], count: int, strategy: str, location: str, workers: int
) -> None:
    """Raise ``UsageError`` ``delta.larger`` if parts of ``nbytes`` are more than those of the fine-tune.

    Parameters
    ----------
    nbytes, tuned_nbytes : int
        Stored bytes of all parts.
    changed : iterable of Both
        The tensors that the delta stores; read only to find a smaller strategy.
    count : int
        Their number.
    strategy : str
        The delta's, which is not proposed.
    """
    if nbytes <= tuned_nbytes + _SPARE + _PER_TENSOR * count:
        return
    advice = _advice([*changed], strategy, tuned_nbytes, workers)
    raise UsageError(
        f"the delta would take {format_size(nbytes)}, the fine-tune itself takes {format_size(tuned_nbytes)}; "
        f"{advice}; --allow-larger (allow_larger=True) writes it all the same",
        rule="delta.larger",
        where=location,
    )


def _advice(changed: list[Both], refused: str, limit: int, workers: int) -> str:
    for strategy in (name for name in STRATEGIES if name != refused):
        size = sum(ordered(partial(_size, strategy=strategy), changed, workers))
        if size < limit:
            exactness = "exact" if strategy == "exact" else "not exact"
            return f"--strategy {strategy} into a .zt would take about {format_size(int(size))} ({exactness})"
    return "no strategy is smaller: keep the fine-tune as it is"


def _size(both: Both, strategy: str) -> float:
    """Return about how many bytes a strategy of a ``.zt`` takes for a tensor: by a sample where need be."""
    assert both.tuned is not None
    tuned = both.tuned
    if not (both.is_alike or both.is_fitted):
        return tuned.nbytes
    base, shared = both.shared()
    storage = choices(strategy, tuned.name, tuned.shape, tuned.dtype)
    return estimate(base, shared, storage) + both.added_nbytes


PATCH = "safetensors"
"""The format whose deltas are sparse patches."""
_LEAST = 256 << 20


@takes(DiffOptions, "diff")
def diff(options: DiffOptions) -> DiffReport:
    """Write the delta that turns ``base`` into ``finetuned``.

    Layout, container and lossless codecs of the two do not matter; either may be a state dict: arrays, torch tensors or
    ``Tensor`` objects by name, an open checkpoint. The strategy ``exact`` gives the fine-tune back bit
    for bit, others are smaller (``delta.strategy``). New, reshaped and retyped tensors are stored whole; equal ones
    are not stored. A ``.wdelta`` knows the strategies of that format, ``.safetensors`` a sparse patch. With ``resume``
    the output is byte for byte that of an uninterrupted run. It is the same whoever the ``engine`` has do the work.

    Returns
    -------
    DiffReport

    Raises
    ------
    UsageError
        ``cluster.engine``, ``delta.container``, ``delta.strategy``, an option; ``delta.resume``: a run of state dicts
        cannot be resumed.
    CodecError
        A value that the strategy cannot store, such as a NaN in a quantized difference.
    UnsupportedError
        ``delta.keys``: the two have not the same tensors and the container knows no other case.
    FormatError, IntegrityError, ResourceError
        As ``ingot.convert``. Nothing is left under the final name.
    """
    started = time.perf_counter()
    target = destination(Location.parse(options.out))
    if target.format.name not in BY_CONTAINER:
        raise UsageError(
            f"expected a delta's container, {' or '.join(BY_CONTAINER)}, found {target.format.name}",
            rule="delta.container",
            where=target.display,
        )
    elsewhere = is_distributed(options.engine, options.address)
    with ExitStack() as stack:
        sources = []
        for weights in (options.base, options.finetuned):
            _require_file(weights, options, elsewhere=elsewhere)
            source = open_weights(
                weights, io=options.io, verify=options.verify, max_decompressed=options.max_decompressed
            )
            stack.callback(source.close)
            refuse_adapter(source)
            refuse_same(source, target)
            sources.append(source)
        _require_calibrated(options, target, elsewhere=elsewhere)
        stated = options.calibration
        known = None if stated is None else statistics_of_one(stated, [weights_of(sources[1]), weights_of(sources[0])])
        if known is not None and known is not stated:
            stack.callback(known.close)
        pool = stack.enter_context(closing(_pool(options))) if elsewhere else None
        report = _Diff(sources, target, options, pool, known).run()
    return replace(report, seconds=time.perf_counter() - started)


def _require_file(weights: AnyPath | Mapping[str, Any], options: DiffOptions, *, elsewhere: bool) -> None:
    """Refuse a state dict where a file is wanted."""
    if not isinstance(weights, Mapping):
        return
    if elsewhere:
        raise UsageError("expected files that workers can open, found a state dict", rule="cluster.engine")
    if options.resume:
        raise UsageError("expected files to resume a run of, found a state dict", rule="delta.resume")


def _require_calibrated(options: DiffOptions, target: Destination, *, elsewhere: bool) -> None:
    """Refuse statistics where nothing goes by them."""
    if options.calibration is None:
        return
    strategies = (*CALIBRATED, AUTO)
    named = options.strategy in strategies or any(item.quantizer for item in options.storages.values())
    if target.format.name != "zt" or not named or elsewhere:
        raise UsageError(
            f"expected --calibration with a strategy that goes by it ({', '.join(strategies)}), in .zt, by no engine; "
            f"found {options.strategy or DEFAULTS[target.format.name]} in {target.format.name}, by {options.engine}",
            rule="delta.calibration",
        )


def _pool(options: DiffOptions) -> Pool:
    """Start, or connect to, the workers; errors as ``pool_of``."""
    from ingot.cluster.pool import pool_of

    return pool_of(options.engine, options.address, options.threads or 1)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is stored, in order, and what the delta says of every tensor of the fine-tune."""

    plan: Plan
    info: DeltaInfo
    exact: Sequence[bool]


class _Diff:
    """One run."""

    def __init__(
        self,
        sources: Sequence[Source],
        target: Destination,
        options: DiffOptions,
        pool: Pool | None,
        known: Statistics | None,
    ) -> None:
        self._sources = sources
        self._place = target
        self._options = options
        self._pool = pool
        self._known = known
        container = target.format.name
        strategy = self._strategy = options.strategy or DEFAULTS[container]
        said = "" if known is None else f"{known.location} {sorted(known.metadata.items())}"
        self._draft = Draft(container, strategy, options.strategy is None, options.options, known, said)
        assert self._draft.asked  # a strategy that is known
        self._base, self._tuned = (weights_of(source) for source in sources)
        self._pairs = pairs_of(self._base, self._tuned)
        self._wdelta = container == PARENT
        self._patch = container == PATCH
        if not self._draft.auto and (options.target_size, options.max_error) != (None, None):
            raise UsageError("expected strategy auto, in .zt, with a target size or largest error", rule="delta.target")
        self._storages: Mapping[str, Storage] = {}
        self._progress = Progress(self._base.nbytes + self._tuned.nbytes, options.progress)
        self._resources = Resources(options.max_ram, options.threads, self._progress, _LEAST)
        self._asking: Asking = Here(self._pairs, self._resources.workers)
        if pool is not None:
            from ingot.delta.questions import ByWorkers

            weights = (options.base, options.finetuned)
            texts = [Location.parse(path).text for path in weights if not isinstance(path, Mapping)]
            how = (options.io, options.verify, options.max_decompressed)
            files = PairFiles(texts[0], texts[1], *how)
            self._asking = ByWorkers(self._pairs, sources, files, pool, self._progress)
        self._shards: Sequence[str] | None = None  # the order in which a sharded base's parent hash goes
        self._counts: Mapping[str, int] = {}
        self._account = Account()
        self._same: dict[str, str] = {}
        self._moved: dict[str, str] = {}

    def run(self) -> DiffReport:
        check_inputs(self._base, self._tuned)
        self._account = account_of_reading((self._base, self._tuned), self._tuned.location, self._options.drop)
        for checkpoint in (self._base, self._tuned):
            require_in_proportion(checkpoint.values(), checkpoint.location)
        place = self._place
        if self._wdelta or self._patch:
            require_same_keys(self._base, self._tuned, place.format.name)
        companions = self._tuned.companions if place.directory else {}
        overwrite = self._options.overwrite
        resume = self._options.resume
        with stage(place, overwrite=overwrite, resume=resume, names=companions) as staging:
            planned = self._prepared()
            observer = Identify(
                self._base,
                self._tuned,
                planned.info,
                known=self._same | self._moved,
                same=self._same,
                metadata=self._metadata,
                digests=self._digests,
                require=self._require_smaller,
                progress=self._progress,
                wdelta=self._wdelta,
                shards=self._shards,
            )
            target = Target(staging, place.name, lambda made, _: copy_companions(companions, made))
            executed = self._execute(planned.plan, target, observer)
        return self._report(planned, observer.info, executed)

    def _execute(self, plan: Plan, target: Target, observer: Identify) -> Executed:
        if self._pool is None:
            return execute(plan, self._sources, target, self._resources, observer)
        from ingot.cluster.driver.distribute import Cluster, distribute
        from ingot.delta.planfile import delta_plan_json, source_data

        pool, options = self._pool, self._options
        read = [
            source_data(checkpoint, source.url, options.io, options.verify, options.max_decompressed)
            for checkpoint, source in zip((self._base, self._tuned), self._sources, strict=True)
        ]
        told = delta_plan_json("diff", plan, read, self._place, observer.points)
        cluster = Cluster(lambda: pool, options.max_ram, options.threads or 1, told, "delta")
        return distribute(plan, self._sources, target, self._resources, cluster, observer)

    def _digests(self, side: int, names: Sequence[str]) -> Mapping[str, str]:
        return dict(zip(names, self._asking.each(digest_of, names, [(side,)] * len(names)), strict=True))

    def _prepared(self) -> _Planned:
        """Find out what is the same, choose how the rest is stored, and plan it."""
        if self._wdelta:
            self._shards = parent_orders(self._base, sorted(self._tuned)).get("shards")
        else:
            self._same = same_tensors(self._pairs, self._asking, self._progress)
        if self._patch:  # a header comes before what it describes
            self._counts = changed_elements(self._pairs, self._same, self._asking)
        by_measure = self._measured() if self._draft.auto else {}
        self._storages = {**by_measure, **self._cast(), **self._options.storages}
        names = sorted(self._tuned) if self._wdelta else list(self._tuned)
        drafted = self._drafted(names)
        self._moved = {name: item.digest for name, item in drafted.items() if item.digest is not None}
        unordered = [item.step for item in drafted.values()]
        steps = [unordered[index] for index in self._place.format.order([step.spec for step in unordered])]
        changes = {
            name: drafted[name].change if name in drafted else Change("same", self._tuned[name].dtype) for name in names
        }
        if any(step.spec.params.get("layout") == 2 for step in steps):
            self._shards = None  # version 2 of .wdelta hashes sorted names, whatever the shards
        removed = [name for name in self._base if name not in self._tuned]
        info = DeltaInfo(
            version_for(changes.values()),
            self._strategy,
            self._unknown_base(),
            self._unknown_base() if self._patch else Identity(),
            tensors=changes,
            removed=removed,
        )
        options = WriteOptions(digest=self._options.digest)
        measured = self._options.measure
        plan = Plan(steps, self._place.format, self._metadata(info), options, measured)
        at_least = sum(part.length or 0 for step in steps for part in step.spec.parts)
        self._require_smaller(at_least)
        return _Planned(plan, info, [name not in drafted or drafted[name].step.exact for name in names])

    def _require_smaller(self, nbytes: int) -> None:
        """Refuse a delta of ``nbytes`` that is larger than the fine-tune, unless the caller accepts that."""
        if not self._options.allow_larger:
            changed = (both for name, both in self._pairs.items() if both.tuned is not None and name not in self._same)
            count = len(self._tuned) - len(self._same)
            workers = self._resources.workers
            strategy = "" if self._wdelta else self._strategy  # a .wdelta has an int4 of its own
            require_smaller(nbytes, self._tuned.nbytes, changed, count, strategy, self._place.display, workers)

    def _metadata(self, info: DeltaInfo) -> Mapping[str, Any]:
        """Return the metadata of a delta that says ``info`` of itself."""
        own = {key: value for key, value in self._tuned.metadata.items() if key != KEY}
        return self._place.format.metadata({**own, KEY: info.to_metadata()})

    def _measured(self) -> dict[str, Storage]:
        """Choose how each tensor's difference is stored, for strategy ``auto``."""
        changed = [tensor for name, tensor in self._tuned.items() if name not in self._same]
        measured = {item.name: self._pairs[item.name] for item in changed if self._is_measured(item)}
        pairs = [both.shared() for both in measured.values()]
        whole = sum(both.added_nbytes for both in measured.values())
        whole += sum(item.nbytes for item in changed if item.name not in measured)
        size = self._options.target_size
        error = self._options.max_error
        budget = None if size is None else target_bytes(size, self._tuned.nbytes) - whole
        if self._pool is not None:
            require_one(budget, error)
            return chosen(list(self._asking.each(measure_both, list(measured))), budget, error)
        self._progress.total += sum(base.nbytes + tuned.nbytes for base, tuned in pairs)
        self._progress.advance(0)
        workers = self._resources.workers
        max_ram = self._options.max_ram
        if max_ram is not None:
            workers = max(1, min(workers, (parse_size(max_ram) - anonymous_in_use() - RESERVE) // PER_PAIR))
        told: dict[str, Any] = {"target_size": budget, "max_error": error, "progress": self._progress}
        if self._known is not None:
            told["measuring"] = self._measure_known
        return choose(pairs, workers=workers, **told)

    def _measure_known(self, base: Tensor, tuned: Tensor) -> Measured:
        """Measure calibrated ways too, of a tensor that statistics fit: one of as many rows in base and fine-tune."""
        from ingot.delta.weighed import measure_known

        first, other = self._pairs[tuned.name].pair
        assert self._known is not None
        return measure_known(base, tuned, self._known) if first.shape == other.shape else measure(base, tuned)

    def _is_measured(self, tensor: Tensor) -> bool:
        both = self._pairs[tensor.name]
        return (both.is_alike or both.is_fitted) and not is_opaque(tensor)

    def _cast(self) -> dict[str, Storage]:
        """Store exactly what is the base's but for its element type or number of rows: that takes next to nothing."""
        if self._place.format.name != "zt" or self._strategy in ("exact", *EVERY):
            return {}
        names = [name for name, both in self._pairs.items() if both.is_fitted]
        return {name: EXACT for name, cast in zip(names, self._asking.each(is_cast, names), strict=True) if cast}

    def _drafted(self, names: Sequence[str]) -> dict[str, Drafted]:
        """Decide how each tensor of ``names`` that differs from the base is stored."""
        changed = [name for name in names if name not in self._same]
        requests = [(self._storages.get(name), self._counts.get(name)) for name in changed]
        if self._pool is None:
            drafted = list(self._asking.each(self._draft.drafted, changed, requests))
        else:
            from ingot.delta.plan import DraftData

            items = list(self._asking.each(DraftData.from_draft(self._draft), changed, requests))
            steps = bind_steps([item.step for item in items], [self._base, self._tuned], self._place.format)
            drafted = [Drafted(item.change, step, item.digest) for item, step in zip(items, steps, strict=True)]
        rounded = [(item.step.tensor.size, item.rounded) for item in drafted if item.rounded is not None]
        if rounded and self._options.plan is not None:
            self._options.plan(expected(rounded, self._resources.workers))
        return dict(zip(changed, drafted, strict=True))

    def _unknown_base(self) -> Identity:
        """Return an identity as large as the base's will be: a header may have to be laid out before it is known."""
        unknown = "0" * 64
        told = self._patch if not self._wdelta else self._shards
        return Identity(f"blake3:{unknown}" if told else None, {PARENT: unknown} if self._wdelta else {})

    def _report(self, planned: _Planned, info: DeltaInfo, executed: Executed) -> DiffReport:
        rounded = [self._draft.outcomes[name] for name in sorted(self._draft.outcomes)]
        tensors = tensor_diffs(info.tensors, planned.exact, executed.done, self._base, self._tuned)
        return DiffReport(
            base=self._sources[0].location,
            tuned=self._sources[1].location,
            destination=self._place.display,
            format=self._place.format.name,
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
                *([] if self._known is None else [*outcome_lines(rounded, self._known.location), *self._unseen()]),
            ],
            dropped=self._account.dropped,
        )

    def _unseen(self) -> list[str]:
        """Tell of matrices that changed and that there are no statistics of."""
        changed = [tensor for name, tensor in self._tuned.items() if name not in self._same]
        names = [
            item.name
            for item in changed
            if is_matrix(item.shape, item.dtype) and not has_statistics(self._known, item.name, item.shape)
        ]
        return [f"without statistics, stored as without --calibration: {few(names)}"] if names else []
