"""Running a plan's steps through the pipeline into a writer; and how much memory their chunks may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ingot.codecs.base import forget, held, scratch
from ingot.core import encodings
from ingot.core.memory import anonymous_rss, available_ram, parse_size
from ingot.core.stats import ErrorStats
from ingot.engine.frames import TensorSink
from ingot.engine.pipeline import Begin, Chunk, End, Pipeline
from ingot.formats.base import FormatWriter
from ingot.ops.convert.plan import MOVED, Step

# What the process takes beside chunks: thread stacks, allocator slack, the manifest being built.
RESERVE = 24 << 20
_RESERVE_PER_TENSOR = 4096
_RECYCLED = 128 << 20

Finished = Callable[[Step, dict[str, Any], ErrorStats], None]
Advanced = Callable[[int, str], None]


def chunk_budget(max_ram: int | str | None, steps: Sequence[Step], workers: int) -> int:
    """Return the bytes for chunks: the ceiling less what the process has now and a reserve.

    Without a ceiling, a quarter of what the machine has left, or a little where that is next to nothing.
    """
    if max_ram is None:
        return max(available_ram() // 4, 1 << 28)
    reserve = RESERVE + _RESERVE_PER_TENSOR * len(steps)
    # What one tensor's fit passes found is still written with while the next one's begin.
    reserve += sum(sorted(held(step.encoder or step.job) for step in steps)[-2:])
    reserve += workers * max((scratch(step.encoder) for step in steps if step.encoder), default=0)
    if any(part.encoding != "raw" for step in steps for part in step.spec.parts):
        reserve += (workers + 2) * 3 * encodings.FRAME
    return parse_size(max_ram) - anonymous_rss() - reserve


def recycled(max_ram: int | str | None) -> int:
    """Return the bytes of chunks that may be kept for the next ones; none under a ceiling, which does not know them."""
    return _RECYCLED if max_ram is None else 0


def drive(pipeline: Pipeline, writer: FormatWriter, workers: int, finished: Finished, advanced: Advanced) -> None:
    """Take the pipeline's events in order and write.

    ``finished`` gets each step as it was written, the writer's record of it and the sums of its error; ``advanced``
    the bytes that were read, and the tensor's name where one begins.
    """
    sink: TensorSink | None = None
    error = ErrorStats()
    for event in pipeline.events():
        if isinstance(event, Begin):
            step = event.step
            compress = step.encoder is not None or (step.job is not None and step.action != MOVED)
            sink = TensorSink(writer, step.spec, compress=compress, pool=pipeline.pool, pending=workers + 2)
            error = ErrorStats()
            advanced(0, step.tensor.name)
        elif isinstance(event, Chunk):
            assert sink is not None
            encoded = event.result.result()
            sink.write(encoded.parts)
            if encoded.settle is not None:
                encoded.settle()
            error = error + (encoded.error or ErrorStats())
            pipeline.done(event)
            advanced(event.in_bytes, "")
        elif isinstance(event, End):
            assert sink is not None
            finished(event.step, sink.close(), error)
            forget(event.step.encoder or event.step.job)
