"""Diff: what turns a base into a fine-tune, as a delta, in bounded memory.

What is equal is read once. What differs is read up to the first difference (a chunk of a million elements), then once
for every fit pass that its codec asks for, and once to be encoded; hashes are taken on the way. Strategy ``auto`` reads
a sample before, and twice all of a matrix whose sample speaks for a low rank; a sparse patch counts the changes before;
a ``.wdelta`` of a sharded base reads the base once more, in the order of its shards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ingot.codecs.delta.base import DeltaEncoder, delta_codec, difference
from ingot.codecs.reach import reaching
from ingot.codecs.table import CODECS, FLOAT_ENTROPY
from ingot.core.memory import anonymous_rss, parse_size
from ingot.core.options import takes
from ingot.core.parallel import ordered
from ingot.core.progress import Progress
from ingot.engine.chunks import pieces
from ingot.engine.execute import Executed, Target, execute
from ingot.engine.pair import Diff
from ingot.engine.plan import Plan
from ingot.engine.resources import RESERVE, Resources
from ingot.engine.route import is_opaque
from ingot.engine.specs import encoded_spec
from ingot.engine.steps import ENCODED, Encode, Move
from ingot.engine.work import Step
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.formats.base import WriteOptions
from ingot.model.delta import KEY, Change, DeltaInfo, Identity
from ingot.model.layouts.dense import DenseLayout
from ingot.model.limits import require_in_proportion
from ingot.model.tensor import Tensor
from ingot.ops.companions import copy_companions
from ingot.ops.convert.convert import refuse_same
from ingot.ops.delta.auto import PER_PAIR, choose, target_bytes
from ingot.ops.delta.inputs import alike, changed_elements, check_inputs, require_same_keys, same_tensors
from ingot.ops.delta.observe import PARENT, Identify
from ingot.ops.delta.options import DiffOptions
from ingot.ops.delta.parent import parent_orders
from ingot.ops.delta.report import DiffReport, TensorDiff
from ingot.ops.delta.strategy import AUTO, BY_CONTAINER, DEFAULTS, EXACT, SMALL, UNSCALED, Storage, choices
from ingot.ops.destination import Destination, destination, stage
from ingot.ops.identity import tensor_digest
from ingot.ops.in_memory import opened
from ingot.ops.open import Source, weights_of

VERSION = 1
PATCH = "safetensors"
"""The format whose deltas are sparse patches."""
_LEAST = 256 << 20


@takes(DiffOptions, "diff")
def diff(options: DiffOptions) -> DiffReport:
    """Write the delta that turns ``base`` into ``finetuned``.

    Layout, container and lossless codecs of the two do not matter; either may be a state dict: arrays, torch tensors or
    ``Tensor`` objects by name, an open checkpoint. The strategy ``exact`` gives the fine-tune back bit
    for bit, others are smaller (``ops.delta.strategy``). New, reshaped and retyped tensors are stored whole; equal ones
    are not stored. A ``.wdelta`` knows the strategies of that format, ``.safetensors`` a sparse patch. With ``resume``
    the output is byte for byte that of an uninterrupted run.

    Returns
    -------
    DiffReport

    Raises
    ------
    UsageError
        ``delta.container``, ``delta.strategy``, an option; ``delta.resume``: a run of state dicts cannot be resumed.
    CodecError
        A value that the strategy cannot store, such as a NaN in a quantized difference.
    UnsupportedError
        ``delta.keys``: the two have not the same tensors and the container knows no other case.
    FormatError, IntegrityError, ResourceError
        As ``ingot.convert``. Nothing is left under the final name.
    """
    started = time.perf_counter()
    target = destination(options.out)
    if target.format.name not in BY_CONTAINER:
        raise UsageError(
            f"expected a delta's container, {' or '.join(BY_CONTAINER)}, found {target.format.name}",
            rule="delta.container",
            where=target.location,
        )
    with ExitStack() as stack:
        sources = []
        for weights in (options.base, options.finetuned):
            if options.resume and isinstance(weights, Mapping):
                raise UsageError("expected files to resume a run of, found a state dict", rule="delta.resume")
            source = opened(weights, io=options.io, verify=options.verify, max_decompressed=options.max_decompressed)
            stack.callback(source.close)
            refuse_same(source, target)
            sources.append(source)
        report = _Diff(sources, target, options).run()
    return replace(report, seconds=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is stored, in order, and what the delta says of every tensor of the fine-tune."""

    plan: Plan
    info: DeltaInfo
    exact: Mapping[str, bool]


