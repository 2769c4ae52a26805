"""The pipeline's work on one tensor of a patch: read its origin, apply every layer, hash the stages asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from ingot.codecs.base import Encoder
from ingot.codecs.table import CODECS
from ingot.core.buffers import scratch
from ingot.core.dtypes import DTYPES, numpy_dtype
from ingot.engine.pipeline import decompressed, whole_cost
from ingot.engine.watch import ContentWatch, Feed, Watch
from ingot.engine.work import Chunking, Encoded, Sequencer, Take, Work
from ingot.errors import IngotError
from ingot.model.tensor import Array
from ingot.ops.delta.chain import Route, applied
from ingot.ops.delta.jobs import chunk_rows, fixed_cost, per_element

_EVEN = 1 << 17


class PatchJob:
    """Makes one tensor of the result.

    ``watches`` maps the stages whose values are to be hashed on the way to what hashes them; ``digest`` tells the hex
    of a stage when the last chunk is written.
    """

    def __init__(self, route: Route, encoder: Encoder) -> None:
        self.route, self._encoder = route, encoder
        self._watches: Mapping[int, Watch] = {}
        self._feeds: dict[int, Feed] = {}
        self._taps: list[tuple[int, Feed]] = []

    def observe(self, watches: Mapping[int, Watch]) -> None:
        """Say before the work begins which stages are to be hashed; each is one of the route's own."""
        self._watches = watches

    def digest(self, stage: int) -> str:
        """Return the hex of the values that were hashed for ``stage``."""
        return self._feeds[stage].hex

    def chunking(self, budget: int, slots: int) -> Chunking:
        route = self.route
        rows, cols = route.matrix()
        cost = per_element(route.origin) + DTYPES[self._encoder.parts[0].type or self._encoder.parts[0].dtype].bits / 8
        fixed = fixed_cost(route.origin)
        for layer in route.layers:
            cost += 8 + DTYPES[layer.dtype].bits / 8 + 2 * decompressed(layer.tensor) / max(route.origin.size, 1)
            codec = CODECS.get(layer.tensor.codec)
            if codec is not None and not codec.streams:
                fixed += whole_cost(layer.tensor)
        count = chunk_rows(rows, cols, cost * cols, (budget - fixed) / slots, 1)
        if cols == 1 and count > _EVEN:  # exact differences are applied in chunks; a chunk that ends inside costs twice
            count = count // _EVEN * _EVEN
        return Chunking(rows, cols, count, int(count * cost * cols) + fixed)

    def learn(self, shape: Chunking) -> Mapping[str, Any] | None:
        return None

    def work(self, shape: Chunking, take: Take) -> Iterator[tuple[Work, int]]:
        route = self.route
        reader, run = CODECS[route.origin.codec].reader(route.origin), _Run(route, self._encoder)
        self._open_feeds()
        read = route.origin.nbytes + sum(layer.tensor.nbytes for layer in route.layers)
        share, start, number = read / max(shape.rows, 1), 0, 0
        while start < shape.rows or start == 0:
            if not take():
                return
            stop = min(start + shape.chunk_rows, shape.rows)
            rows = scratch((stop - start, shape.cols), numpy_dtype(route.origin.dtype))
            reader.read_into(rows)
            if stop == shape.rows:
                reader.finish()
            # Here, in the order of tensors: a parent hash goes on from one to the next.
            waits = [feed.take(rows) for point, feed in self._taps if point == route.born]
            yield (
                partial(run, rows, number, self._taps, waits, last=stop == shape.rows),
                int(stop * share) - int(start * share),
            )
            start, number = max(stop, 1), number + 1

    def _open_feeds(self) -> None:
        """Begin a hash per stage; stages at which a tensor has the same values share one."""
        shared: dict[int, Feed] = {}
        for stage, watch in self._watches.items():
            point = self.route.made_at(stage)
            if isinstance(watch, ContentWatch) and point in shared:
                self._feeds[stage] = shared[point]
                continue
            feed = self._feeds[stage] = watch.tensor(self.route.name)
            self._taps.append((point, feed))
            if isinstance(watch, ContentWatch):
                shared[point] = feed


class _Run:
    """Applies a route's layers to its chunks, in order, whichever threads they come on."""

    def __init__(self, route: Route, encoder: Encoder) -> None:
        self._route, self._encoder = route, encoder
        self._appliers = route.appliers()
        self._sequencer = Sequencer()

    def __call__(
        self, rows: Array, number: int, taps: Sequence[tuple[int, Feed]], waits: list[Future[None]], *, last: bool
    ) -> Encoded:
        values = [rows]

        def layers() -> None:
            for applier, layer in zip(self._appliers, self._route.layers, strict=True):
                values[0] = applied(applier, values[0], layer.dtype)
                waits.extend(feed.take(values[0]) for point, feed in taps if point == layer.stage)
                if last:
                    applier.finish()

        try:
            self._sequencer.run(number, layers)
            parts = self._encoder.encode(values[0])
        except IngotError as error:
            name = self._route.name
            raise error if error.where and name in error.where else error.at(name) from None
        for wait in waits:
            wait.result()
        return Encoded(parts)
