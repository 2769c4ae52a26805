"""Patch: a base and its deltas, one after the other, become the fine-tune; one pass, in bounded memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ingot.codecs.table import CODECS
from ingot.core.dtypes import DTYPES
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.core.options import takes
from ingot.core.parallel import Workers, default_workers
from ingot.core.progress import Progress
from ingot.core.stats import ErrorStats
from ingot.engine.drive import chunk_budget, drive, recycled
from ingot.engine.pipeline import Pipeline, chunking
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.formats.base import WriteOptions
from ingot.model.delta import KEY
from ingot.model.limits import require_in_proportion
from ingot.ops.companions import copy_companions
from ingot.ops.convert.convert import refuse_same
from ingot.ops.convert.plan import DECODED, MOVED, Step
from ingot.ops.convert.requests import DEFAULT_SHARD
from ingot.ops.delta.chain import Link, Route, link_of, stages
from ingot.ops.delta.options import PatchOptions
from ingot.ops.delta.patch_job import PatchJob
from ingot.ops.delta.proof import Proof
from ingot.ops.delta.report import PatchReport
from ingot.ops.destination import Destination, destination, require_room, stage
from ingot.ops.open import Source, checkpoint_of, open_delta, open_source, weights_of
from ingot.ops.options import AnyPath
from ingot.ops.specs import encoded_spec
from ingot.stores.local import LocalTarget


@takes(PatchOptions, "patch")
def patch(options: PatchOptions) -> PatchReport:
    """Apply a delta, or several in order, to ``base`` and write the result, dense, in the fine-tune's element types.

    Of a chain, each delta's base is what the one before gives. A folder gets the base's container and companion files.

    Returns
    -------
    PatchReport

    Raises
    ------
    IntegrityError
        ``delta.base``: the base, or the order of the chain, is wrong; ``delta.result``: the result is not what the
        delta promises. Nothing is published.
    UsageError
        ``delta.none``, ``delta.of-delta``, ``delta.no-identity``, ``delta.no-result``, an option.
    FormatError, CodecError, UnsupportedError, ResourceError
        As ``ingot.convert``.
    """
    started = time.perf_counter()
    chain = [options.deltas] if isinstance(options.deltas, str | PathLike) else list(options.deltas)
    if not chain:
        raise UsageError("expected at least one delta, found none", rule="patch.option")
    with ExitStack() as stack:
        sources: list[Source] = []
        for path in (options.base, *chain):
            opened = open_delta if sources else open_source
            source = opened(path, io=options.io, verify=options.check_digests)
            stack.callback(source.close)
            sources.append(source)
        place = _destination(options.out, options.format, sources[0])
        for source in sources:
            refuse_same(source, place)
        report = _Patch(sources, place, options).run()
    return replace(report, seconds=time.perf_counter() - started)


def _destination(out: AnyPath, format: str | None, base: Source) -> Destination:
    place = destination(out, format)
    return destination(out, base.format.name) if place.directory and format is None else place


@dataclass(frozen=True, slots=True)
class _Planned:
    steps: list[Step]
    jobs: dict[str, PatchJob]


class _Patch:
    """One run."""

    def __init__(self, sources: Sequence[Source], place: Destination, options: PatchOptions) -> None:
        self._sources, self._place, self._options = sources, place, options
        self._base = weights_of(sources[0])
        self._links: list[Link] = [link_of(checkpoint_of(source)) for source in sources[1:]]
        self._workers = options.threads or default_workers()
        self._progress = Progress(
            self._base.nbytes + sum(link.checkpoint.nbytes for link in self._links), options.progress
        )

    def run(self) -> PatchReport:
        options, place = self._options, self._place
        found = stages(self._base, self._links)
        require_in_proportion((route.origin for route in found[-1].values()), str(place.path))
        proof = Proof(self._links, found, base=options.verify_base, result=options.verify)
        plan = self._plan(found[-1], proof.order or ())
        companions = {**self._base.companions, **self._links[-1].checkpoint.companions}
        with stage(place, overwrite=options.overwrite, names=companions) as staging:
            files = self._write(plan, proof, LocalTarget(staging.files))
            copied = copy_companions(companions, LocalTarget(staging.files)) if place.directory else []
            for source in self._sources:
                source.require_unchanged()
            staging.publish([*files, *copied])
        folder = place.path if place.directory else place.path.parent
        return PatchReport(
            base=self._sources[0].location,
            deltas=[source.location for source in self._sources[1:]],
            destination=str(place.path),
            format=place.format.name,
            tensors=len(plan.steps),
            ops=dict(Counter(change.op for link in self._links for change in link.info.tensors.values())),
            size=sum((Path(folder) / name).stat().st_size for name in files),
            seconds=0.0,
            verified_base=options.verify_base,
            verified=proof.result_id is not None,
            files=files,
            companions=copied,
            result_id=proof.result_id,
        )

    def _plan(self, routes: dict[str, Route], first: Sequence[str]) -> _Planned:
        names = dict.fromkeys([*(name for name in first if name in routes), *routes])
        steps = [self._step(routes[name]) for name in names]
        order = self._place.format.order([step.spec for step in steps])
        steps = [steps[index] for index in order]
        jobs = {step.tensor.name: step.job for step in steps if isinstance(step.job, PatchJob)}
        return _Planned(steps, jobs)

    def _step(self, route: Route) -> Step:
        if route.opaque:
            return self._checked(Step(route.origin, route.origin.spec(), MOVED, "moved", exact=True))
        tensor = replace(route.origin, dtype=route.dtype)
        wanted, options = self._options.dtype, {}
        if wanted is not None and DTYPES[route.dtype].is_float:
            options = {"dtype": resolve_dtype(wanted).name}
        encoder = CODECS["dense"].encoder(route.shape, route.dtype, options)
        spec = encoded_spec(route.name, tensor, encoder, "raw")
        return self._checked(Step(tensor, spec, DECODED, "patch", exact=True, job=PatchJob(route, encoder)))

    def _checked(self, step: Step) -> Step:
        reason = self._place.format.refuses(step.spec)
        if reason is not None:
            raise UnsupportedError(
                f"{self._place.format.name} cannot carry this tensor: {reason}",
                rule="patch.unsupported",
                where=step.spec.name,
            )
        return step

    def _write(self, plan: _Planned, proof: Proof, target: LocalTarget) -> list[str]:
        format, specs = self._place.format, [step.spec for step in plan.steps]
        own = self._links[-1].checkpoint.metadata
        own = {key: value for key, value in own.items() if key != KEY} or dict(self._base.metadata)
        shard = DEFAULT_SHARD if self._place.directory else None
        options = WriteOptions(digest=self._options.digest, max_shard=shard)
        require_room(self._place, format.size(specs, format.metadata(own), options))
        writer = format.writer(target, self._place.name, specs, format.metadata(own), options)
        try:
            budget = chunk_budget(self._options.max_ram, plan.steps, self._workers)
            kept = recycled(self._options.max_ram)
            with Workers(1) as beside, proof.watching(plan.jobs, [step.spec.name for step in plan.steps]):
                whole = [beside.submit(source.require_whole) for source in self._sources]
                chunkings = [chunking(step, budget, self._workers + 3, measured=False) for step in plan.steps]
                with Pipeline(
                    plan.steps, chunkings, workers=self._workers, budget=budget, measured=False, recycled=kept
                ) as pipeline:
                    drive(pipeline, writer, self._workers, _finished, self._progress.advance)
                for checked in whole:
                    checked.result()
                proof.check(plan.jobs, self._workers)
            return writer.finish()
        except BaseException as error:
            writer.abort()
            if isinstance(error, CodecError):
                proof.blame(error)
            raise


def _finished(step: Step, record: dict[str, Any], error: ErrorStats) -> None:
    """Nothing to note: a patch is not measured, and not resumed."""
