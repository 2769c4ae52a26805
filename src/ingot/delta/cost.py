"""What a delta costs: for every tensor its size, and how far base + delta is from the fine-tune."""

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
from ingot.core.parsing.strictjson import warm
from ingot.core.runtime.parallel import default_workers, ordered
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.delta.chain import link_of, stages
from ingot.delta.report import TensorDiff, tensors_table
from ingot.engine.chunks import chunks
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
    """Compare ``base + delta`` with ``finetuned`` tensor by tensor, in chunks; ``max_decompressed`` as for ``open``.

    ``engine`` and ``address`` say who does the work, as of ``ingot.compare``; the result is the same.

    Returns
    -------
    list of TensorDiff
        In the fine-tune's order. ``exact`` tells whether the values are equal bit for bit.

    Raises
    ------
    IntegrityError
        ``delta.base``: names, shapes or types do not fit (values are not proven here); ``delta.tuned``: the fine-tune
        has other tensors than the delta gives.
    FormatError
        ``part.max-decompressed``: a compressed part of one of the three states more.
    UsageError
        ``cluster.engine``; with workers errors as ``cluster.driver.spread.ask``.
    """
    by_workers = is_distributed(engine, address)
    locations = {"base": Location.parse(base), "delta": Location.parse(delta), "finetuned": Location.parse(finetuned)}
    opened = DeltaFiles(**{name: item.text for name, item in locations.items()}, max_decompressed=max_decompressed)
    with open_items(opened) as items:
        state = Progress(sum(item.tuned.nbytes for item in items.items), progress)
        if by_workers:
            addresses = {name: address_of(item) for name, item in locations.items()}
            files = files_of(opened, addresses, items.identity)
            queries = [Query(number, item.route.name, item.tuned.nbytes) for number, item in enumerate(items.items)]
            with closing(pool_of(engine, address)) as pool:
                return ask("delta-cost", files, queries, pool, state)
        costs = []
        for item in ordered(cost_of, items.items, default_workers()):
            costs.append(item)
            state.advance(item.tuned_nbytes, item.name)
        return costs


@warm
class DeltaFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """A base, a delta and a fine-tune, as a worker opens them."""

    base: str
    delta: str
    finetuned: str
    max_decompressed: int | str | None


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor of the fine-tune, how it comes about by the delta, and what that stores for it."""

    route: PatchChain
    tuned: Tensor
    op: str
    stored: Tensor | None


@contextmanager
def open_items(files: DeltaFiles) -> Iterator[Opened[_Item]]:
    """Open all three, in a worker too; errors as ``delta_cost``."""
    opened = partial(open_checkpoint, io="pread", max_decompressed=files.max_decompressed)
    with opened(files.base) as first, opened(files.delta) as second, opened(files.finetuned) as tuned:
        link = link_of(second)
        routes = stages(first, [link])[-1]
        unmatched = set(routes) ^ set(tuned)
        if unmatched:
            raise IntegrityError(
                "delta.tuned",
                f"expected the tensors of the delta's result, found {min(unmatched)[:200]!r} in only one of them",
                where=tuned.location,
            )
        ops = {name: change.op for name, change in link.info.tensors.items()}
        items = [_Item(routes[name], item, ops.get(name, "same"), second.get(name)) for name, item in tuned.items()]
        yield Opened(items, [first.identity(), second.identity(), tuned.identity()])


def cost_report(base: AnyPath, delta: AnyPath, finetuned: AnyPath, costs: Sequence[TensorDiff], top: int = 0) -> Report:
    """Return what ``delta_cost`` gave; people get the ``top`` tensors with the largest errors, all for 0."""
    same = all(item.exact for item in costs)
    stored = sum(item.nbytes for item in costs)
    tuned = sum(item.tuned_nbytes for item in costs)
    ranked = sorted(costs, key=lambda item: item.error["snr_db"] if item.error else inf)
    figures = [
        Figure("base", Location.parse(base).display),
        Figure("tuned", Location.parse(finetuned).display),
        Figure("delta", Location.parse(delta).display),
        Figure("same", same, "flag"),
        Figure("stored", stored, "bytes", data=False),
        Figure("share", stored / max(tuned, 1), "ratio", data=False),
        Figure("unequal", sum(not item.exact for item in costs), "count", data=False),
        Figure("more", max(len(costs) - top, 0) if top else 0, "count", data=False),
    ]
    equal = "equal bit for bit" if same else "{unequal} tensors are not equal"
    closing = [Line(f"{{stored}} stored, {{share}} of the fine-tune; {equal}")]
    if top and len(costs) > top:
        closing.insert(0, Line("... and {more} more (--top 0 shows all)"))
    tables = [table_of("tensors", costs, TensorDiff), tensors_table(ranked[: top or None])]
    return Report(figures, (), tables, closing)


def cost_of(item: _Item) -> TensorDiff:
    """Return what a tensor costs."""
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
    for rows, wanted in _pairs(route, tuned):
        same = same and np.array_equal(_bits(rows), _bits(wanted))
        if route.dtype in FLOATS:
            error = error + measure(wanted, rows)
    return same, error


def _pairs(route: PatchChain, tuned: Tensor) -> Iterator[tuple[Array, Array]]:
    """Yield both in chunks of whole rows, which any codec takes."""
    if route.resized and len(route.shape) < 2:  # one row, of another length before
        yield np.concatenate([*route.chunks()]).reshape(1, -1), tuned.numpy().reshape(1, -1)
        return
    rows, cols = tuned.matrix_shape
    wanted = chunks(tuned, (rows, cols), max(1, (1 << 20) // max(cols, 1)))
    yield from zip(route.chunks(by_rows=True), wanted, strict=True)


def _bits(rows: Array) -> Array:
    return np.frombuffer(file_bytes(rows), np.uint8)