class _Diff:
    """One run."""

    def __init__(self, sources: Sequence[Source], target: Destination, options: DiffOptions) -> None:
        self._sources, self._place, self._options = sources, target, options
        strategy = self._strategy = options.strategy or DEFAULTS[target.format.name]
        self._base, self._tuned = (weights_of(source) for source in sources)
        self._wdelta = target.format.name == PARENT
        self._patch = target.format.name == PATCH
        self._auto = strategy == AUTO and target.format.name == "zt"
        if not self._auto and (options.target_size, options.max_error) != (None, None):
            raise UsageError("expected strategy auto, in .zt, with a target size or largest error", rule="delta.target")
        # What options are for: the strategy's matrices.
        self._asked = EXACT if self._auto else choices(strategy, "", (SMALL, SMALL), "f32", target.format.name)
        self._storages: Mapping[str, Storage] = {}
        self._progress = Progress(self._base.nbytes + self._tuned.nbytes, options.progress)
        self._resources = Resources(options.max_ram, options.threads, self._progress, _LEAST)
        self._workers = self._resources.workers
        self._shards: Sequence[str] | None = None  # the order in which a sharded base's parent hash goes
        self._counts: Mapping[str, int] = {}
        self._same: dict[str, str] = {}
        self._moved: dict[str, str] = {}

    def run(self) -> DiffReport:
        check_inputs(self._base, self._tuned)
        for checkpoint in (self._base, self._tuned):
            require_in_proportion(checkpoint.values(), checkpoint.location)
        place = self._place
        if self._wdelta or self._patch:
            require_same_keys(self._base, self._tuned, place.format.name)
        companions = self._tuned.companions if place.directory else {}
        overwrite, resume = self._options.overwrite, self._options.resume
        with stage(place, overwrite=overwrite, resume=resume, names=companions) as staging:
            planned = self._prepared()
            observer = Identify(
                self._base,
                self._tuned,
                planned.info,
                known=self._same | self._moved,
                same=self._same,
                metadata=self._metadata,
                workers=self._workers,
                progress=self._progress,
                wdelta=self._wdelta,
                shards=self._shards,
            )
            target = Target(staging, place.name, lambda made, _: copy_companions(companions, made))
            executed = execute(planned.plan, self._sources, target, self._resources, observer)
        return self._report(planned, observer.info, executed)

    def _prepared(self) -> _Planned:
        """Find out what is the same, choose how the rest is stored, and plan it."""
        if self._wdelta:
            self._shards = parent_orders(self._base, sorted(self._tuned)).get("shards")
        else:
            self._same = same_tensors(self._base, self._tuned, self._workers, self._progress)
        if self._patch:  # a header comes before what it describes
            self._counts = changed_elements(self._base, self._tuned, self._same, self._workers)
        self._storages = {**(self._measured() if self._auto else {}), **self._options.storages}
        steps, changes, exact = self._steps()
        if any(step.spec.params.get("layout") == 2 for step in steps):
            self._shards = None  # version 2 of .wdelta hashes sorted names, whatever the shards
        removed = [name for name in self._base if name not in self._tuned]
        info = DeltaInfo(
            VERSION,
            self._strategy,
            self._unknown_base(),
            self._unknown_base() if self._patch else Identity(),
            tensors=changes,
            removed=removed,
        )
        options = WriteOptions(digest=self._options.digest)
        measured = self._options.measure
        plan = Plan(steps, self._place.format, self._metadata(info), options, measured)
        return _Planned(plan, info, exact)

    def _metadata(self, info: DeltaInfo) -> Mapping[str, Any]:
        """Return the metadata of a delta that says ``info`` of itself."""
        own = {key: value for key, value in self._tuned.metadata.items() if key != KEY}
        return self._place.format.metadata({**own, KEY: info.to_metadata()})

    def _measured(self) -> dict[str, Storage]:
        """Choose how each tensor's difference is stored, for strategy ``auto``."""
        changed = [tensor for name, tensor in self._tuned.items() if name not in self._same]
        pairs = [(self._base[item.name], item) for item in changed if item.name in self._base]
        pairs = [pair for pair in pairs if alike(*pair) and not is_opaque(pair[1])]
        paired = {tuned.name for _, tuned in pairs}
        whole = sum(item.nbytes for item in changed if item.name not in paired)
        size = self._options.target_size
        budget = None if size is None else target_bytes(size, self._tuned.nbytes) - whole
        self._progress.total += sum(base.nbytes + tuned.nbytes for base, tuned in pairs)
        self._progress.advance(0)
        workers, max_ram = self._workers, self._options.max_ram
        if max_ram is not None:
            workers = max(1, min(workers, (parse_size(max_ram) - anonymous_rss() - RESERVE) // PER_PAIR))
        return choose(
            pairs,
            target_size=budget,
            max_error=self._options.max_error,
            workers=workers,
            progress=self._progress,
        )

    def _steps(self) -> tuple[list[Step], dict[str, Change], dict[str, bool]]:
        """Return what is stored in the container's order; of every tensor what changes, and whether exactly."""
        steps: list[Step] = []
        changes: dict[str, Change] = {}
        exact: dict[str, bool] = {}
        names = sorted(self._tuned) if self._wdelta else list(self._tuned)
        changed = [self._tuned[name] for name in names if name not in self._same]
        located = ordered(self._located, changed, self._workers)
        for name in names:
            tensor = self._tuned[name]
            op, step = "same", None
            if name not in self._same:
                op, step = next(located)
                steps.append(step)
            changes[name] = Change(op, tensor.dtype)
            exact[name] = step is None or step.exact
        order = self._place.format.order([step.spec for step in steps])
        return [steps[index] for index in order], changes, exact

    def _located(self, tensor: Tensor) -> tuple[str, Step]:
        try:
            return self._step(tensor, self._storage(tensor))
        except IngotError as error:
            small = UNSCALED.get(self._place.format.name)
            if error.rule == "codec.underflow" and small is not None and self._options.strategy is None:
                return self._step(tensor, small)
            raise error if error.where and tensor.name in error.where else error.at(tensor.name) from None

    def _storage(self, tensor: Tensor) -> Storage:
        storage = self._storages.get(tensor.name, EXACT if self._auto else None)
        if storage is not None:
            return storage
        return choices(self._strategy, tensor.name, tensor.shape, tensor.dtype, self._place.format.name)

    def _step(self, tensor: Tensor, storage: Storage) -> tuple[str, Step]:
        base = self._base.get(tensor.name)
        if is_opaque(tensor):
            self._moved[tensor.name] = tensor_digest(tensor)
            return "replace", self._checked(Move(tensor, tensor.spec(), source=1))
        if base is None or not (self._wdelta or alike(base, tensor)):
            return "replace", self._whole(tensor)
        codec = delta_codec(storage.codec)
        extra = self._options.options if storage == self._asked else {}
        if self._patch:
            extra = {**extra, "count": self._counts[tensor.name]}

        def made(options: Mapping[str, Any]) -> DeltaEncoder:
            return codec.encoder(tensor.shape, tensor.dtype, options)

        options = {**storage.options, **extra}
        try:
            encoder = made(options)
        except UnsupportedError:  # complex numbers
            if not codec.exact:
                raise
            return "replace", self._whole(tensor)
        differences = ((start, difference(*pair)) for start, pair in pieces(base, tensor))
        encoder, more = reaching(encoder, made, options, differences)
        default = replace(tensor, dtype=tensor.dtype if codec.exact else "f32")
        spec = encoded_spec(tensor.name, default, encoder, storage.encoding)
        pair = partial(Diff, base=base, codec=codec, encoder=encoder, options={**options, **more})
        return "apply", self._checked(pair(tensor, spec, ENCODED, storage.codec, encoder.lossless))

    def _whole(self, tensor: Tensor) -> Step:
        codec = FLOAT_ENTROPY if tensor.dtype in ("bf16", "f16", "f32") and tensor.size > SMALL else DenseLayout.codec
        encoder = CODECS[codec].encoder(tensor.shape, tensor.dtype, {})
        spec = encoded_spec(tensor.name, tensor, encoder, "raw")
        return self._checked(Encode(tensor, spec, ENCODED, codec, encoder=encoder, source=1))

    def _checked(self, step: Step) -> Step:
        reason = self._place.format.refuses(step.spec)
        if reason is not None:
            raise UnsupportedError(f"{self._place.format.name} cannot carry this: {reason}", rule="delta.container")
        return step

    def _unknown_base(self) -> Identity:
        """Return an identity as large as the base's will be: a header may have to be laid out before it is known."""
        unknown, told = "0" * 64, self._patch if not self._wdelta else self._shards
        return Identity(f"blake3:{unknown}" if told else None, {PARENT: unknown} if self._wdelta else {})

    def _report(self, planned: _Planned, info: DeltaInfo, executed: Executed) -> DiffReport:
        written = {item.step.spec.name: item for item in executed.done}
        tensors = []
        for name, change in info.tensors.items():
            tensor, done, exact = self._tuned[name], written.get(name), planned.exact[name]
            lossy = done is not None and not exact and done.error.count > 0
            moved = done.notes.get("moved", 0.0) if done else 0.0
            tensors.append(
                TensorDiff(
                    name=name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    op=change.op,
                    codec=done.step.spec.codec if done else "",
                    nbytes=done.nbytes if done else 0,
                    tuned_nbytes=tensor.nbytes,
                    exact=exact,
                    error=done.error.summary() if done and lossy else None,
                    left=done.error.squared_error / moved if done and lossy and moved else None,
                )
            )
        return DiffReport(
            base=self._sources[0].location,
            tuned=self._sources[1].location,
            destination=self._place.location,
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
        )
