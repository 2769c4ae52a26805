"""The cost of a delta: the size of every tensor, and the error of base + delta relative to the fine-tune."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
from msgspec import Struct

from ingot.artifacts.destination import is_distributed
from ingot.artifacts.identity import tensor_digest
from ingot.artifacts.open import address_of
from ingot.artifacts.open import open as open_checkpoint
from ingot.cluster.driver.spread import Opened, Query, ask, files_of
from ingot.cluster.pool import pool_of
from ingot.core.numeric.dtypes import FLOATS, file_bytes
from ingot.core.numeric.stats import ErrorStats, measure
from ingot.core.parsing.strictjson import preload
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.delta.report import TensorDiff, tensors_table
from ingot.engine.chunks import chunks
from ingot.engine.delta_chain import link_of, stages
from ingot.engine.patch_step import PatchChain
from ingot.errors import IntegrityError
from ingot.model.tensor import Array, Tensor
from ingot.reporting.report import Figure, Line, Report, table_of
from ingot.stores.location import AnyPath, Location


def delta_cost(
    base: AnyPath,
    delta: AnyPath,
    finetuned: AnyPath,
    *,
    max_decompressed: int | str | None = None,
    progress: ProgressCallback | None = None,
    engine: str = "local",
    address: str | None = None,
) -> list[TensorDiff]:
    """Compare ``base + delta`` with ``finetuned``, tensor by tensor in chunks; ``max_decompressed`` as in ``open``.

    ``engine`` and ``address`` select the workers as in ``ingot.compare``; the result is the same for each.

    Returns
    -------
    list of TensorDiff
        In the fine-tune's order; ``exact`` states whether the values are equal bit for bit.

    Raises
    ------
    IntegrityError
        ``delta.base``: names, shapes or types do not match (values are not checked here); ``delta.tuned``: the
        fine-tune's tensors are not those of the delta's result.
    FormatError
        ``part.max-decompressed``: a compressed part of one of the three exceeds the limit.
    UsageError
        ``cluster.engine``; with workers also the errors of ``cluster.driver.spread.ask``.
    """
    distributed = is_distributed(engine, address)
    locations = {"base": Location.parse(base), "delta": Location.parse(delta), "finetuned": Location.parse(finetuned)}
    opened = DeltaFiles(**{name: item.text for name, item in locations.items()}, max_decompressed=max_decompressed)
    with open_items(opened) as items:
        state = Progress(sum(item.tuned.nbytes for item in items.items), progress)
        if distributed:
            addresses = {name: address_of(item) for name, item in locations.items()}
            files = files_of(opened, addresses, items.identity)
            queries = [Query(index, item.route.name, item.tuned.nbytes) for index, item in enumerate(items.items)]
            with closing(pool_of(engine, address)) as pool:
                return ask("delta-cost", files, queries, pool, state)
        costs = []
        for item in ordered(cost_of, items.items, default_workers()):
            costs.append(item)
            state.advance(item.tuned_nbytes, item.name)
        return costs


@preload
class DeltaFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """The locations of a base, a delta and a fine-tune, from which workers open them."""

    base: str
    delta: str
    finetuned: str
    max_decompressed: int | str | None


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor whose cost is computed: the fine-tune's tensor, and the chain of patches from the base.

    ``op`` and ``stored`` are the delta's operation and tensor for it.
    """

    route: PatchChain
    tuned: Tensor
    op: str
    stored: Tensor | None


@contextmanager
def open_items(files: DeltaFiles) -> Iterator[Opened[_Item]]:
    """Open base, delta and fine-tune, in the driver or in a worker; raises the errors of ``delta_cost``."""
    opened = partial(open_checkpoint, io="pread", max_decompressed=files.max_decompressed)
    with opened(files.base) as first, opened(files.delta) as second, opened(files.finetuned) as tuned:
        link = link_of(second)
        routes = stages(first, [link])[-1]
        unmatched = set(routes) ^ set(tuned)
        if unmatched:
            raise IntegrityError(
                "delta.tuned",
                f"expected the tensors of the delta's result, found {min(unmatched)[:200]!r} in only one of the two",
                where=tuned.location,
            )
        ops = {name: change.op for name, change in link.info.tensors.items()}
        items = [_Item(routes[name], item, ops.get(name, "same"), second.get(name)) for name, item in tuned.items()]
        yield Opened(items, [first.identity(), second.identity(), tuned.identity()])


