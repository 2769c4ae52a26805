"""Patch: compute a fine-tune from a base and a chain of deltas, in one pass and bounded memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from os import PathLike

from ingot.artifacts.account import account_of_reading
from ingot.artifacts.adapter_files import refuse_adapter
from ingot.artifacts.companions import ConfigChange, copy_companions
from ingot.artifacts.destination import Destination, destination, is_distributed, stage
from ingot.artifacts.open import Source, open_delta, open_source, weights_of
from ingot.codecs.table import CODECS
from ingot.conversion.packed_layers import require_layers
from ingot.conversion.prepare_source import DEFAULT_SHARD
from ingot.conversion.prepared import refuse_same
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.options import takes
from ingot.core.runtime.progress import Progress
from ingot.delta.options import PatchOptions
from ingot.delta.proof import Proof
from ingot.delta.report import PatchReport
from ingot.engine.delta_chain import Link, Routes, link_of, stages
from ingot.engine.execute import Executed, Target, execute
from ingot.engine.patch_step import Patch, PatchChain, result_tensor
from ingot.engine.resources import Resources
from ingot.engine.steps import Move
from ingot.engine.work import Plan, Step, encoded_spec
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import WriteOptions
from ingot.formats.packed_folders.base import PACKING_FILES, PACKING_KEYS
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.model.delta import KEY
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.limits import require_in_proportion
from ingot.model.tensor import Tensor
from ingot.stores.location import Location

_DENSE = ConfigChange(PACKING_KEYS)
"""Removes packing keys from a ``config.json``, because the result has no packed layers."""


@takes(PatchOptions, "patch")
def patch(options: PatchOptions) -> PatchReport:
    """Apply one delta, or several in order, to ``base``, and write the dense result in the fine-tune's element types.

    In a chain, the base of each delta is the result of the one before. A folder gets the base's container and
    companions. With ``resume`` the output has the same bytes as an uninterrupted run.

    Returns
    -------
    PatchReport

    Raises
    ------
    IntegrityError
        ``delta.base``: the base, or the order of the chain, is wrong; ``delta.result``: the result is not the one
        stated in the delta. Nothing is published.
    UsageError
        ``cluster.engine``, ``delta.none``, ``delta.of-delta``, ``delta.no-identity``, ``delta.no-result``, an option.
    FormatError, CodecError, UnsupportedError, ResourceError
        As ``ingot.convert``.

    Examples
    --------
    >>> report = ingot.diff("model", "tuned.safetensors", "tuned.zt")
    >>> report = ingot.patch("model", "tuned.zt", "again.safetensors")
    >>> ingot.compare("tuned.safetensors", "again.safetensors").same
    True
    """
    started = time.perf_counter()
    distributed = is_distributed(options.engine, options.address)
    chain = [options.deltas] if isinstance(options.deltas, str | PathLike | Location) else list(options.deltas)
    if not chain:
        raise UsageError("expected at least one delta, but the list is empty", rule="patch.option")
    with ExitStack() as stack:
        sources: list[Source] = []
        for path in (options.base, *chain):
            opened = open_delta if sources else open_source
            source = opened(
                Location.parse(path),
                io=options.io,
                verify=options.check_digests,
                max_decompressed=options.max_decompressed,
            )
            stack.callback(source.close)
            refuse_adapter(source)
            sources.append(source)
        target = _destination(Location.parse(options.out), options.format, sources[0])
        for source in sources:
            refuse_same(source, target)
        report = _Patch(sources, target, options).run(is_distributed=distributed)
    return replace(report, seconds=time.perf_counter() - started)


def _destination(out: Location, format: str | None, base: Source) -> Destination:
    """Return the destination of a patch's result.

    A folder without a stated format gets the base's format, or ``safetensors`` if the base has packed layers.
    """
    target = destination(out, format)
    if not target.directory or format is not None:
        return target
    traits = base.format.traits
    packs = traits.config_keys and not (traits.packed_codecs and not traits.how_to_quantize)
    return destination(out, SafetensorsFormat.name if packs else base.format.name)


class _Patch:
    """The state of one call of ``patch``."""

    def __init__(self, sources: Sequence[Source], target: Destination, options: PatchOptions) -> None:
        self._sources = sources
        self._destination = target
        self._options = options
        self._base = weights_of(sources[0])
        self._links: list[Link] = [link_of(source.view()) for source in sources[1:]]
        read = self._base.nbytes + sum(link.checkpoint.nbytes for link in self._links)
        progress = Progress(read, options.progress)
        self._resources = Resources(options.max_ram, options.threads, progress)

    def run(self, *, is_distributed: bool) -> PatchReport:
        options = self._options
        destination = self._destination
        read = [self._base, *(link.checkpoint for link in self._links)]
        account = account_of_reading(read, self._base.location, options.drop)
        stage_routes = stages(self._base, self._links)
        require_in_proportion(map(_largest, stage_routes[-1].uncached()), destination.display)
        base = options.verify_base
        result = options.verify
        workers = self._resources.workers
        proof = Proof(self._links, stage_routes, base=base, result=result, workers=workers)
        plan = self._plan(stage_routes[-1], proof.order or ())
        available = {**self._base.companions, **self._links[-1].checkpoint.companions} if destination.directory else {}
        companions = {name: path for name, path in available.items() if name not in PACKING_FILES}
        overwrite = options.overwrite
        resume = options.resume
        with stage(destination, overwrite=overwrite, resume=resume, names=companions) as staging:
            target = Target(staging, destination.name, lambda output, _: copy_companions(companions, output, _DENSE))
            if is_distributed:
                executed = self._distribute(plan, target, proof)
            else:
                executed = execute(plan, self._sources, target, self._resources, proof)
        return PatchReport(
            base=self._sources[0].location,
            deltas=[source.location for source in self._sources[1:]],
            destination=destination.display,
            format=destination.format.name,
            tensors=len(plan.steps),
            ops=dict(Counter(change.op for link in self._links for change in link.info.tensors.values())),
            size=executed.size,
            seconds=0.0,
            verified_base=base,
            verified=proof.result_id is not None,
            files=executed.files,
            companions=executed.companions,
            result_id=proof.result_id,
            resumed=executed.resumed,
            notes=account.notes(),
            cast=self._cast(plan),
        )

    def _cast(self, plan: Plan) -> str | None:
        """Return the element type of the option ``dtype`` if a step rounds values to it, else None."""
        if self._options.dtype is None:
            return None
        rounds = any(isinstance(step, Patch) and not step.encoder.lossless for step in plan.steps)
        return resolve_dtype(self._options.dtype).name if rounds else None

    def _distribute(self, plan: Plan, target: Target, proof: Proof) -> Executed:
        from ingot.cluster.driver.distribute import Cluster, distribute
        from ingot.cluster.pool import pool_of
        from ingot.delta.planfile import delta_plan_json, source_data

        options = self._options
        threads = self._options.threads or 1
        how = (options.io, options.check_digests, options.max_decompressed)
        checkpoints = [self._base, *(link.checkpoint for link in self._links)]
        read = [source_data(item, source.url, *how) for item, source in zip(checkpoints, self._sources, strict=True)]
        plan_json = delta_plan_json("patch", plan, read, self._destination, proof.points)
        pool = partial(pool_of, options.engine, options.address, threads)
        cluster = Cluster(pool, options.max_ram, threads, plan_json, "delta")
        return distribute(plan, self._sources, target, self._resources, cluster, proof)

    def _plan(self, routes: Routes, first: Sequence[str]) -> Plan:
        """Plan every tensor, in the order in which the proof hashes tensors."""
        format = self._destination.format
        names = dict.fromkeys([*(name for name in first if name in routes), *routes])
        steps = [self._step(routes.get_uncached(name)) for name in names]
        steps = [steps[index] for index in format.order([step.spec for step in steps])]
        require_layers(steps, format)
        metadata = {key: value for key, value in self._links[-1].checkpoint.metadata.items() if key != KEY}
        metadata = metadata or dict(self._base.metadata)
        shard = DEFAULT_SHARD if self._destination.directory else None
        options = WriteOptions(digest=self._options.digest, max_shard=shard)
        return Plan(steps, format, format.metadata(metadata), options, measured=False)

    def _step(self, route: PatchChain) -> Step:
        if route.opaque:
            return self._checked(Move(route.origin, route.origin.spec(), source=route.first_stage))
        tensor = result_tensor(route)
        target_dtype = self._options.dtype
        options = {}
        if target_dtype is not None and DTYPES[route.dtype].is_float:
            options = {"dtype": resolve_dtype(target_dtype).name}
        encoder = CODECS[DenseLayout.codec].encoder(route.shape, route.dtype, options)
        spec = encoded_spec(route.name, tensor, encoder, "raw")
        return self._checked(Patch(tensor, spec, rule="patch", route=route, encoder=encoder, options=options))

    def _checked(self, step: Step) -> Step:
        reason = self._destination.format.why_unsupported(step.spec)
        if reason is not None:
            raise UnsupportedError(
                f"{self._destination.format.name} cannot carry this tensor: {reason}",
                rule="patch.unsupported",
                where=step.spec.name,
            )
        return step


def _largest(route: PatchChain) -> Tensor:
    """Return the largest tensor of a chain: its origin, or a delta's tensor of another shape."""
    resized = [layer.tensor for layer in route.layers if layer.shape != route.origin.shape]
    return max(route.origin, *resized, key=lambda tensor: tensor.size) if resized else route.origin
