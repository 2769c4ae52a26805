"""What a delta costs: for every tensor its size, and how far base + delta is from the fine-tune."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from os import PathLike

import numpy as np

from ingot.core.dtypes import file_bytes
from ingot.core.floats import FLOATS
from ingot.core.parallel import default_workers, ordered
from ingot.core.progress import Progress, ProgressCallback
from ingot.core.stats import ErrorStats, measure
from ingot.engine.chunks import chunks
from ingot.engine.route import Route
from ingot.errors import IntegrityError
from ingot.model.report import Figure, Line, Report, table_of
from ingot.model.tensor import Array, Tensor
from ingot.ops.delta.chain import Link, link_of, stages
from ingot.ops.delta.report import TensorDiff, tensors_table
from ingot.ops.identity import tensor_digest
from ingot.ops.open import open as open_checkpoint
from ingot.stores.table import location_of

AnyPath = str | PathLike[str]


def delta_cost(
    base: AnyPath,
    delta: AnyPath,
    finetuned: AnyPath,
    *,
    max_decompressed: int | str | None = None,
    progress: ProgressCallback | None = None,
) -> list[TensorDiff]:
    """Compare ``base + delta`` with ``finetuned`` tensor by tensor, in chunks; ``max_decompressed`` as for ``open``.

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
    """
    opened = partial(open_checkpoint, io="pread", max_decompressed=max_decompressed)
    with opened(base) as first, opened(delta) as second, opened(finetuned) as tuned:
        link = link_of(second)
        routes = stages(first, [link])[-1]
        odd = set(routes) ^ set(tuned)
        if odd:
            raise IntegrityError(
                "delta.tuned",
                f"expected the tensors of the delta's result, found {min(odd)[:200]!r} in only one of them",
                where=tuned.location,
            )
        state = Progress(tuned.nbytes, progress)
        pairs = [(routes[name], tensor) for name, tensor in tuned.items()]
        costs = []
        for item in ordered(lambda pair: _cost(pair[0], pair[1], link), pairs, default_workers()):
            costs.append(item)
            state.advance(tuned[item.name].nbytes, item.name)
        return costs


def cost_report(base: AnyPath, delta: AnyPath, finetuned: AnyPath, costs: Sequence[TensorDiff], top: int = 0) -> Report:
    """Return what ``delta_cost`` gave; people get the ``top`` tensors with the largest errors, all for 0."""
    same = all(item.exact for item in costs)
    stored, tuned = sum(item.nbytes for item in costs), sum(item.tuned_nbytes for item in costs)
    ranked = sorted(costs, key=lambda item: item.error["snr_db"] if item.error else inf)
    figures = [
        Figure("base", location_of(base)),
        Figure("tuned", str(finetuned)),
        Figure("delta", str(delta)),
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


def _cost(route: Route, tuned: Tensor, link: Link) -> TensorDiff:
    if route.shape != tuned.shape or route.dtype != tuned.dtype:
        raise IntegrityError(
            "delta.tuned",
            f"expected shape {list(route.shape)} in {route.dtype}, found {list(tuned.shape)} in {tuned.dtype}",
            where=tuned.name,
        )
    op = link.info.tensors[route.name].op if route.name in link.info.tensors else "same"
    stored = link.checkpoint.get(route.name)
    same, error = _values(route, tuned)
    return TensorDiff(
        name=route.name,
        shape=route.shape,
        dtype=route.dtype,
        op=op,
        codec=stored.codec if stored else "",
        nbytes=stored.nbytes if stored else 0,
        tuned_nbytes=tuned.nbytes,
        exact=same,
        error=None if same or not error.count else error.summary(),
    )


def _values(route: Route, tuned: Tensor) -> tuple[bool, ErrorStats]:
    if route.opaque:
        return tensor_digest(route.origin) == tensor_digest(tuned), ErrorStats()
    same, error = True, ErrorStats()
    for rows, wanted in _pairs(route, tuned):
        same = same and np.array_equal(_bits(rows), _bits(wanted))
        if route.dtype in FLOATS:
            error = error + measure(wanted, rows)
    return same, error


def _pairs(route: Route, tuned: Tensor) -> Iterator[tuple[Array, Array]]:
    """Yield both in chunks of whole rows, which any codec takes."""
    rows, cols = tuned.matrix_shape
    wanted = chunks(tuned, (rows, cols), max(1, (1 << 20) // max(cols, 1)))
    yield from zip(route.chunks(tuned.matrix_shape), wanted, strict=True)


def _bits(rows: Array) -> Array:
    return np.frombuffer(file_bytes(rows), np.uint8)