def cost_report(base: AnyPath, delta: AnyPath, finetuned: AnyPath, costs: Sequence[TensorDiff], top: int = 0) -> Report:
    """Return a report on ``delta_cost``; its text shows the ``top`` tensors with the largest errors, or all if 0."""
    is_exact = all(item.exact for item in costs)
    stored = sum(item.nbytes for item in costs)
    tuned = sum(item.tuned_nbytes for item in costs)
    ranked = sorted(costs, key=lambda item: item.error["snr_db"] if item.error else inf)
    figures = [
        Figure("base", Location.parse(base).display),
        Figure("tuned", Location.parse(finetuned).display),
        Figure("delta", Location.parse(delta).display),
        Figure("same", is_exact, "flag"),
        Figure("stored", stored, "bytes", data=False),
        Figure("share", stored / max(tuned, 1), "ratio", data=False),
        Figure("unequal", sum(not item.exact for item in costs), "count", data=False),
        Figure("more", max(len(costs) - top, 0) if top else 0, "count", data=False),
    ]
    equal = "equal bit for bit" if is_exact else "{unequal} tensors are not equal"
    closing = [Line(f"{{stored}} stored, {{share}} of the fine-tune; {equal}")]
    if top and len(costs) > top:
        closing.insert(0, Line("... and {more} more (--top 0 shows all)"))
    tables = [table_of("tensors", costs, TensorDiff), tensors_table(ranked[: top or None])]
    return Report(figures, (), tables, closing)


def cost_of(item: _Item) -> TensorDiff:
    """Return the size and the error of one tensor."""
    route = item.route
    tuned = item.tuned
    stored = item.stored
    if route.shape != tuned.shape or route.dtype != tuned.dtype:
        raise IntegrityError(
            "delta.tuned",
            f"expected shape {list(route.shape)} in {route.dtype}, found {list(tuned.shape)} in {tuned.dtype}",
            where=tuned.name,
        )
    same, error = _values(route, tuned)
    return TensorDiff(
        name=route.name,
        shape=route.shape,
        dtype=route.dtype,
        op=item.op,
        codec=stored.codec if stored is not None else "",
        nbytes=stored.nbytes if stored is not None else 0,
        tuned_nbytes=tuned.nbytes,
        exact=same,
        error=None if same or not error.count else error.summary(),
    )


def _values(route: PatchChain, tuned: Tensor) -> tuple[bool, ErrorStats]:
    if route.opaque:
        return tensor_digest(route.origin) == tensor_digest(tuned), ErrorStats()
    same = True
    error = ErrorStats()
    for rows, expected in _pairs(route, tuned):
        same = same and np.array_equal(_bits(rows), _bits(expected))
        if route.dtype in FLOATS:
            error = error + measure(expected, rows)
    return same, error


def _pairs(route: PatchChain, tuned: Tensor) -> Iterator[tuple[Array, Array]]:
    """Yield chunks of full rows: the values after patching, and the values of the fine-tune."""
    if route.resized and len(route.shape) < 2:  # one row, whose length differs from the base's
        yield np.concatenate([*route.chunks()]).reshape(1, -1), tuned.numpy().reshape(1, -1)
        return
    rows, cols = tuned.matrix_shape
    expected = chunks(tuned, (rows, cols), max(1, (1 << 20) // max(cols, 1)))
    yield from zip(route.chunks(by_rows=True), expected, strict=True)


def _bits(rows: Array) -> Array:
    return np.frombuffer(file_bytes(rows), np.uint8)
